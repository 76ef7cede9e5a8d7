"""Policies with a memory are compared on what they remember of the reference's episodes, not on single situations."""

import numpy as np
import pytest
import torch

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, OBSERVATION_SIZE
from agentpipe.environments.rules import RulesPlayer
from agentpipe.errors import EvaluationError
from agentpipe.evaluation.drift import policy_drift
from agentpipe.evaluation.reference import collect_reference
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe_tests.environments.line import catalog, make_pool, profile, table

STEPS, LINES = 16, 5


def policy(seed, memory=4):
    network = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, NetworkOptions(hidden=(8,), memory=memory))
    network.initialise(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        network.actor_head.weight.mul_(100.0)
    return PolicyPackage(network, ObservationStatistics.empty(OBSERVATION_NAMES))


def collected(*watching):
    environments = catalog().environments("validation")[:LINES]
    return collect_reference(
        environments,
        table(),
        profile(),
        RulesPlayer(profile()),
        seed=5,
        rows=STEPS * LINES,
        steps=STEPS,
        watching=watching,
        build=lambda specs, *_, **__: make_pool(specs),
    )


@pytest.fixture(scope="module")
def policies():
    return policy(0), policy(1)


@pytest.fixture(scope="module")
def reference(policies):
    return collected(*policies)


def test_what_is_remembered_is_what_one_who_watched_every_step_remembers(policies, reference):
    for package in policies:
        pool, player = make_pool(catalog().environments("validation")[:LINES]), RulesPlayer(profile())
        state, found = np.zeros((LINES, 4), np.float32), reference.memories[package.digest]
        for step in range(STEPS):
            np.testing.assert_array_equal(found[step * LINES : (step + 1) * LINES], state)
            state = package.remember(pool.observation, pool.last_action, pool.time, state)
            pool.step(player.act(pool).actions)
        assert np.abs(state).max() > 0


def test_watching_changes_no_row_and_no_digest(reference):
    assert collected().digest == reference.digest


def test_drift_of_policies_with_a_memory(policies, reference):
    first, second = policies
    same = policy_drift(first, policy(0), reference, minimum_rows=1)
    other = policy_drift(first, second, reference, minimum_rows=1)
    assert same.kl == 0.0
    assert other.kl > 0.001


def test_a_policy_that_did_not_watch_is_refused_and_one_without_a_memory_need_not(policies):
    reference = collected(policies[0])
    with pytest.raises(EvaluationError, match="nothing of what the champion remembers"):
        policy_drift(*policies, reference, minimum_rows=1)
    assert policy_drift(policies[0], policy(2, memory=0), reference, minimum_rows=1).kl is not None
