"""From production to a candidate: takes feedback in as it comes, and trains on a day once it is over."""

from __future__ import annotations

import dagster as dg

from agentpipe.defs.feedback.due import FEEDBACK_TAG, Standing, closed_days, standing, untaken_days, waiting_input
from agentpipe.defs.jobs import asset_jobs
from agentpipe.defs.partitions import candidate_key, last_closed_day
from agentpipe.defs.resources import Workspace
from agentpipe.defs.under_way import SKIPPED_TAG, UNFINISHED
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
        "unchanged feedback never. An intake that fails is tried three times.",
    )
    def feedback(context: dg.SensorEvaluationContext, workspace: Workspace) -> list[dg.RunRequest] | dg.SkipReason:
        instance = context.instance
        taking = instance.get_runs(dg.RunsFilter(job_name="feedback_day", statuses=UNFINISHED), limit=1)
        if taking:
            return dg.SkipReason(f"feedback is being taken in by run {taking[0].run_id}")
        try:
            waiting = waiting_input(workspace)
            intake, given_up = _intake(instance, workspace, waiting.digest)
            if intake:
                return intake
            found = [standing(workspace, day) for day in closed_days(workspace)]
        except AgentpipeError as error:
            return dg.SkipReason(f"the feedback cannot be judged: {error}")
        launched = _training(instance, found, given_up)
        if isinstance(launched, dg.SkipReason) and waiting.trouble:
            return dg.SkipReason(f"{launched.skip_message}; {waiting.trouble}")
        return launched

    return feedback


def _training(
    instance: dg.DagsterInstance, found: list[Standing], lines: list[str]
) -> list[dg.RunRequest] | dg.SkipReason:
    """A run for the first day that is due and was not launched for exactly its feedback; else why there is none."""
    running = [run for run in instance.get_runs(dg.RunsFilter(statuses=UNFINISHED)) if FEEDBACK_TAG in run.tags]
    if running:  # one at a time: the next one starts from the champion that this one may become
        return dg.SkipReason(f"{running[0].tags[FEEDBACK_TAG]} is being trained on by run {running[0].run_id}")
    for item in found:
        tags = {FEEDBACK_TAG: item.tag}
        if item.kind != "due":
            lines.append(f"{item.day}: {item.text}")
        elif runs := instance.get_runs(dg.RunsFilter(tags=tags), limit=1):
            skipped = runs[0].tags.get(SKIPPED_TAG)
            what = f"trained nothing: {skipped}" if skipped else "was launched before; see the runs page"
            lines.append(f"{item.day}: the run of exactly this feedback {what}")
        else:
            key = candidate_key(item.day, "feedback")
            return [dg.RunRequest(run_key=f"feedback:{item.tag}", job_name="candidate", partition_key=key, tags=tags)]
    return dg.SkipReason("; ".join(lines) or "no feedback of a day that is over")


def _intake(instance: dg.DagsterInstance, workspace: Workspace, waiting: str) -> tuple[list[dg.RunRequest], list[str]]:
    """A run for what waits, and one for each day whose partition lags behind the store; and what was given up.

    A file that is not finished yet waits on after its run went well, and is not asked for again until it has grown.
    """
    wanted = {f"{day}:{digest[:16]}": day for day, digest in untaken_days(workspace)}
    if waiting:
        wanted = {f"waiting:{waiting}": last_closed_day(), **wanted}
    asked: dict[str, dg.RunRequest] = {}
    given_up: list[str] = []
    for name, day in wanted.items():
        statuses = [run.status for run in instance.get_runs(dg.RunsFilter(tags={INTAKE_TAG: name}))]
        failed = statuses.count(dg.DagsterRunStatus.FAILURE)
        if failed >= ATTEMPTS:
            given_up.append(
                f"taking in {name} failed {failed} times: mend the cause the last run names, then materialise "
                f"production_feedback[{day}]"
            )
        elif failed == len(statuses) and day.isoformat() not in asked:  # a run for a day takes in everything
            asked[day.isoformat()] = dg.RunRequest(
                run_key=f"feedback_day:{name}:{failed + 1}",
                job_name="feedback_day",
                partition_key=day.isoformat(),
                tags={INTAKE_TAG: name},
            )
    return list(asked.values()), given_up
