"""The index of a feedback store: one SQLite file that says what counts. One writer; readers are never held up.

Parts (Parquet files of rows) are immutable and are on disk before the transaction that names them commits; a part that
the index does not name does not exist. Ids, who labelled what, the figures of each day and everything in quarantine
stand in the index itself, so that they change together or not at all.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from agentpipe.errors import CorruptError, DiskFullError, HomeError, LockHeldError, VersionError
from agentpipe.feedback.damage import REMEDY, damage, typed_damage
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE: Final = "index.sqlite3"
FORMAT: Final = 1
PATIENCE_S: Final = 30.0
"""seconds that a statement waits for another process, which holds the file for moments only"""
_NO_ACCESS: Final = (
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL
)  # fmt: skip
_ROOM: Final = 1 << 20
"""bytes that the index needs beside it at most for one look"""
ORPHAN, CURRENT, SUPERSEDED = 0, 1, 2  # state of a label: no decision yet; counts; a later one of the decision counts

_TABLES: Final = """
CREATE TABLE sources(
  number INTEGER PRIMARY KEY AUTOINCREMENT, digest TEXT NOT NULL UNIQUE, name TEXT NOT NULL, taken INTEGER NOT NULL);
CREATE TABLE parts(
  number INTEGER PRIMARY KEY AUTOINCREMENT, day INTEGER NOT NULL, kind TEXT NOT NULL, rows INTEGER NOT NULL);
