"""The job ``approval``: a person decides of a held candidate, and it is recorded who and why."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest

from agentpipe.definitions import defs
from agentpipe.defs.instance import recorded_version
from agentpipe.defs.resources import Workspace
from agentpipe.learning.succession.promotion import champion_stores
from agentpipe_tests.bundles import save_bundle, save_package
from agentpipe_tests.defs.homes import QUIET, promote

WHY = "the moved decisions are right"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder with package and bundle of a candidate, and the digests of both."""
    folder = tmp_path_factory.mktemp("packaged")
    package = save_package(folder / "packages" / "candidate", 0)
    return folder, package, save_bundle(folder / "bundles" / "candidate", 0)


@pytest.fixture
def candidate(packaged: tuple[Path, str, str]) -> str:
    """The digest of a held candidate."""
    return packaged[1]


@pytest.fixture
def workspace(packaged: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A home with a champion and a candidate that was compared with it and is held."""
    home = tmp_path / "home"
    shutil.copytree(packaged[0], home)
    monkeypatch.setenv("AGENTPIPE_HOME", str(home))
    found = Workspace(home=str(home), profile="demo")
    promote(found, "first")
    champion_stores(home)[1].hold(
        packaged[1],
        package="packages/candidate",
        bundle="bundles/candidate",
        compared_with="first",
        reasons=["drift 0.21 nats is above 0.15"],
        figures={"success": 0.9, "bundle_digest": packaged[2]},
        who="publish[2026-11-24|nightly]",
    )
    return found


def decide(instance: dg.DagsterInstance, decision: str, candidate: str, **changes: str) -> dg.ExecuteInProcessResult:
    config = {"candidate": candidate, "decision": decision, "who": "ann", "why": WHY, **changes}
    return defs.resolve_job_def("approval").execute_in_process(
        instance=instance, raise_on_error=False, run_config={"ops": {"decide": {"config": config}}, **QUIET}
    )


def error(result: dg.ExecuteInProcessResult) -> str:
    [failure] = [event for event in result.all_events if event.is_step_failure]
    return str(failure.step_failure_data.error)


def test_an_approved_candidate_is_champion_with_who_and_why_and_dagster_is_told(
    workspace: Workspace, instance: dg.DagsterInstance, candidate: str
) -> None:
    result = decide(instance, "APPROVE", candidate[:8])
    assert result.success, error(result)
    champions, holds = champion_stores(workspace.root)
    entry = champions.current()
    assert entry is not None
    assert (entry.digest, entry.kind, entry.who, entry.reason, entry.previous) == (
        candidate,
        "approval",
        "ann",
        WHY,
        "first",
    )
    assert holds.waiting() == ()
    assert recorded_version(instance, "champion", None) == candidate


def test_a_rejected_candidate_leaves_the_champion(
    workspace: Workspace, instance: dg.DagsterInstance, candidate: str
) -> None:
    assert decide(instance, "REJECT", candidate).success
    champions, holds = champion_stores(workspace.root)
    assert [entry.digest for entry in champions.history()] == ["first"]
    [held] = holds.all()
    assert held.decision is not None
    assert (held.decision.kind, held.decision.who, held.decision.reason) == (
        "rejected",
        "ann",
        WHY,
    )
    assert recorded_version(instance, "champion", None) is None
    after = decide(instance, "APPROVE", candidate)
    assert "rejected by ann" in error(after)


def test_a_comparison_with_an_earlier_champion_is_outdated(
    workspace: Workspace, instance: dg.DagsterInstance, candidate: str
) -> None:
    promote(workspace, "second")
    result = decide(instance, "APPROVE", candidate)
    assert not result.success
    assert "the champion is second" in error(result)
    champions, holds = champion_stores(workspace.root)
    assert [entry.digest for entry in champions.history()] == ["first", "second"]
    assert len(holds.waiting()) == 1


def test_a_package_that_was_damaged_meanwhile_is_not_promoted(
    workspace: Workspace, instance: dg.DagsterInstance, candidate: str
) -> None:
    (workspace.root / "packages" / "candidate" / "package.json").write_text("{}")
    assert "CheckpointError" in error(decide(instance, "APPROVE", candidate))
    assert [entry.digest for entry in champion_stores(workspace.root)[0].history()] == ["first"]


@pytest.mark.parametrize("other", ["beef", "d00d" * 16])
def test_a_candidate_that_is_not_held_is_refused(
    workspace: Workspace, instance: dg.DagsterInstance, other: str
) -> None:
    assert "InputError" in error(decide(instance, "APPROVE", other))
    assert [entry.digest for entry in champion_stores(workspace.root)[0].history()] == ["first"]


@pytest.mark.parametrize("changes", [{"who": " "}, {"why": ""}])
def test_nobody_decides_without_a_name_or_a_reason(
    workspace: Workspace, instance: dg.DagsterInstance, candidate: str, changes: dict[str, str]
) -> None:
    assert "InputError" in error(decide(instance, "APPROVE", candidate, **changes))
    assert [entry.digest for entry in champion_stores(workspace.root)[0].history()] == ["first"]
