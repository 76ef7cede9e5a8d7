"""The index of a feedback store: one SQLite file that says what counts. One writer; readers are never held up.

Parts (Parquet files of rows) are immutable and are on disk before the transaction that names them commits; a part that
the index does not name does not exist. Ids, who labelled what, the figures of each day and everything in quarantine
stand in the index itself, so that they change together or not at all.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Final

from agentpipe.errors import CorruptError, DiskFullError, HomeError, LockHeldError, VersionError
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE: Final = "index.sqlite3"
FORMAT: Final = 1
PATIENCE_S: Final = 30.0
"""seconds that a statement waits for another process, which holds the file for moments only"""
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


def index_path(store: Path) -> Path:
    """Where the index of a store lies."""
    return store / FILE


@contextlib.contextmanager
def typed_sqlite_errors(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into typed ones.

    Raises:
        DiskFullError: no room left.
        LockHeldError: another process holds the index for longer than half a minute.
        HomeError: it may not be written.
        CorruptError: damaged.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise DiskFullError("the disk is full", file=path, remedy="free space and run again") from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise LockHeldError("the feedback index is held", file=path, remedy="run again") from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise HomeError(f"cannot open: {error}", file=path, remedy="make it writable") from error
        if code == sqlite3.SQLITE_IOERR:
            raise HomeError(f"cannot read or write: {error}", file=path, remedy="check the disk") from error
        raise CorruptError(f"cannot be read: {error}", file=path, remedy="restore it from a copy") from error


@contextlib.contextmanager
def reading(store: Path) -> Iterator[sqlite3.Connection | None]:
    """One consistent look at the index; None where nothing was ever taken in.

    Raises:
        CorruptError: damaged, or lost while parts are there.
    """
    path = index_path(store)
    if not path.exists():
        if _has_parts(store) and not path.exists():  # looked at again: a first intake may just have begun
            raise _lost(path)
        yield None
        return
    with typed_sqlite_errors(path), contextlib.closing(_connect(path)) as connection:
        if not _is_ready(connection, path) and _has_parts(store) and not _is_ready(connection, path):
            raise _lost(path)
        if _is_ready(connection, path):
            connection.execute("PRAGMA query_only = 1")
            connection.execute("BEGIN")
            yield connection
        else:
            yield None


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
    with typed_sqlite_errors(path), contextlib.closing(_connect(path)) as connection:
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
        connection.rollback()
        raise
    connection.commit()


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
