"""What Dagster is told of the sources that lie outside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import dagster as dg

from agentpipe.defs.instance import recorded_version
from agentpipe.defs.resources import Workspace
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import AgentpipeError

if TYPE_CHECKING:
    from agentpipe.serving.agent.reports import Report

AGENT_ASSETS: Final = {"incidents": "agent_incidents", "shadow": "agent_shadow"}
MARKDOWN_BYTES: Final = 16_000
MOST_EVENTS: Final = 50
AGAIN_SECONDS: Final = 600.0


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
    from agentpipe.learning.succession.champion import ChampionStore

    current = ChampionStore(workspace.root / "champion").current()
    if current is None or recorded_version(instance, "champion", None) == current.digest:
        return []
    shown = {name: value for name, value in current.figures.items() if isinstance(value, bool | int | float | str)}
    metadata = {**shown, "sequence": current.sequence, "kind": current.kind, "who": current.who, "why": current.reason}
    return [dg.AssetMaterialization("champion", metadata=metadata, tags={"dagster/data_version": current.digest})]


@dataclass(frozen=True)
class Told:
    """What Dagster was told of one report of an agent."""

    mark: str
    version: str
    at: float
    """seconds since 1970"""


def agent_events(
    workspace: Workspace, told: Mapping[str, Told], now: float
) -> tuple[list[dg.AssetMaterialization], dict[str, Told], list[str]]:
    """An event for every report of an agent that is new, or another one than Dagster was told of.

    One that is still being written is told again ten minutes after the last time, and when it is over. Returns the
    events, fifty at most, what has been told then, and what is damaged.
    """
    from agentpipe.serving.agent.reports import places, read

    events: list[dg.AssetMaterialization] = []
    known: dict[str, Told] = {}
    damaged: list[str] = []
    for place in places(workspace.root):
        before = told.get(place.key)
        if before is not None:
            known[place.key] = before
        if (before is not None and before.mark == place.mark) or len(events) == MOST_EVENTS:
            continue
        try:
            report = read(place)
        except AgentpipeError as error:
            damaged.append(f"{place.key}: {error.message}")
            continue
        if before is None or (before.version != report.version and (report.ended or now - before.at >= AGAIN_SECONDS)):
            events.append(_agent_event(report))
            known[place.key] = Told(place.mark, report.version, now)
        elif before.version == report.version:
            known[place.key] = replace(before, mark=place.mark)
    return events, known, damaged


def _agent_event(report: Report) -> dg.AssetMaterialization:
    """Figures and text of one report, in the asset of its kind."""
    text = report.markdown.encode()
    cut = len(text) > MARKDOWN_BYTES
    shown = text[:MARKDOWN_BYTES].decode(errors="ignore") + ("\n\n… cut; the file has all of it" if cut else "")
    metadata = {**report.figures, "report": dg.MetadataValue.md(shown), "file": str(report.place.path)}
    return dg.AssetMaterialization(
        AGENT_ASSETS[report.place.kind], metadata=metadata, tags={"dagster/data_version": report.version}
    )
