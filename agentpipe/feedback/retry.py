"""Judging rows in quarantine again: once a policy version is known, or with more days for late rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from agentpipe.feedback.block import Refused
from agentpipe.feedback.csvfile import row_of_cells
from agentpipe.feedback.intake import Intake, committing
from agentpipe.feedback.rows import FaultError, load_object, read_row
from agentpipe.feedback.store import unpacked
from agentpipe.feedback.stream import NO_ROW, is_stream

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from agentpipe.feedback.batch import Batch
    from agentpipe.feedback.block import Row
    from agentpipe.feedback.rules import Rules

_MAY_CHANGE: Final = frozenset(
    {"duplicate", "late", "future_time", "unknown_policy_version", "does_not_fit_policy", "probabilities"}
)
"""reasons that depend on more than the row itself: on the day, on what came before, on the policies"""
_KEPT_IN_PART: Final = frozenset({"too_long", "malformed_row"})
"""reasons with which a row is not kept as it came"""
_AT_ONCE: Final = 2_000
"""rows that are fetched together"""


def retry(store: Path, rules: Rules, *, reason: str | None = None, numbers: Collection[int] = ()) -> Intake:
    """Judges rows in quarantine by ``rules``; the valid ones leave it for their day, the others get the new reason.

    A row that quarantine does not hold as it came (cut off, or without a row at all) keeps its reason.

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


class _Entry(NamedTuple):
    """A row in quarantine, and the file or stream that it came from."""

    number: int
    source: int
    line: int | str
    reason: str
    detail: str
    packed: bytes
    name: str
    digest: str

    def row(self, store: Path) -> Row | Refused:
        """The row again, or why it is still none."""
        raw = unpacked(self.packed, self.number, store)
        kept = Refused(self.reason, self.detail, self.line, raw)
        ending = "" if is_stream(self.digest) else self.name.lower().rpartition(".")[2]
        if self.reason in _KEPT_IN_PART or (is_stream(self.digest) and self.detail == NO_ROW):
            return kept
        if ending == "parquet" and self.reason not in _MAY_CHANGE:  # its values were written as JSON as far as they go
            return kept
        found = _of_csv(raw, self.line) if ending == "csv" else read_row(raw.strip(), self.line, raw)
        return kept if isinstance(found, Refused) and self.reason in _MAY_CHANGE else found


def _rows(batch: Batch, numbers: list[int]) -> Iterator[tuple[int, Row | Refused]]:
    for entry in _fetch(batch.connection, numbers):
        batch.source(entry.digest, entry.name)
        batch.again[entry.source, entry.line] = entry.number
        yield entry.source, entry.row(batch.store)


def _fetch(connection: sqlite3.Connection, numbers: list[int]) -> list[_Entry]:
    marks = ", ".join("?" * len(numbers))
    query = (
        "SELECT quarantine.number, source, line, reason, detail, raw, name, digest FROM quarantine"  # noqa: S608
        f" JOIN sources ON sources.number = source WHERE quarantine.number IN ({marks}) ORDER BY quarantine.number"
    )
    return [_Entry._make(row) for row in connection.execute(query, numbers)]


def _of_csv(raw: bytes, line: int | str) -> Row | Refused:
    """Of CSV the cells by column were kept."""
    try:
        cells = load_object(raw)
    except FaultError:  # not UTF-8: what it is not, it does not become
        return read_row(raw.strip(), line, raw)
    return row_of_cells({column: str(cell) for column, cell in cells.items()}, line)
