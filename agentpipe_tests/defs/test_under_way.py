"""What two sensors find due at one moment is made once: the second one waits for the first."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill

from agentpipe.defs.under_way import unfinished_run, unless_under_way

DAY = "2026-11-28"


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as found:
        yield found


def run(instance: dg.DagsterInstance, job: str, partition: str, status: dg.DagsterRunStatus) -> str:
    added = instance.add_run(dg.DagsterRun(job_name=job, status=status, tags={"dagster/partition": partition}))
    return added.run_id


def change(instance: dg.DagsterInstance, status: BulkActionStatus) -> None:
    instance.add_backfill(
        PartitionBackfill(
            backfill_id="change",
            status=status,
            from_failure=False,
            tags={"agentpipe/table-change": "d"},
            backfill_timestamp=0.0,
            serialized_asset_backfill_data="{}",
        )
    )


def asked(job: str, partition: str) -> list[dg.RunRequest]:
    return [dg.RunRequest(run_key="k", job_name=job, partition_key=partition)]


@pytest.mark.parametrize("status", ["NOT_STARTED", "STARTING", "STARTED", "CANCELING"])
def test_a_night_waits_for_an_intake_that_runs_already(instance: dg.DagsterInstance, status: str) -> None:
    run_id = run(instance, "feedback_day", DAY, dg.DagsterRunStatus[status])
    found = unless_under_way(instance, asked("feedback_day", DAY))
    assert isinstance(found, dg.SkipReason)
    assert run_id in str(found.skip_message)


@pytest.mark.parametrize("status", ["SUCCESS", "FAILURE", "CANCELED"])
def test_what_is_over_holds_nobody_up(instance: dg.DagsterInstance, status: str) -> None:
    run(instance, "feedback_day", DAY, dg.DagsterRunStatus[status])
    assert unless_under_way(instance, asked("feedback_day", DAY)) == asked("feedback_day", DAY)


def test_another_partition_or_another_job_holds_nobody_up(instance: dg.DagsterInstance) -> None:
    run(instance, "cell", "load-1", dg.DagsterRunStatus.STARTED)
    assert unless_under_way(instance, asked("cell", "load-2")) == asked("cell", "load-2")
    assert unfinished_run(instance, {("candidate", "load-1")}) is None
    assert unfinished_run(instance, {("cell", "load-1")}) is not None


def test_a_reason_to_wait_stays_as_it_is(instance: dg.DagsterInstance) -> None:
    reason = dg.SkipReason("begun before")
    assert unless_under_way(instance, reason) is reason


def test_a_night_makes_no_cell_while_a_change_of_the_table_runs(instance: dg.DagsterInstance) -> None:
    change(instance, BulkActionStatus.REQUESTED)
    assert isinstance(unless_under_way(instance, asked("cell", "load-1")), dg.SkipReason)
    assert unless_under_way(instance, asked("week", "2026-11-23")) == asked("week", "2026-11-23")


def test_a_change_that_has_ended_leaves_its_cells_to_the_night(instance: dg.DagsterInstance) -> None:
    change(instance, BulkActionStatus.FAILED)
    assert unless_under_way(instance, asked("cell", "load-1")) == asked("cell", "load-1")
