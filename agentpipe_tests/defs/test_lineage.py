"""What makes a partition due: settings, code version, data versions of what it consumes; exactly those."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import dagster as dg
import pytest

from agentpipe.defs.environments.assets import disturbance_table
from agentpipe.defs.graph import SHAPES
from agentpipe.defs.instance import recorded_version
from agentpipe.defs.references import Reference
from agentpipe.defs.resources import NONE, Workspace
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import TableError

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(home=str(tmp_path), profile="demo")


def materialise_table(workspace: Workspace, partition: str, instance: dg.DagsterInstance) -> None:
    result = dg.materialize(
        [disturbance_table],
        instance=instance,
        partition_key=partition,
        resources={"workspace": workspace},
        run_config=QUIET,
    )
    assert result.success


def pretend(workspace: Workspace, asset: str, partition: str | None, version: str = "v") -> None:
    """Leaves the reference of a partition that is materialised from what is there now."""
    folder = workspace.root / asset / (partition or "whole").replace("|", "_")
    folder.mkdir(parents=True, exist_ok=True)
    workspace.references.save(
        Reference(
            asset=asset,
            partition=partition,
            data_version=version,
            path=str(folder.relative_to(workspace.root)),
            consumed=workspace.consumed(asset, partition),
            configuration=workspace.configuration(asset),
            code_version=SHAPES[asset].code_version,
            seconds=0.0,
        )
    )


def due(workspace: Workspace, asset: str) -> list[str]:
    return [cell for cell in CELLS if not workspace.is_current(asset, cell)]


def test_editing_one_row_makes_exactly_its_cell_due(workspace: Workspace) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for cell in CELLS:
            materialise_table(workspace, cell, instance)
        assert due(workspace, "disturbance_table") == []
        before = {cell: recorded_version(instance, "disturbance_table", cell) for cell in CELLS}
        workspace.table_store().set(
            "kind = network and intensity = 3 and variant = 1", {"network_rtt_ms": 333.0}, who="eve", why="new switch"
        )
        assert due(workspace, "disturbance_table") == ["network-3"]
        materialise_table(workspace, "network-3", instance)
        assert due(workspace, "disturbance_table") == []
        after = {cell: recorded_version(instance, "disturbance_table", cell) for cell in CELLS}
    assert [cell for cell in CELLS if before[cell] != after[cell]] == ["network-3"]


def test_a_change_undone_before_it_ran_costs_nothing(workspace: Workspace) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for cell in CELLS:
            materialise_table(workspace, cell, instance)
    store = workspace.table_store()
    version = store.current().version
    store.set("kind = load and intensity = 1", {"load_sigma": 0.5}, who="eve", why="try")
    assert due(workspace, "disturbance_table") == ["load-1"]
    store.rollback(version, who="eve", why="no")
    assert due(workspace, "disturbance_table") == []


def test_cells_of_different_table_versions_are_never_mixed_silently(workspace: Workspace) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for cell in CELLS:
            materialise_table(workspace, cell, instance)
        workspace.table_store().set("kind = load", {"load_sigma": 0.5}, who="eve", why="try")
        materialise_table(workspace, "load-2", instance)
    with pytest.raises(TableError, match="different versions") as caught:
        workspace.table()
    assert caught.value.remedy == "materialise disturbance_table for load-1, load-3, load-4, load-5"
    assert workspace.table("load-2").version == workspace.table_store().current().version


def test_a_new_line_makes_what_plays_on_it_due_and_nothing_of_the_table(workspace: Workspace) -> None:
    pretend(workspace, "line_profile", None, "line-1")
    pretend(workspace, "environment_catalog", None, "catalog-1")
    for cell in CELLS:
        pretend(workspace, "disturbance_table", cell)
        pretend(workspace, "environment_pool_health", cell)
        pretend(workspace, "trajectories", cell)
    pretend(workspace, "line_profile", None, "line-2")
    assert due(workspace, "disturbance_table") == []
    assert due(workspace, "environment_pool_health") == list(CELLS)
    assert due(workspace, "trajectories") == list(CELLS)


def test_a_recomputed_upstream_with_the_same_content_makes_nothing_due(workspace: Workspace) -> None:
    pretend(workspace, "line_profile", None, "line-1")
    pretend(workspace, "environment_catalog", None, "catalog-1")
    pretend(workspace, "disturbance_table", "load-1")
    pretend(workspace, "environment_pool_health", "load-1")
    pretend(workspace, "disturbance_table", "load-1")
    assert workspace.is_current("environment_pool_health", "load-1")


def test_a_manual_partition_resumes_only_under_the_same_configuration(workspace: Workspace, tmp_path) -> None:
    key = "2026-11-01|manual"
    pretend(workspace, "policy_checkpoint", key)
    assert workspace.is_current("policy_checkpoint", key)
    for other in ({"seed": 1}, {"threads": 7}, {"profile": "standard"}):
        changed = Workspace(**{"home": str(tmp_path), "profile": "demo", **other})
        assert not changed.is_current("policy_checkpoint", key), other
        assert changed.key("policy_checkpoint", key) != workspace.key("policy_checkpoint", key)


def test_the_number_of_threads_changes_no_simulation(workspace: Workspace, tmp_path) -> None:
    other = Workspace(home=str(tmp_path), profile="demo", threads=7)
    for asset in ("line_profile", "environment_catalog", "environment_pool_health", "trajectories"):
        assert other.configuration(asset) == workspace.configuration(asset), asset


def test_an_artefact_that_is_gone_is_made_again(workspace: Workspace) -> None:
    pretend(workspace, "line_profile", None)
    assert workspace.is_current("line_profile", None)
    (workspace.root / "line_profile" / "whole").rmdir()
    assert not workspace.is_current("line_profile", None)


def test_a_new_code_version_makes_a_partition_due(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(workspace, "line_profile", None)
    monkeypatch.setitem(SHAPES, "line_profile", dataclasses.replace(SHAPES["line_profile"], code_version="2"))
    assert not workspace.is_current("line_profile", None)


def test_a_week_consumes_its_own_days_only(workspace: Workspace) -> None:
    before = workspace.consumed("weekly_drift_report", "2026-11-16")
    pretend(workspace, "policy_drift", "2026-11-15|manual")
    pretend(workspace, "policy_drift", "2026-11-23|manual")
    assert workspace.consumed("weekly_drift_report", "2026-11-16") == before
    pretend(workspace, "policy_drift", "2026-11-22|nightly")
    assert workspace.consumed("weekly_drift_report", "2026-11-16") != before


def test_feedback_is_due_while_something_waits_or_when_its_day_grew(workspace: Workspace) -> None:
    day = "2026-11-01"
    assert workspace.source_version("feedback_inbox", day) == NONE
    pretend(workspace, "production_feedback", day)
    inbox = workspace.root / "feedback" / "inbox"
    inbox.mkdir(parents=True)
    assert workspace.is_current("production_feedback", day)
    (inbox / "a.jsonl").write_text("{}\n")
    assert not workspace.is_current("production_feedback", day)


@pytest.mark.parametrize(("trigger", "again"), [("manual", False), ("nightly", True), ("feedback", True)])
def test_feedback_trains_only_what_learns_from_it_again(workspace: Workspace, trigger: str, again: bool) -> None:
    pretend(workspace, "production_feedback", "2026-11-01", "twelve labels")
    pretend(workspace, "policy_checkpoint", f"2026-11-01|{trigger}")
    assert workspace.is_current("policy_checkpoint", f"2026-11-01|{trigger}")
    pretend(workspace, "production_feedback", "2026-11-01", "thirteen labels")
    assert workspace.is_current("policy_checkpoint", f"2026-11-01|{trigger}") is not again


@pytest.mark.parametrize(
    ("name", "asset"),
    [
        ("line_profile.json", "line_profile"),
        ("templates.csv", "environment_catalog"),
        ("splits.csv", "environment_catalog"),
    ],
)
def test_an_edited_data_file_left_everything_as_it_was(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, asset: str
) -> None:
    """A data folder of one's own: a changed byte makes due what reads it, and nothing else; undone, nothing is due."""
    folder = tmp_path / "data"
    shutil.copytree(data_dir(), folder)
    monkeypatch.setenv("AGENTPIPE_DATA", str(folder))
    before = (folder / name).read_bytes()
    for each in ("line_profile", "environment_catalog"):
        pretend(workspace, each, None)
    (folder / name).write_bytes(before + b"\n")
    assert [each for each in ("line_profile", "environment_catalog") if not workspace.is_current(each, None)] == [asset]
    (folder / name).write_bytes(before)
    assert workspace.is_current(asset, None)
