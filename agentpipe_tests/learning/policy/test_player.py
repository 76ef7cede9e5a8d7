"""A policy as a player."""

import numpy as np
import pytest
import torch

from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.policy.player import PolicyPlayer
from agentpipe_tests.learning.tiny import ACTION_NAMES, ACTIONS, NAMES, WIDTH, TinyPool, tiny_statistics


@pytest.fixture(scope="module")
def package():
    network = PolicyNetwork(WIDTH, ACTIONS, NetworkOptions(hidden=(8,), action_embedding=2, time_frequencies=1))
    network.initialise(torch.Generator().manual_seed(0))
    return PolicyPackage(network, tiny_statistics(), NAMES, ACTION_NAMES)


@pytest.mark.parametrize("greedy", [True, False])
def test_plays_legally_and_tells_the_probability_of_what_it_chose(package, greedy):
    pool, player = TinyPool(50), PolicyPlayer(package, greedy=greedy)
    for _ in range(8):
        decision = player.act(pool)
        output = package.act(pool.observation, pool.last_action, pool.time, pool.mask)
        rows = np.arange(50)
        assert pool.mask[rows, decision.actions].all()
        assert decision.probabilities.tolist() == output.probabilities[rows, decision.actions].tolist()
        assert decision.probabilities.dtype == np.float32
        assert decision.values.tolist() == output.value.tolist()
        if greedy:
            assert decision.actions.tolist() == output.action.tolist()
        pool.step(decision.actions)


def test_draws_are_those_of_environment_episode_and_step_and_differ_by_seed(package):
    """Asked again, or beside other environments, a player decides the same; at the next step it draws anew."""
    pool, player = TinyPool(200), PolicyPlayer(package, greedy=False, seed=1)
    first = player.act(pool).actions
    assert PolicyPlayer(package, greedy=False, seed=1).act(pool).actions.tolist() == first.tolist()
    alone = TinyPool(50)
    for name in ("observation", "mask", "last_action", "time"):
        getattr(alone, name)[:] = getattr(pool, name)[:50]
    assert player.act(alone).actions.tolist() == first[:50].tolist()
    assert PolicyPlayer(package, greedy=False, seed=2).act(pool).actions.tolist() != first.tolist()
    pool.time += 0.1
    assert player.act(pool).actions.tolist() != first.tolist()
