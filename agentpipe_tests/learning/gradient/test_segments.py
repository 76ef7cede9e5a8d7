"""Segments (S9): credit for the first decision, ratios that stay finite, and no effect of a segment's length."""

import numpy as np
import pytest
import torch

from agentpipe.learning.gradient.advantages import generalised_advantages
from agentpipe.learning.gradient.fused import KL, POLICY, SEGMENTED, SegmentedGradient
from agentpipe.learning.trainer import train
from agentpipe.learning.workers import Workers
from agentpipe_tests.learning.gradient.late import ACTION_NAMES, LatePool, late_options, no_statistics, right_share
from agentpipe_tests.learning.gradient.reference import normalised, select
from agentpipe_tests.learning.gradient.test_ppo import batch_of, network

SEEDS = range(3)
SEGMENTS = 4


def learned(folder, seed, *, shown=False, waiting=3, updates=8, **ppo):
    """Probability of the right first decision after training; 0.5 at its start."""
    options = late_options(seed, updates, waiting, **ppo)
    pool = LatePool(seed=seed, waiting=waiting, shown=shown)
    result = train(pool, no_statistics(), options, directory=folder / str(seed), action_names=ACTION_NAMES)
    return right_share(result.package)


@pytest.mark.parametrize("waiting", [3, 10])
def test_credit_over_the_episode_teaches_the_early_segment(tmp_path, waiting):
    """Only the last step of the late segment pays, three or ten steps later, and the critic cannot see it coming."""
    assert all(learned(tmp_path, seed, waiting=waiting) > 0.95 for seed in SEEDS)


def test_credit_within_a_segment_does_not(tmp_path):
    """Negative control: the same training learns nothing. Without a signal the policy drifts to either side of 0.5."""
    shares = [learned(tmp_path, seed, credit="segment") for seed in SEEDS]
    assert max(shares) < 0.85
    assert 0.25 < np.mean(shares) < 0.75


def test_within_a_segment_credit_comes_only_by_a_critic_that_sees(tmp_path):
    """The value at the border carries over what the late segment pays, where it shows in the observation."""
    assert all(learned(tmp_path, seed, credit="segment", shown=True) > 0.85 for seed in SEEDS)


def test_no_training_teaches_nothing(tmp_path):
    """Negative control: one update is not enough, so that what is learned above is learned by training."""
    assert all(learned(tmp_path, seed, updates=1) < 0.8 for seed in SEEDS)


@pytest.mark.parametrize("credit", ["episode", "segment"])
def test_advantage_of_the_early_step_by_hand(credit):
    """Reward 8 in the third step, values 1, 2, 4, gamma 0.5, lambda 0.5, the border behind the first step.

    delta = (0.5 * 2 - 1, 0.5 * 4 - 2, 8 - 4) = (0, 0, 4); 0.25 and its square carry 4 back to the first step: 0.25.
    """
    column = [np.array(values, np.float32)[:, None] for values in ([0, 0, 8], [1, 2, 4], [0, 0, 0])]
    ends = np.array([False, False, True])[:, None]
    segment = np.array([0, 1, 1], np.int8)[:, None] if credit == "segment" else None
    advantages, _ = generalised_advantages(
        column[0], column[1], np.zeros(1, np.float32), ends, np.zeros_like(ends), column[2], 0.5, 0.5, segment
    )
    assert advantages[:, 0].tolist() == [0.25 if credit == "episode" else 0.0, 1.0, 4.0]


def gradients_of(net, batch, rows):
    gradient = SegmentedGradient(net, (0.15, 0.08, 0.25, 0.12), 0.5, Workers(1))
    sums = gradient(batch, rows, 0.01)
    named = dict(net.named_parameters())
    return sums, torch.cat([named[name].grad.flatten() for name in gradient.names])


