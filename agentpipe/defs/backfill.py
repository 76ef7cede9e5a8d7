"""Backfills that a sensor launches: several partitions of several assets under one tag, together in the UI.

Dagster's public ``RunRequest`` names one partition of one job; what its own automation conditions use for more is a
set of asset partitions, from which the daemon makes a backfill. Dagster is pinned to one version here, and a test
launches such a backfill with the daemon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph_subset import AssetGraphSubset
from dagster._core.definitions.events import AssetKeyPartitionKey
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus, PartitionBackfill

if TYPE_CHECKING:
    from dagster._core.definitions.assets.graph.asset_graph import AssetGraph

_UNFINISHED = (BulkActionStatus.REQUESTED, BulkActionStatus.CANCELING, BulkActionStatus.FAILING)


def backfill_request(
    graph: AssetGraph, partitions: Iterable[tuple[str, str | None]], tags: Mapping[str, str]
) -> dg.RunRequest:
    """A request that becomes one backfill over ``partitions``, pairs of an asset's name and a partition key.

    Partitions of the same key of assets that follow each other share a run; an asset without partitions comes last.
    """
    wanted = {AssetKeyPartitionKey(dg.AssetKey(asset), key) for asset, key in partitions}
    subset = AssetGraphSubset.from_asset_partition_set(wanted, graph)
    return dg.RunRequest.for_asset_graph_subset(subset, tags=dict(tags))


def unfinished_backfills(instance: dg.DagsterInstance, tag: str) -> Sequence[PartitionBackfill]:
    """The backfills that carry ``tag``, whatever its value, and are not over yet."""
    found = instance.get_backfills(filters=BulkActionsFilter(statuses=list(_UNFINISHED)))
    return [backfill for backfill in found if tag in backfill.tags]


def cancel_unstarted(instance: dg.DagsterInstance, backfill: PartitionBackfill) -> bool:
    """Cancels a backfill none of whose runs has started; False where one has."""
    runs = instance.get_runs(dg.RunsFilter(tags={"dagster/backfill": backfill.backfill_id}))
    waiting = {dg.DagsterRunStatus.QUEUED, dg.DagsterRunStatus.NOT_STARTED}
    if any(run.status not in waiting for run in runs) or backfill.status is not BulkActionStatus.REQUESTED:
        return False
    instance.update_backfill(backfill.with_status(BulkActionStatus.CANCELING))  # type: ignore[no-untyped-call]
    return True
