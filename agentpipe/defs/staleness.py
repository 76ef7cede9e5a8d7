"""Which cells a night makes again, and why."""

from __future__ import annotations

from dataclasses import dataclass

from agentpipe.defs.resources import CELL_CHAIN, Workspace
from agentpipe.environments.parameters import CELLS


@dataclass(frozen=True)
class Stale:
    """One cell that is to be made again."""

    cell: str
    why: str
    key: str
    """digest of what it would be made from; part of the run's key"""


def stale_cells(workspace: Workspace) -> list[Stale]:
    """Cells whose rows, settings, code or upstream changed, that failed a gate, or whose behaviour policy is too old.

    Raises:
        TableError: the table's source is not valid.
    """
    champions = _champions(workspace)
    found = []
    for cell in CELLS:
        why = _why(workspace, cell, champions)
        if why:
            found.append(Stale(cell, why, workspace.key(CELL_CHAIN[0], cell)))
    return found


def _why(workspace: Workspace, cell: str, champions: int) -> str:
    for asset in CELL_CHAIN:
        if not workspace.is_current(asset, cell):
            return f"{asset} is not current"
    failed = workspace.failed_gates(cell)
    if failed:
        return f"it failed {', '.join(failed)}"
    recorded = workspace.references.load("trajectories", cell).figures.get("behaviour_ordinal", 0)
    age = champions - recorded
    allowed = workspace.settings.schedule.behaviour_age
    return f"its behaviour policy is {age} champions old" if age > allowed else ""


def _champions(workspace: Workspace) -> int:
    from agentpipe.learning.succession.champion import ChampionStore

    current = ChampionStore(workspace.root / "champion").current()
    return 0 if current is None else current.sequence
