"""The compiled gradients of all losses, against autograd through the network in float64."""

import copy

import numpy as np
import pytest
import torch

from agentpipe.learning.cloning.fused import ClonedBatch, CloningGradient
from agentpipe.learning.gradient.anchor import AnchoredBatch, AnchoredGradient
from agentpipe.learning.gradient.fused import SHARD_SAMPLES, SHARDS, SegmentedGradient, shards_of
from agentpipe.learning.kernels.layers import BLOCK
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.samples.batch import Batch
from agentpipe.learning.workers import Workers
from agentpipe_tests.learning.gradient.reference import anchor_loss, cloning_loss, segmented_loss

WIDTH, ACTIONS, CLIP = 5, 9, (0.15, 0.08, 0.25, 0.12)
QUESTIONS = np.array([-1, 0, 0, 0, 1, 1, -1, -1, -1], np.int8)


def network(hidden=(8, 6), **options):
    sizes = NetworkOptions(hidden=hidden, action_embedding=3, time_frequencies=2, **options)
    made, generator = PolicyNetwork(WIDTH, ACTIONS, sizes), torch.Generator().manual_seed(0)
    made.initialise(generator)
    with torch.no_grad():  # far from uniform, and nothing is zero
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def batch_of(net, rows, kind=Batch):
    """Samples of every kind: forced decisions, weights from 0 to 2, old policies near and far."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(rows, ACTIONS, generator=generator) < 0.4
    action = torch.randint(0, ACTIONS, (rows,), generator=generator)
    mask[torch.arange(rows), action] = True
    mask[::7] = False
    mask[::7].scatter_(1, action[::7].unsqueeze(1), True)
    encoded = torch.randn(rows, net.encoded_size, generator=generator)
    last_action = torch.randint(0, ACTIONS + 1, (rows,), generator=generator)
    with torch.no_grad():
        log_p = net.heads(encoded, last_action, mask)[0].log_softmax(dim=-1).gather(1, action.unsqueeze(1)).squeeze(1)
    return kind(
        encoded=encoded,
        last_action=last_action,
        mask=mask,
        action=action,
        log_probability=log_p + 0.2 * torch.randn(rows, generator=generator),
        advantage=torch.randn(rows, generator=generator),
        returns=torch.randn(rows, generator=generator),
        segment=torch.randint(0, 4, (rows,), generator=generator),
        weight=2.0 * torch.rand(rows, generator=generator),
    )


def in_float64(net, batch):
    """Copies of both."""
    wide = type(batch)(
        *(
            column.double() if column.is_floating_point() else column
            for column in (getattr(batch, name) for name in Batch.__dataclass_fields__)
        )
    )
    return copy.deepcopy(net).double(), wide


def assert_equal_to_autograd(net, reference, loss):
    """Within 1e-5 of the largest number of each parameter's gradient; of the temperature's, of that of its weights.

    The temperature has one number, a sum over the whole head whose terms cancel: float32 rounds each of them.
    """
    loss.backward()
    expected = dict(reference.policy_parameters())
    for name, parameter in net.policy_parameters():
        exact = expected[name].grad
        largest = float(exact.abs().max())
        if name == "actor_head.log_temperature":
            largest = max(largest, float(expected["actor_head.weight_raw"].grad.abs().max()))
        assert float((parameter.grad - exact).abs().max()) <= 1e-5 * largest + 1e-9, name


SHAPES = [
    {},
    {"shared_trunk": True},
    {"activation": "tanh"},
    {"shared_trunk": True, "activation": "tanh", "actor_head": "unit"},
    {"actor_head": "unit"},
    {"encoder": "mlp"},
    {"encoder": "mlp", "shared_trunk": True, "actor_head": "unit"},
    {"hidden": (7,)},
    {"hidden": (7,), "shared_trunk": True},
    {"hidden": (9, 5, 4)},
    {"perception": 4, "memory": 3},
]


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_policy_gradient_equals_autograd(options):
    net = network(**options)
    batch = batch_of(net, 700)
    with Workers(2) as workers:
        SegmentedGradient(net, CLIP, 0.7, workers)(batch, torch.arange(700), 0.02)
    reference, wide = in_float64(net, batch)
    assert_equal_to_autograd(
        net, reference, segmented_loss(reference, wide, torch.tensor(CLIP).double(), 0.02, 0.7).total
    )


@pytest.mark.parametrize("rows", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * SHARD_SAMPLES - 1, 2_100])
@pytest.mark.parametrize("shared", [True, False])
def test_any_number_of_samples_has_its_gradient(rows, shared):
    net = network(shared_trunk=shared)
    batch = batch_of(net, rows + 5)
    chosen = torch.randperm(rows + 5, generator=torch.Generator().manual_seed(3))[:rows]
    SegmentedGradient(net, CLIP, 0.7, Workers(1))(batch, chosen, 0.02)
    picked = Batch(*(getattr(batch, name)[chosen] for name in Batch.__dataclass_fields__))
    reference, wide = in_float64(net, picked)
    assert_equal_to_autograd(
        net, reference, segmented_loss(reference, wide, torch.tensor(CLIP).double(), 0.02, 0.7).total
    )


@pytest.mark.parametrize("options", SHAPES[:6], ids=str)
def test_anchored_gradient_equals_autograd(options):
    net = network(**options)
    batch = batch_of(net, 300, AnchoredBatch)
    batch.anchor = torch.rand(300, ACTIONS, generator=torch.Generator().manual_seed(4)) * batch.mask
    batch.anchor /= batch.anchor.sum(dim=1, keepdim=True)
    sums = AnchoredGradient(net, CLIP, 0.7, Workers(1), 0.5)(batch, torch.arange(300), 0.02)
    reference, wide = in_float64(net, batch)
    away = anchor_loss(reference, wide, batch.anchor.double())
    loss = segmented_loss(reference, wide, torch.tensor(CLIP).double(), 0.02, 0.7).total + 0.5 * away
    assert sums[-1] == pytest.approx(300 * float(away.detach()), rel=1e-5)
    assert_equal_to_autograd(net, reference, loss)


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, BLOCK + 1, 600])
def test_cloning_gradient_equals_autograd(options, rows):
    net = network(**options)
    batch = batch_of(net, rows, ClonedBatch)
    generator = torch.Generator().manual_seed(5)
    answers = [torch.randint(low, high, (rows,), generator=generator) for low, high in ((1, 4), (4, 6))]
    unasked = torch.rand(rows, 2, generator=generator) < 0.3
    batch.answers = torch.where(unasked, -1, torch.stack(answers, dim=1))
    CloningGradient(net, QUESTIONS, 0.7, 0.3, Workers(1))(batch, torch.arange(rows), 0.0)
    reference, wide = in_float64(net, batch)
    assert_equal_to_autograd(net, reference, cloning_loss(reference, wide, batch.answers, QUESTIONS, 0.7, 0.3))


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_gradient_has_the_same_bits_on_any_number_of_threads(threads):
    net = network(hidden=(64, 64))
    batch, found = batch_of(net, 2_300), []
    for count in (1, threads):
        with Workers(count) as workers:
            sums = SegmentedGradient(net, CLIP, 0.5, workers)(batch, torch.arange(2_300), 0.01)
        found.append([torch.from_numpy(sums), *(p.grad.clone() for _, p in net.policy_parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_shards_are_a_power_of_two_of_enough_samples():
    counts = {rows: shards_of(rows) for rows in (1, SHARD_SAMPLES, 1_750, 2_048, 10**6)}
    assert counts == {1: 1, SHARD_SAMPLES: 1, 1_750: 4, 2_048: 8, 10**6: SHARDS}


@pytest.mark.parametrize("field", ["encoded", "returns", "advantage", "log_probability", "weight"])
def test_a_nan_reaches_the_figures(field):
    net = network()
    batch = batch_of(net, 250)
    getattr(batch, field)[17] = float("nan")
    sums = SegmentedGradient(net, CLIP, 0.5, Workers(1))(batch, torch.arange(250), 0.01)
    gradients = torch.cat([parameter.grad.flatten() for _, parameter in net.policy_parameters()])
    assert not (np.isfinite(sums).all() and bool(torch.isfinite(gradients).all()))
