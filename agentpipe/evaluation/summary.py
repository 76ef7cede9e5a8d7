"""From the per-episode table to the figures: overall, by slice, by failure, and paired between players."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.environments.layout import SEGMENTS
from agentpipe.evaluation.columns import column
from agentpipe.evaluation.statistics import (
    Estimate,
    group_by,
    paired_difference,
    ratio_interval,
    rounded,
    success_interval,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

SLICES = ("cell", "kind", "intensity", "mode", "topology")
"""Columns that every player's success is sliced by."""


@dataclass(frozen=True)
class _Rows:
    """The columns of one player, in the order of environment and episode."""

    values: dict[str, npt.NDArray[Any]]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.values[name]


_NEEDED = (
    *SLICES,
    "environment_id",
    "episode",
    "success",
    "reason",
    "failed_segment",
    "decisions",
    "decision_seconds",
    "elapsed_seconds",
    "steps",
    "return",
)


def player_rows(table: pa.Table) -> dict[str, _Rows]:
    """Each player's rows as numpy columns, in order of first appearance."""
    columns = {name: column(table, name) for name in (*_NEEDED, "player")}
    names = columns["player"]
    order = names[np.sort(np.unique(names, return_index=True)[1])]
    return {str(name): _Rows({key: columns[key][names == name] for key in _NEEDED}) for name in order}


def _share(estimate: Estimate) -> dict[str, Any]:
    return {
        "success": estimate.value,
        "ci95": estimate.ci95(),
        "episodes": estimate.observations,
        "environments": estimate.clusters,
    }


def success_by(rows: _Rows, name: str) -> dict[str, dict[str, Any]]:
    """Success, interval, episodes and environments for each value of the column ``name``."""
    environment = rows["environment_id"]
    groups = group_by(rows[name])
    return {label: _share(success_interval(rows["success"][part], environment[part])) for label, part in groups.items()}


def _counts(labels: npt.NDArray[Any]) -> dict[str, int]:
    return {name: int(part.size) for name, part in group_by(labels).items()}


def player_figures(rows: _Rows) -> dict[str, Any]:
    """All figures of one player."""
    success, environment = rows["success"], rows["environment_id"]
    failed = ~success
    seconds = ratio_interval(rows["decision_seconds"], rows["decisions"], environment)
    by_segment = _counts(rows["failed_segment"][failed])
    return {
        **_share(success_interval(success, environment)),
        "successes": int(success.sum()),
        "failures": int(failed.sum()),
        "decision_seconds": seconds.value,
        "decision_seconds_ci95": seconds.ci95(),
        "mean_return": float(np.mean(rows["return"], dtype=np.float64)),
        "mean_steps": float(np.mean(rows["steps"])),
        "mean_decisions": float(np.mean(rows["decisions"])),
        "mean_elapsed_seconds": float(np.mean(rows["elapsed_seconds"], dtype=np.float64)),
        **{f"by_{name}": success_by(rows, name) for name in SLICES},
        "failures_by_segment": {segment: by_segment.get(segment, 0) for segment in SEGMENTS},
        "failures_by_reason": _counts(rows["reason"][failed]),
    }


def paired_figures(first: _Rows, second: _Rows) -> dict[str, Any]:
    """Difference in success, first minus second, on the same episodes; overall and by cell."""
    a, b, environment = first["success"], second["success"], first["environment_id"]

    def difference(part: npt.NDArray[np.int64]) -> dict[str, Any]:
        estimate = paired_difference(a[part], b[part], environment[part])
        return {"difference": estimate.value, "ci95": estimate.ci95(), "environments": estimate.clusters}

    cells = group_by(first["cell"])
    return {**difference(np.arange(a.size)), "by_cell": {cell: difference(part) for cell, part in cells.items()}}


def _pairs(names: list[str]) -> list[tuple[str, str]]:
    """Every pair, the policy first where it takes part."""
    ordered = sorted(names, key=lambda name: (name != "policy", names.index(name)))
    return list(combinations(ordered, 2))


def summarise(table: pa.Table) -> dict[str, Any]:
    """``players`` and ``paired`` of an evaluation, every float rounded to six digits."""
    rows = player_rows(table)
    players = {name: player_figures(columns) for name, columns in rows.items()}
    paired = {f"{a}-{b}": paired_figures(rows[a], rows[b]) for a, b in _pairs(list(rows))}
    result: dict[str, Any] = rounded({"players": players, "paired": paired})
    return result
