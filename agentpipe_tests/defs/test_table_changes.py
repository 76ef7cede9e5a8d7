"""The sensor ``table_changes``: one change, one backfill over exactly what it touches."""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill

from agentpipe.definitions import defs
from agentpipe.defs.backfill import cancel_unstarted, unfinished_backfills
from agentpipe.defs.environments.sensors import table_sensor
from agentpipe.defs.instance import recorded_version
from agentpipe.defs.references import References
from agentpipe.defs.resources import CELL_CHAIN, Workspace
from agentpipe.defs.table_plan import CHANGE_TAG, table_plan
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import CorruptError
from agentpipe.settings import ScheduleSettings
from agentpipe_tests.defs.homes import Status, add_run, edit, leave, make_cell

SENSOR = table_sensor(ScheduleSettings())


class Table:
    """The sensor of one home, tick by tick, with the cursor that the daemon keeps in between."""

    def __init__(self, workspace: Workspace, instance: dg.DagsterInstance) -> None:
        self.workspace, self.instance = workspace, instance
        self.cursor: str | None = None
        self.sensor = SENSOR

    def tick(self) -> dg.SensorResult:
        context = dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursor,
            repository_def=defs.get_repository_def(),
            resources={"workspace": self.workspace},
        )
        found = self.sensor(context)
        if isinstance(found, dg.SkipReason):  # leaves the cursor as it is
            return dg.SensorResult(skip_reason=found)
        assert isinstance(found, dg.SensorResult)
        self.cursor = found.cursor
        for event in found.asset_events:
            self.instance.report_runless_asset_event(event)
        return found

    def launched(self) -> list[tuple[str, str | None]]:
        """The partitions of the one backfill that a tick asks for; none where it asks for nothing."""
        return partitions(self.tick())


def partitions(result: dg.SensorResult) -> list[tuple[str, str | None]]:
    requests = result.run_requests or []
    assert len(requests) <= 1
    return [
        (found.asset_key.to_user_string(), found.partition_key)
        for request in requests
        if request.asset_graph_subset is not None
        for found in request.asset_graph_subset.iterate_asset_partitions()
    ]


def said(result: dg.SensorResult) -> str:
    assert result.skip_reason is not None
    return result.skip_reason.skip_message or ""


@pytest.fixture
def table(home: Workspace, instance: dg.DagsterInstance) -> Table:
    return Table(home, instance)


def backfill(
    instance: dg.DagsterInstance,
    status: BulkActionStatus = BulkActionStatus.REQUESTED,
    tags: Mapping[str, str] | None = None,
) -> PartitionBackfill:
    """What the daemon makes of a request."""
    added = PartitionBackfill(
        backfill_id="b1",
        status=status,
        from_failure=False,
        tags={CHANGE_TAG: "c1"} if tags is None else tags,
        backfill_timestamp=0.0,
        asset_selection=[dg.AssetKey(asset) for asset in CELL_CHAIN],
        serialized_asset_backfill_data="{}",
    )
    instance.add_backfill(added)
    return added


def ended(instance: dg.DagsterInstance, added: PartitionBackfill, status: BulkActionStatus) -> None:
    instance.update_backfill(added.with_status(status))


# ------------------------------------------------------------------------------------------------- launching


def test_one_change_is_one_backfill_over_exactly_what_the_plan_names(table: Table) -> None:
    edit(table.workspace, "network-3", 333.0)
    edit(table.workspace, "load-1", 44.0)
    plan = table_plan(table.workspace)
    result = table.tick()
    assert sorted(partitions(result), key=str) == sorted(((due.asset, due.partition) for due in plan.due), key=str)
    assert len(plan.due) == 7
    [request] = result.run_requests or []
    assert request.tags[CHANGE_TAG] == plan.digest[:16]
    assert request.tags["agentpipe/cells"] == "network-3,load-1"


def test_two_ticks_without_a_change_between_them_launched_it_twice(table: Table) -> None:
    edit(table.workspace, "network-3", 333.0)
    assert len(table.launched()) == 4
    assert table.launched() == []
    make_cell(table.workspace, "network-3")
    for _ in range(2):
        assert said(table.tick()) == "no cell is due"


def test_a_change_undone_before_the_next_tick_launches_nothing(table: Table) -> None:
    before = table.workspace.table_store().current().version
    edit(table.workspace, "network-3", 333.0)
    table.workspace.table_store().rollback(before, who="eve", why="no")
    assert said(table.tick()) == "no cell is due"


def test_nothing_is_launched_while_the_backfill_of_an_earlier_change_runs(table: Table) -> None:
    edit(table.workspace, "network-3", 333.0)
    table.tick()
    running = backfill(table.instance)
    edit(table.workspace, "load-1", 44.0)
    assert said(table.tick()) == "backfill b1 of an earlier change still runs"
    make_cell(table.workspace, "network-3")
    ended(table.instance, running, BulkActionStatus.COMPLETED_SUCCESS)
    assert {cell for _, cell in table.launched()} == {"load-1", None}


def test_a_change_whose_runs_failed_was_launched_again_at_every_tick(table: Table) -> None:
    edit(table.workspace, "network-3", 333.0)
    table.tick()
    ended(table.instance, backfill(table.instance), BulkActionStatus.COMPLETED_FAILED)
    assert said(table.tick()) == "launched before, and not made: network-3"


