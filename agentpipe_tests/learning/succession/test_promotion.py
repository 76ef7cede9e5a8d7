"""Held candidates: one decision, by a person, against the champion that was compared with."""

import json
import multiprocessing
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agentpipe.errors import AgentpipeError, CheckpointError, CorruptError, InputError, VersionError
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.succession import promotion
from agentpipe.learning.succession.champion import ChampionConflictError
from agentpipe.learning.succession.promotion import (
    DecidedError,
    approve_candidate,
    champion_stores,
    reject_candidate,
    roll_back,
)
from agentpipe_tests.learning.tiny import ACTION_NAMES, NAMES, tiny_statistics

SIGNED = {"who": "ann", "reason": "looked at the cells that moved"}
CHECKED = {**SIGNED, "check_bundle": lambda _folder, _digest: None}


@pytest.fixture
def stores(tmp_path):
    champions, holds = champion_stores(tmp_path)
    champions.promote("champ-1", "packages/1", expected=None, reason="first")
    return champions, holds


def hold(holds, candidate="candidate-a", compared_with="champ-1", **changes):
    arguments = {
        "package": f"packages/{candidate}",
        "bundle": f"bundles/{candidate}",
        "compared_with": compared_with,
        "reasons": ["drift 0.21 nats is above 0.15"],
        "figures": {"kl": 0.21, "success": 0.9},
        "who": "publish[2026-01-01|nightly]",
    }
    return holds.hold(candidate, **{**arguments, **changes})


def test_a_held_candidate_waits_and_changes_no_champion(stores):
    champions, holds = stores
    held = hold(holds)
    assert holds.waiting() == (held,)
    assert (held.compared_with, held.reasons, held.decision) == ("champ-1", ("drift 0.21 nats is above 0.15",), None)
    assert champions.current().digest == "champ-1"


def test_held_again_for_the_same_comparison_nothing_changes(stores):
    _, holds = stores
    first = hold(holds)
    before = [path.stat().st_mtime_ns for path in holds.root.iterdir()]
    assert hold(holds) == first
    assert [path.stat().st_mtime_ns for path in holds.root.iterdir()] == before


def test_held_after_another_comparison_that_one_counts(stores):
    champions, holds = stores
    hold(holds)
    champions.promote("champ-2", "packages/2", expected="champ-1", reason="better")
    with pytest.raises(ChampionConflictError, match="the champion is champ-2") as error:
        holds.approve("candidate-a", **SIGNED)
    assert "compared with the present champion again" in error.value.remedy
    assert holds.waiting()[0].compared_with == "champ-1"
    hold(holds, compared_with="champ-2")
    assert holds.approve("candidate-a", **SIGNED).previous == "champ-2"


def test_approval_makes_it_champion_with_who_and_why(stores):
    champions, holds = stores
    hold(holds)
    entry = holds.approve("candidate-a", **SIGNED)
    assert champions.current() == entry
    assert (entry.kind, entry.who, entry.reason, entry.package) == (
        "approval",
        "ann",
        SIGNED["reason"],
        "packages/candidate-a",
    )
    assert entry.figures == {
        "kl": 0.21,
        "success": 0.9,
        "bundle": "bundles/candidate-a",
        "held_because": ["drift 0.21 nats is above 0.15"],
    }
    decision = holds.find("candidate-a").decision
    assert (decision.kind, decision.who, decision.at) == ("approved", "ann", entry.at)
    assert holds.waiting() == ()


def test_the_first_decision_stands(stores):
    champions, holds = stores
    hold(holds)
    hold(holds, "candidate-b")
    first = holds.approve("candidate-a", **SIGNED)
    assert holds.approve("candidate-a", who="bob", reason="me too") == first
    with pytest.raises(DecidedError, match="approved by ann"):
        holds.reject("candidate-a", who="bob", reason="no")
    rejected = holds.reject("candidate-b", who="bob", reason="no")
    assert holds.reject("candidate-b", **SIGNED) == rejected
    with pytest.raises(DecidedError, match="rejected by bob"):
        holds.approve("candidate-b", **SIGNED)
    assert [entry.digest for entry in champions.history()] == ["champ-1", "candidate-a"]


