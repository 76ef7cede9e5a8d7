"""The main job: every asset from the line to the bundle, through Dagster, one run per stage and partition.

What is finished is not repeated: a partition is finished where Dagster has recorded a materialisation whose reference
was made under the same settings and code versions from the data versions that it would consume now.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg

from agentpipe.defs import partitions
from agentpipe.defs.gates import demand
from agentpipe.defs.graph import SHAPES
from agentpipe.defs.instance import (
    OURS,
    open_instance,
    recorded_version,
    settle_interrupted_runs,
    typed_storage_errors,
)
from agentpipe.defs.jobs import BOUND, STAGES, Stage
from agentpipe.defs.progress import listening
from agentpipe.defs.resources import Workspace, hold_home
from agentpipe.defs.sources import source_events
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import HomeError
from agentpipe.progress import Progress, silent
from agentpipe.settings import load_settings
from agentpipe.storage import prepare_home, remove_staging, write_json

TITLE = "main job"


@dataclass
class Outcome:
    """What one main job did."""

    home: Path
    day: dt.date
    executed: list[str] = field(default_factory=list)
    """partitions that were materialised now, such as ``trajectories[load-1]``"""
    reused: list[str] = field(default_factory=list)
    """partitions that were finished before"""

    @property
    def candidate(self) -> str:
        """The candidate's partition key."""
        return partitions.candidate_key(self.day, "manual")


def label(asset: str, partition: str | None) -> str:
    """How one partition of one asset is written: ``trajectories[load-1]``."""
    return f"{asset}[{partition}]" if partition else asset


def keys_of(stage: Stage, day: dt.date) -> tuple[str | None, ...]:
    """The partitions of ``stage`` that the main job of ``day`` materialises."""
    kind = SHAPES[stage.assets[0]].partitions
    if kind is None:
        return (None,)
    if kind is partitions.cells:
        return CELLS
    if kind is partitions.days:
        return (day.isoformat(),)
    if kind is partitions.weeks:
        return (partitions.monday(day).isoformat(),)
    return (partitions.candidate_key(day, "manual"),)


def run_main_job(
    definitions: dg.Definitions, options: Mapping[str, Any], day: dt.date | None = None, progress: Progress = silent
) -> Outcome:
    """Materialises everything that is not finished; see the module.

    Args:
        definitions: Everything that Dagster knows.
        options: Fields of :class:`~agentpipe.defs.resources.Workspace` (``None`` values are read from the environment).
        day: The candidate's day, UTC; the last closed day by default.
        progress: Hears of every finished partition and of the progress inside each.

    Raises:
        LockHeldError: another process works on the home.
        GateError: a gate stopped what depends on it; what was finished before stays.
        AgentpipeError: whatever an asset raised.
    """
    given = _absolute(options)
    settings = load_settings(**given)
    home = settings.home.resolve()
    Workspace(**given).source_version("machine_history", None)  # what is named and not there fails here …
    settings.digest()  # … rather than in the run that reads it
    prepare_home(home)
    with hold_home(home, "agentpipe run"), typed_storage_errors(home):
        start = partitions.keep_start(home)
        if start != partitions.START:
            raise HomeError("the definitions were loaded for another home", file=home, remedy="start a new process")
        chosen = partitions.check_day(day or partitions.last_closed_day(), start)
        remove_staging(home)
        write_json(home / "last_run.json", {**given, "home": str(home)})
        outcome = Outcome(home, chosen)
        with open_instance(home) as instance, listening(progress):
            settle_interrupted_runs(instance)
            workspace = Workspace(**given)
            for event in source_events(instance, workspace):
                instance.report_runless_asset_event(event)
            runner = _Runner(definitions, instance, workspace, given, outcome, progress)
            for stage in STAGES:
                for key in keys_of(stage, chosen):
                    runner.run(stage, key)
    return outcome


def _absolute(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as JSON values; paths absolute, so that a run launched from the UI finds the same files."""
    paths = ("home", "machine_history", "table_source")
    given = {name: value for name, value in options.items() if value is not None}
    home = given.get("home") or os.environ.get("AGENTPIPE_HOME") or ".agentpipe"
    return {
        name: str(Path(value).resolve()) if name in paths else value for name, value in {**given, "home": home}.items()
    }


@dataclass
class _Runner:
    definitions: dg.Definitions
    instance: dg.DagsterInstance
    workspace: Workspace
    options: dict[str, Any]
    outcome: Outcome
    progress: Progress

    def run(self, stage: Stage, key: str | None) -> None:
        """Materialises what is due of one partition of one stage, in one run."""
        due = self._due(stage, key)
        self.outcome.reused += [label(asset, key) for asset in stage.assets if asset not in due]
        if due:
            self._tell(f"{label(stage.name, key)}: {', '.join(due)}")
            self._execute(stage, key, due)
            self.outcome.executed += [label(asset, key) for asset in due]
        self._tell(f"{label(stage.name, key)} done")

    def _tell(self, note: str) -> None:
        total = sum(len(stage.assets) * len(keys_of(stage, self.outcome.day)) for stage in STAGES)
        self.progress(TITLE, len(self.outcome.executed) + len(self.outcome.reused), total, note)

    def _due(self, stage: Stage, key: str | None) -> list[str]:
        due: list[str] = []
        for asset in stage.assets:
            follows = any(upstream in due for upstream in SHAPES[asset].consumes)
            if follows or not self._finished(asset, key):
                due.append(asset)
        return due

    def _finished(self, asset: str, key: str | None) -> bool:
        if not self.workspace.is_current(asset, key):
            return False
        return recorded_version(self.instance, asset, key) == self.workspace.references.version(asset, key)

    def _execute(self, stage: Stage, key: str | None, due: list[str]) -> None:
        try:
            part_of_job(self.definitions.resolve_job_def(stage.name), stage, due).execute_in_process(
                run_config={
                    "resources": {"workspace": {"config": self.options}},
                    "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},
                },
                instance=self.instance,
                partition_key=key,
                tags={OURS: self.outcome.candidate},
            )
        except dg.DagsterError:
            for asset in due:
                found = self.workspace.references.find(asset, key)
                if found is not None:
                    demand(found.figures.get("gates", ()), f"{label(asset, key)} does not pass its gates")
            raise


def part_of_job(job: dg.JobDefinition, stage: Stage, due: list[str]) -> dg.JobDefinition:
    """The job of ``stage``, reduced to the assets that are due and those of their checks that belong to the stage."""
    if len(due) == len(stage.assets):
        return job
    assets = {dg.AssetKey(asset) for asset in due}
    checks = {key for key in job.asset_layer.asset_graph.asset_check_keys if key.asset_key in assets}
    return job.get_subset(asset_selection=assets, asset_check_selection=checks if stage.bound else checks - {BOUND})
