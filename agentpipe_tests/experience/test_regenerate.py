"""What is left of an episode, its actions, brings all of it back."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE, Purpose
from agentpipe.environments.players import RandomPlayer
from agentpipe.errors import CorruptError, VersionError
from agentpipe.experience.graph import words_of
from agentpipe.experience.recorder import Recorded, Recorder
from agentpipe.experience.regenerate import compact_of, regenerate
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import fill, range_checksums
from agentpipe_tests.environments.line import catalog, make_pool

DTYPE = rec.step_dtype(OBSERVATION_SIZE, ACTION_COUNT)
SPECS = catalog().environments("train")[::250]
INDEX = np.array([spec.index for spec in SPECS], np.uint32)


def stored(parts):
    """Recorded parts as one, with what the store fills in."""
    lengths = np.concatenate([part.episodes["steps"] for part in parts])
    words = words_of(lengths)
    merged = Recorded(
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.episodes for part in parts]),
        np.concatenate([part.finals for part in parts if part.finals is not None]),
        np.concatenate([part.parents for part in parts]),
    )
    fill(merged.steps)
    fill(merged.finals)
    merged.episodes["graph_checksum"] = range_checksums(merged.parents, np.cumsum(words) - words, words)
    fill(merged.episodes)
    return merged


def play(*, purpose=Purpose.COLLECT, steps=70, first_episode=0):
    """Random play of every environment but the last; the end is cut."""
    pool = make_pool(SPECS[:-1], seed=11, purpose=purpose, first_episode=first_episode)
    recorder, player, parts = Recorder(pool, DTYPE, INDEX[:-1]), RandomPlayer(), []
    for stamp in range(steps):
        recorder.before()
        decision = player.act(pool)
        pool.step(decision.actions)
        values = np.arange(pool.size, dtype=np.float32) + stamp
        parts.append(
            recorder.take(recorder.after(decision.actions, np.log(decision.probabilities), values, stamp // 9, stamp))
        )
    return stored([*parts, recorder.cut()])


def pool_of(*, threads=1, purpose=Purpose.COLLECT, seed=11):
    return make_pool(SPECS, seed=seed, purpose=purpose, threads=threads)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


@pytest.fixture(scope="module")
def recorded():
    return play()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("purpose", [Purpose.COLLECT, Purpose.TRAIN])
def test_everything_comes_back_byte_for_byte(threads, purpose):
    """Also from a pool over more environments than were recorded."""
    recorded = play(purpose=purpose)
    assert len(recorded.episodes) > 150
    assert (recorded.episodes["cut"] == 1).sum() > 10
    pool = pool_of(threads=threads, purpose=purpose)
    same(regenerate(pool, INDEX, recorded.episodes, compact_of(recorded.steps)), recorded)
    pool.close()


def test_any_episodes_in_any_order_come_back(recorded):
    """With gaps in the numbers, so that environments wait for each other."""
    chosen = np.random.default_rng(0).permutation(len(recorded.episodes))[:60]
    ends = np.cumsum(recorded.episodes["steps"].astype(np.int64))
    words = np.cumsum(words_of(recorded.episodes["steps"]))
    steps = np.split(recorded.steps, ends[:-1])
    parents = np.split(recorded.parents, words[:-1])
    finals = [recorded.episodes["final"][row] for row in chosen if recorded.episodes["cut"][row]]
    expected = Recorded(
        np.concatenate([steps[row] for row in chosen]),
        recorded.episodes[chosen],
        recorded.finals[finals],
        np.concatenate([parents[row] for row in chosen]),
    )
    same(regenerate(pool_of(), INDEX, expected.episodes, compact_of(expected.steps)), expected)


def test_later_episodes_come_back_without_those_before():
    later = play(first_episode=7, steps=15)
    same(regenerate(pool_of(), INDEX, later.episodes, compact_of(later.steps)), later)


def test_episodes_without_a_cut_have_no_finals_and_nothing_at_all_is_fine(recorded):
    whole = recorded.episodes["cut"] == 0
    steps = recorded.steps[np.repeat(whole, recorded.episodes["steps"])]
    assert regenerate(pool_of(), INDEX, recorded.episodes[whole], compact_of(steps)).finals is None
    nothing = regenerate(pool_of(), INDEX, recorded.episodes[:0], compact_of(steps[:0]))
    assert (len(nothing.steps), len(nothing.episodes), nothing.finals, len(nothing.parents)) == (0, 0, None, 0)


def test_compact_records_are_a_fraction_and_hold_what_no_simulator_can_say(recorded):
    compact = compact_of(recorded.steps)
    assert compact.itemsize == 32 < recorded.steps.itemsize / 20
    for name in ("action", "log_probability", "value", "policy", "time_ns"):
        np.testing.assert_array_equal(compact[name], recorded.steps[name])
    assert len(np.unique(compact["checksum"])) == len(compact)


def test_another_simulator_is_refused_by_version(recorded):
    with pytest.raises(VersionError, match=r"recorded by simulator 0\.9"):
        regenerate(pool_of(), INDEX, recorded.episodes, compact_of(recorded.steps), simulator_version="0.9")


@pytest.mark.parametrize("pool", [{"seed": 12}, {"purpose": Purpose.TRAIN}])
def test_a_pool_that_plays_other_episodes_is_found_out_and_named(recorded, pool):
    with pytest.raises(CorruptError, match="plays otherwise") as caught:
        regenerate(pool_of(**pool), INDEX, recorded.episodes, compact_of(recorded.steps))
    assert {"environment", "episode"} <= set(caught.value.where)


@pytest.mark.parametrize(
    ("field", "value"), [("return", 1.5), ("reason", 3), ("steps", None), ("graph_checksum", 1), ("environment", 9999)]
)
def test_one_other_number_in_an_episode_row_is_found_out_and_named(recorded, field, value):
    episodes, compact = recorded.episodes.copy(), compact_of(recorded.steps)
    if field == "steps":
        episodes["steps"][5] += 1
        episodes["steps"][6] -= 1
    else:
        episodes[field][5] = value
    with pytest.raises(CorruptError) as caught:
        regenerate(pool_of(), INDEX, episodes, compact)
    expected = {(int(episodes["environment"][row]), int(episodes["episode"][row])) for row in (5, 6)}
    assert (caught.value.where["environment"], caught.value.where["episode"]) in expected


def test_an_action_that_was_not_allowed_and_missing_actions_are_refused(recorded):
    compact = compact_of(recorded.steps)
    compact["action"][0] = 999
    with pytest.raises(CorruptError, match="not allowed"):
        regenerate(pool_of(), INDEX, recorded.episodes, compact)
    with pytest.raises(CorruptError, match="actions for"):
        regenerate(pool_of(), INDEX, recorded.episodes, compact[1:])
