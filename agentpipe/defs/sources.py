"""What Dagster is told of the sources that lie outside it."""

from __future__ import annotations

import dagster as dg

from agentpipe.defs.instance import recorded_version
from agentpipe.defs.resources import Workspace
from agentpipe.environments.parameters import CELLS


def source_events(instance: dg.DagsterInstance, workspace: Workspace) -> list[dg.AssetMaterialization]:
    """One event for every cell whose rows in the source are others than Dagster has recorded.

    They let the UI mark exactly the touched cells as stale.
    """
    versions = workspace.cell_versions()
    changed = (cell for cell in CELLS if recorded_version(instance, "table_source", cell) != versions[cell])
    return [
        dg.AssetMaterialization("table_source", partition=cell, tags={"dagster/data_version": versions[cell]})
        for cell in changed
    ]


def champion_events(instance: dg.DagsterInstance, workspace: Workspace) -> list[dg.AssetMaterialization]:
    """An event for the champion where it is another one than Dagster has recorded; none before the first."""
    from agentpipe.learning.champion import ChampionStore

    current = ChampionStore(workspace.root / "champion").current()
    if current is None or recorded_version(instance, "champion", None) == current.digest:
        return []
    shown = {name: value for name, value in current.figures.items() if isinstance(value, bool | int | float | str)}
    metadata = {**shown, "sequence": current.sequence, "kind": current.kind, "who": current.who, "why": current.reason}
    return [dg.AssetMaterialization("champion", metadata=metadata, tags={"dagster/data_version": current.digest})]
