"""The segment-wise clipped policy gradient."""

import dataclasses

import numpy as np
import pytest
import torch

from agentpipe.errors import EmptyMaskError, NonFiniteError
from agentpipe.learning.gradient.fused import CHOICES as CHOICE_COUNT
from agentpipe.learning.gradient.fused import ENTROPY, POLICY, SegmentedGradient
from agentpipe.learning.gradient.ppo import prepare, update
from agentpipe.learning.gradient.rewards import RewardScaler
from agentpipe.learning.options import NetworkOptions, PpoOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.samples.rollout import Rollout, collect
from agentpipe.learning.workers import Workers
from agentpipe_tests.learning.gradient.reference import segmented_loss, select
from agentpipe_tests.learning.tiny import ACTIONS, CHOICES, WIDTH, TinyPool

CLIP = torch.tensor([0.15, 0.08, 0.25, 0.12])


def network(seed=0):
    made = PolicyNetwork(WIDTH, ACTIONS, NetworkOptions(hidden=(8, 8), action_embedding=2, time_frequencies=1))
    made.initialise(torch.Generator().manual_seed(seed))
    return made


def rolled(net, size=16, steps=8, seed=0, **changes):
    rollout = Rollout(steps, size, net.encoded_size, ACTIONS)
    pool = TinyPool(size, seed, **changes)
    collect(pool, net, rollout, np.random.default_rng(seed), Workers(1))
    return rollout


def batch_of(net, **changes):
    return prepare(rolled(net, **changes), RewardScaler(changes.get("size", 16), 0.9), PpoOptions(discount=0.9))[0]


def run(net, batch, rate=1e-3, **options):
    optimiser = torch.optim.Adam(net.parameters(), lr=rate, fused=True)
    gradient, order = SegmentedGradient(net, CLIP.tolist(), 0.5, Workers(1)), torch.Generator().manual_seed(0)
    return update(net, optimiser, gradient, batch, PpoOptions(**options), order, entropy_weight=0.01)


def sums_of(net, batch, entropy_weight=0.01, value_weight=0.5, threads=1):
    """Sums over the samples; the network's gradients are set."""
    with Workers(threads) as workers:
        gradient = SegmentedGradient(net, CLIP.tolist(), value_weight, workers)
        return gradient(batch, torch.arange(len(batch.action)), entropy_weight)


def network_of(shape, **options):
    net = PolicyNetwork(WIDTH, ACTIONS, NetworkOptions(hidden=shape, action_embedding=3, time_frequencies=2, **options))
    net.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        net.actor_head.weight.mul_(100.0)
    return net


