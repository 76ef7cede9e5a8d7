"""From the gates to the champion: nothing is built on an error, and a champion is replaced by nobody silently."""

from __future__ import annotations

import dataclasses
import json

import dagster as dg
import pytest

from agentpipe.defs.graph import SHAPES
from agentpipe.defs.references import Reference
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving import promotion
from agentpipe.defs.serving.assets import publish, triton_bundle
from agentpipe.errors import CorruptError, GateError
from agentpipe.learning.succession.champion import Champion, ChampionStore
from agentpipe.learning.succession.promotion import champion_stores
from agentpipe.serving import deployment
from agentpipe.storage import read_json, write_json

D2 = "d2" * 32
KEY = "2026-11-02|manual"
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
GOOD = {"gate": 5, "name": "success", "passed": True, "severity": "error", "remedy": "train longer"}
BAD = {**GOOD, "passed": False}


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(home=str(tmp_path), profile="standard")


@pytest.fixture(autouse=True)
def _intact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages and bundles are names only; whether they are whole is asked in ``test_intact.py``."""
    monkeypatch.setattr(promotion, "_check", lambda *_: None)
    monkeypatch.setattr(deployment, "check_bundle", lambda *_: None)
    monkeypatch.setattr(deployment, "serve_champion", lambda _: None)


def leave(workspace: Workspace, asset: str, key: str, version: str, **figures: object) -> None:
    consumed, configuration = workspace.consumed(asset, key), workspace.configuration(asset)
    code_version = SHAPES[asset].code_version
    reference = Reference(asset, key, version, f"{asset}/x", consumed, configuration, code_version, 0.0, figures)
    workspace.references.save(reference)


def package(workspace: Workspace, labels: frozenset[str] = frozenset()) -> None:
    """A package at the place that every checkpoint here names."""
    from agentpipe.learning.policy.lineage import LABELS, pack_labels
    from agentpipe.learning.tensors import seal, sealed_manifest
    from agentpipe.storage import publish_directory

    files = {LABELS: pack_labels(labels)} if labels else {}
    with publish_directory(workspace.root / "policy_checkpoint" / "x") as folder:
        content = {"kind": "agentpipe.policy-package", "format": 1}
        seal(folder, "package.json", sealed_manifest(content, files), files)


def candidate(
    workspace: Workspace, key: str, digest: str, *, promotable: bool = True, gate: dict = GOOD, parent: str = "none"
) -> None:
    package(workspace)
    leave(workspace, "policy_checkpoint", key, digest, gates=[], parent=parent)
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
    checked(workspace, key)


def checked(workspace: Workspace, key: str, status: str = "PASSED", **figures: object) -> None:
    leave(workspace, "bundle_server_check", key, "c", **{"status": status, "reason": "", "gates": [], **figures})


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


class Compared:
    """What a comparison came to; the episodes themselves are another test's."""

    def __init__(self, verdict: str) -> None:
        self.verdict, self.reasons = verdict, ("as measured",)
        look = {"number": 1, "of_champion": 1}
        self.figures = {"verdict": verdict, "difference": 0.0, "low": -0.004, "high": 0.004, "look": look}

    def markdown(self) -> str:
        return self.verdict


@pytest.mark.parametrize(
    ("verdict", "drift", "fate", "champions"),
    [
        ("PROMOTE", "OK", "promote", ["d1", "d2"]),
        ("PROMOTE", "REVIEW", "hold", ["d1"]),
        ("PROMOTE", "INSUFFICIENT_DATA", "hold", ["d1"]),
        ("NOT_BETTER_ENOUGH", "OK", "refuse", ["d1"]),
        ("VETO_CELL", "OK", "refuse", ["d1"]),
        ("INSUFFICIENT_DATA", "OK", "refuse", ["d1"]),
    ],
)
def test_a_later_candidate_replaces_it_only_after_a_comparison(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, verdict: str, drift: str, fate: str, champions: list[str]
) -> None:
    monkeypatch.setattr(promotion, "_compare", lambda *_: Compared(verdict))
    with dg.DagsterInstance.ephemeral() as instance:
        candidate(workspace, KEY, "d1")
        materialise(publish, workspace, KEY, instance)
        candidate(workspace, "2026-11-03|nightly", D2, parent="d1")
        leave(workspace, "policy_drift", "2026-11-03|nightly", "k", champion="d1", status=drift)
        materialise(publish, workspace, "2026-11-03|nightly", instance)
    store, holds = champion_stores(workspace.root)
    assert [entry.digest for entry in store.history()] == [D2 if name == "d2" else name for name in champions]
    figures = workspace.references.load("publish", "2026-11-03|nightly").figures
    assert (figures["fate"], figures["promoted"]) == (fate, fate == "promote")
    assert [held.candidate for held in holds.waiting()] == ([D2] if fate == "hold" else [])


