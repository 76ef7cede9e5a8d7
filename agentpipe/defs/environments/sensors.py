"""A change of the disturbance table launches exactly the cells that it touches, and then judges the champion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import dagster as dg

from agentpipe.defs.backfill import backfill_request, cancel_unstarted, unfinished_backfills
from agentpipe.defs.resources import CELL_CHAIN, Workspace
from agentpipe.defs.sources import source_events
from agentpipe.defs.table_plan import CHANGE_TAG, JUDGED_AFTERWARDS, Plan, table_plan
from agentpipe.defs.under_way import unfinished_run
from agentpipe.errors import AgentpipeError
from agentpipe.settings import ScheduleSettings


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
        "page, or edit again; the nightly retraining tries it once more.",
    )
    def table_changes(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult | dg.SkipReason:
        try:
            return _launch(context, workspace, table_plan(workspace))
        except AgentpipeError as error:
            return dg.SkipReason(f"the table cannot be read and nothing is launched: {error}")

    return table_changes


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
