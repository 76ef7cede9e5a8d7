"""The recorder: every byte of every episode is what was seen and done, whole episodes come out, none twice."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.layout import A_MACHINE, ACCUMULATING, ACTION_COUNT, MAX_STEPS, OBSERVATION_SIZE
from agentpipe.environments.players import RandomPlayer
from agentpipe.errors import CorruptError, SimulationError
from agentpipe.experience import graph
from agentpipe.experience.recorder import Recorder
from agentpipe.experience.store import records as rec
from agentpipe_tests.environments.line import catalog, make_pool

from .fakes import CountingPool

DTYPE = rec.step_dtype(OBSERVATION_SIZE, ACTION_COUNT)
STAMP = 1_700_000_000_000_000_000
SIZE = 40


def line_pool(**options):
    return make_pool(catalog().environments("train")[:: 7000 // SIZE][:SIZE], **options)


def recorder_of(pool, **options):
    index = np.arange(100, 100 + pool.size, dtype=np.uint32)
    return Recorder(pool, DTYPE, index, index * 3, **options)


def one_step(recorder, stamp, player=None):
    """A step of random play whose log-probability, value, policy and time stamp can be told from its number."""
    pool = recorder.pool
    recorder.before()
    actions = (player or RandomPlayer()).act(pool).actions
    pool.step(actions)
    rows = np.arange(pool.size, dtype=np.float32)
    ended = recorder.after(actions, -rows - stamp, rows * stamp, stamp % 3, STAMP + stamp)
    return actions, ended


class Naive:
    """Keeps copies of everything, step by step, and lists the records of an environment's episode in plain Python."""

    def __init__(self, pool):
        self.pool, self.steps = pool, [[] for _ in range(pool.size)]

    def see(self):
        pool = self.pool
        names = ("observation", "mask", "segment", "last_action", "time", "episode")
        self.seen = {name: getattr(pool, name).copy() for name in names}

    def do(self, actions, stamp):
        for row in range(self.pool.size):
            record = {name: array[row].copy() for name, array in self.seen.items()}
            for name in ("reward", "terminated", "truncated", "produced", "used", "earned"):
                record[name] = getattr(self.pool, name)[row].copy()
            record |= {"environment": 100 + row, "fingerprint": 3 * (100 + row), "step": len(self.steps[row])}
            record |= {"action": actions[row], "log_probability": -float(row) - stamp, "value": float(row * stamp)}
            record |= {"policy": stamp % 3, "time_ns": STAMP + stamp}
            self.steps[row].append(record)

    def take(self, row):
        taken, self.steps[row] = self.steps[row], []
        return taken


def same(steps, expected):
    assert len(steps) == len(expected)
    for record, wanted in zip(steps, expected, strict=True):
        mask = wanted.pop("mask")
        assert rec.unpack_masks(record["mask"], ACTION_COUNT).tolist() == mask.tolist()
        for name, value in wanted.items():
            assert np.array_equal(record[name], value), name
        assert record["checksum"] == 0
        assert not record["reserved"].any()
        assert not record["padding"].any()


def split(recorded):
    ends = np.cumsum(recorded.episodes["steps"])
    return np.split(recorded.steps, ends[:-1])


def test_episodes_of_the_line_are_recorded_byte_for_byte():
    pool = line_pool()
    recorder, naive, seen = recorder_of(pool), Naive(pool), 0
    for stamp in range(1, 90):
        naive.see()
        actions, ended = one_step(recorder, stamp)
        naive.do(actions, stamp)
        assert ended.tolist() == np.flatnonzero(pool.terminated | pool.truncated).tolist()
        recorded = recorder.take(ended[::-1])
        for row, steps, episode in zip(ended[::-1], split(recorded), recorded.episodes, strict=False):
            expected = naive.take(row)
            assert (episode["environment"], episode["episode"]) == (100 + row, pool.episode[row] - 1)
            assert (episode["steps"], episode["time_ns"]) == (len(expected), expected[0]["time_ns"])
            for name in ("return", "elapsed_seconds", "decision_seconds", "success", "reason", "mode", "machine"):
                assert episode[name] == getattr(pool, f"result_{name}")[row]
            assert (episode["cut"], episode["final"]) == (0, rec.NO_FINAL)
            same(steps, expected)
            seen += 1
        words = graph.derive_parents(
            recorded.steps["produced"], recorded.steps["used"], recorded.episodes["steps"], ACCUMULATING
        )
        assert recorded.parents.tobytes() == words.tobytes()
        assert recorded.finals is None
    assert seen > 300


