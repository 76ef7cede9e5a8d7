"""Looks at the hold-out: counted durably, each with episodes of its own, the same question the same look."""

import json
import multiprocessing
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import CorruptError, EvaluationError, VersionError
from agentpipe.evaluation.challenge_looks import LookStore, question
from agentpipe_tests.evaluation.fakes import PROFILE, FakeTable, make_environments


def test_each_look_plays_the_next_episodes(tmp_path):
    store = LookStore(tmp_path)
    looks = [
        store.take("a", "one", "q", 4),
        store.take("b", "one", "q", 4),
        store.take("c", "two", "q", 3),
        store.take("d", "one", "q", 4),
    ]
    assert [(look.number, look.of_champion, look.first_episode, look.episodes) for look in looks] == [
        (1, 1, 0, 4),
        (2, 2, 4, 4),
        (3, 1, 8, 3),
        (4, 3, 11, 4),
    ]
    assert LookStore(tmp_path).all() == tuple(looks)


def test_the_same_question_is_the_same_look(tmp_path):
    store = LookStore(tmp_path)
    first = store.take("a", "one", "q", 4)
    store.take("b", "one", "q", 4)
    assert store.take("a", "one", "q", 4) == first
    assert len(store.all()) == 2


@pytest.mark.parametrize(
    "other", [("b", "one", "q", 4), ("a", "two", "q", 4), ("a", "one", "r", 4), ("a", "one", "q", 5)]
)
def test_another_question_is_another_look(tmp_path, other):
    store = LookStore(tmp_path)
    store.take("a", "one", "q", 4)
    assert store.take(*other).first_episode == 4


def test_a_question_is_everything_but_the_policies():
    environments, table = make_environments(3), FakeTable()
    base = question(environments, table, PROFILE, seed=1, episodes=4)
    assert base == question(make_environments(3), FakeTable(), PROFILE, seed=1, episodes=4)
    others = [
        question(environments[:2], table, PROFILE, seed=1, episodes=4),
        question(environments, FakeTable("table-2"), PROFILE, seed=1, episodes=4),
        question(environments, table, SimpleNamespace(digest="profile-2"), seed=1, episodes=4),
        question(environments, table, PROFILE, seed=2, episodes=4),
        question(environments, table, PROFILE, seed=1, episodes=5),
    ]
    assert len({base, *others}) == 6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(1, 5)), max_size=12))
def test_no_two_looks_share_an_episode(tmp_path_factory, wishes):
    store = LookStore(tmp_path_factory.mktemp("looks"))
    taken = {(candidate, champion, k): store.take(candidate, champion, "q", k) for candidate, champion, k in wishes}
    played = [
        episode for look in taken.values() for episode in range(look.first_episode, look.first_episode + look.episodes)
    ]
    assert len(played) == len(set(played))
    assert len(store.all()) == len(taken)


def _take(root, name, barrier, results):
    barrier.wait()
    results.put(LookStore(root).take(name, "one", "q", 4).first_episode)


def test_looks_taken_at_once_share_no_episode(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    racers = [context.Process(target=_take, args=(tmp_path, f"c{i}", barrier, results)) for i in range(4)]
    for racer in racers:
        racer.start()
    first = sorted(results.get(timeout=300) for _ in racers)
    for racer in racers:
        racer.join(30)
    assert first == [0, 4, 8, 12]


def test_an_interrupted_look_takes_nothing(tmp_path, monkeypatch):
    store = LookStore(tmp_path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.take("a", "one", "q", 4)
    monkeypatch.undo()
    assert store.all() == ()
    assert store.take("b", "one", "q", 4).number == 1


def test_a_look_at_nothing_is_refused(tmp_path):
    with pytest.raises(EvaluationError, match="0 episodes"):
        LookStore(tmp_path).take("a", "one", "q", 0)


def _changed(**changes):
    return lambda looks: [looks[0], {**looks[1], **changes}]


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda looks: looks[1:], CorruptError),
        (lambda looks: [looks[0], {"number": 2}], CorruptError),
        (lambda looks: [looks[0], 7], CorruptError),
        (_changed(first_episode=3), CorruptError),
        (_changed(first_episode="4"), CorruptError),
        (_changed(episodes=0), CorruptError),
        (_changed(number=3), CorruptError),
    ],
)
def test_a_damaged_file_is_told(tmp_path, damage, error):
    store = LookStore(tmp_path)
    store.take("a", "one", "q", 4)
    store.take("b", "one", "q", 4)
    path = tmp_path / "looks.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "looks": damage(content["looks"])}))
    with pytest.raises(error):
        store.all()


@pytest.mark.parametrize(
    ("text", "error"),
    [("[]", CorruptError), ('{"format": 1}', CorruptError), ('{"format": 2, "looks": []}', VersionError)],
)
def test_another_file_is_told(tmp_path, text, error):
    (tmp_path / "looks.json").write_text(text)
    with pytest.raises(error):
        LookStore(tmp_path).all()
