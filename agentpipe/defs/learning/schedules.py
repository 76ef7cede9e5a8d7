"""The nightly retraining: when it begins. How it goes on is the sensor's, see ``sensors.py``."""

from __future__ import annotations

import datetime as dt

import dagster as dg

from agentpipe.defs.night import cells_to_ask
from agentpipe.defs.nights import Nights, cron, day_of, last_due
from agentpipe.defs.resources import Workspace
from agentpipe.defs.under_way import unless_under_way
from agentpipe.errors import AgentpipeError
from agentpipe.settings import ScheduleSettings


def nightly_schedule(chosen: ScheduleSettings) -> dg.ScheduleDefinition:
    """The schedule ``nightly`` at the chosen local time; partition keys are UTC days all the same."""

    @dg.schedule(
        name="nightly",
        job_name="cell",
        cron_schedule=cron(chosen),
        execution_timezone=chosen.timezone,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Begins a night for the last UTC day that is over: launches its stale cells. The sensor "
        "`nightly_candidate` waits for them and for the day's feedback run, and then trains.",
    )
    def nightly(context: dg.ScheduleEvaluationContext, workspace: Workspace) -> list[dg.RunRequest] | dg.SkipReason:
        tick = context.scheduled_execution_time
        day = day_of(tick)
        try:
            if last_due(tick, workspace.settings.schedule).at < tick and Nights(workspace.root).find(day) is not None:
                following = day + dt.timedelta(days=1)
                text = f"no day is left: {following} is not over (UTC), and the night of {day} was begun before"
                return dg.SkipReason(text)
            return unless_under_way(context.instance, begin(workspace, day))
        except AgentpipeError as error:
            return dg.SkipReason(f"the night of {day} cannot begin: {error}")

    return nightly


def begin(
    workspace: Workspace, day: dt.date, *, made_up: bool = False, now: dt.datetime | None = None
) -> list[dg.RunRequest] | dg.SkipReason:
    """Begins the night of ``day``, once: a night that is late is made up, one that a later one has overtaken is not.

    Raises:
        CorruptError: the file of the night is damaged.
    """
    now = now or dt.datetime.now(dt.UTC)
    latest = last_due(now, workspace.settings.schedule).day
    if day < latest:
        return dg.SkipReason(f"the night of {day} is overtaken by that of {latest}")
    night = Nights(workspace.root).begin(day, now, made_up=made_up)
    if night is None:
        return dg.SkipReason(f"the night of {day} was begun before")
    try:
        asked = cells_to_ask(workspace)
    except AgentpipeError as error:
        return dg.SkipReason(f"begun; no cell is launched: {error}")
    if not asked:
        return dg.SkipReason("begun; no cell is stale, nightly_candidate goes on")
    return [item.request(night) for item in asked]