def test_a_truncated_episode_brings_what_would_have_been_seen_next():
    pool = line_pool()
    pool.plant().deadline[:] = 1e6
    pool.hidden().growth[:] = 0
    recorder = recorder_of(pool)
    for stamp in range(MAX_STEPS):
        recorder.before()
        pool.step(np.zeros(pool.size, np.int64))
        none = np.zeros(pool.size, np.float32)
        ended = recorder.after(np.zeros(pool.size, np.int64), none, None, 0, STAMP + stamp)
        assert len(ended) == (pool.size if stamp == MAX_STEPS - 1 else 0)
    recorded = recorder.take(ended)
    assert recorded.steps["truncated"].reshape(pool.size, MAX_STEPS).sum(axis=1).tolist() == [1] * pool.size
    assert recorded.episodes["final"].tolist() == list(range(pool.size))
    assert recorded.episodes["cut"].tolist() == [0] * pool.size
    finals = recorded.finals
    assert finals["environment"].tolist() == list(range(100, 100 + pool.size))
    assert finals["observation"].tobytes() == pool.final_observation.tobytes()
    np.testing.assert_array_equal(rec.unpack_masks(finals["mask"], ACTION_COUNT), pool.final_mask)
    for name in ("time", "last_action", "segment"):
        np.testing.assert_array_equal(finals[name], getattr(pool, f"final_{name}"))
    assert set(finals["time_ns"].tolist()) == {STAMP + MAX_STEPS - 1}
    assert set(finals["episode"].tolist()) == {0}


def test_cutting_ends_all_that_runs_with_what_is_seen_now():
    pool = line_pool()
    recorder, naive = recorder_of(pool), Naive(pool)
    for stamp in range(1, 12):
        naive.see()
        actions, ended = one_step(recorder, stamp)
        naive.do(actions, stamp)
        for row in ended:
            naive.take(row)
        recorder.take(ended)
    running = [row for row in range(pool.size) if naive.steps[row]]
    assert 0 < len(running) < pool.size
    recorded = recorder.cut()
    assert recorded.episodes["environment"].tolist() == [100 + row for row in running]
    for position, (row, steps) in enumerate(zip(running, split(recorded), strict=True)):
        expected = naive.take(row)
        assert not expected[-1]["truncated"]
        expected[-1]["truncated"] = 1
        same(steps, expected)
        episode, final = recorded.episodes[position], recorded.finals[position]
        assert (episode["cut"], episode["reason"], episode["success"], episode["final"]) == (1, -1, 0, position)
        assert (episode["mode"], episode["machine"]) == (pool.hidden().mode[row], pool.hidden().machine[row])
        assert episode["return"] == pytest.approx(steps["reward"].sum(), rel=1e-5)
        assert episode["elapsed_seconds"] == pytest.approx(pool.plant().elapsed[row], rel=1e-5)
        assert episode["decision_seconds"] == np.float32(pool.plant().decision_seconds[row])
        assert final["observation"].tobytes() == pool.observation[row].tobytes()
        assert (final["time"], final["segment"]) == (pool.time[row], pool.segment[row])
        assert (final["last_action"], final["episode"]) == (pool.last_action[row], pool.episode[row])
        assert rec.unpack_masks(final["mask"], ACTION_COUNT).tolist() == pool.mask[row].tolist()
    assert not recorder.length.any()
    assert np.flatnonzero(~recorder.recording).tolist() == running  # their rest is nobody's
    one_step(recorder, 12)
    assert not recorder.length[running].any()
    recorder.recording[:] = False
    recorder.length[:] = 0
    nothing = recorder.cut()
    assert (len(nothing.steps), len(nothing.episodes), nothing.finals, len(nothing.parents)) == (0, 0, None, 0)


