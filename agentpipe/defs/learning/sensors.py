"""How a night goes on, and the making up of one that was missed."""

from __future__ import annotations

import datetime as dt

import dagster as dg

from agentpipe.defs.feedback.due import feedback_waits
from agentpipe.defs.jobs import asset_jobs
from agentpipe.defs.learning.schedules import begin
from agentpipe.defs.night import next_step, past_runs
from agentpipe.defs.nights import Night, Nights, last_due
from agentpipe.defs.resources import Workspace
from agentpipe.defs.under_way import unless_under_way
from agentpipe.errors import AgentpipeError
from agentpipe.settings import ScheduleSettings

LATE = dt.timedelta(minutes=10)
"""After its time a night that nothing has begun counts as missed."""


def nightly_sensor(chosen: ScheduleSettings) -> dg.SensorDefinition:
    """The sensor ``nightly_candidate``."""

    @dg.sensor(
        name="nightly_candidate",
        jobs=asset_jobs(),
        minimum_interval_seconds=chosen.every_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Leads a night on: line, stale cells, statistics, the day's feedback, then the candidate, the "
        "champion's evaluation and the weekly report. Makes up a missed night once. One night at a time.",
    )
    def nightly_candidate(
        context: dg.SensorEvaluationContext, workspace: Workspace
    ) -> list[dg.RunRequest] | dg.SkipReason:
        now = dt.datetime.now(dt.UTC)
        nights = Nights(workspace.root)
        night: Night | None = None
        try:
            night = nights.running()
            return (
                _make_up(context, workspace, nights, now) if night is None else _go_on(context, workspace, night, now)
            )
        except AgentpipeError as error:
            name = "the night" if night is None else f"night {night.day}"
            return dg.SkipReason(f"{name} cannot go on: {error}")

    return nightly_candidate


def _go_on(
    context: dg.SensorEvaluationContext, workspace: Workspace, night: Night, now: dt.datetime
) -> list[dg.RunRequest] | dg.SkipReason:
    """What a night that was begun still lacks."""
    waits = feedback_waits(context.instance, workspace, night.date)
    step = next_step(workspace, night, past_runs(context.instance, night), waits, now)
    if step.kind == "ask":
        return unless_under_way(context.instance, [asked.request(night) for asked in step.asked])
    if step.kind == "end":
        Nights(workspace.root).end(night, now, step.text)
        return dg.SkipReason(f"night {night.day} has ended: {step.text}")
    return dg.SkipReason(f"night {night.day} waits: {step.text}")


def _make_up(
    context: dg.SensorEvaluationContext, workspace: Workspace, nights: Nights, now: dt.datetime
) -> list[dg.RunRequest] | dg.SkipReason:
    """Begins a night that nobody has begun: its time has passed, or the schedule has none for it.

    Not where the schedule was off when the night was due.
    """
    due = last_due(now, workspace.settings.schedule)
    night = nights.find(due.day)
    if night is not None:
        return dg.SkipReason(f"the night of {due.day} has ended: {night.outcome}")
    on_since = schedule_on_since(context.instance)
    if on_since is None:
        return dg.SkipReason("the schedule `nightly` is off")
    if on_since > due.at:
        return dg.SkipReason(f"the schedule is on since {on_since:%Y-%m-%d %H:%M} UTC; no night was due since then")
    if now - due.at < LATE and not due.passed_over:
        return dg.SkipReason(f"the night of {due.day} is about to begin")
    return unless_under_way(context.instance, begin(workspace, due.day, made_up=True, now=now))


def schedule_on_since(instance: dg.DagsterInstance) -> dt.datetime | None:
    """Since when the schedule ``nightly`` is on, in UTC; ``None`` where it is off or the daemon has never seen it."""
    for state in instance.all_instigator_state():
        if state.name == "nightly" and state.is_running and state.instigator_data is not None:
            started = getattr(state.instigator_data, "start_timestamp", None)
            return None if started is None else dt.datetime.fromtimestamp(started, dt.UTC)
    return None
