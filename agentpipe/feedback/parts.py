"""Parts: immutable Parquet files with rows of one kind and UTC day, written by one intake."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import IO, TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from agentpipe.errors import CorruptError
from agentpipe.feedback.index import check_parts
from agentpipe.feedback.schema import KEY, TABLES, utc_day
from agentpipe.storage import sync, typed_os_errors

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ROW_GROUP: Final = 16_384
FEW: Final = 8
"""parts of about one size that a day may have of a kind; then they become one"""


def day_folder(store: Path, day: int) -> Path:
    """Where the parts of a day (since 1970) lie."""
    return store / utc_day(day).isoformat()


def part_path(store: Path, day: int, kind: str, number: int) -> Path:
    """Where a part lies."""
    return day_folder(store, day) / f"{kind}s-{number:08d}.parquet"


class PartWriter:
    """One part while it is written: aside, then flushed to disk and renamed by :meth:`finish`."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.rows = 0
        self._waiting: list[pa.Table] = []
        with typed_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, self.staged = tempfile.mkstemp(prefix=".staging-", dir=path.parent)
        self._file = os.fdopen(descriptor, "wb")
        texts = [field.name for field in TABLES[kind] if pa.types.is_string(field.type) and field.name != KEY[kind]]
        self._writer = pq.ParquetWriter(
            self._file,
            TABLES[kind],
            compression="zstd",
            compression_level=1,
            use_dictionary=texts,
            write_statistics=False,
            write_page_checksum=True,
        )

    def write(self, table: pa.Table) -> None:
        """Adds rows; whole row groups are written at once."""
        self._waiting.append(table)
        self.rows += table.num_rows
        if sum(waiting.num_rows for waiting in self._waiting) >= ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            with typed_os_errors(self.path):
                self._writer.write_table(pa.concat_tables(self._waiting), row_group_size=ROW_GROUP)
            self._waiting = []

    def finish(self) -> None:
        """Makes the part durable under its name; the folder's entry is flushed too."""
        self._flush()
        with typed_os_errors(self.path):
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.chmod(self.staged, 0o644)  # noqa: PTH101 - for other processes to read; a staged file
            os.replace(self.staged, self.path)  # noqa: PTH105
            sync(self.path.parent)
            sync(self.path.parent.parent)

    def abandon(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError, ValueError):  # closing writes the footer, which a full disk may refuse
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()
        for path in (self.staged, self.path):
            if os.path.exists(path):  # noqa: PTH110
                os.unlink(path)  # noqa: PTH108


def read_part(file: IO[bytes], path: Path, kind: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The rows of an open part, a row group at a time; ``path`` is for messages.

    Raises:
        CorruptError: damaged, or of another schema.
    """
    try:
        part = pq.ParquetFile(file, page_checksum_verification=True)
        if not part.schema_arrow.equals(TABLES[kind]):
            message = "the columns are not those of this format"
            raise CorruptError(message, file=path, remedy="restore it from a copy")
        for group in range(part.num_row_groups):
            # One thread: pyarrow's pool may abort the process at its exit.
            yield part.read_row_group(group, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: names that are not UTF-8
        raise CorruptError(f"cannot be read: {error}", file=path, remedy="restore it from a copy") from error


def parts_of(connection: sqlite3.Connection, day: int, kind: str) -> list[int]:
    """Numbers of the parts that count."""
    found = connection.execute("SELECT number FROM parts WHERE day = ? AND kind = ? ORDER BY number", (day, kind))
    return [number for (number,) in found]


def sweep(connection: sqlite3.Connection, store: Path) -> None:
    """Removes files that no committed intake names: what a killed writer left. Call with the index held.

    Raises:
        CorruptError: the index is damaged, and may have named them; nothing was removed then.
        StoreError: they may not be removed.
    """
    named = {
        part_path(store, day, kind, number)
        for number, day, kind in connection.execute("SELECT number, day, kind FROM parts")
    }
    with typed_os_errors(store):
        left = {path for path in (*store.glob("*/*.parquet"), *store.glob("*/.staging-*")) if path not in named}
        if any(path.suffix == ".parquet" for path in left):
            check_parts(connection, store)
        for path in sorted(left):
            path.unlink(missing_ok=True)


def crowded(connection: sqlite3.Connection) -> list[tuple[int, str, list[int]]]:
    """Groups of parts that should become one: of a day and kind, and of about one size (a factor of eight)."""
    groups: dict[tuple[int, str, int], list[int]] = {}
    for number, day, kind, rows in connection.execute("SELECT number, day, kind, rows FROM parts ORDER BY number"):
        groups.setdefault((day, kind, max(0, rows.bit_length() - 1) // 3), []).append(number)
    return [(day, kind, numbers) for (day, kind, _), numbers in groups.items() if len(numbers) >= FEW]


def merge(connection: sqlite3.Connection, store: Path, day: int, kind: str, numbers: Sequence[int]) -> None:
    """Writes several parts as one, within the caller's transaction; the old files go at the next sweep."""
    number = begin_part(connection, day, kind)
    writer = PartWriter(part_path(store, day, kind, number), kind)
    try:
        for old in numbers:
            path = part_path(store, day, kind, old)
            with path.open("rb") as file:
                for table in read_part(file, path, kind):
                    writer.write(table)
        writer.finish()
    except BaseException:
        writer.abandon()
        connection.execute("DELETE FROM parts WHERE number = ?", (number,))
        raise
    end_part(connection, number, writer.rows)
    connection.executemany("DELETE FROM parts WHERE number = ?", [(old,) for old in numbers])


def begin_part(connection: sqlite3.Connection, day: int, kind: str) -> int:
    """The number of a new part; a number is never given twice."""
    cursor = connection.execute("INSERT INTO parts(day, kind, rows) VALUES (?, ?, 0)", (day, kind))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def end_part(connection: sqlite3.Connection, number: int, rows: int) -> None:
    """Says how many rows a part has."""
    connection.execute("UPDATE parts SET rows = ? WHERE number = ?", (rows, number))