def test_a_candidate_that_lost_a_race_is_compared_with_the_champion_of_now(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []

    def compare(_work: object, _candidate: object, current: Champion) -> Compared:
        met.append(current.digest)
        if len(met) == 1:  # another one is promoted while the two play
            store.promote("d9", "policy_checkpoint/x", expected="d1", reason="faster", who="a feedback run")
        return Compared("PROMOTE")

    monkeypatch.setattr(promotion, "_compare", compare)
    monkeypatch.setattr(promotion, "_drift", lambda *_: "OK")
    store = ChampionStore(workspace.root / "champion")
    with dg.DagsterInstance.ephemeral() as instance:
        candidate(workspace, KEY, "d1")
        materialise(publish, workspace, KEY, instance)
        candidate(workspace, "2026-11-03|nightly", D2, parent="d1")
        materialise(publish, workspace, "2026-11-03|nightly", instance)
    assert met == ["d1", "d9"]
    assert [entry.digest for entry in store.history()] == ["d1", "d9", D2]


def test_a_night_that_races_with_a_feedback_run_loses_neither_s_corrections(workspace: Workspace) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        candidate(workspace, KEY, "d1")
        materialise(publish, workspace, KEY, instance)
        candidate(workspace, "2026-11-03|nightly", D2, parent="d1")
        learned = workspace.root / "policy_checkpoint" / "x"
        learned.rename(learned.with_name("night"))
        package(workspace, frozenset({"label-1", "label-2"}))
        leave(workspace, "policy_checkpoint", "2026-11-03|nightly", D2, gates=[], parent="d1")
        reference = workspace.references.load("policy_checkpoint", "2026-11-03|nightly")
        workspace.references.save(dataclasses.replace(reference, path="policy_checkpoint/night"))
        materialise(publish, workspace, "2026-11-03|nightly", instance)
    figures = workspace.references.load("publish", "2026-11-03|nightly").figures
    assert figures["fate"] == "retrain"
    assert "2 correction(s)" in figures["reason"]


def test_a_promotion_whose_run_was_killed_before_it_was_noted_stays_one(workspace: Workspace) -> None:
    candidate(workspace, KEY, "d1")
    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(2):
            materialise(publish, workspace, KEY, instance)
            figures = workspace.references.load("publish", KEY).figures
            assert (figures["promoted"], figures["fate"]) == (True, "promote")
    assert len(ChampionStore(workspace.root / "champion").history()) == 1


def test_running_an_old_partition_again_never_promotes_past_the_champion(workspace: Workspace) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for key, digest in ((KEY, "d1"), (KEY, "d1"), ("2026-11-01|manual", "d0")):
            candidate(workspace, key, digest)
            materialise(publish, workspace, key, instance)
    assert [entry.digest for entry in ChampionStore(workspace.root / "champion").history()] == ["d1"]


@pytest.mark.parametrize(
    ("champion", "again", "parent", "labels", "fate"),
    [
        # of an earlier day, whatever it learned; amended feedback begins from the champion
        ("2026-11-03|nightly", "2026-11-02|feedback", "d0", {"a", "b"}, "refuse"),
        ("2026-11-03|nightly", "2026-11-02|nightly", "d1", {"a", "b"}, "refuse"),
        ("2026-11-03|nightly", "2026-11-02|manual", "d1", {"a", "b"}, "refuse"),
        ("2026-11-03|nightly", "2026-11-02|feedback", "d1", {"a", "b"}, "promote"),
        # of the same day: the night waits for the feedback and learns the same labels
        ("2026-11-03|nightly", "2026-11-03|feedback", "d0", {"a"}, "refuse"),
        ("2026-11-03|nightly", "2026-11-03|feedback", "d0", {"a", "b"}, "promote"),
        ("2026-11-03|nightly", "2026-11-03|feedback", "d0", {"b"}, "retrain"),
        ("2026-11-03|nightly", "2026-11-03|feedback", "d1", {"a"}, "promote"),
        ("2026-11-03|feedback", "2026-11-03|nightly", "d0", {"a"}, "promote"),
        ("2026-11-03|nightly", "2026-11-03|manual", "d0", {"a"}, "promote"),
        ("2026-11-03|manual", "2026-11-03|feedback", "d0", {"a"}, "promote"),
        ("2026-11-03|nightly", "2026-11-03|nightly", "d1", {"a"}, "promote"),
        # of a later day
        ("2026-11-03|nightly", "2026-11-04|feedback", "d0", {"a"}, "promote"),
    ],
)
def test_an_old_partition_run_again_never_promotes_past_a_later_champion(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    champion: str,
    again: str,
    parent: str,
    labels: set[str],
    fate: str,
) -> None:
    """The champion ``d1`` has learned the label ``a``; the other one is better in every comparison."""
    monkeypatch.setattr(promotion, "_compare", lambda *_: Compared("PROMOTE"))
    monkeypatch.setattr(promotion, "_drift", lambda *_: "OK")
    with dg.DagsterInstance.ephemeral() as instance:
        candidate(workspace, champion, "d1")
        package(workspace, frozenset({"a"}))
        materialise(publish, workspace, champion, instance)
        learned = workspace.root / "policy_checkpoint" / "x"
        learned.rename(learned.with_name("first"))
        pointer = workspace.root / "champion" / "champion.json"
        write_json(pointer, json.loads(pointer.read_text().replace("policy_checkpoint/x", "policy_checkpoint/first")))
        candidate(workspace, again, D2, parent=parent)
        package(workspace, frozenset(labels))
        materialise(publish, workspace, again, instance)
    assert workspace.references.load("publish", again).figures["fate"] == fate
    current = ChampionStore(workspace.root / "champion").current()
    assert current is not None
    assert current.digest == (D2 if fate == "promote" else "d1")


def test_what_is_not_promotable_says_why_and_changes_nothing(workspace: Workspace) -> None:
    candidate(workspace, KEY, "d1", promotable=False)
    with dg.DagsterInstance.ephemeral() as instance:
        materialise(publish, workspace, KEY, instance)
    assert ChampionStore(workspace.root / "champion").current() is None
    assert workspace.references.load("publish", KEY).figures["reason"] == "not promotable: it is a demo"


def test_a_bundle_whose_server_check_was_skipped_needs_the_setting(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate(workspace, KEY, "d1")
    checked(workspace, KEY, "SKIPPED", reason="no Triton is installed here")
    champions = ChampionStore(workspace.root / "champion")
    (workspace.root / "triton_bundle" / "x").mkdir(parents=True)
    with dg.DagsterInstance.ephemeral() as instance:
        materialise(publish, workspace, KEY, instance)
        figures = workspace.references.load("publish", KEY).figures
        assert (figures["fate"], champions.current()) == ("refuse", None)
        assert figures["reason"] == "not promotable: its server check was skipped: no Triton is installed here"
        assert workspace.is_current("publish", KEY)
        monkeypatch.setenv("AGENTPIPE_SERVING__SKIPPED_CHECK_ALLOWED", "true")
        assert not workspace.is_current("publish", KEY)
        materialise(publish, workspace, KEY, instance)
    assert champions.current().digest == "d1"


def test_a_bundle_that_failed_its_server_check_or_had_none_is_not_promoted(workspace: Workspace) -> None:
    candidate(workspace, KEY, "d1")
    checked(workspace, KEY, "FAILED", gates=[{**BAD, "name": "server_values", "gate": 6}])
    with dg.DagsterInstance.ephemeral() as instance:
        with pytest.raises(GateError, match=r"server_values \(gate 6\) failed"):
            materialise(publish, workspace, KEY, instance)
        checked(workspace, KEY)
        leave(workspace, "triton_bundle", KEY, "another", gates=[], reasons=[], package_bytes=7)
        with pytest.raises(GateError, match="the server check is of another bundle"):
            materialise(publish, workspace, KEY, instance)
    assert ChampionStore(workspace.root / "champion").current() is None


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


def test_with_the_champion_s_pointer_lost_no_candidate_takes_its_place(workspace: Workspace) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        candidate(workspace, KEY, "d1")
        materialise(publish, workspace, KEY, instance)
        (workspace.root / "champion" / "champion.json").unlink()
        candidate(workspace, "2026-11-03|nightly", D2)
        with pytest.raises(CorruptError, match="pointer is lost"):
            materialise(publish, workspace, "2026-11-03|nightly", instance)
    assert ChampionStore(workspace.root / "champion").history() == ()


@pytest.mark.parametrize("partition", ["x", "", "2026-13-01|nightly", "nightly", 5, None])
def test_a_champion_whose_partition_is_none_is_a_typed_error(workspace: Workspace, partition: object) -> None:
    pointer = workspace.root / "champion" / "champion.json"
    with dg.DagsterInstance.ephemeral() as instance:
        candidate(workspace, KEY, "d1")
        materialise(publish, workspace, KEY, instance)
        content = read_json(pointer)
        content["history"][-1]["figures"]["partition"] = partition
        write_json(pointer, content)
        before = pointer.read_bytes()
        candidate(workspace, "2026-11-03|nightly", D2, parent="d1")
        with pytest.raises(CorruptError, match="partition") as caught:
            materialise(publish, workspace, "2026-11-03|nightly", instance)
    assert caught.value.where["file"] == pointer
    assert pointer.read_bytes() == before


@pytest.mark.parametrize(
    ("asset", "figure"),
    [
        ("policy_checkpoint", "parent"),
        ("holdout_evaluation", "success"),
        ("triton_bundle", "reasons"),
        ("triton_bundle", "gates"),
        ("triton_bundle", "package_bytes"),
        ("bundle_server_check", "status"),
        ("bundle_server_check", "gates"),
    ],
)
def test_a_candidate_whose_references_lack_a_figure_is_a_typed_error(
    workspace: Workspace, asset: str, figure: str
) -> None:
    candidate(workspace, KEY, "d1")
    reference = workspace.references.load(asset, KEY)
    figures = {name: value for name, value in reference.figures.items() if name != figure}
    workspace.references.save(dataclasses.replace(reference, figures=figures))
    with (
        dg.DagsterInstance.ephemeral() as instance,
        pytest.raises(CorruptError, match=rf"{asset}\[.*lacks a figure \[field {figure}\]"),
    ):
        materialise(publish, workspace, KEY, instance)
    assert ChampionStore(workspace.root / "champion").current() is None
