"""What is being made already: two sensors, or a sensor and a person, may find the same partition due at one moment."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import dagster as dg

from agentpipe.defs.backfill import unfinished_backfills
from agentpipe.defs.table_plan import CHANGE_TAG

OVER = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)
"""Statuses of a run that will not change any more."""
UNFINISHED = [status for status in dg.DagsterRunStatus if status not in OVER]
SKIPPED_TAG = "agentpipe/skipped"
"""Tag of a run that made no candidate, since there was nothing to learn; its value says why."""


def unless_under_way(
    instance: dg.DagsterInstance, asked: Sequence[dg.RunRequest] | dg.SkipReason
) -> list[dg.RunRequest] | dg.SkipReason:
    """The requests, or a reason to wait where some of what they ask for is being made already."""
    if isinstance(asked, dg.SkipReason):
        return asked
    changes = unfinished_backfills(instance, CHANGE_TAG) if any(one.job_name == "cell" for one in asked) else ()
    if changes:
        return dg.SkipReason(f"backfill {changes[0].backfill_id} of a change of the table runs")
    run = unfinished_run(instance, {(one.job_name, one.partition_key) for one in asked})
    return dg.SkipReason(f"run {run.run_id} makes some of it already") if run else list(asked)


def unfinished_run(
    instance: dg.DagsterInstance, wanted: Collection[tuple[str | None, str | None]]
) -> dg.DagsterRun | None:
    """A run that is not over of one of these jobs and partitions."""
    runs = instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
    return next((run for run in runs if (run.job_name, run.tags.get("dagster/partition")) in wanted), None)
