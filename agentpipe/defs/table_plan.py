"""What a change of the disturbance table makes due: which partitions, why, and about how long they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agentpipe.defs.references import MISSING
from agentpipe.defs.resources import CELL_CHAIN, Workspace
from agentpipe.environments.parameters import CELLS
from agentpipe.storage import canonical_json, digest_bytes

CHANGE_TAG = "agentpipe/table-change"
"""Tag of every run and backfill that a change of the table launched; its value is the change's digest."""
JUDGED_AFTERWARDS = "champion_evaluation"
LAUNCH_SECONDS = 12.0
"""What starting a run costs, beside its assets."""


@dataclass(frozen=True)
class Due:
    """One partition that a change would run."""

    asset: str
    partition: str | None
    why: str
    seconds: float | None
    """what it took last time; none where it never ran"""


@dataclass(frozen=True)
class Plan:
    """Everything that a change would run; empty where nothing is due."""

    cells: Mapping[str, str]
    """due cell → digest of its rows as the source has them"""
    due: tuple[Due, ...]
    never_made: tuple[str, ...]
    """cells that the main job has not made yet; no change launches their first time"""

    @property
    def digest(self) -> str:
        """What the change is: digest of the due cells' rows."""
        return digest_bytes(canonical_json(dict(self.cells)))

    @property
    def seconds(self) -> float:
        """About how long it takes: what the partitions took last time, and a launch for each run."""
        runs = len(self.cells) + 1 if self.cells else 0
        return round(sum(item.seconds or 0.0 for item in self.due) + LAUNCH_SECONDS * runs, 1)

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {
            "cells": list(self.cells),
            "partitions": [
                {"asset": item.asset, "partition": item.partition, "why": item.why, "seconds": item.seconds}
                for item in self.due
            ],
            "change": self.digest if self.cells else None,
            "seconds": self.seconds,
            "never_made": list(self.never_made),
        }


def table_plan(workspace: Workspace) -> Plan:
    """Compares what every cell was made from with what the source holds now.

    A cell whose rows are the same is not due, however often they were changed in between; a cell that a failed run left
    half-way is due from where it stopped.

    Raises:
        TableError: the source is not valid.
    """
    source = workspace.cell_versions()
    made = {cell: workspace.references.version("disturbance_table", cell) for cell in CELLS}
    due: list[Due] = []
    cells: dict[str, str] = {}
    for cell in CELLS:
        behind = () if made[cell] == MISSING else _behind(workspace, cell, source[cell])
        if behind:
            cells[cell] = source[cell]
            due += [Due(asset, cell, why, _last(workspace, asset, cell)) for asset, why in behind]
    if due:
        why = f"judges the champion under the rows of {', '.join(cells)}"
        due.append(Due(JUDGED_AFTERWARDS, None, why, _last(workspace, JUDGED_AFTERWARDS, None)))
    return Plan(cells, tuple(due), tuple(cell for cell in CELLS if made[cell] == MISSING))


def _behind(workspace: Workspace, cell: str, source: str) -> tuple[tuple[str, str], ...]:
    """The assets of ``cell`` that were not made from the rows of now, with the reason."""
    references = workspace.references
    reasons = [(CELL_CHAIN[0], references.version(CELL_CHAIN[0], cell) != source, f"the rows of {cell} changed")]
    for before, asset in pairwise(CELL_CHAIN):
        found = references.find(asset, cell)  # one that was never made is the main job's to make
        stale = found is not None and found.consumed.get(before) != references.version(before, cell)
        reasons.append((asset, stale, f"was not made from the present {before}"))
    first = next((index for index, (_, stale, _) in enumerate(reasons) if stale), len(reasons))
    following = (asset for asset, _, _ in reasons[first + 1 :])
    own = ((asset, why) for asset, _, why in reasons[first : first + 1])
    return (*own, *((asset, f"follows {reasons[first][0]}") for asset in following))


def _last(workspace: Workspace, asset: str, partition: str | None) -> float | None:
    found = workspace.references.find(asset, partition)
    return None if found is None else found.seconds