def test_decided_it_is_not_held_anew(stores):
    _, holds = stores
    hold(holds)
    rejected = holds.reject("candidate-a", **SIGNED)
    assert hold(holds, compared_with="champ-9") == rejected


def test_an_approval_of_long_ago_promotes_nothing_again(stores):
    champions, holds = stores
    hold(holds)
    entry = holds.approve("candidate-a", **SIGNED)
    champions.rollback(expected="candidate-a", reason="worse", who="bob")
    assert holds.approve("candidate-a", **SIGNED) == entry
    assert champions.current().digest == "champ-1"


def test_killed_between_pointer_and_note_the_approval_counts(stores, monkeypatch):
    champions, holds = stores
    hold(holds)
    monkeypatch.setattr(promotion, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        holds.approve("candidate-a", **SIGNED)
    monkeypatch.undo()
    assert json.loads((holds.root / "candidate-a.json").read_text())["decision"] is None
    assert holds.waiting() == ()
    with pytest.raises(DecidedError, match="approved by ann"):
        holds.reject("candidate-a", who="bob", reason="no")
    holds.approve("candidate-a", who="bob", reason="again")
    assert json.loads((holds.root / "candidate-a.json").read_text())["decision"]["who"] == "ann"
    assert len(champions.history()) == 2


def test_an_approval_that_a_restored_history_lacks_was_not_made(stores):
    champions, holds = stores
    hold(holds)
    pointer = champions.root / "champion.json"
    backup = pointer.read_bytes()
    holds.approve("candidate-a", **SIGNED)
    pointer.write_bytes(backup)
    assert [held.candidate for held in holds.waiting()] == ["candidate-a"]
    assert holds.find("candidate-a").decision is None
    entry = holds.approve("candidate-a", who="bob", reason="again")
    assert (entry.sequence, entry.digest, entry.who) == (2, "candidate-a", "bob")
    assert champions.current() == entry
    assert json.loads((holds.root / "candidate-a.json").read_text())["decision"]["who"] == "bob"
    pointer.write_bytes(backup)
    assert holds.reject("candidate-a", who="cem", reason="no").decision.kind == "rejected"


def _decide(home, number, barrier, results):
    holds = champion_stores(home)[1]
    barrier.wait()
    try:
        if number % 2:
            holds.approve("candidate-a", who=f"w{number}", reason="yes")
        else:
            holds.reject("candidate-a", who=f"w{number}", reason="no")
        results.put((number, True))
    except DecidedError:
        results.put((number, False))


def test_of_many_decisions_at_once_one_wins(stores, tmp_path):
    champions, holds = stores
    hold(holds)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    racers = [context.Process(target=_decide, args=(tmp_path, i, barrier, results)) for i in range(4)]
    for racer in racers:
        racer.start()
    outcomes = dict(results.get(timeout=300) for _ in racers)
    for racer in racers:
        racer.join(30)
    decision = holds.find("candidate-a").decision
    approved = decision.kind == "approved"
    assert outcomes == {number: bool(number % 2) == approved for number in range(4)}
    assert len(champions.history()) == (2 if approved else 1)
    assert (int(decision.who[1:]) % 2 == 1) == approved


def test_candidates_are_found_by_the_beginning_of_their_digest(stores):
    _, holds = stores
    hold(holds)
    hold(holds, "candidate-b")
    assert holds.find("candidate-b").candidate == "candidate-b"
    for name, text in (("candidate", "2 held candidates"), ("candi", "no held candidate"), ("nobody", "no held")):
        with pytest.raises(InputError, match=text):
            holds.find(name)


@pytest.mark.parametrize("changes", [{"reasons": []}, {"reasons": [" "]}, {"candidate": "../x"}, {"candidate": ""}])
def test_what_cannot_be_held_is_refused(stores, changes):
    with pytest.raises(InputError):
        hold(stores[1], **changes)


@pytest.mark.parametrize("unsigned", [{"who": " ", "reason": "r"}, {"who": "w", "reason": ""}])
def test_a_decision_needs_who_and_why(stores, tmp_path, unsigned):
    champions, holds = stores
    hold(holds)
    for decide in (holds.approve, holds.reject):
        with pytest.raises(InputError, match="a decision needs"):
            decide("candidate-a", **unsigned)
    with pytest.raises(InputError, match="a decision needs"):
        roll_back(tmp_path, None, **unsigned, check_bundle=CHECKED["check_bundle"])
    assert len(champions.history()) == 1


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda content: [], CorruptError),
        (lambda content: {**content, "format": 9}, VersionError),
        (lambda content: {**content, "candidate": "another"}, CorruptError),
        (lambda content: {**content, "decision": {"kind": "approved"}}, CorruptError),
        (lambda content: {**content, "decision": {"kind": "maybe", "who": "", "reason": "", "at": ""}}, CorruptError),
        (lambda content: {name: content[name] for name in content if name != "reasons"}, CorruptError),
        (lambda content: {**content, "extra": 1}, CorruptError),
        (lambda content: {**content, "candidate": 5}, CorruptError),
        (lambda content: {**content, "package": None}, CorruptError),
        (lambda content: {**content, "bundle": []}, CorruptError),
        (lambda content: {**content, "compared_with": 1}, CorruptError),
        (lambda content: {**content, "at": 1}, CorruptError),
        (lambda content: {**content, "figures": []}, CorruptError),
        (lambda content: {**content, "figures": {"bundle_digest": 5}}, CorruptError),
        (lambda content: {**content, "figures": {"partition": None}}, CorruptError),
        (lambda content: {**content, "figures": {"difference": "x"}}, CorruptError),
        (lambda content: {**content, "reasons": "drift"}, CorruptError),
        (lambda content: {**content, "reasons": [1]}, CorruptError),
        (lambda content: {**content, "reasons": None}, CorruptError),
        (lambda content: {**content, "decision": []}, CorruptError),
        (lambda content: {**content, "decision": "approved"}, CorruptError),
        (lambda content: {**content, "decision": {"kind": [], "who": "a", "reason": "b", "at": "c"}}, CorruptError),
        (lambda content: {**content, "decision": {"kind": "rejected", "who": 1, "reason": "", "at": ""}}, CorruptError),
    ],
)
def test_a_damaged_file_is_told(stores, damage, error):
    _, holds = stores
    hold(holds)
    path = holds.root / "candidate-a.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(error):
        holds.waiting()


