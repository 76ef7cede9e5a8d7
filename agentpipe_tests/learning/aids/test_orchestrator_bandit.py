"""The bandit: what it believes follows the definition; it finds what is highest, follows it, and invents nothing."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.learning.aids.orchestrator_bandit import ARMS, POOLING, Bandit, arm_of, levels_of_arm

SAMPLES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 6), st.floats(0, 3, allow_nan=False)), min_size=1, max_size=60
)


def hear(bandit, samples):
    for group, arm, value in samples:
        bandit.count[group, arm] += 1
        bandit.total[group, arm] += value
        bandit.squares[group, arm] += value**2


def naive_belief(samples, group, arm, most):
    """From single samples, each with the weight that is left of it: group, arm, value, weight."""
    weight, total = sum(w for *_, w in samples), sum(v * w for _, _, v, w in samples)
    by_arm = defaultdict(list)
    for g, a, value, w in samples:
        by_arm[a].append((g, value, w))
    spread = 0.0
    for members in by_arm.values():
        inside = sum(w for *_, w in members)
        mean = sum(v * w for _, v, w in members) / inside
        spread += sum(w * (v - mean) ** 2 for _, v, w in members)
    sigma = math.sqrt(spread / max(weight - len(by_arm), 1.0))
    here = by_arm.get(arm, [])
    of_arm = (sum(v * w for _, v, w in here) + total / weight) / (sum(w for *_, w in here) + 1)
    own = [(v, w) for g, v, w in here if g == group]
    count = sum(w for _, w in own)
    mean = (sum(v * w for v, w in own) + POOLING * of_arm) / (count + POOLING)
    evidence = min(count + min(sum(w for *_, w in here), POOLING), most)
    return mean, max(sigma / math.sqrt(1 + evidence), 1e-6)


@given(SAMPLES, SAMPLES, st.sampled_from([1.0, 5.0, 50.0]), st.sampled_from([0.5, 0.8, 1.0]))
@settings(max_examples=40, deadline=None)
def test_beliefs_are_those_of_the_definition(earlier, later, most, discount):
    bandit = Bandit(3, discount, most)
    hear(bandit, earlier)
    bandit.forget()
    hear(bandit, later)
    cells = defaultdict(int)
    for group, arm, _ in earlier:
        cells[group, arm] += 1
    kept = [(g, a, v, discount * min(1.0, most / cells[g, a])) for g, a, v in earlier]
    samples = [*kept, *((g, a, v, 1.0) for g, a, v in later)]
    mean, deviation = bandit.beliefs()
    for group in range(3):
        for arm in range(8):
            wanted = naive_belief(samples, group, arm, most)
            assert (mean[group, arm], deviation[group, arm]) == pytest.approx(wanted, rel=1e-6, abs=2e-6)


def test_before_anything_is_known_every_arm_is_as_likely_and_nothing_is_expected():
    arms, best, expected = Bandit(2, 0.8, 50).draw(np.zeros(20_000, np.int64), np.random.default_rng(0))
    counts = np.bincount(arms, minlength=ARMS)
    assert counts.min() > 50
    assert counts.max() < 140
    assert not best.any()
    assert np.isnan(expected).all()


def test_arms_that_are_equal_share_the_moves_and_the_higher_one_gets_them():
    bandit = Bandit(1, 1.0, 50)
    bandit.count[:], bandit.total[:] = 40, 20.0
    bandit.squares[:] = 40 * (0.25 + 0.04)
    arms, _, _ = bandit.draw(np.zeros(20_000, np.int64), np.random.default_rng(0))
    assert np.bincount(arms, minlength=ARMS).max() < 140
    bandit.total[0, 7], bandit.squares[0, 7] = 60.0, 40 * (2.25 + 0.04)
    arms, best, expected = bandit.draw(np.zeros(20_000, np.int64), np.random.default_rng(0))
    assert (arms == 7).mean() > 0.999
    assert best[arms == 7].all()
    assert not best[arms != 7].any()
    assert expected[arms == 7] == pytest.approx(1.5, abs=0.03)


def test_what_one_group_shows_counts_a_little_in_the_others():
    bandit = Bandit(2, 1.0, 50)
    hear(bandit, [(0, arm, 0.5) for arm in range(ARMS)] * 4)
    hear(bandit, [(0, 9, 1.5)] * 40)
    mean, deviation = bandit.beliefs()
    assert mean[0, 9] > mean[1, 9] > mean[1, 8]
    assert deviation[1, 9] > deviation[0, 9]


def test_levels_and_arms_are_each_other_s_inverse():
    arms = np.arange(ARMS)
    assert arm_of(levels_of_arm(arms)).tolist() == arms.tolist()
    assert levels_of_arm(np.array([0, 5, 6, 36, 215])).tolist() == [
        [0, 0, 0],
        [0, 0, 5],
        [0, 1, 0],
        [1, 0, 0],
        [5, 5, 5],
    ]
    assert arm_of(np.array([[3, -1, 0], [1, 2, 3]], np.int8)).tolist() == [-1, 51]


def test_a_bandit_comes_back_from_its_state():
    bandit, other = Bandit(3, 0.8, 50), Bandit(3, 0.8, 50)
    hear(bandit, [(1, 3, 0.5), (2, 200, 1.0)])
    bandit.forget()
    other.restore({name: array.copy() for name, array in bandit.state().items()})
    for one, two in zip(bandit.beliefs(), other.beliefs(), strict=True):
        assert one.tobytes() == two.tobytes()
