"""What a change of the table would run: exactly the touched cells, in order, with reasons and seconds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from agentpipe.defs.resources import CELL_CHAIN, Workspace
from agentpipe.defs.table_plan import LAUNCH_SECONDS, table_plan
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import TableError
from agentpipe_tests.defs.homes import edit, leave, make_cell

TABLE, HEALTH, TRAJECTORIES = CELL_CHAIN


def names(workspace: Workspace) -> list[tuple[str, str | None]]:
    return [(item.asset, item.partition) for item in table_plan(workspace).due]


def test_nothing_is_due_where_every_cell_was_made_from_its_rows(home: Workspace) -> None:
    plan = table_plan(home)
    assert plan.to_json() == {"cells": [], "partitions": [], "change": None, "seconds": 0, "never_made": []}


def test_one_edited_row_makes_due_exactly_its_cell_in_order_and_then_the_champion_is_judged(home: Workspace) -> None:
    edit(home, "network-3", 333.0)
    plan = table_plan(home)
    assert [dataclasses.astuple(item) for item in plan.due] == [
        (TABLE, "network-3", "the rows of network-3 changed", 1.0),
        (HEALTH, "network-3", f"follows {TABLE}", 2.0),
        (TRAJECTORIES, "network-3", f"follows {TABLE}", 3.0),
        ("champion_evaluation", None, "judges the champion under the rows of network-3", 20.0),
    ]
    assert plan.cells == {"network-3": home.cell_versions()["network-3"]}
    assert plan.seconds == 1 + 2 + 3 + 20 + 2 * LAUNCH_SECONDS


def test_two_edited_cells_are_one_plan_that_ends_with_one_evaluation(home: Workspace) -> None:
    edit(home, "load-5", 100.0)
    edit(home, "sensor-1", 100.0)
    cells = [(asset, cell) for cell in ("sensor-1", "load-5") for asset in CELL_CHAIN]
    assert names(home) == [*cells, ("champion_evaluation", None)]


def test_an_edit_undone_costs_nothing(home: Workspace) -> None:
    before = home.table_store().current().version
    edit(home, "network-3", 333.0)
    home.table_store().rollback(before, who="eve", why="no")
    assert names(home) == []


def test_there_and_back_and_there_again_is_due_each_time_it_differs(home: Workspace) -> None:
    """A is made; B is due; made B: back to A is due; made A: B is due once more, under the digest of the first time."""
    first = home.table_store().current().version
    edit(home, "load-2", 77.0)
    there = table_plan(home)
    make_cell(home, "load-2")
    assert names(home) == []
    home.table_store().rollback(first, who="eve", why="back")
    back = table_plan(home)
    make_cell(home, "load-2")
    edit(home, "load-2", 77.0)
    again = table_plan(home)
    assert len(there.due) == len(back.due) == len(again.due) == 4
    assert again.digest == there.digest != back.digest


def test_a_half_made_cell_is_due_from_where_it_stopped(home: Workspace) -> None:
    edit(home, "load-2", 77.0)
    leave(home, TABLE, "load-2")
    plan = table_plan(home)
    assert [(item.asset, item.why) for item in plan.due][:2] == [
        (HEALTH, f"was not made from the present {TABLE}"),
        (TRAJECTORIES, f"follows {HEALTH}"),
    ]
    leave(home, HEALTH, "load-2", "other")
    assert names(home) == [(TRAJECTORIES, "load-2"), ("champion_evaluation", None)]


def test_cells_that_were_never_made_are_named_and_not_launched(tmp_path) -> None:
    workspace = Workspace(home=str(tmp_path / "new"), profile="demo")
    assert table_plan(workspace).to_json()["never_made"] == list(CELLS)
    make_cell(workspace, "load-1")
    edit(workspace, "load-1", 50.0)
    edit(workspace, "load-2", 50.0)
    plan = table_plan(workspace)
    assert list(plan.cells) == ["load-1"]
    assert plan.never_made == tuple(cell for cell in CELLS if cell != "load-1")


def test_a_cell_that_was_never_measured_is_made_whole_by_the_change_that_touches_it(home: Workspace) -> None:
    for asset in (HEALTH, TRAJECTORIES):
        home.references.path(asset, "load-1").unlink()
    assert names(home) == []  # the first time is the main job's, or the night's
    edit(home, "load-1", 50.0)
    plan = table_plan(home)
    assert [item.seconds for item in plan.due] == [1.0, None, None, 20.0]


def test_a_source_that_is_not_valid_is_a_typed_error(home: Workspace) -> None:
    edit(home, "load-1", 50.0)
    source = home.table_store().source_path
    source.write_text(source.read_text().replace("50", "nan", 1))
    with pytest.raises(TableError):
        table_plan(home)


def test_a_source_that_is_missing_for_a_moment_launches_nothing(home: Workspace) -> None:
    edit(home, "network-3", 333.0)
    home.table_store().refresh()
    make_cell(home, "network-3")
    home.table_store().source_path.unlink()
    assert names(home) == []


def test_a_source_of_one_s_own_that_is_gone_is_an_error(home: Workspace, tmp_path: Path) -> None:
    own = Workspace(home=str(home.root), profile="demo", table_source=str(tmp_path / "gone.csv"))
    with pytest.raises(TableError):
        table_plan(own)
