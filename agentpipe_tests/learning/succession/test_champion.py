"""One champion at any time, whoever promotes."""

import json
import multiprocessing
import os
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import AgentpipeError, CorruptError, InputError, VersionError
from agentpipe.learning.succession.champion import (
    ChampionConflictError,
    ChampionStore,
    rollback_target,
    summed_differences,
)


def test_first_champion_then_the_next(tmp_path):
    store = ChampionStore(tmp_path)
    assert store.current() is None
    assert store.history() == ()
    first = store.promote(
        "aaa", "packages/aaa", expected=None, reason="first whose gates pass", figures={"success": 0.9}
    )
    assert (first.sequence, first.previous, first.digest) == (1, None, "aaa")
    second = store.promote("bbb", "packages/bbb", expected="aaa", reason="not worse", who="someone")
    assert store.current() == second
    assert [champion.digest for champion in store.history()] == ["aaa", "bbb"]
    assert store.history()[1].previous == "aaa"
    assert second.at.endswith("+00:00")


@pytest.mark.parametrize("expected", [None, "older"])
def test_promotion_against_another_champion_is_refused(tmp_path, expected):
    store = ChampionStore(tmp_path)
    store.promote("aaa", "a", expected=None, reason="first")
    before = (tmp_path / "champion.json").read_bytes()
    with pytest.raises(ChampionConflictError, match="the champion is aaa"):
        store.promote("bbb", "b", expected=expected, reason="late")
    assert (tmp_path / "champion.json").read_bytes() == before


def _promote(root, name, barrier, results):
    barrier.wait()
    try:
        ChampionStore(root).promote(name, name, expected=None, reason="race")
        results.put(name)
    except ChampionConflictError:
        results.put("")


def test_two_promotions_at_once_give_one_champion(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    racers = [context.Process(target=_promote, args=(tmp_path, f"c{i}", barrier, results)) for i in range(4)]
    for racer in racers:
        racer.start()
    winners = [name for name in (results.get(timeout=300) for _ in racers) if name]
    for racer in racers:
        racer.join(30)
    assert len(winners) == 1
    assert [champion.digest for champion in ChampionStore(tmp_path).history()] == winners


def test_interrupted_write_leaves_the_old_champion(tmp_path, monkeypatch):
    store = ChampionStore(tmp_path)
    store.promote("aaa", "a", expected=None, reason="first")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.promote("bbb", "b", expected="aaa", reason="next")
    monkeypatch.undo()
    assert store.current().digest == "aaa"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["champion.json", "champion.lock"]
    store.promote("bbb", "b", expected="aaa", reason="next")


ENTRY = {"sequence": 1, "package": "p", "digest": "aaa", "previous": None, "reason": "r", "who": "w", "at": "t"}


def pointer(*entries, version=2):
    return json.dumps({"format": version, "history": list(entries)})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 1, "history": [{"sequence": 1}]}',
        pointer(7),
        pointer(["sequence"]),
        pointer({**ENTRY, "unknown": 1}),
        pointer({**ENTRY, "digest": 5}),
        pointer({**ENTRY, "sequence": "1"}),
        pointer({**ENTRY, "sequence": True}),
        pointer({**ENTRY, "figures": []}),
        pointer({**ENTRY, "figures": None}),
        *(pointer({**ENTRY, "figures": {name: 5}}) for name in ("partition", "bundle", "bundle_digest", "drift")),
        *(pointer({**ENTRY, "figures": {name: "x"}}) for name in ("success", "difference", "low", "high")),
        *(pointer({**ENTRY, "figures": {name: 0.5}}) for name in ("package_bytes", "look", "look_of_champion")),
        *(pointer({**ENTRY, "figures": {name: True}}) for name in ("success", "package_bytes")),
        pointer({**ENTRY, "figures": {"verdict": None}}),
        pointer({**ENTRY, "package": ["p"]}),
        pointer({**ENTRY, "digest": None}),
        pointer({**ENTRY, "previous": {}}),
        pointer({**ENTRY, "kind": []}),
        pointer({**ENTRY, "restores": []}),
        pointer({**ENTRY, "restores": {}}),
        pointer({**ENTRY, "restores": ""}),
        pointer({**ENTRY, "restores": False}),
        pointer(ENTRY, {**ENTRY, "sequence": 2, "previous": "aaa", "kind": "rollback", "restores": [1]}),
        pointer({**ENTRY, "kind": "accident"}),
        pointer({**ENTRY, "kind": "rollback", "restores": 1}),
        pointer({**ENTRY, "previous": "zzz"}),
        pointer(ENTRY, {**ENTRY, "sequence": 2, "digest": "bbb", "previous": "ccc"}),
    ],
)
def test_damaged_pointer_is_told(tmp_path, content):
    (tmp_path / "champion.json").write_text(content)
    with pytest.raises(CorruptError):
        ChampionStore(tmp_path).current()


