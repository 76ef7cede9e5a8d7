"""What a night does next: a function of what is materialised and of the runs that the night has launched so far."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import dagster as dg

from agentpipe.defs.jobs import STAGES, Stage
from agentpipe.defs.nights import NIGHT_TAG, Night
from agentpipe.defs.partitions import candidate_key, monday
from agentpipe.defs.resources import Workspace
from agentpipe.defs.staleness import stale_cells
from agentpipe.environments.parameters import CELLS

_BY_NAME = {stage.name: stage for stage in STAGES}
_AGAIN = ("retrain", "compare_again")
"""fates of a candidate that lost a race against another; it is made once more"""
_LAUNCHING = dt.timedelta(seconds=20)
"""How long the runs that the schedule asked for may take to appear; asked for again here they would run twice."""


@dataclass(frozen=True)
class Asked:
    """One run that a night wants."""

    job: str
    partition: str | None
    why: str
    attempt: int = 1

    def request(self, night: Night) -> dg.RunRequest:
        """The run request; its key names the night, so that nothing is launched twice."""
        key = f"night:{night.day}:{self.job}:{self.partition or ''}:{self.attempt}"
        tags = {NIGHT_TAG: night.day, "agentpipe/why": self.why[:200]}
        return dg.RunRequest(run_key=key, job_name=self.job, partition_key=self.partition, tags=tags)


@dataclass(frozen=True)
class Step:
    """What a night does now."""

    kind: Literal["ask", "wait", "end"]
    text: str
    asked: tuple[Asked, ...] = ()


@dataclass(frozen=True)
class Past:
    """One run that a night has launched."""

    job: str
    partition: str | None
    status: dg.DagsterRunStatus

    @property
    def finished(self) -> bool:
        """Over, one way or the other."""
        return self.status in (
            dg.DagsterRunStatus.SUCCESS,
            dg.DagsterRunStatus.FAILURE,
            dg.DagsterRunStatus.CANCELED,
        )

    @property
    def good(self) -> bool:
        """It did what it should."""
        return self.status is dg.DagsterRunStatus.SUCCESS


def past_runs(instance: dg.DagsterInstance, night: Night) -> list[Past]:
    """The runs of ``night``, oldest first."""
    runs = instance.get_runs(dg.RunsFilter(tags={NIGHT_TAG: night.day}), ascending=True)
    return [Past(run.job_name, run.tags.get("dagster/partition"), run.status) for run in runs]


def cells_to_ask(workspace: Workspace) -> tuple[Asked, ...]:
    """The stale cells as runs; none while the line itself is to be made first."""
    if any(not workspace.is_current(asset, None) for asset in _BY_NAME["line"].assets):
        return ()
    return tuple(Asked("cell", stale.cell, stale.why) for stale in stale_cells(workspace))


def next_step(workspace: Workspace, night: Night, runs: Sequence[Past], feedback: str, now: dt.datetime) -> Step:
    """The next step of ``night``.

    Args:
        workspace: The home.
        night: A night that was begun and has not ended.
        runs: What it has launched so far.
        feedback: What the day's feedback run is waiting for or doing; empty where it has ended or is not to be.
        now: Aware present time.

    Raises:
        TableError: the table's source is not valid.
    """
    open_runs = [run for run in runs if not run.finished]
    if open_runs:
        names = ", ".join(_name(run.job, run.partition) for run in open_runs[:4])
        return Step("wait", f"{len(open_runs)} of its runs are not over: {names}")
    waited = now - dt.datetime.fromisoformat(night.begun)
    if not runs and not night.made_up and waited < _LAUNCHING:
        return Step("wait", "its first runs are being launched")
    if not any(run.job == "candidate" for run in runs):  # what is edited from then on is the next night's
        for step in _before_training(workspace, night, runs):
            return step
        fresh, needed = workspace.fresh_cells(), workspace.settings.schedule.cells_needed
        if len(fresh) < needed:
            missing = ", ".join(cell for cell in CELLS if cell not in fresh)
            return Step(
                "end", f"skipped: {len(fresh)} of 15 cells are fresh, {needed} are needed; not fresh: {missing}"
            )
    if feedback and (waited < dt.timedelta(minutes=workspace.settings.schedule.feedback_minutes) or "runs" in feedback):
        return Step("wait", f"for the day's feedback: {feedback}")
    return _training_and_after(workspace, night, runs)


def _before_training(workspace: Workspace, night: Night, runs: Sequence[Past]) -> Iterator[Step]:
    """The first of line, cells, statistics and feedback that is due, if any."""
    yield from _single(workspace, runs, _BY_NAME["line"], None)
    tried = {run.partition for run in runs if run.job == "cell"}
    cells = tuple(asked for asked in cells_to_ask(workspace) if asked.partition not in tried)
    if cells:
        yield Step("ask", f"{len(cells)} stale cells", cells)
    yield from _single(workspace, runs, _BY_NAME["statistics"], None)
    yield from _single(workspace, runs, _BY_NAME["feedback_day"], night.day)


def _single(workspace: Workspace, runs: Sequence[Past], stage: Stage, partition: str | None) -> Iterator[Step]:
    due = [asset for asset in stage.assets if not workspace.is_current(asset, partition)]
    if not due:
        return
    tried = [run for run in runs if (run.job, run.partition) == (stage.name, partition)]
    if not tried:
        yield Step("ask", f"{stage.name} is due", (Asked(stage.name, partition, f"{due[0]} is not current"),))
    elif not tried[-1].good:
        yield Step("end", f"failed: {_name(stage.name, partition)}")


def _training_and_after(workspace: Workspace, night: Night, runs: Sequence[Past]) -> Step:
    key = candidate_key(night.date, "nightly")
    tried = [run for run in runs if run.job == "candidate"]
    if not tried:
        return Step("ask", "every cell is fresh", (Asked("candidate", key, "nightly retraining"),))
    if not tried[-1].good:
        return Step("end", f"failed: {_name('candidate', key)}; its checks and log say why")
    published = workspace.references.find("publish", key)
    fate, reason = (
        ("unknown", "nothing was published")
        if published is None
        else (str(published.figures.get("fate", "unknown")), str(published.figures.get("reason", "")))
    )
    if fate in _AGAIN and len(tried) == 1:
        return Step("ask", reason, (Asked("candidate", key, f"once more: {reason}", attempt=2),))
    week = monday(night.date).isoformat()
    if not workspace.is_current("weekly_drift_report", week) and all(run.job != "week" for run in runs):
        return Step("ask", "the week's report is due", (Asked("week", week, "after the night's candidate"),))
    return Step("end", f"{fate}: {reason}")


def _name(job: str, partition: str | None) -> str:
    return f"{job}[{partition}]" if partition else job
