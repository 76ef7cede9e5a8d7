"""Reading a feedback store: days, their figures, their rows, and what is in quarantine. No lock is needed.

::

    <store>/index.sqlite3                           what counts
    <store>/<YYYY-MM-DD>/decisions-<number>.parquet, labels-<number>.parquet
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from agentpipe.errors import CorruptError
from agentpipe.feedback.damage import REMEDY
from agentpipe.feedback.figures import EMPTY, FiguresOfLabels
from agentpipe.feedback.index import index_path, reading
from agentpipe.feedback.parts import part_path, parts_of, read_part
from agentpipe.feedback.schema import KEY, TABLES, day_number, utc_day

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

_ATTEMPTS: Final = 5
"""looks at the index for a reader whose parts are merged under its hands"""


@dataclass(frozen=True)
class DayState:
    """One UTC day, from the index alone.

    ``digest`` changes when the day's rows do, and when one of its labels begins or ceases to count (its decision came,
    or a later label supersedes it): what :func:`agentpipe.feedback.labelled.read_labelled` gives changes with it.
    ``labelled`` counts the day's decisions that have a label, whenever it came; ``trainable`` counts the day's labels
    that have their decision and are the latest word on it; ``orphans`` counts those whose decision did not come yet.
    """

    day: str
    digest: str
    decisions: int
    labels: int
    labelled: int
    trainable: int
    superseded: int
    orphans: int
    verdicts: dict[str, int]
    error_types: dict[str, int]

    @property
    def unlabelled(self) -> int:
        """Decisions of the day without a label."""
        return self.decisions - self.labelled


class Quarantined(NamedTuple):
    """A row, or a whole file (line 0), that was not taken."""

    number: int
    reason: str
    detail: str
    file: str
    source: str
    """digest of the file, or the stream"""
    line: int | str
    raw: bytes

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form; bytes that are not UTF-8 are written as escapes."""
        return {**self._asdict(), "raw": self.raw.decode(errors="backslashreplace")}


def days(store: Path) -> list[dt.date]:
    """Every UTC day that has a row, ascending.

    Raises:
        CorruptError: the index is damaged or lost.
    """
    with reading(store) as connection:
        found = connection.execute("SELECT day FROM days ORDER BY day") if connection else ()
        return [utc_day(number) for (number,) in found]


def day_state(store: Path, day: dt.date) -> DayState:
    """What ``day`` amounts to; a day without rows has zeros and always the same digest.

    Raises:
        CorruptError: the index is damaged or lost.
    """
    query = "SELECT decisions, labelled, figures FROM days WHERE day = ?"
    with reading(store) as connection:
        found = connection.execute(query, (day_number(day),)).fetchone() if connection else None
    if found is None:
        return DayState(day.isoformat(), EMPTY, 0, 0, 0, 0, 0, 0, {}, {})
    decisions, labelled, text = found
    try:
        figures, sound = FiguresOfLabels.model_validate_json(text), 0 <= labelled <= decisions
    except (ValidationError, TypeError):
        sound = False
    if not sound:
        message = "the figures of a day are damaged"
        raise CorruptError(message, file=index_path(store), day=day.isoformat(), remedy=REMEDY)
    return DayState(
        day=day.isoformat(),
        digest=figures.digest,
        decisions=decisions,
        labels=figures.labels,
        labelled=labelled,
        trainable=figures.current,
        superseded=figures.superseded,
        orphans=figures.orphans,
        verdicts={str(name): count for name, count in figures.verdicts.items()},
        error_types={str(name): count for name, count in figures.error_types.items()},
    )


def read_day(store: Path, day: dt.date) -> tuple[pa.Table, pa.Table]:
    """The day's decisions and labels, each sorted by id.

    Raises:
        CorruptError: a part is missing, damaged or has another schema.
    """
    return read_kind(store, day, "decision"), read_kind(store, day, "label")


