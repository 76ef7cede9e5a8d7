"""Parquet: rows of both kinds in one table, lists as list columns, times as time stamps with a zone (or text).

Whole columns are turned into blocks; nothing goes through Python row by row but what is refused. A row counts under its
number in the file, from 1.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import IO, TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentpipe.feedback.block import Refused
from agentpipe.feedback.jsonl import UnfinishedError
from agentpipe.feedback.parquet_columns import block_of_batch, json_of_row
from agentpipe.feedback.rows import FaultError
from agentpipe.feedback.schema import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from agentpipe.feedback.block import Block

MAGIC: Final = b"PAR1"
BATCH: Final = 16_384
"""rows that are decoded together, at most"""
BATCH_BYTES: Final = 1 << 27
"""bytes of them, as the footer says"""
MOST_ROWS: Final = 100_000_000
MOST_BYTES: Final = 1 << 37
"""that a file may claim to hold once it is decompressed"""
MOST_OF_A_ROW: Final = 1 << 20
"""bytes of one row, on average over a row group"""
_FOOTER: Final = 8
_THRIFT: Final = 1 << 26


def check(file: IO[bytes]) -> None:
    """Reads footer and then every page once, checksums included, and keeps nothing.

    Raises:
        UnfinishedError: it begins like a Parquet file and has no footer yet.
        FaultError: not Parquet, damaged, columns of one name, texts that are not UTF-8, or claiming more than can be.
    """
    _check_ends(file)
    with _typed():
        reader = _open(file)
        _check_claims(reader.metadata)
        names = reader.schema_arrow.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FaultError("duplicate_column", f"column {twice[0]!r} occurs twice")
        for batch in _batches(reader):
            _check_values(batch)


def read(file: IO[bytes]) -> Iterator[Block | Refused]:
    """Every row in exactly one block or refusal, after :func:`check` found nothing."""
    first = 1
    with _typed():
        for batch in _batches(_open(file)):
            yield from _of_batch(batch, first)
            first += batch.num_rows


def _of_batch(batch: pa.RecordBatch, first: int) -> Iterator[Block | Refused]:
    kinds, codes = _kinds(batch)
    for kind in FIELDS:
        places = np.flatnonzero(codes == (kinds.index(kind) if kind in kinds else len(kinds))).astype(np.int64)
        if len(places):
            yield block_of_batch(kind, _rows(batch, places), (places + first).tolist())
    known = np.isin(codes, [kinds.index(kind) for kind in FIELDS if kind in kinds])
    for place in np.flatnonzero(~known).tolist():
        detail = f"kind is {str(kinds[codes[place]])[:60]!r} instead of decision or label"
        yield Refused("unknown_kind", detail, first + place, json_of_row(batch, place))


def _kinds(batch: pa.RecordBatch) -> tuple[list[str | None], npt.NDArray[np.int64]]:
    """The kinds that occur, and for each row the place of its own among them; the last is None."""
    none: tuple[list[str | None], npt.NDArray[np.int64]] = [None], np.full(batch.num_rows, -1, dtype=np.int64)
    place = batch.schema.get_field_index("kind")
    if place < 0:
        return none
    column = batch.column(place)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return none
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    names = [*encoded.dictionary.to_pylist(), None]
    return names, pc.fill_null(encoded.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)


def _rows(batch: pa.RecordBatch, places: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """Some rows of a batch; where they stand together nothing is copied."""
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return batch.slice(first, len(places))
    return batch.take(pa.array(places))


def _check_ends(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(len(MAGIC))
    if start == b"PARE":
        raise FaultError("not_parquet", "encrypted")
    if not MAGIC.startswith(start):
        raise FaultError("not_parquet", "does not begin like a Parquet file")
    file.seek(max(0, size - _FOOTER))
    end = file.read()
    file.seek(0)
    if size < len(MAGIC) + _FOOTER or not end.endswith(MAGIC):
        raise UnfinishedError("no footer yet")
    length = struct.unpack("<I", end[:4])[0]
    if length > size - len(MAGIC) - _FOOTER:
        raise FaultError("not_parquet", f"the footer claims {length:,} bytes of a file of {size:,}")


def _check_claims(metadata: pq.FileMetaData) -> None:
    """What the footer says of sizes, before anything is decoded.

    Raises:
        FaultError: more rows, bytes, or bytes a row than can be.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    if metadata.num_rows != rows or min([0, *(min(group.num_rows, group.total_byte_size) for group in groups)]) < 0:
        raise FaultError("not_parquet", f"the footer claims {metadata.num_rows:,} rows, its groups {rows:,}")
    if rows > MOST_ROWS:
        raise FaultError("too_large", f"claims {rows:,} rows; a file may have {MOST_ROWS:,}")
    total = 0
    for group in groups:
        claimed = group.total_byte_size  # its columns are not asked: of some damaged footers that ends the process
        total += claimed
        if claimed > MOST_OF_A_ROW * max(16, group.num_rows):
            detail = f"a group of {group.num_rows:,} rows claims {claimed:,} bytes"
            raise FaultError("too_large", f"{detail}; a row has at most {MOST_OF_A_ROW:,}")
    if total > MOST_BYTES:
        raise FaultError("too_large", f"claims {total:,} bytes; a file may have {MOST_BYTES:,}")


def _check_values(batch: pa.RecordBatch) -> None:
    """That texts are UTF-8 and codes have their words, which decoding by itself does not look at.

    Raises:
        FaultError: they are not.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowException as error:
            text = " ".join(str(error).split())[:300]
            reason = "not_utf8" if "UTF8" in text else "corrupt"
            raise FaultError(reason, f"column {name!r}: {text}") from error


def _open(file: IO[bytes]) -> pq.ParquetFile:
    """Texts stay dictionaries: one long text that a million rows repeat takes the room of one."""
    limits = {"thrift_string_size_limit": _THRIFT, "thrift_container_size_limit": _THRIFT}
    file.seek(0)
    plain = pq.ParquetFile(file, **limits)
    texts = [field.name for field in plain.schema_arrow if pa.types.is_string(field.type)]
    return pq.ParquetFile(
        file,
        metadata=plain.metadata,
        read_dictionary=texts,
        buffer_size=1 << 20,
        pre_buffer=False,
        page_checksum_verification=True,
        **limits,
    )


def _batches(reader: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    groups = [reader.metadata.row_group(number) for number in range(reader.metadata.num_row_groups)]
    longest = max([1, *(group.total_byte_size // max(1, group.num_rows) for group in groups)])
    size = max(16, min(BATCH, BATCH_BYTES // longest))
    # One thread: pyarrow's pool may abort the process at its exit.
    return reader.iter_batches(batch_size=size, use_threads=False)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    """Turns what pyarrow, or the reading of what it gave, raises over damaged bytes into a fault of the file."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError, ValueError, LookupError, ArithmeticError) as error:
        text = " ".join(str(error).split())[:300]
        reason = "corrupt" if "checksum" in text.lower() else "not_parquet"
        raise FaultError(reason, text or type(error).__name__) from error
