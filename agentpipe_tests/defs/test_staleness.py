"""Which cells a night makes again."""

from __future__ import annotations

import dataclasses

import pytest

from agentpipe.defs.graph import SHAPES
from agentpipe.defs.resources import Workspace
from agentpipe.defs.staleness import stale_cells
from agentpipe.environments.parameters import CELLS
from agentpipe_tests.defs.homes import edit, leave, make_cell, promote


def stale(workspace: Workspace) -> dict[str, str]:
    return {found.cell: found.why for found in stale_cells(workspace)}


def test_a_made_home_has_no_stale_cell(home: Workspace) -> None:
    assert stale(home) == {}


def test_exactly_the_cells_whose_rows_changed_are_stale(home: Workspace) -> None:
    edit(home, "load-3", 50.0)
    edit(home, "sensor-2", 50.0)
    why = "disturbance_table is not current"
    assert stale(home) == {"sensor-2": why, "load-3": why}
    make_cell(home, "load-3")
    assert stale(home) == {"sensor-2": why}


@pytest.mark.parametrize(("champions", "old"), [(3, False), (4, True)])
def test_a_behaviour_policy_more_than_three_champions_old_makes_a_cell_stale(
    home: Workspace, champions: int, old: bool
) -> None:
    for number in range(champions):
        promote(home, f"champion-{number}")
    expected = dict.fromkeys(CELLS, "its behaviour policy is 4 champions old") if old else {}
    assert stale(home) == expected
    make_cell(home, "load-1", ordinal=champions - 3)
    expected.pop("load-1", None)
    assert stale(home) == expected


def test_how_old_a_behaviour_policy_may_be_is_a_setting(home: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(home, "champion-0")
    monkeypatch.setenv("AGENTPIPE_SCHEDULE__BEHAVIOUR_AGE", "0")
    assert set(stale(home)) == set(CELLS)


def test_other_settings_make_stale_what_they_change(home: Workspace) -> None:
    other = Workspace(home=str(home.root), profile="demo", seed=5)
    assert stale(other) == dict.fromkeys(CELLS, "environment_pool_health is not current")
    assert stale(Workspace(home=str(home.root), profile="demo", threads=1)) == {}


def test_another_version_of_the_code_makes_its_asset_stale(home: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPES["trajectories"], code_version="next")
    monkeypatch.setitem(SHAPES, "trajectories", shape)
    assert stale(home) == dict.fromkeys(CELLS, "trajectories is not current")


def test_trajectories_that_were_removed_are_made_again(home: Workspace) -> None:
    (home.root / "trajectories" / "load-1").rmdir()
    home.references.path("environment_pool_health", "load-2").unlink()
    assert stale(home) == {"load-1": "trajectories is not current", "load-2": "environment_pool_health is not current"}


GATE = {"name": "buffer_size", "passed": False, "severity": "error"}


def test_a_cell_that_failed_a_gate_was_trained_on_all_the_same(home: Workspace) -> None:
    """Its trajectories are there and made from what is there now; the night tries it again, and leaves it out."""
    leave(home, "trajectories", "load-1", "trajectories-2", gates=[GATE], behaviour_ordinal=0)
    assert stale(home) == {"load-1": "it failed buffer_size of trajectories"}
    assert home.fresh_cells() == [cell for cell in CELLS if cell != "load-1"]
    make_cell(home, "load-1")
    assert (stale(home), home.fresh_cells()) == ({}, list(CELLS))


@pytest.mark.parametrize("gate", [{**GATE, "passed": True}, {**GATE, "severity": "warn"}])
def test_a_gate_that_passes_or_only_warns_leaves_a_cell_fresh(home: Workspace, gate: dict[str, object]) -> None:
    leave(home, "trajectories", "load-1", "trajectories-2", gates=[gate], behaviour_ordinal=0)
    assert (stale(home), home.fresh_cells()) == ({}, list(CELLS))
