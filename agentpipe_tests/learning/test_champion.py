"""One champion at any time, whoever promotes."""

import json
import multiprocessing

import pytest

from agentpipe.errors import CorruptError, VersionError
from agentpipe.learning.champion import ChampionConflictError, ChampionStore


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
    winners = [name for name in (results.get(timeout=30) for _ in racers) if name]
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


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 1, "history": [{"sequence": 1}]}'])
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
    (tmp_path / "champion.json").write_text('{"format": 2, "history": []}')
    with pytest.raises(VersionError):
        ChampionStore(tmp_path).current()
