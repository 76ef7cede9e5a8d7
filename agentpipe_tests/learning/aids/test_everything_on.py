"""A training of the line with everything on: aids, orchestrator, perception, memory, recorded steps, live shards."""

from __future__ import annotations

import dataclasses

import pytest

from agentpipe.environments.layout import Purpose
from agentpipe.environments.players import RandomPlayer
from agentpipe.environments.rules import RulesPlayer
from agentpipe.experience.origin import origin
from agentpipe.experience.record import record_trajectories
from agentpipe.experience.store.shard import open_shard
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.aids.options import AidOptions, OrchestratorOptions
from agentpipe.learning.options import NetworkOptions, ReplayOptions, StreamOptions
from agentpipe.learning.policy.normalisation import gather_statistics
from agentpipe.learning.samples.stream import line_source
from agentpipe.learning.trainer import train
from agentpipe_tests.environments.line import catalog, make_pool, profile, table
from agentpipe_tests.learning.tiny import tiny_options

SPECS = catalog().environments("train")[::200]
STEPS, UPDATES = 8, 6
AIDS = AidOptions(
    curiosity="always", dynamic_lambda="always", layer_rates="always", distillation="always", lambda_updates=1
)
NETWORK = NetworkOptions(
    hidden=(16, 16), action_embedding=4, time_frequencies=2, actor_head="unit", perception=8, memory=8
)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Statistics, and a shard that a quarter of each batch is drawn from."""
    statistics = gather_statistics(make_pool(SPECS, purpose=Purpose.STATISTICS), RandomPlayer(), steps=30)
    shard = record_trajectories(
        lambda some: make_pool(some, purpose=Purpose.COLLECT),
        RulesPlayer(profile()),
        environments=SPECS,
        table=table(),
        episodes_per_env=1,
        out_dir=tmp_path_factory.mktemp("recorded") / "shard",
        cell="all",
        policy_version="rules",
        durability="process",
    )
    return statistics, shard


def run(folder, given, threads, **changes):
    statistics, shard = given
    options = tiny_options(
        network=NETWORK, aids=AIDS, budget_steps=len(SPECS) * STEPS * UPDATES, checkpoint_every=2, threads=threads
    )
    options = dataclasses.replace(
        options,
        orchestrator=OrchestratorOptions(share=0.6, floor=0.25, every=2),
        replay=ReplayOptions(share=0.25),
        stream=StreamOptions(),
    )
    pool = make_pool(SPECS, seed=5, threads=threads)
    source = line_source(SPECS, table().version, origin(5, "TRAIN", profile().digest))
    return train(pool, statistics, options, directory=folder, recorded=[shard], source=source, **changes)


def ended(result):
    """Weights, optimisers, memories, aids, their log; and every live step."""
    shards = [open_shard(path).digest for path in result.shards]
    return result.package.digest, checkpoints.load(result.checkpoint).digest, result.aid_log, shards


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    return {threads: run(tmp_path_factory.mktemp("whole"), given, threads) for threads in (1, 2)}


def test_everything_is_on(whole):
    row = whole[1].update_log[-1]
    names = {"orchestrator/environments", "aids/curiosity_bonus", "aids/credit_reach", "rewards/advantage_signs"}
    assert names <= set(row)
    assert any("perception" in name for name in row)
    assert any("memory" in name for name in row)
    assert row["share/live"] < 1
    arrays = checkpoints.load(whole[1].checkpoint).arrays["aids"]
    assert arrays["difficulty/episodes"].sum() > 0


def test_threads_make_no_difference(whole):
    assert ended(whole[1])[0] == ended(whole[2])[0]
    assert ended(whole[1])[2:] == ended(whole[2])[2:]


@pytest.mark.parametrize(("update", "threads"), [(3, 1), (4, 2), (1, 2)])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(whole, given, tmp_path, update, threads):
    asked = iter([False] * update + [True])
    part = run(tmp_path, given, threads, stop=lambda: next(asked))
    assert (part.reason, part.updates) == ("interrupted", update)
    assert ended(run(tmp_path, given, threads, resume=part.checkpoint)) == ended(whole[threads])
