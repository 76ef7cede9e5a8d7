"""The bundle in a server as an asset: what the UI shows, what is skipped, what is made again and what is not."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from agentpipe.defs.graph import SHAPES
from agentpipe.defs.references import Reference
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving.checks import SERVER
from agentpipe.defs.serving.server_check import bundle_server_check
from agentpipe.errors import BundleError, GateError
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.defs.homes import QUIET
from agentpipe_tests.serving.fake_triton import fake_triton

KEY = "2026-11-02|manual"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A home with the bundle of one candidate, on a machine without a Triton."""
    monkeypatch.setenv("AGENTPIPE_TRITON_HOME", str(tmp_path / "none"))
    workspace = Workspace(home=str(tmp_path / "home"), profile="standard")
    leave_bundle(workspace, save_bundle(workspace.root / "bundles" / "one", 0))
    return workspace


def leave_bundle(workspace: Workspace, digest: str, **figures: object) -> None:
    asset = "triton_bundle"
    consumed, configuration = workspace.consumed(asset, KEY), workspace.configuration(asset)
    found = {"gates": [], "latency_p50_ms": 0.02, "latency_p99_ms": 0.05, **figures}
    code = SHAPES[asset].code_version
    workspace.references.save(Reference(asset, KEY, digest, "bundles/one", consumed, configuration, code, 0.0, found))


def check(workspace: Workspace, raise_on_error: bool = True) -> dict[str, dg.AssetCheckEvaluation]:
    """Materialises the check; what Dagster recorded of each of its checks."""
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            [bundle_server_check],
            instance=instance,
            partition_key=KEY,
            resources={"workspace": workspace},
            run_config=QUIET,
            raise_on_error=raise_on_error,
        )
        return {found.check_name: found for found in result.get_asset_check_evaluations()}


def figures(workspace: Workspace) -> dict[str, object]:
    return workspace.references.load("bundle_server_check", KEY).figures


def test_without_a_server_it_is_skipped_with_the_reason_and_warns(workspace: Workspace) -> None:
    found = check(workspace)
    assert set(found) == set(SERVER)
    assert {each.passed for each in found.values()} == {False}
    assert {each.severity for each in found.values()} == {dg.AssetCheckSeverity.WARN}
    assert "SKIPPED" in str(found["server_values"].description)
    assert found["server_available"].metadata["status"].value == "SKIPPED"
    assert figures(workspace)["status"] == "SKIPPED"
    assert "agentpipe bundle install-triton" in str(figures(workspace)["reason"])
    assert workspace.is_current("bundle_server_check", KEY)


def test_with_a_server_it_is_made_once_and_not_again(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(workspace)
    with fake_triton(tmp_path) as server:
        monkeypatch.setenv("AGENTPIPE_TRITON_URL", server.http)
        monkeypatch.setenv("AGENTPIPE_SERVING__TRITON_GRPC", server.grpc)
        assert not workspace.is_current("bundle_server_check", KEY), "there is a server now"
        found = check(workspace)
    assert {each.passed for each in found.values()} == {True}
    assert found["server_values"].metadata["batches"].value == "1, 7, 64"
    assert (figures(workspace)["status"], figures(workspace)["checked_before"]) == ("PASSED", False)
    assert workspace.is_current("bundle_server_check", KEY)
    version = workspace.references.version("bundle_server_check", KEY)
    check(workspace)  # the server is gone; the same bundle has passed
    assert figures(workspace)["checked_before"] is True
    assert workspace.references.version("bundle_server_check", KEY) == version


def test_a_look_that_does_not_pass_blocks_and_says_why(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_triton(tmp_path, refuse_load="no such operator") as server:
        monkeypatch.setenv("AGENTPIPE_TRITON_URL", server.http)
        found = check(workspace, raise_on_error=False)
    assert {name for name, each in found.items() if each.severity is dg.AssetCheckSeverity.ERROR} == {"server_loads"}
    assert found["server_loads"].metadata["reason"].value == "no such operator"
    assert found["server_loads"].blocking
    assert [gate["name"] for gate in figures(workspace)["gates"] if not gate["passed"]] == ["server_loads"]


def test_a_server_that_does_not_answer_is_tried_again(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTPIPE_TRITON_URL", "http://127.0.0.1:1")
    check(workspace)
    assert figures(workspace)["status"] == "SKIPPED"
    assert not workspace.is_current("bundle_server_check", KEY)


def test_nothing_is_checked_of_a_bundle_that_failed_its_gates_or_is_another_one(workspace: Workspace) -> None:
    gate = {"gate": 6, "name": "parity", "passed": False, "severity": "error", "remedy": "export again"}
    leave_bundle(workspace, "x", gates=[gate])
    with pytest.raises(GateError, match="parity"):
        check(workspace)
    leave_bundle(workspace, "0" * 64)
    with pytest.raises(BundleError, match="not 000000000000"):
        check(workspace)
    assert workspace.references.find("bundle_server_check", KEY) is None