def read_kind(store: Path, day: dt.date, kind: str) -> pa.Table:
    """The day's rows of one kind, sorted by id; an empty table with the schema where there are none."""
    table = pa.concat_tables([TABLES[kind].empty_table(), *_rows_of(store, day, kind, None)])
    return table.take(pc.sort_indices(table, sort_keys=[(KEY[kind], "ascending")]))


def decisions_of(store: Path, wanted: Iterable[dt.date], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Decisions of several days, a row group (16,384 rows at most, mostly) at a time: memory does not grow with days.

    Args:
        store: Root of the feedback store.
        wanted: UTC days.
        columns: Names of columns of ``schema.DECISION_TABLE``.

    Raises:
        CorruptError: a part is missing or damaged.
    """
    for day in wanted:
        yield from _rows_of(store, day, "decision", list(columns))


def _rows_of(store: Path, day: dt.date, kind: str, columns: list[str] | None) -> Iterator[pa.Table]:
    """Row groups of a day. Its parts are all opened first, so that none is lost to a merge while they are read."""
    with contextlib.ExitStack() as stack:
        for path, file in _opened_parts(store, day_number(day), kind, stack):
            yield from read_part(file, path, kind, columns)


def _opened_parts(store: Path, day: int, kind: str, stack: contextlib.ExitStack) -> list[tuple[Path, IO[bytes]]]:
    """The parts of a day; the index is looked at anew where a merge has removed one before it was opened."""
    path = store
    for _ in range(_ATTEMPTS):
        with reading(store) as connection:
            paths = (
                [part_path(store, day, kind, part) for part in parts_of(connection, day, kind)] if connection else []
            )
        with contextlib.ExitStack() as attempt:
            try:
                found: list[tuple[Path, IO[bytes]]] = []
                for path in paths:
                    found.append((path, attempt.enter_context(path.open("rb"))))
            except FileNotFoundError:
                continue
            except OSError as error:
                remedy = "make it readable, or restore it from a copy"
                raise CorruptError(f"cannot be read: {error.strerror}", file=path, remedy=remedy) from error
            stack.push(attempt.pop_all())
            return found
    raise CorruptError("a part is missing", file=path, remedy="restore it from a copy")


def quarantine_counts(store: Path) -> dict[str, int]:
    """Rows and files in quarantine, by reason."""
    query = "SELECT reason, count(*) FROM quarantine GROUP BY reason ORDER BY reason"
    with reading(store) as connection:
        return dict(connection.execute(query).fetchall()) if connection else {}


def quarantined(
    store: Path, *, reason: str | None = None, numbers: Sequence[int] = (), limit: int | None = None
) -> list[Quarantined]:
    """What is in quarantine, in the order in which it came.

    Args:
        store: Root of the feedback store.
        reason: Only with this reason.
        numbers: Only these; all where empty.
        limit: At most so many.

    Raises:
        CorruptError: the index is damaged or lost.
    """
    keep: Callable[[int], bool] = set(numbers).__contains__ if numbers else lambda _: True
    found: list[Quarantined] = []
    query = (
        "SELECT quarantine.number, reason, detail, name, digest, line, raw FROM quarantine"
        " JOIN sources ON sources.number = source WHERE ?1 IS NULL OR reason = ?1 ORDER BY quarantine.number"
    )
    with reading(store) as connection:
        for row in connection.execute(query, (reason,)) if connection else ():
            if limit is not None and len(found) >= limit:
                break
            if keep(row[0]):
                found.append(Quarantined._make([*row[:-1], unpacked(row[-1], row[0], store)]))
    return found


def unpacked(packed: bytes, number: int, store: Path) -> bytes:
    """The row of an entry in quarantine as it came.

    Raises:
        CorruptError: damaged.
    """
    try:
        return zlib.decompress(packed)
    except (zlib.error, TypeError) as error:
        message = "a row in quarantine is damaged"
        raise CorruptError(message, file=index_path(store), entry=number, remedy=REMEDY) from error
