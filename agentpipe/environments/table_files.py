"""Parquet files of table versions, named by their content."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from agentpipe.environments.parameters import PARAMETER_NAMES
from agentpipe.environments.table import COLUMNS, TABLE_FORMAT, DisturbanceTable, TableRow, table_from_rows
from agentpipe.errors import CorruptError, TableError, VersionError
from agentpipe.storage import write_bytes

if TYPE_CHECKING:
    from pathlib import Path

_FORMAT_KEY = b"agentpipe.disturbance_table"
_REMEDY = "restore the file from a backup, or roll back to another version"


def path_of(folder: Path, version: str) -> Path:
    """Where a version lies below a store's folder."""
    return folder / "versions" / f"{version}.parquet"


def names(folder: Path) -> list[str]:
    """The versions kept in a store's folder, sorted."""
    return sorted(path.stem for path in (folder / "versions").glob("*.parquet") if not path.name.startswith("."))


def write(path: Path, table: DisturbanceTable) -> None:
    """Writes a version durably and atomically, unless it is there already and whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.exists():
        try:
            read(path)
        except (CorruptError, VersionError):
            pass
        else:
            return
    columns = {
        "kind": pa.array([row.kind for row in table.rows], pa.string()),
        "intensity": pa.array([row.intensity for row in table.rows], pa.int8()),
        "variant": pa.array([row.variant for row in table.rows], pa.int16()),
    }
    for index, name in enumerate(PARAMETER_NAMES):
        columns[name] = pa.array([row.values[index] for row in table.rows], pa.float64())
    data = pa.table(columns).replace_schema_metadata({_FORMAT_KEY: str(TABLE_FORMAT)})
    buffer = io.BytesIO()
    pq.write_table(data, buffer, compression="zstd")
    write_bytes(path, buffer.getvalue())


def read(path: Path) -> DisturbanceTable:
    """Reads a version and checks that its content matches the file's name.

    Raises:
        CorruptError: missing, damaged, or not what its name says.
        VersionError: written with other columns, by another agentpipe.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # not read_table: its dataset threads abort the interpreter's exit now and then
        content = pq.ParquetFile(io.BytesIO(path.read_bytes())).read(use_threads=False)
    except FileNotFoundError as error:
        raise CorruptError("the version's file is missing", file=path, remedy=_REMEDY) from error
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"the version's file is damaged: {error}", file=path, remedy=_REMEDY) from error
    found = (content.schema.metadata or {}).get(_FORMAT_KEY)
    if found != str(TABLE_FORMAT).encode() or tuple(content.column_names) != COLUMNS:
        message = "the version was written with other columns"
        raise VersionError(message, file=path, remedy="use the agentpipe that wrote it, or another version")
    try:
        table = table_from_rows(
            (
                TableRow(
                    str(row["kind"]), int(row["intensity"]), int(row["variant"]), tuple(row[n] for n in PARAMETER_NAMES)
                )
                for row in content.to_pylist()
            ),
            path,
        )
    except (TableError, TypeError) as error:
        raise CorruptError(f"the version's content is damaged: {error}", file=path, remedy=_REMEDY) from error
    if table.version != path.stem:
        message = f"the content has the digest {table.version[:12]}, not that of its name"
        raise CorruptError(message, file=path, remedy=_REMEDY)
    return table
