"""GAE against a naive loop, closed forms, and an infinite-horizon environment with its negative control."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import LearningError
from agentpipe.learning.gradient.advantages import (
    explained_variance,
    generalised_advantages,
)
from agentpipe_tests.learning.gradient.reference import normalised


def naive(reward, value, last, terminated, truncated, final, discount, lambda_):
    """The definition, one environment at a time, in float64: every delta from t to the end of its episode."""
    steps, size = reward.shape
    advantages = np.zeros((steps, size))
    for n in range(size):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                following = value[k + 1, n] if k + 1 < steps else last[n]
                if truncated[k, n]:
                    following = final[k, n]
                if terminated[k, n]:
                    following = 0.0
                advantages[t, n] += weight * (reward[k, n] + discount * following - value[k, n])
                weight *= discount * lambda_
                if terminated[k, n] or truncated[k, n]:
                    break
    return advantages


def f32(array):
    return np.asarray(array, dtype=np.float32)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 5), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_matches_the_naive_definition(seed, steps, size, discount, lambda_):
    generator = np.random.default_rng(seed)
    reward, value, final = (f32(generator.normal(size=(steps, size))) for _ in range(3))
    last = f32(generator.normal(size=size))
    terminated, truncated = (generator.random((steps, size)) < 0.3 for _ in range(2))
    arguments = (reward, value, last, terminated, truncated, final, discount, lambda_)
    advantages, returns = generalised_advantages(*arguments)
    np.testing.assert_allclose(advantages, naive(*arguments), atol=2e-5)
    np.testing.assert_allclose(returns, advantages + value, atol=1e-6)


def one_environment(reward, value, last, terminated=(), truncated=(), final=None, discount=1.0, lambda_=1.0):
    steps = len(reward)
    flags = [np.isin(np.arange(steps), list(where))[:, None] for where in (terminated, truncated)]
    finals = f32(np.zeros(steps) if final is None else final)[:, None]
    columns = (f32(reward)[:, None], f32(value)[:, None], f32([last]))
    return generalised_advantages(*columns, *flags, finals, discount, lambda_)[0][:, 0].tolist()


def test_constant_critic_and_reward_give_the_geometric_sum():
    """delta = 1 + 0.5 * 2 - 2 = 0 for the critic that is right; 1 + 0.5 * 0 - 0 = 1, summed with 0.25, for zero."""
    assert one_environment([1, 1, 1], [2, 2, 2], 2.0, discount=0.5, lambda_=0.5) == [0.0, 0.0, 0.0]
    assert one_environment([1, 1, 1], [0, 0, 0], 0.0, discount=0.5, lambda_=0.5) == [1.3125, 1.25, 1.0]


def test_termination_does_not_look_beyond_the_episode():
    assert one_environment([1, 2, 4], [0, 0, 0], 100.0, terminated=[1]) == [3.0, 2.0, 104.0]


def test_truncation_looks_at_the_final_observation_not_at_the_next_episode():
    assert one_environment([1, 2, 4], [0, 0, 50], 100.0, truncated=[1], final=[7, 10, 7]) == [13.0, 12.0, 54.0]


def test_both_flags_are_a_termination():
    assert one_environment([1, 2], [0, 0], 100.0, terminated=[1], truncated=[1], final=[9, 9]) == [3.0, 2.0]


def test_lambda_is_cut_at_truncation():
    """A large reward in the next episode changes nothing before the cut."""
    before = one_environment([1, 1, 1], [0, 0, 0], 0.0, truncated=[1], final=[0, 5, 0])
    after = one_environment([1, 1, 1_000], [0, 0, 0], 0.0, truncated=[1], final=[0, 5, 0])
    assert before[:2] == after[:2] == [7.0, 6.0]


@pytest.mark.parametrize(("as_termination", "expected"), [(False, 10.0), (True, 3.439)])
def test_infinite_horizon_value_is_one_over_one_minus_gamma(as_termination, expected):
    """Reward 1 for ever, cut every four steps: V = 1/(1 - 0.9) = 10 everywhere. Taken for terminations, the cuts make
    the first step's value 1 + 0.9 + 0.81 + 0.729 = 3.439: the wrong number that shows the fault.
    """
    truncated = np.zeros((4, 1), np.bool_)
    truncated[3] = True
    flags = (truncated, np.zeros_like(truncated)) if as_termination else (np.zeros_like(truncated), truncated)
    value = np.zeros((4, 1), np.float32)
    for _ in range(300):
        reward, last = np.ones((4, 1), np.float32), value[0].copy()
        _, returns = generalised_advantages(reward, value, last, *flags, value[:1].repeat(4, 0), 0.9, 0.95)
        value = returns
    assert value[0, 0] == pytest.approx(expected, rel=1e-4)


def test_wrong_shapes_and_types_are_named():
    good = np.zeros((3, 2), np.float32)
    flags = np.zeros((3, 2), np.bool_)
    with pytest.raises(LearningError, match=r"v_last is float32\(3,\), expected float32\(2,\)"):
        generalised_advantages(good, good, np.zeros(3, np.float32), flags, flags, good, 0.9, 0.9)
    with pytest.raises(LearningError, match="terminated_t is float32"):
        generalised_advantages(good, good, good[0], good, flags, good, 0.9, 0.9)


def test_every_segment_is_normalised_by_its_own_scale():
    advantages = f32([1, 3, 100, 300, 500])
    found = normalised(advantages, np.array([0, 0, 2, 2, 2], np.int8), 4)
    assert found.tolist() == pytest.approx([-1, 1, -1.2247449, 0, 1.2247449])


def test_segment_of_one_sample_is_scaled_by_the_whole_batch():
    advantages = f32([1, 3, 5])
    found = normalised(advantages, np.array([0, 0, 1], np.int8), 4)
    assert found.tolist() == pytest.approx([-1, 1, 2 / np.std([1, 3, 5])])


@pytest.mark.parametrize("values", [[], [5], [2, 2, 2], [1e30, -1e30]])
def test_normalisation_is_never_nan(values):
    found = normalised(f32(values), np.zeros(len(values), np.int8), 4)
    assert np.isfinite(found).all()


def test_explained_variance():
    assert explained_variance(f32([1, 2, 3]), f32([1, 2, 3])) == pytest.approx(1.0)
    assert explained_variance(f32([0, 0, 0]), f32([1, 2, 3])) == pytest.approx(0.0)
    assert explained_variance(f32([1, 2]), f32([4, 4])) == 0.0
