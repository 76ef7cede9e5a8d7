"""Judging rows in quarantine again: once a policy version is known, or with more days for late rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from agentpipe.feedback.csvfile import row_of_cells
from agentpipe.feedback.intake import Intake, committing
from agentpipe.feedback.rows import FaultError, load_object, read_row
from agentpipe.feedback.store import unpacked
from agentpipe.feedback.stream import is_stream

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from agentpipe.feedback.batch import Batch
    from agentpipe.feedback.block import Refused, Row
    from agentpipe.feedback.rules import Rules

_AT_ONCE: Final = 2_000
"""rows that are fetched together"""


def retry(store: Path, rules: Rules, *, reason: str | None = None, numbers: Collection[int] = ()) -> Intake:
    """Judges rows in quarantine by ``rules``; the valid ones leave it for their day, the others get the new reason.

    Files that were refused whole are no rows: correct them and drop them again. The caller holds the home's lock.

    Args:
        store: Root of the feedback store.
        rules: What rows are held against now.
        reason: Only rows with this reason.
        numbers: Only these rows, as :func:`agentpipe.feedback.store.quarantined` numbers them; all where empty.

    Raises:
        StoreError: the store cannot be read or written; nothing has changed then.
    """
    with committing(store, rules) as batch:
        chosen = [
            number
            for (number,) in batch.connection.execute(
                "SELECT number FROM quarantine WHERE line <> 0 AND (?1 IS NULL OR reason = ?1) ORDER BY number",
                (reason,),
            )
            if not numbers or number in numbers
        ]
        for start in range(0, len(chosen), _AT_ONCE):
            for source, row in _rows(batch, chosen[start : start + _AT_ONCE]):
                batch.add(source, iter([row]))
            batch.flush()
    return Intake(rows_taken=batch.taken, quarantined=dict(sorted(batch.quarantined.items())))


def _rows(batch: Batch, numbers: list[int]) -> Iterator[tuple[int, Row | Refused]]:
    for number, source, line, raw, name, digest in _fetch(batch.connection, numbers):
        batch.source(digest, name)
        batch.again[source, line] = number
        yield source, _parsed(unpacked(raw, number, batch.store), line, name, digest)


def _fetch(connection: sqlite3.Connection, numbers: list[int]) -> list[tuple[int, int, int | str, bytes, str, str]]:
    marks = ", ".join("?" * len(numbers))
    query = (
        "SELECT quarantine.number, source, line, raw, name, digest FROM quarantine"  # noqa: S608 - only marks
        f" JOIN sources ON sources.number = source WHERE quarantine.number IN ({marks}) ORDER BY quarantine.number"
    )
    return connection.execute(query, numbers).fetchall()


def _parsed(raw: bytes, line: int | str, name: str, digest: str) -> Row | Refused:
    """The row again: of CSV its cells by column were kept, of every other format a JSON object."""
    if name.lower().endswith(".csv") and not is_stream(digest):
        try:
            cells = load_object(raw)
        except FaultError:  # not UTF-8, or too few cells: what it is not, it does not become
            return read_row(raw.strip(), line, raw)
        return row_of_cells({column: str(cell) for column, cell in cells.items()}, line)
    return read_row(raw.strip(), line, raw)
