"""``agentpipe table plan``: names what the sensor would launch, and runs nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.defs.resources import Workspace
from agentpipe_tests.defs.homes import edit, make_cell


@pytest.fixture
def home(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("AGENTPIPE_HOME", str(tmp_path / "home"))
    workspace = Workspace(profile="demo")
    for cell in ("load-1", "load-2"):
        make_cell(workspace, cell)
    return workspace


def plan(workspace: Workspace, *options: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["table", "plan", "--home", str(workspace.root), *options])
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_json_names_exactly_what_one_edited_cell_makes_due(home: Workspace) -> None:
    edit(home, "load-2", 77.0)
    answer = json.loads(plan(home, "--json"))
    assert answer["ok"] is True
    assert answer["cells"] == ["load-2"]
    assert [(item["asset"], item["partition"], item["seconds"]) for item in answer["partitions"]] == [
        ("disturbance_table", "load-2", 1.0),
        ("environment_pool_health", "load-2", 2.0),
        ("trajectories", "load-2", 3.0),
        ("champion_evaluation", None, None),
    ]
    assert len(answer["change"]) == 64
    assert answer["seconds"] == 30.0
    assert len(answer["never_made"]) == 13
    assert json.loads(plan(home, "--json")) == answer  # it ran nothing


def test_people_read_reasons_and_seconds(home: Workspace) -> None:
    assert plan(home).splitlines()[-1] == "nothing is due"
    edit(home, "load-2", 77.0)
    lines = plan(home).splitlines()
    assert lines[0].split(maxsplit=1) == ["disturbance_table[load-2]", "the rows of load-2 changed  1 s last time"]
    assert lines[3].startswith("champion_evaluation ")
    assert lines[-1] == "about 30 s together, with the start of each run"


def test_another_source_is_planned_without_touching_the_home(home: Workspace, tmp_path) -> None:
    edit(home, "load-1", 77.0)
    other = tmp_path / "other.csv"
    other.write_bytes(home.table_store().source_path.read_bytes())
    edit(home, "load-1", 78.0)
    make_cell(home, "load-1")
    assert json.loads(plan(home, "--json"))["cells"] == []
    assert json.loads(plan(home, "--json", "--table-source", str(other)))["cells"] == ["load-1"]


def test_an_invalid_source_is_an_error_and_no_plan(home: Workspace, tmp_path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text("kind,intensity\nload,1\n")
    answer = json.loads(plan(home, "--json", "--table-source", str(bad), code=1))
    assert (answer["ok"], answer["error"]["type"]) == (False, "TableError")


def test_a_home_that_has_made_nothing_is_not_said_to_have_nothing_due(tmp_path: Path) -> None:
    lines = plan(Workspace(home=str(tmp_path / "home"))).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("not made yet, agentpipe run makes them: sensor-1, ")
