"""What the agents at their lines report, shown as events of assets."""

from __future__ import annotations

import json
import time
from dataclasses import astuple

import dagster as dg

from agentpipe.defs.resources import Workspace
from agentpipe.defs.sources import Told, agent_events
from agentpipe.errors import AgentpipeError
from agentpipe.settings import ScheduleSettings


def agents_sensor(chosen: ScheduleSettings) -> dg.SensorDefinition:
    """The sensor ``agents``. Its cursor holds what Dagster was told."""

    @dg.sensor(
        name="agents",
        minimum_interval_seconds=chosen.every_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells Dagster of the agents' incidents and of the candidates that decide beside them: one event "
        "for each new or changed report in HOME/agent/. Launches nothing.",
    )
    def agents(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult | dg.SkipReason:
        told = _read(context.cursor)
        try:
            events, known, damaged = agent_events(workspace, told, time.time())
        except AgentpipeError as error:
            return dg.SkipReason(f"the agents' reports cannot be read: {error}")
        said = [f"told {len(events)} new or changed report(s)" if events else "no report is new or changed"]
        said += [f"{len(damaged)} damaged: {'; '.join(damaged[:5])}"] if damaged else []
        cursor = json.dumps({key: astuple(each) for key, each in known.items()}) if known != told else None
        return dg.SensorResult(skip_reason=". ".join(said), asset_events=events, cursor=cursor)

    return agents


def _read(cursor: str | None) -> dict[str, Told]:
    """What was told; nothing where the cursor is another one's, as after an upgrade."""
    try:
        return {str(key): Told(str(mark), str(version), float(at)) for key, (mark, version, at) in _entries(cursor)}
    except (ValueError, TypeError, AttributeError):
        return {}


def _entries(cursor: str | None) -> list[tuple[str, tuple[str, str, float]]]:
    return list(json.loads(cursor).items()) if cursor else []