def test_hole_in_the_history_is_told(tmp_path):
    store = ChampionStore(tmp_path)
    store.promote("aaa", "a", expected=None, reason="first")
    store.promote("bbb", "b", expected="aaa", reason="next")
    content = json.loads((tmp_path / "champion.json").read_text())
    del content["history"][0]
    (tmp_path / "champion.json").write_text(json.dumps(content))
    with pytest.raises(CorruptError, match="missing"):
        store.current()


def test_another_version_is_told(tmp_path):
    (tmp_path / "champion.json").write_text('{"format": 3, "history": []}')
    with pytest.raises(VersionError):
        ChampionStore(tmp_path).current()


# ------------------------------------------------------------------------------------------------ rollback


def history_of(store):
    return [(entry.digest, entry.kind, entry.restores) for entry in store.history()]


@pytest.fixture
def three(tmp_path):
    store = ChampionStore(tmp_path)
    for previous, name in ((None, "aaaaaa11"), ("aaaaaa11", "aaaaaa22"), ("aaaaaa22", "cccccc33")):
        store.promote(name, f"packages/{name}", expected=previous, reason="next", figures={"success": len(name)})
    return store


def test_a_rollback_is_a_new_entry_that_restores_an_older_one(three):
    back = three.rollback(expected="cccccc33", reason="worse in production", who="ann")
    assert (back.sequence, back.digest, back.previous, back.kind, back.restores) == (
        4,
        "aaaaaa22",
        "cccccc33",
        "rollback",
        2,
    )
    assert (back.package, back.figures, back.who, back.reason) == (
        "packages/aaaaaa22",
        {"success": 8},
        "ann",
        "worse in production",
    )
    assert three.current() == back
    assert len(three.history()) == 4


def test_repeated_rollbacks_go_further_back_and_never_forth(three):
    three.rollback(expected="cccccc33", reason="r", who="w")
    three.rollback(expected="aaaaaa22", reason="r", who="w")
    assert [digest for digest, _, _ in history_of(three)][3:] == ["aaaaaa22", "aaaaaa11"]
    with pytest.raises(InputError, match="no champion before this one"):
        three.rollback(expected="aaaaaa11", reason="r", who="w")


def test_a_promotion_after_a_rollback_has_the_restored_one_before_it(three):
    three.rollback(1, expected="cccccc33", reason="r", who="w")
    three.promote("dddddd44", "d", expected="aaaaaa11", reason="next")
    assert three.rollback(expected="dddddd44", reason="r", who="w").digest == "aaaaaa11"
    with pytest.raises(InputError, match="no champion before this one"):
        three.rollback(expected="aaaaaa11", reason="r", who="w")


@pytest.mark.parametrize(
    ("to", "digest"), [(1, "aaaaaa11"), (2, "aaaaaa22"), ("aaaaaa11", "aaaaaa11"), ("aaaaaa2", "aaaaaa22")]
)
def test_a_rollback_goes_to_a_sequence_or_a_digest(three, to, digest):
    assert three.rollback(to, expected="cccccc33", reason="r", who="w").digest == digest


