"""A change of the disturbance table launches exactly the cells that it touches, and then judges the champion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import dagster as dg

from agentpipe.defs.backfill import backfill_request, cancel_unstarted, unfinished_backfills
from agentpipe.defs.resources import Workspace
from agentpipe.defs.sources import source_events
from agentpipe.defs.table_plan import CHANGE_TAG, Plan, table_plan
from agentpipe.errors import InputError

EVERY_SECONDS = 30


@dg.sensor(
    name="table_changes",
    asset_selection=dg.AssetSelection.assets(
        "disturbance_table", "environment_pool_health", "trajectories", "champion_evaluation"
    ),
    minimum_interval_seconds=EVERY_SECONDS,
    default_status=dg.DefaultSensorStatus.RUNNING,
)
def table_changes(context: dg.SensorEvaluationContext, workspace: Workspace) -> dg.SensorResult | dg.SkipReason:
    """Launches what an edit of the disturbance table makes due, as one backfill.

    Compares the rows of every cell with those that it was made from; an edit that was undone is none. `agentpipe table
    plan` says beforehand what would run. A change whose runs failed is not launched again by itself: mend it and
    re-execute from the backfill's page, or edit again; the nightly retraining tries it once more.
    """
    try:
        plan = table_plan(workspace)
    except InputError as error:
        return dg.SkipReason(f"the table's source is not valid and nothing is launched: {error}")
    events = source_events(context.instance, workspace)
    asked: dict[str, str] = json.loads(context.cursor) if context.cursor else {}
    asked = {cell: digest for cell, digest in asked.items() if cell in plan.cells}
    running = unfinished_backfills(context.instance, CHANGE_TAG)
    if running:
        note = _while_running(context.instance, running[0], plan)
        return dg.SensorResult(skip_reason=note, asset_events=events, cursor=json.dumps(asked))
    new = {cell: digest for cell, digest in plan.cells.items() if asked.get(cell) != digest}
    if not new:
        reason = "no cell is due" if not plan.cells else f"launched before, and not made: {', '.join(plan.cells)}"
        return dg.SensorResult(skip_reason=reason, asset_events=events, cursor=json.dumps(asked))
    assert context.repository_def is not None
    partitions = [(item.asset, item.partition) for item in plan.due if item.partition is None or item.partition in new]
    request = backfill_request(context.repository_def.asset_graph, partitions, _tags(plan))
    return dg.SensorResult(
        run_requests=[request], asset_events=events, cursor=json.dumps({**asked, **new}, sort_keys=True)
    )


def _tags(plan: Plan) -> Mapping[str, str]:
    return {CHANGE_TAG: plan.digest[:16], "agentpipe/cells": ",".join(plan.cells)[:200]}


def _while_running(instance: dg.DagsterInstance, backfill: Any, plan: Plan) -> str:  # noqa: ANN401 - Dagster's own
    if not plan.cells and cancel_unstarted(instance, backfill):
        return f"the change was undone before it ran: backfill {backfill.backfill_id} is cancelled"
    return f"backfill {backfill.backfill_id} of an earlier change still runs"
