"""From production to a candidate: takes feedback in as it comes, and trains on a day once it is over."""

from __future__ import annotations

import dagster as dg

from agentpipe.defs.feedback.due import FEEDBACK_TAG, closed_days, standing, untaken_days, waiting_input
from agentpipe.defs.jobs import asset_jobs
from agentpipe.defs.partitions import candidate_key, last_closed_day
from agentpipe.defs.resources import Workspace
from agentpipe.errors import AgentpipeError
from agentpipe.settings import ScheduleSettings

INTAKE_TAG = "agentpipe/intake"
"""Tag of a run that takes feedback in; its value names what waited."""
ATTEMPTS = 3
"""Failing runs after which an intake waits for another file, or for a person."""


def feedback_sensor(chosen: ScheduleSettings) -> dg.SensorDefinition:
    """The sensor ``feedback``."""

    @dg.sensor(
        name="feedback",
        jobs=[job for job in asset_jobs() if job.name in ("feedback_day", "candidate")],
        minimum_interval_seconds=chosen.every_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Takes in what lies in the inbox or the stream, and starts the incremental fine-tuning of a day "
        "once it is over and there is enough feedback; else its tick says why not. Amended feedback trains once more, "
        "unchanged feedback never.",
    )
    def feedback(context: dg.SensorEvaluationContext, workspace: Workspace) -> list[dg.RunRequest] | dg.SkipReason:
        try:
            intake = _intake(workspace)
            if intake:
                return intake
            found = [standing(workspace, day) for day in closed_days(workspace)]
        except AgentpipeError as error:
            return dg.SkipReason(f"the feedback cannot be judged: {error}")
        due = [item for item in found if item.kind == "due"]
        if not due:
            lines = [f"{item.day}: {item.text}" for item in found]
            return dg.SkipReason("; ".join(lines) or "no feedback of a day that is over")
        # One at a time: the next one starts from the champion that this one may become.
        item = due[0]
        key = candidate_key(item.day, "feedback")
        tags = {FEEDBACK_TAG: item.tag}
        if context.instance.get_runs(dg.RunsFilter(tags=tags), limit=1):
            return dg.SkipReason(
                f"{item.day}: its run was launched before for exactly this feedback; see the runs page"
            )
        return [dg.RunRequest(run_key=f"feedback:{item.tag}", job_name="candidate", partition_key=key, tags=tags)]

    return feedback


def _intake(workspace: Workspace) -> list[dg.RunRequest]:
    """A run for what waits, and one for each day whose partition lags behind the store."""
    asked = {day: f"feedback_day:{day}:{digest[:16]}" for day, digest in untaken_days(workspace)}
    waiting = waiting_input(workspace)
    if waiting:
        day = last_closed_day()
        asked[day] = f"{asked.get(day, f'feedback_day:{day}')}:{waiting}"
    return [
        dg.RunRequest(run_key=key, job_name="feedback_day", partition_key=day.isoformat()) for day, key in asked.items()
    ]
