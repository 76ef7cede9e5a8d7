"""Recording in the built-in line itself."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import ACTION_SEGMENT, REASONS, Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.pool import build_pool
from agentpipe.environments.rules import RulesPlayer
from agentpipe.environments.table import load_table
from agentpipe.experience.behaviour import epsilon_player
from agentpipe.experience.record import record_trajectories
from agentpipe.experience.shard import open_shard


@pytest.fixture(scope="module")
def line():
    environments = load_catalog().environments(split="train", cell="network-4")[:12]
    return environments, load_table(data_dir() / "disturbances.csv"), default_profile()


def record(line, path, threads=1, first_episode=0):
    environments, table, profile = line
    options = {"seed": 5, "purpose": Purpose.COLLECT, "threads": threads, "first_episode": first_episode}
    return record_trajectories(
        build_pool(environments, table, profile, **options),
        epsilon_player(RulesPlayer(profile)),
        environments=environments,
        table=table,
        episodes_per_env=2,
        out_dir=path,
        cell="network-4",
        policy_version="rules",
    )


@pytest.fixture(scope="module")
def shard(line, tmp_path_factory):
    return record(line, tmp_path_factory.mktemp("line") / "shard")


def test_whole_episodes_of_the_line_are_recorded(line, shard):
    environments, table, _ = line
    opened = open_shard(shard.path)
    assert len(opened.episodes) == 24
    assert set(opened.records["environment"].tolist()) == {environment.index for environment in environments}
    assert set(opened.episodes["episode"].tolist()) == {0, 1}
    ends = opened.records["terminated"] | opened.records["truncated"]
    assert ends.sum() == 24
    fingerprint = int(table.fingerprint(environments[0].environment_id).crc32, 16)
    own = opened.records["environment"] == environments[0].index
    assert set(opened.records["fingerprint"][own].tolist()) == {fingerprint}
    assert set(opened.quality.reasons) <= set(REASONS)


def test_every_recorded_action_was_legal_and_of_its_segment_and_as_likely_as_said(shard):
    mask = shard.unpack_masks(shard.records["mask"])
    actions = shard.records["action"].astype(np.int64)
    assert mask[np.arange(len(mask)), actions].all()
    np.testing.assert_array_equal(ACTION_SEGMENT[actions], shard.records["segment"])
    probability = np.exp(shard.records["log_probability"])
    explored = 0.2 / mask.sum(axis=1)
    assert (np.isclose(probability, explored) | np.isclose(probability, explored + 0.8)).all()


def test_the_return_of_an_episode_is_the_sum_of_its_rewards(shard):
    sums = [shard.steps(number)["reward"].sum() for number in range(len(shard.episodes))]
    np.testing.assert_allclose(sums, shard.episodes["return"], rtol=1e-4, atol=1e-4)


def test_two_threads_and_a_second_time_give_the_same_shard_and_other_episodes_another(line, shard, tmp_path):
    assert record(line, tmp_path / "again", threads=2).digest == shard.digest
    later = record(line, tmp_path / "later", first_episode=2)
    assert set(later.episodes["episode"].tolist()) == {2, 3}
    assert later.digest != shard.digest
