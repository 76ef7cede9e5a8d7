"""Which environments are hard: exponential means against a loop, and the order of the hardest."""

from types import SimpleNamespace

import numpy as np
import pytest

from agentpipe.errors import LearningError
from agentpipe.learning.aids.base import Knobs
from agentpipe.learning.aids.difficulty import RATE, Difficulty, Met, hardest
from agentpipe_tests.learning.aids.told import copied, rollout_of


def played(seed, steps=20, size=5):
    rollout, generator = rollout_of(steps, size, seed=seed), np.random.default_rng(seed)
    rollout.success[:] = generator.random((steps, size)) < 0.6
    rollout.total[:] = generator.normal(size=(steps, size))
    return rollout


def test_means_equal_weights_that_sum_to_one():
    """The k-th newest of n episodes weighs a (1 - a)^k / (1 - (1 - a)^n)."""
    aid, outcomes = Difficulty(), [[] for _ in range(5)]
    for seed in range(3):
        rollout = played(seed)
        aid.collected(rollout, None)
        for t, n in np.argwhere(rollout.done):
            outcomes[n].append((float(rollout.success[t, n]), float(rollout.total[t, n])))
    for n, seen in enumerate(outcomes):
        assert aid.met.episodes[n] == len(seen)
        weight = (1 - RATE) ** np.arange(len(seen))[::-1]
        success, total = np.average(seen, axis=0, weights=weight)
        assert aid.met.success_rate[n] == pytest.approx(success)
        assert aid.met.mean_return[n] == pytest.approx(total, abs=1e-6)


def test_steered_episodes_do_not_count():
    """Environment 1 is steered at the start of the rollout, 3 at its end, the others never."""
    aid, rollout = Difficulty(), played(0)
    pool = SimpleNamespace(compound=np.zeros((5, 3), np.uint8))
    pool.compound[1, 2] = 4
    aid.before(Knobs(0.1, 0.2, 0.95), pool)
    pool.compound[:] = 0
    pool.compound[3, 0] = 1
    ended = rollout.done.sum(axis=0)
    aid.collected(rollout, pool)
    assert aid.met.episodes.tolist() == [ended[0], 0, ended[2], 0, ended[4]]


def test_one_episode_is_its_own_mean():
    met = Met.of(2)
    met.add(np.array([1]), np.array([False, True]), np.array([9.0, 2.5], np.float32))
    assert met.success_rate.tolist() == pytest.approx([0.0, 1.0])
    assert met.mean_return.tolist() == pytest.approx([0.0, 2.5])


def met_of(success, episodes=20):
    """Environments with these shares of success, each met so often."""
    met = Met.of(len(success))
    met.episodes[:] = episodes
    met.success[:] = np.array(success) * met._correction()
    met.total[:] = -np.array(success) * met._correction()
    return met


def test_hardest_have_the_lowest_success_and_equal_ones_come_by_name():
    met = met_of([0.5, 0.25, 0.75, 0.25, 0.0])
    names = ("a", "z", "b", "c", "d")
    assert hardest(met, names, 3, least=10).tolist() == [4, 3, 1]
    assert hardest(met, names, 99, least=10).tolist() == [4, 3, 1, 0, 2]


def test_regret_goes_before_success_where_the_oracle_is_known():
    """Returns are minus the success here; the oracle gets 1, 3, 1 and, of the last, nobody knows."""
    met, oracle = met_of([0.9, 0.8, 0.1, 0.0]), np.array([1.0, 3.0, 1.0, np.nan])
    assert hardest(met, "abcd", 4, least=10, oracle=oracle).tolist() == [1, 0, 2]


def test_what_was_hardly_met_is_left_out():
    met = met_of([0.0, 0.5])
    met.episodes[0] = 9
    assert hardest(met, "ab", 2, least=10).tolist() == [1]
    with pytest.raises(LearningError, match="no environment was met 30 times"):
        hardest(met, "ab", 2, least=30)
    with pytest.raises(LearningError, match="2 environments were met, 3 are named"):
        hardest(met, "abc", 2, least=1)


def test_state_goes_on_where_it_was():
    aid = Difficulty()
    aid.collected(played(0), None)
    again = copied(aid, Difficulty())
    for one in (aid, again):
        one.collected(played(1), None)
    np.testing.assert_array_equal(again.met.success_rate, aid.met.success_rate)
    np.testing.assert_array_equal(again.met.episodes, aid.met.episodes)