CREATE INDEX parts_of_day ON parts(day, kind);
CREATE TABLE decisions(
  id TEXT PRIMARY KEY, day INTEGER NOT NULL, source INTEGER NOT NULL, line NOT NULL, labelled INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE labels(
  id TEXT PRIMARY KEY, decision TEXT NOT NULL, day INTEGER NOT NULL, time INTEGER NOT NULL, verdict INTEGER NOT NULL,
  error INTEGER NOT NULL, confidence REAL NOT NULL, corrected INTEGER NOT NULL, source INTEGER NOT NULL, line NOT NULL,
  state INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX labels_of_decision ON labels(decision);
CREATE INDEX labels_of_day ON labels(day, state);
CREATE TABLE days(
  day INTEGER PRIMARY KEY, decisions INTEGER NOT NULL, labelled INTEGER NOT NULL, sum_of_decisions TEXT NOT NULL,
  sum_of_labels TEXT NOT NULL, figures TEXT NOT NULL);
CREATE TABLE quarantine(
  number INTEGER PRIMARY KEY AUTOINCREMENT, reason TEXT NOT NULL, detail TEXT NOT NULL, source INTEGER NOT NULL,
  line NOT NULL, raw BLOB NOT NULL, UNIQUE(source, line));
CREATE INDEX quarantine_by_reason ON quarantine(reason);
"""
_ROWS_WITHOUT_PARTS: Final = [
    f"SELECT * FROM ({one} EXCEPT {other}) UNION ALL SELECT * FROM ({other} EXCEPT {one}) LIMIT 1"  # noqa: S608
    for one, other in (
        (
            f"SELECT day, sum(rows) FROM parts WHERE kind = '{kind}' GROUP BY day HAVING sum(rows) > 0",  # noqa: S608
            counted,
        )
        for kind, counted in (
            ("decision", "SELECT day, decisions FROM days WHERE decisions > 0"),
            ("label", "SELECT day, count(*) FROM labels GROUP BY day"),
        )
    )
]


def index_path(store: Path) -> Path:
    """Where the index of a store lies."""
    return store / FILE


@contextlib.contextmanager
def typed_sqlite_errors(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into typed ones.

    Raises:
        DiskFullError: no room left.
        LockHeldError: another process holds the index for longer than half a minute.
        HomeError: it may not be read or written.
        CorruptError: damaged.
    """
    try:
        yield
    except UnicodeDecodeError as error:  # SQLite quotes what it read in its messages
        raise CorruptError(f"cannot be read: {error}", file=path, remedy=REMEDY) from error
    except sqlite3.DatabaseError as error:
        code = _code(error)
        if code == sqlite3.SQLITE_FULL or (code in _NO_ACCESS and _no_room(path)):
            raise DiskFullError("the disk is full", file=path, remedy="free space and run again") from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LockHeldError("the feedback index is held", file=path, remedy="run again") from error
        if code == sqlite3.SQLITE_IOERR:
            raise HomeError(f"cannot read or write: {error}", file=path, remedy="check the disk") from error
        if code in _NO_ACCESS:
            raise HomeError(f"cannot open: {error}", file=path, remedy="make it and its folder writable") from error
        raise CorruptError(f"cannot be read: {error}", file=path, remedy=REMEDY) from error


def _code(error: sqlite3.DatabaseError) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _no_room(path: Path) -> bool:
    """SQLite says "disk I/O error" where what it keeps beside the file has no room to grow; so ask the disk."""
    with contextlib.suppress(OSError):
        found = os.statvfs(path.parent)
        return not found.f_flag & os.ST_RDONLY and found.f_bavail * found.f_frsize < _ROOM
    return False


@contextlib.contextmanager
def reading(store: Path) -> Iterator[sqlite3.Connection | None]:
    """One consistent look at the index; None where nothing was ever taken in.

    Where nothing can be written beside it (a read-only or a full disk), it is read as it lies there.

    Raises:
        CorruptError: damaged, or lost while parts are there.
        LockHeldError: it was written while it was read as it lies there.
    """
    path = index_path(store)
    with typed_os_errors(path):
        if not path.exists() and _has_parts(store) and not path.exists():  # a first intake may just have begun
            raise _lost(path)
        begun = path.exists()
    if not begun:
        yield None
        return
    with typed_sqlite_errors(path), _connected_to_read(path) as connection, typed_damage(connection, path, _TABLES):
        if not _is_ready(connection, path) and _has_parts(store) and not _is_ready(connection, path):
            raise _lost(path)
        if _is_ready(connection, path):
            connection.execute("PRAGMA query_only = 1")
            connection.execute("BEGIN")
            yield connection
        else:
            yield None


@contextlib.contextmanager
def _connected_to_read(path: Path) -> Iterator[sqlite3.Connection]:
    connection = _connect(path)
    try:
        connection.execute("PRAGMA user_version").fetchone()  # needs what lies beside the file
    except sqlite3.OperationalError as error:
        connection.close()
        if _code(error) not in _NO_ACCESS or _log_size(path):
            raise
    else:
        with contextlib.closing(connection):
            yield connection
        return
    before = _stamp(path)
    uri = f"file:{quote(str(path))}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
        yield connection
    if _stamp(path) != before or _log_size(path):
        raise LockHeldError("the feedback index was written meanwhile", file=path, remedy="run again")


def _log_size(path: Path) -> int:
    """Bytes of the log beside the file: what a writer that was killed had not put into it yet."""
    log = path.with_name(f"{path.name}-wal")
    return log.stat().st_size if log.exists() else 0


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def writing(store: Path) -> Iterator[sqlite3.Connection]:
    """One transaction: all of it counts when the body ends, or nothing. The caller holds the home's lock.

    The tables are made in a transaction of their own, before the first part is written: parts beside an index without
    tables are never what a killed writer left.

    Raises:
        CorruptError: damaged, or lost while parts are there.
    """
    path = index_path(store)
    with typed_os_errors(store):
        store.mkdir(parents=True, exist_ok=True)
        if not path.exists() and _has_parts(store):
            raise _lost(path)
    with (
        typed_sqlite_errors(path),
        contextlib.closing(_connect(path)) as connection,
        typed_damage(connection, path, _TABLES),
    ):
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cache_size = -131072")  # KiB
        with _transaction(connection):
            if not _is_ready(connection, path):
                if _has_parts(store):
                    raise _lost(path)
                for statement in filter(str.strip, _TABLES.split(";")):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {FORMAT}")
        with _transaction(connection):
            yield connection


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.DatabaseError):  # a full disk: closing the connection ends it as well
            connection.rollback()
        raise
    connection.commit()


def check_parts(connection: sqlite3.Connection, store: Path) -> None:
    """Before files are removed that the index does not name: that it names all that it should, as far as one can see.

    Raises:
        CorruptError: the list of parts is damaged.
    """
    found = damage(connection, _TABLES, ["parts", "days"])
    if not found and any(connection.execute(query).fetchone() for query in _ROWS_WITHOUT_PARTS):
        found = "parts: the rows of a day are more or fewer than were taken in"
    if found:
        raise CorruptError(f"the index is damaged: {found}", file=index_path(store), remedy=REMEDY)


def _has_parts(store: Path) -> bool:
    return any(store.glob("*/*.parquet"))


def _lost(path: Path) -> CorruptError:
    return CorruptError("parts without an index", file=path, remedy=f"restore {FILE} from a backup")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)


def _is_ready(connection: sqlite3.Connection, path: Path) -> bool:
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > FORMAT:
        remedy = "use the agentpipe that wrote it, or another --home"
        raise VersionError(f"feedback index of format {found}, this program reads {FORMAT}", file=path, remedy=remedy)
    return bool(found == FORMAT)