@pytest.mark.parametrize("shape", [(7,), (8, 5), (8, 6, 4)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("weighted", [True, False])
def test_fused_gradient_equals_autograd(shape, shared, activation, weighted):
    net = network_of(shape, shared_trunk=shared, activation=activation)
    batch = batch_of(net, size=150)
    if weighted:
        batch.weight = 2 * torch.rand(1200, generator=torch.Generator().manual_seed(2))
    batch.log_probability = batch.log_probability + 0.3 * torch.randn(1200, generator=torch.Generator().manual_seed(1))
    sums = sums_of(net, batch, 0.02, 0.7)
    fused = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad()
    loss = segmented_loss(net, batch, CLIP, 0.02, 0.7)
    loss.total.backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(fused[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    figures = loss.parts.tolist()
    expected = [figures[0] * 1200, figures[1] * 1200, figures[2], figures[3], figures[4] * 1200, figures[5] * 1200]
    assert sums[:6].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert sums[6:10].tolist() == pytest.approx(loss.segment_kl.tolist(), rel=1e-4, abs=1e-3)
    assert sums[10:14].tolist() == loss.segment_clipped.tolist()
    assert sums[14:].tolist() == [300] * 4


def test_two_gradients_of_one_network_take_turns():
    net = network_of((8,))
    batch, rows, none = batch_of(net), torch.arange(64), Workers(1)
    first, second = (SegmentedGradient(net, CLIP.tolist(), weight, none) for weight in (0.5, 1.0))
    seen = []
    for gradient in (first, second, first):
        gradient(batch, rows, 0.0)
        seen.append(net.critic_head.weight.grad.clone())
    assert torch.equal(seen[0], seen[2])
    torch.testing.assert_close(2 * seen[0], seen[1])


def test_weight_of_two_is_the_sample_twice_and_weight_zero_is_no_sample():
    net = network_of((8,))
    batch = select(batch_of(net), torch.arange(4))
    batch.weight = torch.tensor([2.0, 1.0, 0.0, 1.0])
    once = sums_of(net, batch)
    gradient = net.first.weight.grad.clone()
    twice = sums_of(net, select(batch_with_ones(batch), torch.tensor([0, 0, 1, 3])))
    torch.testing.assert_close(net.first.weight.grad, gradient, rtol=1e-4, atol=1e-7)
    assert once[:2].tolist() == pytest.approx(twice[:2].tolist(), rel=1e-5)


def batch_with_ones(batch):
    return dataclasses.replace(batch, weight=torch.ones(len(batch.weight)))


def test_gradient_does_not_depend_on_the_number_of_threads():
    net = network_of((8, 8))
    batch = batch_of(net, size=700)
    gradients = []
    for threads in (1, 2, 3):
        sums_of(net, batch, threads=threads)
        gradients.append(torch.cat([parameter.grad.flatten().clone() for parameter in net.parameters()]))
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_rollout_stores_what_was_seen_and_done():
    net = network()
    rollout = rolled(net, size=4, steps=6)
    pool, generator = TinyPool(4, 0), np.random.default_rng(0)
    for t in range(6):
        last, time = torch.from_numpy(pool.last_action), torch.from_numpy(pool.time)
        encoded, _ = net.encode(torch.from_numpy(pool.observation), last, time)
        torch.testing.assert_close(rollout.encoded[t], encoded)
        assert rollout.segment[t].tolist() == pool.segment.tolist()
        assert rollout.mask[t].numpy().tolist() == pool.mask.tolist()
        logits, value = net.heads(encoded, last, torch.from_numpy(pool.mask))
        expected = logits.log_softmax(1)[torch.arange(4), rollout.action[t]]
        torch.testing.assert_close(rollout.log_probability[t], expected.detach())
        torch.testing.assert_close(rollout.value[t], value.detach())
        pool.step(rollout.action[t].numpy())
        generator.random(4)
        assert rollout.reward[t].tolist() == pool.reward.tolist()
        assert rollout.terminated[t].tolist() == [t == 3] * 4


def test_final_values_are_of_the_final_observation_where_truncated():
    net = network()
    rollout = rolled(net, size=4, steps=4, truncating=True)
    pool = TinyPool(4, 0, truncating=True)
    for t in range(4):
        pool.step(rollout.action[t].numpy())
    final = (pool.final_observation, pool.final_time, pool.final_last_action, pool.final_mask)
    observation, time, last, mask = (torch.from_numpy(array) for array in final)
    expected = net.heads(net.encode(observation, last, time)[0], last, mask)[1].detach().numpy()
    np.testing.assert_allclose(rollout.final_value[3], expected, rtol=1e-6)
    assert (rollout.final_value[:3] == 0).all()


def test_actions_of_a_rollout_obey_the_mask():
    rollout = rolled(network(), size=64, steps=16)
    assert rollout.mask.gather(2, rollout.action.unsqueeze(2)).all()


def test_ratio_is_one_before_the_first_step():
    net = network()
    sums = sums_of(net, batch_of(net))
    assert np.abs(sums[6:10]).max() < 1e-4
    assert sums[10:14].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("segment", "limit"), enumerate(CLIP.tolist()))
def test_each_segment_has_its_own_clip_range(segment, limit):
    """Beyond 1 + clip, a sample with a positive advantage adds the constant -(1 + clip) and no policy gradient."""
    net = network()
    whole = batch_of(net)
    rows = (whole.segment == segment).nonzero()[:1, 0]
    for stretch, inside in ((0.9, True), (1.1, False)):
        batch = select(whole, rows)
        batch.advantage = torch.ones(1)
        batch.log_probability = batch.log_probability - np.log1p(limit * stretch)
        sums = sums_of(net, batch, 0.0, 0.0)
        assert sums[POLICY] == pytest.approx(-(1 + limit * stretch if inside else 1 + limit), rel=1e-5)
        assert bool(net.actor_head.weight.grad.abs().max() > 0) == inside
        assert sums[10:14].sum() == (0 if inside else 1)


@pytest.mark.parametrize("repeats", [2, 16, 64])
def test_ratio_does_not_grow_with_the_length_of_a_segment(repeats):
    """One ratio a sample: repeating samples, as a longer segment would, changes neither mean loss nor gradient."""
    net = network()
    batch = select(batch_of(net), torch.arange(8))
    batch.log_probability = batch.log_probability - 0.1
    once = sums_of(net, batch)
    gradient = net.first.weight.grad.clone()
    longer = sums_of(net, select(batch, torch.arange(8).repeat(repeats)))
    np.testing.assert_allclose(longer, once * repeats, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net.first.weight.grad, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_astronomic_log_ratio_is_clamped_before_exp(shift):
    net = network()
    batch = batch_of(net)
    batch.log_probability = batch.log_probability - shift
    assert np.isfinite(sums_of(net, batch)).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in net.parameters())


@pytest.mark.parametrize(("samples", "minibatch"), [(65, 64), (1, 64), (2, 1)])
def test_minibatch_of_one_stays_finite(samples, minibatch):
    net = network()
    batch = batch_of(net, size=13, steps=5)
    figures = run(net, select(batch, torch.arange(samples)), minibatch=minibatch, epochs=2)
    assert all(np.isfinite(value) for value in figures.losses.values())
    assert all(torch.isfinite(parameter).all() for parameter in net.parameters())


def test_update_raises_the_probability_of_good_actions():
    net = network()
    batch = batch_of(net, size=128)
    before = sums_of(net, batch)[POLICY]
    run(net, batch, epochs=4, minibatch=256)
    assert sums_of(net, batch)[POLICY] < before


def test_update_is_reproducible():
    weights = []
    for _ in range(2):
        net = network()
        run(net, batch_of(net))
        weights.append(torch.cat([parameter.flatten() for parameter in net.parameters()]))
    assert torch.equal(*weights)


def test_target_kl_stops_further_epochs():
    net = network()
    batch = batch_of(net, size=64)
    assert run(net, batch, rate=0.05, epochs=9, target_kl=1e-6).losses["losses/gradient_steps"] == 2
    assert run(network(), batch, rate=0.05, epochs=9).losses["losses/gradient_steps"] == 9


def test_gradient_norms_are_reported_for_every_layer():
    net = network()
    figures = run(net, batch_of(net))
    assert set(figures.gradient_norms) == {name for name, _ in net.named_parameters()}
    assert figures.gradient_norms["actor_head.weight"] > 0


def test_nan_in_the_loss_stops_before_the_step():
    net = network()
    batch = batch_of(net)
    batch.returns[3] = float("nan")
    before = torch.cat([parameter.detach().flatten().clone() for parameter in net.parameters()])
    with pytest.raises(NonFiniteError, match="not finite") as caught:
        run(net, batch)
    assert "field" in caught.value.where
    assert torch.equal(before, torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))


@pytest.mark.parametrize(("field", "value"), [("observation", np.nan), ("observation", np.inf), ("reward", np.nan)])
def test_nan_from_the_pool_names_environment_field_and_step(field, value):
    class Broken(TinyPool):
        def step(self, actions):
            super().step(actions)
            if self.episode[0] == 1:
                getattr(self, field)[5] = value

    net = network()
    rollout = Rollout(8, 8, net.encoded_size, ACTIONS)
    with pytest.raises(NonFiniteError) as caught:
        collect(Broken(8), net, rollout, np.random.default_rng(0), Workers(1), step=100)
    assert caught.value.where["environment"] == "tiny-5"
    assert caught.value.where["field"] == field
    assert caught.value.where["step"] == (103 if field == "reward" else 104)


def test_empty_mask_from_the_pool_is_named():
    pool, net = TinyPool(8), network()
    pool.mask[2] = False
    with pytest.raises(EmptyMaskError) as caught:
        collect(pool, net, Rollout(2, 8, net.encoded_size, ACTIONS), np.random.default_rng(0), Workers(1))
    assert caught.value.where["environment"] == "tiny-2"


def test_entropy_is_over_decisions_that_had_a_choice():
    """Uniform over three actions has entropy log 3, however many forced decisions stand beside it."""
    net = network()
    batch = select(batch_of(net), torch.arange(32))
    with torch.no_grad():
        net.actor_head.weight.zero_()
    forced = torch.zeros(16, ACTIONS, dtype=torch.bool)
    forced[torch.arange(16), batch.action[:16]] = True
    batch.mask[:16] = forced
    sums = sums_of(net, batch)
    assert sums[ENTROPY] / sums[CHOICE_COUNT] == pytest.approx(np.log(CHOICES), rel=1e-5)


def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return():
    scaler = RewardScaler(2, 0.5)
    reward = np.array([[2.0, 0.0], [2.0, 4.0]], np.float32)
    done = np.array([[False, True], [True, False]])
    expected = reward / np.std([2.0, 0.0, 3.0, 4.0])
    np.testing.assert_allclose(scaler(reward, done), expected, rtol=1e-6)
    assert scaler.running.tolist() == [0.0, 4.0]


def test_scaled_rewards_are_clamped_to_five():
    scaler = RewardScaler(1000, 0.9)
    reward = np.zeros((1, 1000), np.float32)
    reward[0, 0] = 1e6
    assert scaler(reward, np.zeros((1, 1000), np.bool_)).max() == 5.0
    assert scaler.clamped_share == pytest.approx(0.001)


def test_rewards_that_never_move_are_left_alone():
    assert RewardScaler(3, 0.9)(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.bool_)).tolist() == [[0.0] * 3] * 2
