import json

import numpy as np
import pytest

from agentpipe.experience.quality import Quality, measure_quality
from agentpipe.experience.sampling.causal import CausalSampler
from agentpipe.experience.sampling.definitions import most_influential
from agentpipe.experience.sampling.sets import SampleSet
from agentpipe.experience.sampling.uniform import UniformSampler

from .sampling.fakes import make_shard


@pytest.fixture(scope="module")
def small():
    """Two episodes. In the first step 0 is used by 1 and 2; the second is cut and has a spike without a cause."""
    shard = make_shard(
        [3, 2],
        pairs=[(0, 0, 1), (0, 0, 2)],
        reward=np.array([-0.5, 0.0, 12.0, 0.0, -3.0], np.float32),
        earned=np.array([0, 0, 1, 0, 1]),
        success=[1, 0],
        cut=[0, 1],
        reason=[0, -1],
        mode=[2, 5],
    )
    shard.manifest["reasons"] = ["solved", "wrong"]
    return shard


def test_figures_of_a_small_shard(small):
    found = measure_quality(small)
    assert (found.episodes, found.steps, found.mean_steps) == (2, 5, 2.5)
    assert found.bytes == small.records.nbytes + small.episodes.nbytes + small.graph.nbytes + small.index.nbytes
    assert found.success_share == 1.0  # the cut one has no outcome
    assert (found.reward_mean, found.reward_min, found.reward_max) == (pytest.approx(1.7), -3.0, 12.0)
    assert (found.reward_within_10_share, found.zero_reward_share, found.sign_ratio) == (0.8, 0.4, 0.5)
    assert found.reasons == {"cut": 1, "solved": 1}  # as the manifest names them
    assert found.unexplained_spikes == 1
    assert found.parents_per_step == 2 / 5
    assert (found.idle_share, found.strict_idle_share) == (2 / 5, 2 / 5)
    assert found.influential_nodes == 1
    assert found.reward_histogram["counts"][-1] == 1
    assert sum(found.reward_histogram["counts"]) == 5


def test_shares_under_each_sampler_are_exact(small):
    """Only step 0 has influence: p = 0.9 + 0.02 for it, 0.02 for each other."""
    found = measure_quality(small)
    assert found.key_fault_shares == {"uniform": 0.6, "causal": pytest.approx(0.96)}
    assert found.idle_shares == {"uniform": 0.4, "causal": pytest.approx(0.04)}
    assert found.coverages == {
        "uniform_independent": pytest.approx(1 - 0.8**5),
        "uniform_stratified": 1.0,
        "causal_independent": pytest.approx(1 - 0.08**5),
        "causal_stratified": 1.0,
    }
    assert found.coverage == 1.0


def test_figures_survive_json(small):
    found = measure_quality(small)
    assert Quality.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_shard_without_episodes_has_no_shares():
    found = measure_quality(make_shard([]))
    assert (found.episodes, found.steps, found.influential_nodes) == (0, 0, 0)
    assert found.success_share is found.coverage is found.idle_share is found.reward_mean is None
    assert Quality.from_json(json.loads(json.dumps(found.to_json()))) == found


def random_shard(seed=3):
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 25, 60)
    pairs = [
        (episode, parent, child)
        for episode, length in enumerate(lengths)
        for child in range(1, length)
        for parent in random.choice(child, min(child, 2), replace=False)
    ]
    return make_shard(
        lengths,
        seed=seed,
        pairs=pairs,
        success=random.integers(0, 2, len(lengths)),
        mode=random.integers(0, 8, len(lengths)),
    )


def test_coverage_is_what_epochs_of_the_samplers_find():
    shard = random_shard()
    found, steps = measure_quality(shard), SampleSet([shard])
    top = most_influential(steps.influence, shard.episodes["steps"].astype(np.int64))
    samplers = {
        "uniform_independent": UniformSampler(steps.size, seed=1, stratified=False),
        "uniform_stratified": UniformSampler(steps.size, seed=1),
        "causal_independent": CausalSampler(steps.influence, seed=1, stratified=False),
        "causal_stratified": CausalSampler(steps.influence, seed=1),
    }
    assert set(samplers) == set(found.coverages)
    for name, sampler in samplers.items():
        shares = []
        for _ in range(400):
            drawn = np.zeros(steps.size, bool)
            drawn[sampler.draw(steps.size).ids] = True
            shares.append(drawn[top].mean())
        assert np.mean(shares) == pytest.approx(found.coverages[name], abs=0.003), name


def test_shares_are_what_draws_of_the_samplers_find():
    shard = random_shard()
    found, steps = measure_quality(shard), SampleSet([shard])
    samplers = {
        "uniform": UniformSampler(steps.size, seed=2, stratified=False),
        "causal": CausalSampler(steps.influence, seed=2, stratified=False),
    }
    for name, sampler in samplers.items():
        ids = sampler.draw(400_000).ids
        assert steps.key_fault[ids].mean() == pytest.approx(found.key_fault_shares[name], abs=0.004)
        assert steps.idle[ids].mean() == pytest.approx(found.idle_shares[name], abs=0.004)
        assert steps.idle_strict[ids].mean() == pytest.approx(found.strict_idle_shares[name], abs=0.004)
