"""A policy as a player."""

import numpy as np
import pytest
import torch

from agentpipe.learning.network import PolicyNetwork
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.package import PolicyPackage
from agentpipe.learning.player import PolicyPlayer
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
        if greedy:
            assert decision.actions.tolist() == output.action.tolist()
        pool.step(decision.actions)


def test_draws_repeat_after_reset_and_differ_by_seed(package):
    pool = TinyPool(200)
    player = PolicyPlayer(package, greedy=False, seed=1)
    first, second = player.act(pool).actions, player.act(pool).actions
    player.reset()
    assert player.act(pool).actions.tolist() == first.tolist()
    assert second.tolist() != first.tolist()
    assert PolicyPlayer(package, greedy=False, seed=2).act(pool).actions.tolist() != first.tolist()
