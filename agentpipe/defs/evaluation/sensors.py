"""Whenever the champion changes, by a candidate, a person or a rollback, it is judged under the present table."""

from __future__ import annotations

import dagster as dg

from agentpipe.defs.jobs import asset_jobs
from agentpipe.defs.resources import NONE, Workspace
from agentpipe.defs.sources import champion_events
from agentpipe.errors import AgentpipeError
from agentpipe.settings import ScheduleSettings


def champion_sensor(chosen: ScheduleSettings) -> dg.SensorDefinition:
    """The sensor ``champion_changes``."""

    @dg.sensor(
        name="champion_changes",
        jobs=[job for job in asset_jobs() if job.name == "champion"],
        minimum_interval_seconds=chosen.every_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells Dagster of a champion that a person approved or brought back, and launches "
        "`champion_evaluation` once for each change of the champion.",
    )
    def champion_changes(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult | dg.SkipReason:
        try:
            digest = workspace.champion_digest()
            events = champion_events(context.instance, workspace)
            sequence = _sequence(workspace)
        except AgentpipeError as error:
            return dg.SkipReason(f"the champion cannot be read: {error}")
        try:
            judged = workspace.references.find("champion_evaluation")
        except AgentpipeError as error:
            reason = f"the champion's evaluation cannot be read: {error}"
            return dg.SensorResult(skip_reason=reason, asset_events=events)
        if digest == NONE or (judged is not None and judged.consumed.get("champion") == digest):
            return dg.SensorResult(skip_reason="the champion of now is judged", asset_events=events)
        request = dg.RunRequest(run_key=f"champion:{sequence}:{digest[:16]}", job_name="champion")
        return dg.SensorResult(run_requests=[request], asset_events=events)

    return champion_changes


def _sequence(workspace: Workspace) -> int:
    from agentpipe.learning.succession.champion import ChampionStore

    current = ChampionStore(workspace.root / "champion").current()
    return 0 if current is None else current.sequence
