"""What a day of feedback amounts to: counts and a digest, kept in the index and settled with each intake."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from agentpipe.feedback.index import CURRENT, ORPHAN, SUPERSEDED
from agentpipe.feedback.schema import ERROR_TYPES, VERDICTS, ErrorType, Verdict
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    import numpy.typing as npt

_MODULUS: Final = 1 << 256
_ZERO: Final = "0" * 64
# States of the labels whose decision was touched: of one decision the latest label counts, by time and then by id.
_STATES: Final = f"""
UPDATE labels SET state = CASE
  WHEN NOT EXISTS (SELECT 1 FROM decisions WHERE decisions.id = labels.decision) THEN {ORPHAN}
  WHEN EXISTS (SELECT 1 FROM labels AS other WHERE other.decision = labels.decision
               AND (other.time, other.id) > (labels.time, labels.id)) THEN {SUPERSEDED}
  ELSE {CURRENT} END
WHERE decision IN (SELECT id FROM touched)
"""  # noqa: S608 - only constants
_LABELLED: Final = """
UPDATE decisions SET labelled = 1
WHERE labelled = 0 AND id IN (SELECT id FROM touched) AND EXISTS (SELECT 1 FROM labels WHERE decision = decisions.id)
RETURNING day
"""


class FiguresOfLabels(BaseModel):
    """What is kept of a day's labels, beside the counts of its decisions; read strictly, since it may be damaged."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    labels: NonNegativeInt
    orphans: NonNegativeInt
    current: NonNegativeInt
    superseded: NonNegativeInt
    verdicts: dict[Verdict, NonNegativeInt]
    error_types: dict[ErrorType, NonNegativeInt]


class Figures:
    """Changes of one batch to the figures of days."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._sums: dict[tuple[str, int], int] = defaultdict(int)
        self._counts: dict[tuple[str, int], int] = defaultdict(int)
        connection.execute("CREATE TEMP TABLE IF NOT EXISTS touched(id TEXT PRIMARY KEY) WITHOUT ROWID")
        connection.execute("DELETE FROM touched")

    def add(self, kind: str, days: npt.NDArray[np.int64], digests: npt.NDArray[np.uint8]) -> None:
        """Rows of a day join it; the order in which they come does not matter."""
        for day in np.unique(days).tolist():
            chosen = digests[days == day]
            self._sums[kind, day] = (self._sums[kind, day] + sum_of_digests(chosen)) % _MODULUS
            self._counts[kind, day] += len(chosen)

    def touch_looked(self) -> None:
        """The ids in the temporary table ``looked`` are decisions that came: those with a label are touched."""
        self._connection.execute(
            "INSERT OR IGNORE INTO touched SELECT looked.id FROM looked JOIN labels ON labels.decision = looked.id"
        )

    def touch(self, decisions: Iterable[str]) -> None:
        """Ids of decisions that were labelled."""
        self._connection.executemany(
            "INSERT OR IGNORE INTO touched VALUES (?)", [(identifier,) for identifier in decisions]
        )

    def settle(self) -> None:
        """Brings the states of labels and the figures of every changed day up to date."""
        execute = self._connection.execute
        affected = {day for _, day in self._counts}
        affected |= {
            day for (day,) in execute("SELECT DISTINCT day FROM labels WHERE decision IN (SELECT id FROM touched)")
        }
        execute(_STATES)
        labelled: dict[int, int] = defaultdict(int)
        for (day,) in execute(_LABELLED):
            labelled[day] += 1
        for day in sorted({*affected, *labelled}):
            self._settle_day(day, labelled[day])
        execute("DELETE FROM touched")

    def _settle_day(self, day: int, labelled: int) -> None:
        columns = "decisions, labelled, sum_of_decisions, sum_of_labels"
        found = self._connection.execute(f"SELECT {columns} FROM days WHERE day = ?", (day,)).fetchone()  # noqa: S608
        decisions, before, sum_of_decisions, sum_of_labels = found or (0, 0, _ZERO, _ZERO)
        row = (
            day,
            decisions + self._counts["decision", day],
            before + labelled,
            _added(sum_of_decisions, self._sums["decision", day]),
            _added(sum_of_labels, self._sums["label", day]),
        )
        figures = json.dumps(self._of_labels(day, row[3], row[4]), sort_keys=True)
        self._connection.execute("INSERT OR REPLACE INTO days VALUES (?, ?, ?, ?, ?, ?)", (*row, figures))

    def _of_labels(self, day: int, sum_of_decisions: str, sum_of_labels: str) -> dict[str, Any]:
        query = "SELECT state, verdict, error, count(*) FROM labels WHERE day = ? GROUP BY 1, 2, 3"
        states, verdicts, errors = [0, 0, 0], dict.fromkeys(VERDICTS, 0), dict.fromkeys(ERROR_TYPES, 0)
        for state, verdict, error, count in self._connection.execute(query, (day,)):
            states[state] += count
            verdicts[VERDICTS[verdict]] += count
            if error >= 0:
                errors[ERROR_TYPES[error]] += count
        idle = hashlib.sha256()
        query = f"SELECT id, state FROM labels WHERE day = ? AND state <> {CURRENT} ORDER BY id"  # noqa: S608
        for identifier, state in self._connection.execute(query, (day,)):
            idle.update(canonical_json([identifier, state]))
        content = [sum_of_decisions, sum_of_labels, idle.hexdigest()]
        return {
            "digest": digest_bytes(canonical_json(content)),
            "labels": sum(states),
            "orphans": states[ORPHAN],
            "current": states[CURRENT],
            "superseded": states[SUPERSEDED],
            "verdicts": {name: count for name, count in verdicts.items() if count},
            "error_types": {name: count for name, count in errors.items() if count},
        }


EMPTY: Final = digest_bytes(canonical_json([_ZERO, _ZERO, hashlib.sha256().hexdigest()]))
"""digest of a day without a row"""


def sum_of_digests(digests: npt.NDArray[np.uint8]) -> int:
    """The sum of SHA-256 digests (u8[n, 32], big-endian) modulo 2^256: of a set of rows, whatever their order.

    An incremental hash of a multiset (Bellare and Micciancio, 1997, AdHash); here it tells content apart, not enemies.
    """
    words = np.ascontiguousarray(digests).view(">u4").astype(np.uint64).sum(axis=0)  # n < 2^32: no overflow
    total = 0
    for word in words.tolist():
        total = (total << 32) + word
    return total % _MODULUS


def _added(stored: str, more: int) -> str:
    return f"{(int(stored, 16) + more) % _MODULUS:064x}"
