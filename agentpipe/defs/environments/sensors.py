"""A change of the disturbance table launches exactly the cells that it touches, and then judges the champion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import dagster as dg

from agentpipe.defs.backfill import backfill_request, cancel_unstarted, unfinished_backfills
from agentpipe.defs.instance import sensors_have_threads
from agentpipe.defs.resources import CELL_CHAIN, Workspace
from agentpipe.defs.sources import source_events
from agentpipe.defs.table_plan import CHANGE_TAG, JUDGED_AFTERWARDS, Plan, table_plan
from agentpipe.defs.under_way import unfinished_run
from agentpipe.errors import AgentpipeError
from agentpipe.settings import ScheduleSettings

LONGEST_WAIT = 15.0
"""Seconds that a tick waits for a notice at most: a daemon that is to end waits for it, and `agentpipe ui` ends what
has not ended by itself after 20. Dagster gives up a tick after 60."""
BEFORE_THE_NEXT = 5
"""Seconds between the end of a wait and the next tick: the daemon looks for ticks that are due so often."""


def table_sensor(chosen: ScheduleSettings) -> dg.SensorDefinition:
    """The sensor ``table_changes``."""

    @dg.sensor(
        name="table_changes",
        asset_selection=dg.AssetSelection.assets(*CELL_CHAIN, JUDGED_AFTERWARDS),
        minimum_interval_seconds=chosen.every_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Launches what an edit of the disturbance table makes due, as one backfill: the touched cells, "
        "then the champion's evaluation. `agentpipe table plan` says beforehand what would run. An edit that was "
        "undone is none. A change whose runs failed is not launched again: mend it and re-execute from the backfill's "
        "page, or edit again; the nightly retraining tries it once more. With a Redis, a tick with nothing to launch "
        "waits for the notice of a change and looks again.",
    )
    def table_changes(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult | dg.SkipReason:
        try:
            notices = _Notices(context.instance, workspace, chosen.every_seconds)
            found = _launch(context, workspace, table_plan(workspace))
            if not found.run_requests and notices.wait(briefly=bool(found.asset_events)):
                found = _launch(context, workspace, table_plan(workspace))
            return notices.said(found)
        except AgentpipeError as error:
            return dg.SkipReason(f"the table cannot be read and nothing is launched: {error}")

    return table_changes


class _Notices:
    """Notices of the Redis that is set. They say "look now" and no more: what is due, the home's files say.

    Which version the Redis has is looked at when this is made, before the tick looks at the table: what is published in
    between ends the wait at once. There is no wait where a tick would hold other sensors up, or where the Redis cannot
    be read; the next tick comes in time all the same.
    """

    def __init__(self, instance: dg.DagsterInstance, workspace: Workspace, every_seconds: int) -> None:
        from agentpipe.environments.table_redis_home import published_version

        self._url, self._known, self._trouble = workspace.settings.redis_url, None, ""
        self._seconds = min(LONGEST_WAIT, every_seconds - BEFORE_THE_NEXT) if sensors_have_threads(instance) else 0.0
        if self._url is not None and self._seconds > 0:
            try:
                self._known = published_version(self._url)
            except AgentpipeError as error:
                self._trouble = str(error)

    def wait(self, *, briefly: bool) -> bool:
        """True once a change is published; False where none is in time, or where the Redis is lost meanwhile.

        Args:
            briefly: Only look, since the tick has something to tell Dagster.
        """
        from agentpipe.environments.table_redis_home import wait_for_change

        if self._url is None or self._seconds <= 0 or self._trouble:
            return False
        try:
            return wait_for_change(self._url, self._known, 0.0 if briefly else self._seconds)
        except AgentpipeError:
            return False

    def said(self, found: dg.SensorResult) -> dg.SensorResult:
        """``found``; where nothing is launched it says too why no notice can come."""
        if not self._trouble or found.skip_reason is None:
            return found
        reason = f"{found.skip_reason.skip_message}; no notice of a change can come: {self._trouble}"
        return dg.SensorResult(skip_reason=reason, asset_events=found.asset_events, cursor=found.cursor)


def _launch(context: dg.SensorEvaluationContext, workspace: Workspace, plan: Plan) -> dg.SensorResult:
    events = source_events(context.instance, workspace)
    asked: dict[str, str] = json.loads(context.cursor) if context.cursor else {}
    asked = {cell: digest for cell, digest in asked.items() if cell in plan.cells}

    def skip(reason: str) -> dg.SensorResult:
        return dg.SensorResult(skip_reason=reason, asset_events=events, cursor=json.dumps(asked, sort_keys=True))

    running = unfinished_backfills(context.instance, CHANGE_TAG)
    if running:
        return skip(_while_running(context.instance, running[0], plan))
    new = {cell: digest for cell, digest in plan.cells.items() if asked.get(cell) != digest}
    if not new:
        return skip("no cell is due" if not plan.cells else f"launched before, and not made: {', '.join(plan.cells)}")
    making = unfinished_run(context.instance, {("cell", cell) for cell in new})
    if making:
        return skip(f"run {making.run_id} of a night makes some of it already")
    assert context.repository_def is not None
    partitions = [(item.asset, item.partition) for item in plan.due if item.partition is None or item.partition in new]
    request = backfill_request(context.repository_def.asset_graph, partitions, _tags(plan))
    cursor = json.dumps({**asked, **new}, sort_keys=True)
    return dg.SensorResult(run_requests=[request], asset_events=events, cursor=cursor)


def _tags(plan: Plan) -> Mapping[str, str]:
    return {CHANGE_TAG: plan.digest[:16], "agentpipe/cells": ",".join(plan.cells)[:200]}


def _while_running(instance: dg.DagsterInstance, backfill: Any, plan: Plan) -> str:  # noqa: ANN401 - Dagster's own
    if not plan.cells and cancel_unstarted(instance, backfill):
        return f"the change was undone before it ran: backfill {backfill.backfill_id} is cancelled"
    return f"backfill {backfill.backfill_id} of an earlier change still runs"
