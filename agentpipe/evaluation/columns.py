"""Arrow tables of results: built from numpy, read back into numpy, digested by content."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.errors import CorruptError
from agentpipe.storage import canonical_json, digest_bytes, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt
    import pyarrow as pa


def coded(codes: npt.NDArray[np.integer[Any]], names: Sequence[str]) -> pa.Array:
    """A dictionary-encoded string column: ``names[code]`` for each of the codes [n]."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(list(names), type=pa.string()))


def column(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """One column as numpy; strings as an array of Python strings (sorted and compared like any other).

    Raises:
        CorruptError: the table has no such column.
    """
    if name not in table.column_names:
        raise CorruptError("the result table lacks a column", field=name, remedy="it was written by another version")
    import pyarrow as pa

    values = table.column(name)
    if pa.types.is_dictionary(values.type):
        coded_values = values.unify_dictionaries().combine_chunks()
        names = np.array([*coded_values.dictionary.to_pylist(), ""])
        decoded: npt.NDArray[Any] = names[coded_values.indices.to_numpy(zero_copy_only=False)]
        return decoded
    array: npt.NDArray[Any] = values.to_numpy()
    return array.astype(str) if array.dtype == object else array


def _column_digest(values: npt.NDArray[Any]) -> str:
    if values.dtype.kind == "U":
        return digest_bytes(canonical_json(values.tolist()))
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    digest = hashlib.sha256(str(little.dtype).encode())
    digest.update(little.data)
    return digest.hexdigest()


def content_digest(table: pa.Table, figures: Mapping[str, Any]) -> str:
    """Digest of a table's values and of the figures beside it, whatever wrote or compressed the file."""
    columns = {name: _column_digest(column(table, name)) for name in table.column_names}
    return digest_bytes(canonical_json({"columns": columns, "rows": table.num_rows, "figures": figures}))


def write_parquet(table: pa.Table, path: Path) -> None:
    """Writes ``table`` compressed; equal tables give equal bytes under one pyarrow version."""
    import pyarrow.parquet as pq

    with typed_os_errors(path):
        pq.write_table(table, path, compression="zstd")


def read_parquet(path: Path) -> pa.Table:
    """Reads a Parquet file with its dictionary columns.

    Raises:
        CorruptError: missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        data = io.BytesIO(path.read_bytes())
        return pq.ParquetFile(data).read(use_threads=False)  # the dataset reader can abort the process at its exit
    except FileNotFoundError as error:
        raise CorruptError("file is missing", file=path, remedy="evaluate again") from error
    except (pa.ArrowInvalid, pa.ArrowException, OSError) as error:
        raise CorruptError(f"not a Parquet file: {error}", file=path, remedy="evaluate again") from error