@pytest.mark.parametrize("log_ratio", [1_000.0, -1_000.0])
def test_a_ratio_beyond_all_measure_gives_finite_figures(log_ratio):
    """exp(1000) is infinite; the logarithm is clamped to ten before the exponential, and no gradient passes there."""
    net = network()
    batch = batch_of(net)
    batch.log_probability -= log_ratio
    sums, gradient = gradients_of(net, batch, torch.arange(len(batch.action)))
    assert np.isfinite(sums).all()
    assert torch.isfinite(gradient).all()
    bound = np.exp(10.0) - 1 - 10 if log_ratio > 0 else np.exp(-10.0) - 1 + 10
    assert sums[KL] / len(batch.action) == pytest.approx(bound, rel=1e-3)
    clipped = sums[SEGMENTED + SEGMENTS : SEGMENTED + 2 * SEGMENTS]
    assert clipped.sum() == len(batch.action)


def test_a_long_segment_has_the_ratios_of_a_short_one():
    """One sample, and the same sample a thousand times in one segment: a ratio that multiplied over the segment's
    steps would be its thousandth power; here loss, KL and gradient stay the same to rounding."""
    net = network()
    batch = batch_of(net)
    batch.log_probability -= 0.1
    for row in range(4):
        once, short = gradients_of(net, batch, torch.tensor([row]))
        often, long = gradients_of(net, batch, torch.full((1_000,), row))
        torch.testing.assert_close(long, short, rtol=1e-3, atol=1e-6)
        assert often[[POLICY, KL]] / 1_000 == pytest.approx(once[[POLICY, KL]], rel=1e-4, abs=1e-9)


def test_figures_of_a_segment_do_not_depend_on_the_length_of_another():
    net = network()
    batch = batch_of(net)
    batch.log_probability -= 0.2
    first = torch.nonzero(batch.segment == 0).squeeze(1)
    others = torch.nonzero(batch.segment != 0).squeeze(1)
    short, _ = gradients_of(net, batch, torch.cat([others, first]))
    long, _ = gradients_of(net, batch, torch.cat([others, first.repeat(20)]))
    kl, clipped, count = (slice(SEGMENTED + start * SEGMENTS, SEGMENTED + (start + 1) * SEGMENTS) for start in range(3))
    np.testing.assert_allclose(long[kl] / long[count], short[kl] / short[count], rtol=1e-4)
    np.testing.assert_allclose(long[clipped] / long[count], short[clipped] / short[count])
    assert long[count][0] == 20 * short[count][0]


def test_normalisation_of_a_segment_does_not_depend_on_lengths():
    """Advantages that occur seven times as often keep mean and deviation, and those of other segments do not count."""
    generator = np.random.default_rng(0)
    early, late = (generator.normal(scale, scale, 50).astype(np.float32) for scale in (1.0, 30.0))
    segment = np.repeat([0, 1], 50).astype(np.int8)
    short = normalised(np.concatenate([early, late]), segment, SEGMENTS)
    lengths = np.concatenate([np.zeros(50 * 7), np.ones(50)]).astype(np.int8)
    long = normalised(np.concatenate([np.tile(early, 7), late]), lengths, SEGMENTS)
    np.testing.assert_allclose(long[:50], short[:50], atol=1e-5)
    np.testing.assert_allclose(long[-50:], short[50:], atol=1e-5)


def test_each_segment_is_clipped_in_its_own_range():
    """Ratio 1.2 lies inside the range of dispatch, 0.25, and outside all others; 1.1 outside assess's 0.08 alone."""
    net = network()
    batch = batch_of(net)
    seen = torch.arange(len(batch.action))
    logits, _ = net.heads(batch.encoded, batch.last_action, batch.mask)
    now = logits.detach().log_softmax(1).gather(1, batch.action[:, None]).squeeze(1)
    for ratio, expected in ((1.2, [1, 1, 0, 1]), (1.1, [0, 1, 0, 0])):
        batch.log_probability[:] = now - float(np.log(ratio))
        sums, _ = gradients_of(net, select(batch, seen), seen)
        clipped, count = (sums[SEGMENTED + k * SEGMENTS : SEGMENTED + (k + 1) * SEGMENTS] for k in (1, 2))
        assert (clipped / count).tolist() == expected
