"""What a week's report takes from the feedback store."""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING, Final

from agentpipe.evaluation.drift_sample import Observations, decided_observations
from agentpipe.evaluation.label_mix import ProductionWeek, production_week
from agentpipe.feedback.schema import DECISION_TABLE, LABEL_TABLE
from agentpipe.feedback.store import days, decisions_of, read_kind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COLUMNS: Final = ["decision_id", "time", "line_id", "result"]
EARLIER: Final = timedelta(days=7)
"""How long before the week labels are read: a label may come before its decision does."""


def _week(week: date) -> list[date]:
    return [week + timedelta(days=offset) for offset in range(7)]


def read_week(
    store: Path, week: date, *, quarantine: Mapping[str, int] | None = None, minimum_labels: int = 50
) -> ProductionWeek:
    """Figures of the week from the Monday ``week``; see :func:`~agentpipe.evaluation.label_mix.production_week`.

    Labels given from a week before until now are read, decisions without their observations.

    Raises:
        EvaluationError: not a Monday.
        CorruptError: the store is damaged.
    """
    import pyarrow as pa

    empty = pa.schema([DECISION_TABLE.field(name) for name in COLUMNS]).empty_table()
    decisions = pa.concat_tables([empty, *decisions_of(store, _week(week), COLUMNS)])
    labelled = [day for day in days(store) if day >= week - EARLIER]
    labels = pa.concat_tables([LABEL_TABLE.empty_table(), *(read_kind(store, day, "label") for day in labelled)])
    return production_week(week, decisions, labels, quarantine=quarantine, minimum_labels=minimum_labels)


def read_observations(store: Path, week: date, size: int, *, rows: int = 100_000, seed: int) -> Observations:
    """Observations of the week's decisions and their lines; at most ``rows``, drawn by ``seed`` and decision id.

    Raises:
        EvaluationError: an observation of another size than ``size``.
        CorruptError: the store is damaged.
    """
    tables = decisions_of(store, _week(week), ["decision_id", "line_id", "observation"])
    return decided_observations(tables, size, rows=rows, seed=seed)