def test_a_damaged_file_keeps_nobody_from_deciding_the_others(stores):
    _, holds = stores
    hold(holds)
    hold(holds, "candidate-b")
    (holds.root / "candidate-b.json").write_text("{")
    assert holds.approve("candidate-a", **SIGNED).digest == "candidate-a"
    with pytest.raises(CorruptError):
        holds.reject("candidate-b", **SIGNED)


@pytest.mark.parametrize("name", ["", "*", "../champion", "candidate-*", "candidate-a/"])
def test_a_name_is_no_pattern_and_no_path(stores, name):
    _, holds = stores
    hold(holds)
    with pytest.raises(InputError, match="no held candidate"):
        holds.find(name)


CANDIDATES = st.sampled_from(["candidate-a", "candidate-b", "candidate-c"])


class Decisions(RuleBasedStateMachine):
    """Whatever is held, decided, promoted and rolled back in whatever order, against a model of dictionaries."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        self.champions, self.holds = champion_stores(Path(self.folder.name))
        self.champion, self.compared, self.decided, self.entries = None, {}, {}, 0

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def moved(self, digest):
        self.champion, self.entries = digest, self.entries + 1

    @rule(number=st.integers(0, 3))
    def promote(self, number):
        self.champions.promote(f"champion-{number}", "p", expected=self.champion, reason="r")
        self.moved(f"champion-{number}")

    @rule()
    def go_back(self):
        try:
            entry = self.champions.rollback(expected=self.champion, reason="r", who="w")
        except InputError:
            return
        assert entry.digest != self.champion
        self.moved(entry.digest)

    @rule(candidate=CANDIDATES)
    def hold(self, candidate):
        hold(self.holds, candidate, compared_with=self.champion)
        if candidate not in self.decided:
            self.compared[candidate] = self.champion

    @rule(candidate=CANDIDATES, number=st.integers(0, 9))
    def approve(self, candidate, number):
        known, free = candidate in self.compared, candidate not in self.decided
        allowed = known and (
            self.compared[candidate] == self.champion if free else self.decided[candidate][0] == "approved"
        )
        try:
            entry = self.holds.approve(candidate, who=f"w{number}", reason="r")
        except AgentpipeError:
            assert not allowed
            return
        assert allowed
        assert entry.digest == candidate
        if free:
            self.decided[candidate] = ("approved", f"w{number}")
            self.moved(candidate)

    @rule(candidate=CANDIDATES, number=st.integers(0, 9))
    def reject(self, candidate, number):
        allowed = candidate in self.compared and self.decided.get(candidate, ("rejected",))[0] == "rejected"
        try:
            self.holds.reject(candidate, who=f"w{number}", reason="r")
        except AgentpipeError:
            assert not allowed
            return
        assert allowed
        self.decided.setdefault(candidate, ("rejected", f"w{number}"))

    @invariant()
    def agrees(self):
        if not hasattr(self, "holds"):
            return
        current = self.champions.current()
        assert (current.digest if current else None) == self.champion
        assert len(self.champions.history()) == self.entries
        found = {held.candidate: held for held in self.holds.all()}
        assert {name: held.compared_with for name, held in found.items()} == self.compared
        decisions = {name: (held.decision.kind, held.decision.who) for name, held in found.items() if held.decision}
        assert decisions == self.decided


Decisions.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestDecisions = Decisions.TestCase


# ------------------------------------------------------------------------------------- with real packages


def save(home, name, seed):
    import torch

    network = PolicyNetwork(len(NAMES), len(ACTION_NAMES), NetworkOptions(hidden=(8,), action_embedding=2))
    network.initialise(torch.Generator().manual_seed(seed))
    package = PolicyPackage(network, tiny_statistics(), NAMES, ACTION_NAMES)
    package.save(home / "packages" / name)
    return package.digest


def bundle(name):
    return {"bundle": f"bundles/{name}", "bundle_digest": f"digest of {name}"}


@pytest.fixture
def packaged(tmp_path):
    champions, holds = champion_stores(tmp_path)
    first, second, candidate = (save(tmp_path, name, seed) for seed, name in enumerate(("first", "second", "new")))
    champions.promote(first, "packages/first", expected=None, reason="first", figures=bundle("first"))
    champions.promote(second, "packages/second", expected=first, reason="next", figures=bundle("second"))
    figures = {"bundle_digest": "digest of new"}
    hold(holds, candidate, compared_with=second, package="packages/new", bundle="bundles/new", figures=figures)
    return tmp_path, first, second, candidate


def test_approval_and_rollback_look_at_package_and_bundle_first(packaged):
    home, first, second, candidate = packaged
    asked = []
    checked = {**SIGNED, "check_bundle": lambda folder, digest: asked.append((folder, digest))}
    assert approve_candidate(home, candidate[:8], **checked).digest == candidate
    assert roll_back(home, None, **checked).digest == second
    assert roll_back(home, 1, **checked).digest == first
    assert asked == [(home / "bundles" / name, f"digest of {name}") for name in ("new", "second", "first")]
    assert approve_candidate(home, candidate, **checked).digest == candidate  # decided before: nothing is asked
    assert len(asked) == 3
    assert [entry.kind for entry in champion_stores(home)[0].history()] == [
        "promotion",
        "promotion",
        "approval",
        "rollback",
        "rollback",
    ]


def test_a_lost_or_changed_package_becomes_no_champion(packaged):
    home, first, second, candidate = packaged
    for path in (home / "packages/first").iterdir():
        path.unlink()
    (home / "packages/first").rmdir()
    (home / "packages/new").rename(home / "packages/aside")
    (home / "packages/second").rename(home / "packages/new")
    with pytest.raises(CheckpointError, match="is not there"):
        roll_back(home, first, **CHECKED)
    with pytest.raises(CheckpointError, match=f"is {second[:12]}, not {candidate[:12]}"):
        approve_candidate(home, candidate, **CHECKED)
    assert champion_stores(home)[0].current().digest == second
    assert reject_candidate(home, candidate, **SIGNED).decision.kind == "rejected"
