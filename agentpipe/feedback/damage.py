"""What is wrong with an index: SQLite's own check, its schema, and the types of what its columns hold.

SQLite finds a damaged page when it comes across one, and not always: a page may read as rows of another table, or as
fewer rows. So whoever comes across something odd, or is about to remove what the index does not name, asks here.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from typing import TYPE_CHECKING, Final

from agentpipe.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

REMEDY: Final = "restore the folder of the store from a copy"
_ODD: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, zlib.error)
"""what Python raises over values that an intake never writes"""
_DAY: Final = "day BETWEEN -719162 AND 2932896"
"""the days of the calendar, 0001-01-01 to 9999-12-31"""
_SENSE: Final = {
    "sources": "taken >= 0",
    "parts": f"{_DAY} AND kind IN ('decision', 'label') AND rows >= 0",
    "decisions": f"{_DAY} AND labelled IN (0, 1)",
    "labels": f"{_DAY} AND verdict BETWEEN 0 AND 2 AND error BETWEEN -1 AND 2 AND state BETWEEN 0 AND 2"
    " AND confidence > 0 AND confidence <= 1 AND corrected >= -1",
    "days": f"{_DAY} AND decisions >= 0 AND labelled BETWEEN 0 AND decisions"
    " AND length(sum_of_decisions) = 64 AND sum_of_decisions NOT GLOB '*[^0-9a-f]*'"
    " AND length(sum_of_labels) = 64 AND sum_of_labels NOT GLOB '*[^0-9a-f]*'",
}
"""what is true of every row"""
_SCHEMA: Final = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"


def damage(connection: sqlite3.Connection, tables: str, only: Sequence[str] = ()) -> str:
    """What is wrong; empty where nothing is found.

    Args:
        connection: To the index; what is not committed is looked at as well.
        tables: Statements that make the schema that the index should have.
        only: Tables that are looked through; all where empty, which takes seconds for millions of rows.
    """
    with contextlib.closing(sqlite3.connect(":memory:")) as pattern:
        pattern.executescript(tables)
        expected = _schema(pattern)
        columns = {
            name: pattern.execute(f"PRAGMA table_info({name})").fetchall()
            for name, sql in expected
            if sql.startswith("CREATE TABLE")
        }
    try:
        if _schema(connection) != expected:
            return "the schema is another one"
        for name in only or columns:
            found = _of_table(connection, name, columns[name])
            if found:
                return found
    except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite quotes what it read in its messages
        return str(error)
    return ""


def _schema(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return [(name, " ".join(sql.split())) for name, sql in connection.execute(_SCHEMA)]


def _of_table(
    connection: sqlite3.Connection, table: str, columns: Sequence[tuple[int, str, str, int, str, int]]
) -> str:
    said = connection.execute(f"PRAGMA integrity_check({table})").fetchone()[0]
    if said != "ok":
        return f"{table}: {said}"
    for _, name, kind, *_ in columns:
        query = f"SELECT 1 FROM {table} WHERE typeof({name}) <> ? LIMIT 1"  # noqa: S608 - names of our own
        if kind and connection.execute(query, (kind.lower(),)).fetchone():
            return f"{table}: a {name} is no {kind.lower()}"
    sense = _SENSE.get(table, "1")
    if connection.execute(f"SELECT 1 FROM {table} WHERE NOT ({sense}) LIMIT 1").fetchone():  # noqa: S608 - as above
        return f"{table}: a row with values that no intake writes"
    return ""


@contextlib.contextmanager
def typed_damage(connection: sqlite3.Connection, path: Path, tables: str) -> Iterator[None]:
    """Errors over values that make no sense become ``CorruptError`` where the index is damaged; else they go on.

    Raises:
        CorruptError: the index is damaged.
    """
    try:
        yield
    except _ODD as error:
        found = damage(connection, tables)
        if found:
            raise CorruptError(f"the index is damaged: {found}", file=path, remedy=REMEDY) from error
        raise
