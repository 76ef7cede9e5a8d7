"""Runs whose process is gone: marked as failed, so that they do not hold up those that wait behind them."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import dagster as dg

from agentpipe.settings import ScheduleSettings

PROCESS_TAG = "agentpipe/process"
"""Tag of a run that has begun: host, process id and the process's start, which together name a process once."""
NAMELESS_SECONDS = 600.0
_BEGUN = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


def process_name(process: int | None = None) -> str | None:
    """Host, process id and start time of a process, this one by default; ``None`` where it is gone."""
    number = os.getpid() if process is None else process
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    state, start = fields[0], fields[19]
    return None if state in "ZX" else f"{platform.node()}:{number}:{start}"


def mark_process(instance: dg.DagsterInstance, run_id: str) -> None:
    """Writes down which process executes a run."""
    name = process_name()
    if name is not None:
        instance.add_run_tags(run_id, {PROCESS_TAG: name})


def fail_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """Marks the runs of this host whose process is gone as failed; returns their ids."""
    dead = []
    for run in instance.get_runs(dg.RunsFilter(statuses=_BEGUN)):
        name = run.tags.get(PROCESS_TAG, "")
        host, _, rest = name.partition(":")
        number = rest.partition(":")[0]
        here = host == platform.node() and number.isdigit()
        if not (here and process_name(int(number)) != name) and not (not name and _long_begun(instance, run)):
            continue
        last = instance.get_run_by_id(run.run_id)  # it may have ended well since it was listed, and its process after
        if last is not None and last.status in _BEGUN:
            instance.report_run_failed(last, "the process that ran it ended without a word")
            dead.append(run.run_id)
    return dead


def _long_begun(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """A run names its process with its first step, seconds after it has begun: one that does not was killed before."""
    begun = instance.get_run_records(dg.RunsFilter(run_ids=[run.run_id]))[0].start_time
    return begun is not None and time.time() - begun > NAMELESS_SECONDS


def interrupted_sensor(chosen: ScheduleSettings) -> dg.SensorDefinition:
    """The sensor ``interrupted_runs``."""

    @dg.sensor(
        name="interrupted_runs",
        minimum_interval_seconds=chosen.every_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Marks runs whose process was killed as failed: one run at a time works on a home, and a dead one "
        "would keep the others waiting for ever.",
    )
    def interrupted_runs(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        dead = fail_dead_runs(context.instance)
        return dg.SkipReason(f"marked as failed: {', '.join(dead)}" if dead else "every run that has begun is alive")

    return interrupted_runs
