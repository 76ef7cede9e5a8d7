"""From the gates to the champion: nothing is built on an error, and a champion is replaced by nobody silently."""

from __future__ import annotations

import dagster as dg
import pytest

from agentpipe.defs.graph import SHAPES
from agentpipe.defs.references import Reference
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving.assets import publish, triton_bundle
from agentpipe.errors import GateError
from agentpipe.learning.champion import ChampionStore

KEY = "2026-11-02|manual"
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
GOOD = {"gate": 5, "name": "success", "passed": True, "severity": "error", "remedy": "train longer"}
BAD = {**GOOD, "passed": False}


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(home=str(tmp_path), profile="standard")


def leave(workspace: Workspace, asset: str, key: str, version: str, **figures: object) -> None:
    consumed, configuration = workspace.consumed(asset, key), workspace.configuration(asset)
    code_version = SHAPES[asset].code_version
    reference = Reference(asset, key, version, f"{asset}/x", consumed, configuration, code_version, 0.0, figures)
    workspace.references.save(reference)


def candidate(workspace: Workspace, key: str, digest: str, *, promotable: bool = True, gate: dict = GOOD) -> None:
    leave(workspace, "policy_checkpoint", key, digest, gates=[], parent="none")
    leave(workspace, "holdout_evaluation", key, "e", gates=[gate], success=0.91)
    leave(workspace, "failure_attribution", key, "a", gates=[])
    reasons = [] if promotable else ["it is a demo"]
    leave(
        workspace,
        "triton_bundle",
        key,
        f"bundle-{digest}",
        promotable=promotable,
        reasons=reasons,
        gates=[],
        package_bytes=7,
    )


def materialise(asset: dg.AssetsDefinition, workspace: Workspace, key: str, instance: dg.DagsterInstance) -> None:
    dg.materialize([asset], instance=instance, partition_key=key, resources={"workspace": workspace}, run_config=QUIET)


def test_the_first_promotable_bundle_becomes_champion(workspace: Workspace) -> None:
    candidate(workspace, KEY, "d1")
    with dg.DagsterInstance.ephemeral() as instance:
        materialise(publish, workspace, KEY, instance)
        event = instance.get_latest_materialization_event(dg.AssetKey("champion"))
    champion = ChampionStore(workspace.root / "champion").current()
    assert (champion.digest, champion.package, champion.previous) == ("d1", "policy_checkpoint/x", None)
    assert champion.figures["success"] == 0.91
    assert event.asset_materialization.tags["dagster/data_version"] == "d1"


def test_a_later_candidate_does_not_replace_it_without_a_comparison(workspace: Workspace) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for key, digest in ((KEY, "d1"), ("2026-11-03|nightly", "d2")):
            candidate(workspace, key, digest)
            materialise(publish, workspace, key, instance)
    store = ChampionStore(workspace.root / "champion")
    assert [entry.digest for entry in store.history()] == ["d1"]
    figures = workspace.references.load("publish", "2026-11-03|nightly").figures
    assert figures["promoted"] is False
    assert "comparison" in figures["reason"]


def test_running_an_old_partition_again_never_promotes_past_the_champion(workspace: Workspace) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for key, digest in ((KEY, "d1"), (KEY, "d1"), ("2026-11-01|manual", "d0")):
            candidate(workspace, key, digest)
            materialise(publish, workspace, key, instance)
    assert [entry.digest for entry in ChampionStore(workspace.root / "champion").history()] == ["d1"]


def test_what_is_not_promotable_says_why_and_changes_nothing(workspace: Workspace) -> None:
    candidate(workspace, KEY, "d1", promotable=False)
    with dg.DagsterInstance.ephemeral() as instance:
        materialise(publish, workspace, KEY, instance)
    assert ChampionStore(workspace.root / "champion").current() is None
    assert workspace.references.load("publish", KEY).figures["reason"] == "not promotable: it is a demo"


def test_a_bundle_launched_by_hand_looks_at_the_gates_itself(workspace: Workspace) -> None:
    candidate(workspace, KEY, "d1", gate=BAD)
    with dg.DagsterInstance.ephemeral() as instance, pytest.raises(GateError, match=r"success \(gate 5\) failed"):
        materialise(triton_bundle, workspace, KEY, instance)
    assert not (workspace.root / "bundles").exists()


@pytest.mark.parametrize(
    ("setting", "value", "promotable"),
    [
        ("AGENTPIPE_SEED", "3", True),
        ("AGENTPIPE_PROFILE", "demo", False),
        ("AGENTPIPE_GATES__BEATS_RANDOM_ONLY", "true", False),
        ("AGENTPIPE_EVALUATION__ENVIRONMENTS", "300", False),
    ],
)
def test_only_a_whole_judgement_makes_a_bundle_promotable(
    tmp_path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, promotable: bool
) -> None:
    from agentpipe.defs.serving.assets import _why_not

    monkeypatch.setenv(setting, value)
    assert (_why_not(Workspace(home=str(tmp_path))) == []) is promotable