def test_another_edit_is_launched_also_back_to_one_that_failed_before(table: Table) -> None:
    for value in (333.0, 334.0, 333.0):
        edit(table.workspace, "network-3", value)
        assert len(table.launched()) == 4
        assert table.launched() == []


def test_the_edit_of_another_cell_leaves_a_failed_one_out(table: Table) -> None:
    edit(table.workspace, "network-3", 333.0)
    table.tick()
    edit(table.workspace, "load-1", 44.0)
    assert {cell for _, cell in table.launched()} == {"load-1", None}


def test_an_edit_undone_and_made_again_is_launched_again(table: Table) -> None:
    before = table.workspace.table_store().current().version
    edit(table.workspace, "network-3", 333.0)
    assert table.launched()
    table.workspace.table_store().rollback(before, who="eve", why="no")
    assert table.launched() == []
    edit(table.workspace, "network-3", 333.0)
    assert len(table.launched()) == 4


def test_a_cell_that_another_run_left_half_way_is_launched_from_where_it_stopped(table: Table) -> None:
    edit(table.workspace, "network-3", 333.0)
    leave(table.workspace, "disturbance_table", "network-3")
    assert {asset for asset, _ in table.launched()} == {
        "environment_pool_health",
        "trajectories",
        "champion_evaluation",
    }


# ------------------------------------------------------------------------------------------------ cancelling


@pytest.mark.parametrize("waiting", [None, Status.NOT_STARTED])
def test_a_change_undone_before_its_runs_start_cancels_its_backfill(
    table: Table, waiting: dg.DagsterRunStatus | None
) -> None:
    before = table.workspace.table_store().current().version
    edit(table.workspace, "network-3", 333.0)
    table.tick()
    backfill(table.instance)
    if waiting is not None:
        add_run(table.instance, "cell", "network-3", waiting, {"dagster/backfill": "b1"})
    table.workspace.table_store().rollback(before, who="eve", why="no")
    assert said(table.tick()) == "the change was undone before it ran: backfill b1 is cancelled"
    found = table.instance.get_backfill("b1")
    assert found is not None
    assert found.status is BulkActionStatus.CANCELING
    assert said(table.tick()) == "backfill b1 of an earlier change still runs"


def test_a_backfill_with_a_run_that_has_begun_is_not_cancelled(table: Table) -> None:
    running = backfill(table.instance)
    add_run(table.instance, "cell", "network-3", Status.STARTED, {"dagster/backfill": "b1"})
    assert not cancel_unstarted(table.instance, running)
    assert said(table.tick()) == "backfill b1 of an earlier change still runs"


def test_somebody_s_own_backfill_holds_nothing_up(table: Table) -> None:
    backfill(table.instance, tags={"team": "line 4"})
    assert unfinished_backfills(table.instance, CHANGE_TAG) == []
    edit(table.workspace, "network-3", 333.0)
    assert len(table.launched()) == 4


# ------------------------------------------------------------------------------------------- what Dagster is told


def test_exactly_the_touched_cells_of_the_source_are_marked(table: Table) -> None:
    table.tick()
    before = {cell: recorded_version(table.instance, "table_source", cell) for cell in CELLS}
    assert before == dict(table.workspace.cell_versions())
    edit(table.workspace, "network-3", 333.0)
    edit(table.workspace, "load-1", 44.0)
    events = [event.partition for event in table.tick().asset_events]
    assert events == ["network-3", "load-1"]
    after = {cell: recorded_version(table.instance, "table_source", cell) for cell in CELLS}
    assert after == dict(table.workspace.cell_versions())
    assert [cell for cell in CELLS if before[cell] != after[cell]] == events
    assert table.tick().asset_events == []


def test_the_source_is_told_of_also_while_a_backfill_runs(table: Table) -> None:
    table.tick()
    backfill(table.instance)
    edit(table.workspace, "load-1", 44.0)
    assert [event.partition for event in table.tick().asset_events] == ["load-1"]


# ------------------------------------------------------------------------------------------------------ errors


def test_a_source_that_cannot_be_read_launches_nothing_and_forgets_nothing(table: Table) -> None:
    edit(table.workspace, "network-3", 333.0)
    table.tick()
    before = table.cursor
    source = table.workspace.table_store().source_path
    whole = source.read_text()
    source.write_text(whole.replace("333", "nan", 1))
    assert said(table.tick()).startswith("the table cannot be read and nothing is launched: ")
    assert table.cursor == before
    source.write_text(whole)
    assert said(table.tick()) == "launched before, and not made: network-3"


@pytest.mark.parametrize("error", [OSError("no such device"), CorruptError("a flipped byte")])
def test_a_store_that_fails_in_the_middle_leaves_the_cursor_as_it_was(
    table: Table, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    edit(table.workspace, "network-3", 333.0)
    table.tick()
    before = table.cursor
    edit(table.workspace, "load-1", 44.0)
    find, asked = References.find, []

    def failing(self: References, asset: str, partition: str | None = None) -> object:
        asked.append(asset)
        if len(asked) == 20:
            raise error
        return find(self, asset, partition)

    with monkeypatch.context() as patch:
        patch.setattr(References, "find", failing)
        if isinstance(error, OSError):
            with pytest.raises(OSError, match="no such device"):
                table.tick()
        else:
            assert "a flipped byte" in said(table.tick())
    assert table.cursor == before
    assert {cell for _, cell in table.launched()} == {"load-1", None}
