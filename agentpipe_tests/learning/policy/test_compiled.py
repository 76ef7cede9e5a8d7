"""The compiled policy, against the network that it is a copy of."""

import numpy as np
import pytest
import torch

from agentpipe.learning.kernels.layers import BLOCK
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.compiled import CompiledPolicy
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.samples.rollout import Rollout, collect
from agentpipe.learning.workers import Workers
from agentpipe_tests.learning.tiny import ACTIONS, WIDTH, TinyExpert, TinyPool, tiny_statistics

SHAPES = [
    {},
    {"shared_trunk": True, "activation": "tanh"},
    {"actor_head": "unit", "encoder": "mlp"},
    {"hidden": (6,), "shared_trunk": True, "actor_head": "unit"},
]


def network(hidden=(8, 6), **options):
    sizes = NetworkOptions(hidden=hidden, action_embedding=3, time_frequencies=2, **options)
    made, generator = PolicyNetwork(WIDTH, ACTIONS, sizes), torch.Generator().manual_seed(0)
    made.initialise(generator)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def seen_by(net, rows):
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(rows, ACTIONS, generator=generator) < 0.4
    mask[torch.arange(rows), torch.randint(0, ACTIONS, (rows,), generator=generator)] = True
    encoded = torch.randn(rows, net.encoded_size, generator=generator)
    return encoded, torch.randint(0, ACTIONS + 1, (rows,), generator=generator), mask


def room(rows):
    return torch.zeros(rows, dtype=torch.int64), *torch.full((3, rows), 9.0)


@torch.no_grad()
def expected(net, seen):
    logits, value = net.heads(*seen)
    return logits.softmax(dim=-1), value


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, BLOCK, BLOCK + 1, 500])
def test_decisions_are_drawn_from_the_networks_distribution(options, rows):
    net = network(**options)
    seen, uniforms = seen_by(net, rows), np.random.default_rng(2).random(rows)
    action, log_probability, value, entropy = into = room(rows)
    assert CompiledPolicy(net).decide(0, seen, uniforms, into) == -1
    probability, values = expected(net, seen)
    torch.testing.assert_close(value, values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        log_probability.exp(), probability.gather(1, action[:, None])[:, 0], rtol=1e-4, atol=1e-6
    )
    entropies = -torch.special.xlogy(probability, probability).sum(dim=1)
    torch.testing.assert_close(entropy, entropies, rtol=1e-4, atol=1e-5)
    below = torch.cat([torch.zeros(rows, 1), probability.cumsum(dim=1)], dim=1).double()
    numbers = torch.from_numpy(uniforms)
    assert bool((below.gather(1, action[:, None])[:, 0] <= numbers + 1e-5).all())
    assert bool((numbers - 1e-5 <= below.gather(1, action[:, None] + 1)[:, 0]).all())


@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_decisions_of_others_are_judged_as_the_network_does(options):
    net = network(**options)
    seen = seen_by(net, 300)
    probability, values = expected(net, seen)
    action = probability.argmin(dim=1) * 0 + seen[2].int().argmax(dim=1)
    log_probability, value = CompiledPolicy(net).judge(0, seen, action)
    chosen = probability.gather(1, action[:, None])[:, 0].numpy()
    np.testing.assert_allclose(np.exp(log_probability), chosen, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(value, values.numpy(), rtol=1e-5, atol=1e-5)
    spread = torch.zeros(300, ACTIONS)
    np.testing.assert_array_equal(CompiledPolicy(net).distribution(0, seen, spread), value)
    torch.testing.assert_close(spread, probability * seen[2], rtol=1e-4, atol=1e-6)
    assert not spread[~seen[2]].any()
    np.testing.assert_array_equal(CompiledPolicy(net).values(0, seen), value)


def test_numbers_at_the_ends_draw_the_first_and_the_last_possible_action():
    net = network()
    seen = seen_by(net, 40)
    into = room(40)
    CompiledPolicy(net).decide(0, seen, np.zeros(40), into)
    assert into[0].tolist() == seen[2].int().argmax(dim=1).tolist()
    CompiledPolicy(net).decide(0, seen, np.full(40, np.nextafter(1.0, 0.0)), into)
    assert into[0].tolist() == (ACTIONS - 1 - seen[2].flip(1).int().argmax(dim=1)).tolist()


def test_the_first_sample_without_a_legal_action_is_named():
    net = network()
    seen = seen_by(net, 400)
    seen[2][[250, 300]] = False
    into = room(400)
    assert CompiledPolicy(net).decide(0, seen, np.full(400, 0.5), into) == 250
    assert into[0][[250, 300]].tolist() == [-1, -1]


def test_without_numbers_only_values_are_filled():
    net = network()
    into = room(30)
    CompiledPolicy(net).decide(0, seen_by(net, 30), None, into)
    assert into[0].tolist() == [0] * 30
    assert into[1].tolist() == [9.0] * 30
    assert into[3].tolist() == [0.0] * 30


@pytest.mark.parametrize("options", [*SHAPES, {"perception": 4}, {"memory": 3}], ids=str)
def test_observations_are_encoded_as_the_network_does(options):
    net = network(**options)
    net.set_statistics(tiny_statistics())
    generator = torch.Generator().manual_seed(4)
    observation, time = 5 * torch.randn(50, WIDTH, generator=generator), 90 * torch.rand(50, generator=generator)
    last_action = torch.randint(0, ACTIONS + 1, (50,), generator=generator)
    memory, into = torch.randn(50, net.memory_size, generator=generator), torch.zeros(50, net.encoded_size)
    with torch.inference_mode():
        encoded, state = net.encode(observation, last_action, time, memory)
        found = CompiledPolicy(net).encode(0, observation, last_action, time, memory, into)
    assert torch.equal(into, encoded)
    if net.memory_size:
        assert torch.equal(found, state)


def test_a_copy_stays_as_it_was():
    net = network()
    seen, policy = seen_by(net, 20), CompiledPolicy(net)
    before = policy.values(0, seen)
    with torch.no_grad():
        net.critic_head.bias.add_(1.0)
    np.testing.assert_array_equal(policy.values(0, seen), before)
    np.testing.assert_allclose(CompiledPolicy(net).values(0, seen), before + 1.0, rtol=1e-5, atol=1e-5)


def test_a_rollout_keeps_the_entropy_of_each_decision_and_none_of_an_experts():
    net, pool = network(), TinyPool(40)
    rollout = Rollout(3, 40, net.encoded_size, ACTIONS)
    collect(pool, net, rollout, np.random.default_rng(0), Workers(1))
    seen = (rollout.encoded.flatten(0, 1), rollout.last_action.flatten(), rollout.mask.flatten(0, 1))
    probability = expected(net, seen)[0]
    entropies = -torch.special.xlogy(probability, probability).sum(dim=1)
    torch.testing.assert_close(rollout.entropy.flatten(), entropies, rtol=1e-4, atol=1e-5)
    expert = TinyExpert()
    collect(pool, net, rollout, np.random.default_rng(0), Workers(1), expert=lambda _: expert.act(pool).actions)
    assert not rollout.entropy.any()
