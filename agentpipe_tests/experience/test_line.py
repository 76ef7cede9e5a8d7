"""Recording in the built-in line itself."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import ACTION_NAMES, ACTION_SEGMENT, REASONS, Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.pool import build_pool
from agentpipe.environments.rules import RulesPlayer
from agentpipe.environments.table import load_table
from agentpipe.experience.behaviour import epsilon_player
from agentpipe.experience.graph import influence, neighbours
from agentpipe.experience.origin import origin
from agentpipe.experience.record import record_trajectories
from agentpipe.experience.regenerate import compact_of, regenerate
from agentpipe.experience.store.shard import open_shard


@pytest.fixture(scope="module")
def line():
    environments = load_catalog().environments(split="train", cell="network-4")[:12]
    return environments, load_table(data_dir() / "disturbances.csv"), default_profile()


def builder(line, threads=1, first_episode=0):
    _, table, profile = line
    options = {"seed": 5, "purpose": Purpose.COLLECT, "threads": threads, "first_episode": first_episode}
    return lambda chosen: build_pool(chosen, table, profile, **options)


def record(line, path, threads=1, first_episode=0, **changes):
    environments, table, profile = line
    return record_trajectories(
        builder(line, threads, first_episode),
        epsilon_player(RulesPlayer(profile)),
        environments=environments,
        table=table,
        episodes_per_env=2,
        out_dir=path,
        cell="network-4",
        policy_version="rules",
        first_episode=first_episode,
        origin=origin(5, "COLLECT", profile.digest),
        **changes,
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
    assert set(opened.quality["reasons"]) <= set(REASONS)


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
    later = record(line, tmp_path / "later", first_episode=2, durability="process")
    assert set(later.episodes["episode"].tolist()) == {2, 3}
    assert later.digest != shard.digest


class Ended(Exception):  # noqa: N818 - stands for the end of the process
    """The process ends here."""


@pytest.mark.parametrize("after", [1, 13, 20])
def test_an_interrupted_recording_goes_on_with_fewer_environments_to_the_same_digest(line, shard, tmp_path, after):
    def progress(_stage, done, _total, _note=""):
        if done >= after:
            raise Ended

    with pytest.raises(Ended):
        record(line, tmp_path / "shard", progress=progress)
    assert record(line, tmp_path / "shard", threads=2).digest == shard.digest


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sealed_shard_is_made_again_from_its_actions(line, shard, threads):
    environments = line[0]
    index = np.array([environment.index for environment in environments], np.uint32)
    made = regenerate(builder(line, threads)(environments), index, shard.episodes, compact_of(shard.records))
    assert made.steps.tobytes() == shard.records.tobytes()
    assert made.episodes.tobytes() == shard.episodes.tobytes()
    assert made.parents.tobytes() == shard.graph.tobytes()
    assert made.finals is None
    assert len(shard.finals) == 0


def test_the_graph_of_a_repaired_fault_leads_from_the_readings_to_the_end(shard):
    """Every success that is not a rejection: the last step depends on the repair, and that on the declaration."""
    seen = 0
    for row in np.flatnonzero(shard.episodes["success"] == 1):
        names = [ACTION_NAMES[action] for action in shard.steps(row)["action"]]
        if names[-1] != "close":
            continue
        above, below = neighbours(shard.parents(row))
        assert all(parent < step in below[parent] for step, parents in enumerate(above) for parent in parents)
        repair = max(step for step, name in enumerate(names) if name in ("start", "retry"))
        assert repair in above[-1]
        declared = max(step for step, name in enumerate(names) if name.startswith("declare_machine") and step < repair)
        assert declared in above[names.index("start", declared)]
        dependents, _ = influence(
            shard.parents(row).reshape(-1), np.array([len(names)]), np.ascontiguousarray(shard.steps(row)["reward"])
        )
        assert dependents[declared] >= 5
        seen += 1
    assert seen > 5