@pytest.mark.parametrize(
    ("to", "text"),
    [
        (0, "no champion 0"),
        (9, "no champion 9"),
        ("aaaaaa", "more than one"),
        ("aaaaa", "no champion aaaaa"),  # too short to name one
        ("zzzzzz", "no champion zzzzzz"),
        (3, "is the champion already"),
        ("cccccc", "is the champion already"),
    ],
)
def test_a_rollback_to_nowhere_is_refused(three, to, text):
    before = history_of(three)
    with pytest.raises(InputError, match=text):
        three.rollback(to, expected="cccccc33", reason="r", who="w")
    assert history_of(three) == before


def test_a_rollback_against_another_champion_is_refused(three):
    with pytest.raises(ChampionConflictError, match="the champion is cccccc33"):
        three.rollback(1, expected="aaaaaa22", reason="r", who="w")


def test_nothing_is_rolled_back_before_the_first_champion(tmp_path):
    with pytest.raises(InputError, match="no champion yet"):
        ChampionStore(tmp_path).rollback(expected=None, reason="r", who="w")


def test_format_1_is_read_and_goes_on_as_format_2(tmp_path):
    second = {**ENTRY, "sequence": 2, "digest": "bbb", "previous": "aaa", "figures": {"success": 0.9}}
    (tmp_path / "champion.json").write_text(pointer({**ENTRY, "figures": {}}, second, version=1))
    store = ChampionStore(tmp_path)
    assert history_of(store) == [("aaa", "promotion", None), ("bbb", "promotion", None)]
    store.rollback(expected="bbb", reason="r", who="w")
    assert json.loads((tmp_path / "champion.json").read_text())["format"] == 2
    assert history_of(store) == [("aaa", "promotion", None), ("bbb", "promotion", None), ("aaa", "rollback", 1)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(["p0", "p1", "p2", "p3"]), st.integers(0, 6), st.none()), max_size=8))
def test_history_only_grows_whatever_is_asked(tmp_path_factory, wishes):
    store, model = ChampionStore(tmp_path_factory.mktemp("champion")), []
    for wish in wishes:
        expected = model[-1] if model else None
        try:
            if isinstance(wish, str):
                store.promote(wish, wish, expected=expected, reason="r")
            else:
                store.rollback(wish, expected=expected, reason="r", who="w")
        except AgentpipeError:
            assert [entry.digest for entry in store.history()] == model
            continue
        history = store.history()
        assert [entry.digest for entry in history[:-1]] == model
        assert history[-1].digest in ([wish] if isinstance(wish, str) else model)
        model = [entry.digest for entry in history]


def test_the_target_of_a_rollback_can_be_asked_beforehand(three):
    assert rollback_target(three.history(), None).digest == "aaaaaa22"
    assert len(three.history()) == 3


def test_differences_add_up_along_the_way_to_each_policy(tmp_path):
    store, current = ChampionStore(tmp_path), None
    for name, figures in (("a", {}), ("b", {"difference": -0.004}), ("c", {"difference": -0.008})):
        current = store.promote(name, name, expected=current, reason="r", figures=figures).digest
    store.rollback(2, expected="c", reason="r", who="w")
    store.promote("d", "d", expected="b", reason="r", figures={"difference": 0.01})
    assert summed_differences(store.history()) == pytest.approx([0, -0.004, -0.012, -0.004, 0.006])


def _promote_for_ever(root):
    store = ChampionStore(root)
    for number in range(1_000_000):
        current = store.current()
        store.promote(f"c{number}", "p", expected=current.digest if current else None, reason="r" * 2_000)


def test_killed_at_any_instant_old_or_new_stays(tmp_path):
    context, seen = multiprocessing.get_context("fork"), 0
    for trial in range(8):
        racer = context.Process(target=_promote_for_ever, args=(tmp_path,))
        racer.start()
        time.sleep(0.03 + 0.011 * trial)
        os.kill(racer.pid, signal.SIGKILL)
        racer.join(30)
        history = ChampionStore(tmp_path).history()  # whole: sequences, links and types are checked
        assert len(history) >= seen
        seen = len(history)
    store = ChampionStore(tmp_path)  # the lock died with its holder
    store.promote("last", "p", expected=store.current().digest, reason="r")
    assert store.current().digest == "last"