def test_what_ended_and_was_not_taken_is_forgotten_and_what_is_not_recorded_is_never_seen():
    pool = CountingPool(4)
    recorder = recorder_of(pool)
    recorder.recording[1] = False
    _, ended = one_step(recorder, 1)
    assert ended.tolist() == [0]
    with pytest.raises(AssertionError):
        recorder.take(np.array([2]))
    _, ended = one_step(recorder, 2)
    assert ended.tolist() == [0]  # its second episode; environment 1 ended too
    taken = recorder.take(ended)
    assert taken.episodes["episode"].tolist() == [1]
    with pytest.raises(AssertionError):
        recorder.take(ended)
    _, ended = one_step(recorder, 3)
    assert ended.tolist() == [0, 2]
    assert recorder.take(ended).episodes["steps"].tolist() == [1, 3]


def test_a_pool_that_says_nothing_of_causes_gets_a_temporal_graph_and_the_difference_from_zero():
    pool = CountingPool(4)
    recorder = recorder_of(pool)
    for stamp in (1, 2, 3):
        _, ended = one_step(recorder, stamp)
    recorded = recorder.take(ended[-1:])
    assert recorded.steps["reward"].tolist() == [-1, 0, 1]
    assert recorded.steps["earned"].tolist() == [1, 0, 1]
    assert recorded.steps["produced"].tolist() == recorded.steps["used"].tolist() == [0, 0, 0]
    assert recorded.parents.tolist() == [0, 0b001, 0b010]


def test_a_pool_of_the_users_own_can_supply_its_edges():
    pool = CountingPool(4)
    recorder = recorder_of(pool, edges=lambda rows: np.array([(list(rows).index(2), 0, 2)]))
    for stamp in (1, 2, 3):
        _, ended = one_step(recorder, stamp)
    assert ended.tolist() == [0, 2]
    assert recorder.take(ended).parents.tolist() == [0, 0, 0, 0b001]


def test_an_episode_without_end_is_refused():
    recorder = recorder_of(CountingPool(6), max_steps=4)
    for stamp in range(4):
        one_step(recorder, stamp)
    with pytest.raises(SimulationError, match="outlasts 4 steps") as caught:
        recorder.before()
    assert caught.value.where == {"environment": 104}


def play_on(recorder, first, last):
    """The digest of all that comes out of some steps, and of what is cut behind them."""
    out = []
    for stamp in range(first, last):
        _, ended = one_step(recorder, stamp)
        out.append(recorder.take(ended))
    out.append(recorder.cut())
    return [b"".join(part.tobytes() for part in recorded if part is not None) for recorded in out]


@pytest.mark.parametrize("cut_at", [1, 7, 30])
def test_running_episodes_survive_a_checkpoint_byte_for_byte(cut_at):
    pool = line_pool()
    recorder = recorder_of(pool)
    recorder.recording[3] = False
    for stamp in range(1, cut_at):
        recorder.take(one_step(recorder, stamp)[1])
    partial, snapshot = recorder.partial(), pool.snapshot()
    assert sum(array.nbytes for array in partial.values()) < 2_000 + 40 * recorder.length.sum()
    expected = play_on(recorder, cut_at, cut_at + 20)
    other = line_pool(threads=2)
    again = recorder_of(other)
    again.restore(partial)
    other.restore(snapshot)
    assert again.length.tolist() == partial["length"].tolist()
    assert play_on(again, cut_at, cut_at + 20) == expected
    other.close()


def damaged(partial, damage):
    if damage == "other actions":
        return {**partial, "action": np.full_like(partial["action"], A_MACHINE - 1)}
    if damage == "out of range":
        return {**partial, "action": np.full_like(partial["action"], 999)}
    if damage == "another size":
        return {**partial, "length": partial["length"][:-1]}
    return {**partial, "value": partial["value"][:-1]}


@pytest.mark.parametrize("damage", ["other actions", "out of range", "another size", "too few"])
def test_running_episodes_that_do_not_fit_are_refused(damage):
    recorder = recorder_of(line_pool())
    for stamp in range(1, 9):
        recorder.take(one_step(recorder, stamp)[1])
    with pytest.raises(CorruptError):
        recorder_of(line_pool()).restore(damaged(recorder.partial(), damage))
