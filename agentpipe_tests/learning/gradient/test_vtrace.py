"""V-trace against literal values, closed forms, and a naive loop over the definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import LearningError
from agentpipe.learning.gradient.advantages import generalised_advantages
from agentpipe.learning.gradient.fused import LOG_RATIO_LIMIT
from agentpipe.learning.gradient.vtrace import vtrace


def f32(array):
    return np.asarray(array, dtype=np.float32)


def i64(array):
    return np.asarray(array, dtype=np.int64)


def one_episode(reward, value, ratio, final=0.0, discount=1.0, **limits):
    with np.errstate(divide="ignore"):
        log_ratio = f32(np.log(ratio))
    return vtrace(f32(reward), f32(value), log_ratio, i64([0]), i64([len(reward)]), f32([final]), discount, **limits)


def naive(reward, value, ratio, final, discount, rho_bar, c_bar):
    """Eq. 1 of Espeholt et al. (2018) as it stands, one episode, in float64: every delta, every product."""
    steps = len(reward)
    following = [*value[1:], final]
    rho, c = [min(rho_bar, x) for x in ratio], [min(c_bar, x) for x in ratio]
    target = []
    for s in range(steps):
        v = value[s]
        for t in range(s, steps):
            product = np.prod([c[i] for i in range(s, t)])
            v += discount ** (t - s) * product * rho[t] * (reward[t] + discount * following[t] - value[t])
        target.append(v)
    ahead = [*target[1:], final]
    return target, [reward[s] + discount * ahead[s] - value[s] for s in range(steps)], rho


def test_literal_values():
    """By hand: delta_1 = 0.5 (2 - 1) = 0.5, v_1 = 1.5; delta_0 = 1 (1 + 0.5 1 - 2) = -0.5,
    v_0 = 2 - 0.5 + 0.5 * 1 (1.5 - 1) = 1.75; A_0 = 1 + 0.5 * 1.5 - 2, A_1 = 2 - 1."""
    found = one_episode([1, 2], [2, 1], [4.0, 0.5], discount=0.5)
    assert found.value.tolist() == pytest.approx([1.75, 1.5])
    assert found.advantage.tolist() == pytest.approx([-0.25, 1.0])
    assert found.rho.tolist() == pytest.approx([1.0, 0.5])
    assert found.clipped == 1


def test_rho_and_c_are_clipped_apart():
    """rho_bar 2, c_bar 0.5: delta_1 = 2 (1 - 0) = 2; v_0 = 0 + 2 (0 + 0 - 0) + 0.5 (2 - 0) = 1."""
    found = one_episode([0, 1], [0, 0], [3.0, 3.0], rho_bar=2.0, c_bar=0.5)
    assert found.value.tolist() == pytest.approx([1.0, 2.0])
    assert found.rho.tolist() == pytest.approx([2.0, 2.0])


def test_an_action_that_the_policy_never_takes_teaches_nothing_of_its_consequences():
    found = one_episode([5, 7], [1, 2], [1e-30, 1.0])
    assert found.rho[0] == pytest.approx(np.exp(-LOG_RATIO_LIMIT))
    assert found.value[0] == pytest.approx(1.0, abs=1e-3)
    assert found.value[1] == pytest.approx(7.0)


@pytest.mark.parametrize(("final", "expected"), [(0.0, [7.0, 6.0, 4.0]), (10.0, [17.0, 16.0, 14.0])])
def test_truncated_episode_goes_on_with_the_final_value_a_terminated_one_does_not(final, expected):
    found = one_episode([1, 2, 4], [3, -1, 2], [1.0, 1.0, 1.0], final=final)
    assert found.value.tolist() == pytest.approx(expected)
    assert found.advantage.tolist() == pytest.approx([expected[0] - 3, expected[1] + 1, expected[2] - 2])


def test_each_episode_stands_alone():
    """The second episode's rewards do not reach the first; steps of no episode stay zero."""
    reward, none = f32([1, 1, 100, 1, 50]), f32(np.zeros(5))
    found = vtrace(reward, none, none, i64([3, 0]), i64([1, 2]), f32([0, 0]), 1.0)
    assert found.value.tolist() == [2.0, 1.0, 0.0, 1.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(0.0, 1.0))
def test_on_policy_it_is_the_return_with_lambda_one(seed, steps, discount):
    generator = np.random.default_rng(seed)
    reward, value = (f32(generator.normal(size=steps)) for _ in range(2))
    final = f32(generator.normal(size=1))
    found = vtrace(reward, value, f32(np.zeros(steps)), i64([0]), i64([steps]), final, discount)
    none = np.zeros((steps, 1), np.bool_)
    columns = (reward[:, None], value[:, None], final, none, none, np.zeros((steps, 1), np.float32))
    expected = generalised_advantages(*columns, discount, 1.0)[1][:, 0]
    np.testing.assert_allclose(found.value, expected, atol=2e-5)
    np.testing.assert_allclose(found.advantage, expected - value, atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.floats(0.0, 1.0),
    st.floats(0.1, 3.0),
    st.floats(0.1, 3.0),
)
def test_matches_the_naive_definition(seed, lengths, discount, rho_bar, c_bar):
    generator = np.random.default_rng(seed)
    steps, first = sum(lengths), np.cumsum([0, *lengths[:-1]])
    reward, value = (f32(generator.normal(size=steps)) for _ in range(2))
    log_ratio, final = f32(generator.normal(size=steps)), f32(generator.normal(size=len(lengths)))
    limits = {"rho_bar": rho_bar, "c_bar": c_bar}
    found = vtrace(reward, value, log_ratio, i64(first), i64(lengths), final, discount, **limits)
    for at, count, end in zip(first, lengths, final, strict=True):
        piece = slice(at, at + count)
        ratio = np.exp(log_ratio[piece].astype(np.float64))
        expected = naive(reward[piece].tolist(), value[piece].tolist(), ratio, float(end), discount, rho_bar, c_bar)
        for part, wanted in zip((found.value, found.advantage, found.rho), expected, strict=True):
            np.testing.assert_allclose(part[piece], wanted, rtol=1e-4, atol=1e-4)
    assert found.clipped == int((np.exp(log_ratio) > np.float32(rho_bar)).sum())


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_astronomic_ratio_is_clamped_before_exp(shift):
    found = vtrace(f32([1, 1]), f32([0, 0]), f32([shift, shift]), i64([0]), i64([2]), f32([1]), 0.9, rho_bar=1e9)
    assert all(np.isfinite(part).all() for part in found[:3])
    assert found.rho[0] == pytest.approx(np.exp(np.sign(shift) * LOG_RATIO_LIMIT), rel=1e-5)


def test_what_does_not_fit_is_named():
    good = [f32([0, 0]), f32([0, 0]), f32([0, 0]), i64([0]), i64([2]), f32([0])]
    for position, wrong in ((1, f32([0])), (2, np.zeros(2)), (5, f32([0, 0]))):
        with pytest.raises(LearningError, match="expected float32"):
            vtrace(*good[:position], wrong, *good[position + 1 :], 1.0)
    with pytest.raises(LearningError, match="beyond"):
        vtrace(*good[:4], i64([3]), good[5], 1.0)
