"""Live rollouts as shards: all of them, once, under their update; also across checkpoints, crashes and resumptions."""

import dataclasses
import shutil
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from agentpipe.environments.demonstrator import DemonstratorPlayer
from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, SIMULATOR_VERSION
from agentpipe.environments.players import RandomPlayer
from agentpipe.errors import CheckpointError, LearningError
from agentpipe.experience.care.shrink import regenerate_shard
from agentpipe.experience.origin import origin
from agentpipe.experience.store.manifest import MANIFEST, read_manifest
from agentpipe.experience.store.shard import is_open, open_shard
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.options import ReplayOptions, StreamOptions
from agentpipe.learning.policy.normalisation import gather_statistics
from agentpipe.learning.samples.stream import LiveSource, line_source
from agentpipe.learning.trainer import train
from agentpipe_tests.environments.line import catalog, make_pool, profile, table
from agentpipe_tests.learning.recorded import tiny_shard
from agentpipe_tests.learning.tiny import (
    ACTION_NAMES,
    TinyPool,
    tiny_options,
    tiny_statistics,
    tiny_warm_up,
)

ENVIRONMENTS = catalog().environments("train")[::219]
SIZE, STEPS = len(ENVIRONMENTS), 8
AN_UPDATE = SIZE * STEPS
NOT_DUE = 1_000


def line():
    return make_pool(ENVIRONMENTS, seed=5)


def source(pool_for=None):
    return line_source(ENVIRONMENTS, table().version, origin(5, "TRAIN", profile().digest), pool_for)


@pytest.fixture(scope="module")
def statistics():
    return gather_statistics(line(), RandomPlayer(), steps=30)


def options(updates=4, stream=None, **changes):
    changes.setdefault("checkpoint_every", NOT_DUE)
    made = tiny_options(budget_steps=AN_UPDATE * updates, **changes)
    return dataclasses.replace(made, stream=stream or StreamOptions())


def run(directory, statistics, chosen, **changes):
    changes.setdefault("source", source())
    return train(line(), statistics, chosen, directory=directory, **changes)


def digests(result):
    return [(path.name, open_shard(path).digest) for path in result.shards]


def steps_by_ordinal(result):
    counts = Counter()
    for path in result.shards:
        shard = open_shard(path)
        ordinals = np.array([policy["ordinal"] for policy in shard.policies])
        counts.update(ordinals[shard.records["policy"]].tolist())
    return counts


def after(updates):
    """Ends a run after so many updates."""
    asked = iter([False] * updates + [True])
    return lambda: next(asked)


class BrokenOffError(Exception):
    """What kill -9 looks like from within: no checkpoint is made, nothing is tidied up."""


def breaks_off(updates):
    def progress(stage, done, *_):
        if stage == "training" and done >= updates * AN_UPDATE:
            raise BrokenOffError

    return progress


def test_every_step_of_every_update_is_recorded_once(tmp_path, statistics):
    result = run(tmp_path, statistics, options(4))
    assert [path.name for path in result.shards] == ["updates-000001", "running-000004"]
    assert steps_by_ordinal(result) == dict.fromkeys([1, 2, 3, 4], AN_UPDATE)
    for row in result.update_log:
        assert row["samples/live_last"] - row["samples/live_first"] + 1 == AN_UPDATE
        assert row["samples/live_policy"] == row["update"]
        assert row["samples/live_shard"] == "updates-000001"
        assert row["share/live"] == 1.0


def test_shards_say_who_played_where_and_pass_every_check(tmp_path, statistics):
    result = run(tmp_path, statistics, options(3))
    ended, cut = (open_shard(path) for path in result.shards)
    assert ended.manifest["cell"] == "training"
    assert ended.manifest["origin"] == {"seed": 5, "purpose": "TRAIN", "line_profile": profile().digest}
    assert ended.manifest["table_version"] == table().version
    assert ended.manifest["simulator_version"] == SIMULATOR_VERSION
    assert [(policy["player"], policy["ordinal"]) for policy in ended.policies] == [
        ("training", number) for number in (1, 2, 3)
    ]
    assert len({policy["version"] for policy in ended.policies}) == 3
    known = {environment.index: environment.environment_id for environment in ENVIRONMENTS}
    assert {known[index] for index in ended.episodes["environment"].tolist()} == set(ended.names.values())
    assert (ended.records["fingerprint"] > 0).all()
    assert (ended.episodes["cut"] == 0).all()
    assert (cut.episodes["cut"] == 1).all()
    assert (cut.episodes["final"] >= 0).all()
    assert cut.finals["observation"].shape == (len(cut.episodes), len(OBSERVATION_NAMES))


def test_what_is_recorded_is_what_was_learned_from(tmp_path, statistics):
    """The probability of each recorded action, under the recorded update's own weights: those of the first update are
    the untrained ones, which every run of the seed begins with."""
    result = run(tmp_path, statistics, options(1))
    fresh = train(
        line(),
        statistics,
        dataclasses.replace(options(1), stream=None),
        directory=tmp_path / "fresh",
        stop=lambda: True,
    )
    for path in result.shards:
        shard = open_shard(path)
        records, mask = shard.records, shard.unpack_masks(shard.records["mask"])
        arrays = (records["observation"].copy(), records["last_action"].astype(np.int64), records["time"].copy(), mask)
        output = fresh.package.act(*arrays)
        chosen = output.probabilities[np.arange(len(records)), records["action"]]
        np.testing.assert_allclose(np.exp(records["log_probability"]), chosen, rtol=1e-4)
        np.testing.assert_allclose(records["value"], output.value, atol=1e-4)
        assert mask[np.arange(len(records)), records["action"]].all()


def test_full_shards_are_sealed_and_running_episodes_go_on_in_the_next(tmp_path, statistics):
    result = run(tmp_path, statistics, options(6, StreamOptions(shard_steps=AN_UPDATE)))
    names = [path.name for path in result.shards]
    assert names[0] == "updates-000001"
    assert len(names) > 3
    assert steps_by_ordinal(result) == dict.fromkeys(range(1, 7), AN_UPDATE)
    carried = open_shard(result.shards[1])
    first = int(names[1].removeprefix("updates-"))
    assert min(policy["ordinal"] for policy in carried.policies) < first
    logged = [row["samples/live_shard"] for row in result.update_log]
    assert sorted(set(logged)) == names[:-1] if names[-1].startswith("running") else names


def test_groups_that_count_together_decide_nothing_about_the_shards(tmp_path, statistics):
    wholes = []
    for durability in ("process", "power"):  # under power far fewer episodes than a group has
        stream = StreamOptions(shard_steps=2 * AN_UPDATE, durability=durability)
        wholes.append(run(tmp_path / durability, statistics, options(5, stream, checkpoint_every=3)))
    assert digests(wholes[0]) == digests(wholes[1])
    assert steps_by_ordinal(wholes[1]) == dict.fromkeys(range(1, 6), AN_UPDATE)
    assert not any(is_open(path) for path in (tmp_path / "power" / "experience").iterdir())


def test_streaming_changes_nothing_that_is_learned(tmp_path, statistics):
    plain = dataclasses.replace(options(3), stream=None)
    with_stream, without = run(tmp_path / "a", statistics, options(3)), run(tmp_path / "b", statistics, plain)
    assert with_stream.package.digest == without.package.digest
    assert without.shards == ()
    assert options(3).digest() == plain.digest()


@pytest.mark.parametrize("sampler", ["uniform", "causal", "prioritised"])
def test_resumed_run_equals_an_uninterrupted_one_with_replay_and_shards(tmp_path, statistics, sampler):
    """k + n updates against k, save, load, n: weights, checkpoint and shards, bit for bit."""
    recorded = [open_shard(path) for path in run(tmp_path / "recorded", statistics, options(2)).shards]
    chosen = options(5, checkpoint_every=2, replay=ReplayOptions(sampler=sampler, evaluate=64))
    whole = run(tmp_path / "whole", statistics, chosen, recorded=recorded)
    part = run(tmp_path / "part", statistics, chosen, recorded=recorded, stop=after(3))
    assert (part.reason, part.updates) == ("interrupted", 3)
    index = checkpoints.load(part.checkpoint).content["trajectory_index"]
    assert [entry["name"] for entry in index] == ["updates-000001", "updates-000003"]
    assert index[1]["digest"] is None
    assert is_open(tmp_path / "part" / "experience" / "updates-000003")
    resumed = run(tmp_path / "part", statistics, chosen, recorded=recorded, resume=part.checkpoint)
    assert resumed.package.digest == whole.package.digest
    assert digests(resumed) == digests(whole)
    assert checkpoints.load(resumed.checkpoint).digest == checkpoints.load(whole.checkpoint).digest
    assert resumed.update_log == whole.update_log
    assert whole.update_log[0][f"share/{sampler}"] == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("stream", [StreamOptions(), StreamOptions(shard_steps=AN_UPDATE)])
@pytest.mark.parametrize(("stopped", "broken"), [(2, 3), (2, 4), (None, 3)])
def test_what_was_recorded_after_the_checkpoint_is_made_again(tmp_path, statistics, stream, stopped, broken):
    """Killed between two checkpoints: the shards hold more than the checkpoint says, open or already sealed."""
    chosen = options(6, stream, checkpoint_every=2 if stopped is None else NOT_DUE)
    whole = run(tmp_path / "whole", statistics, chosen)
    folder = tmp_path / "part"
    if stopped is not None:
        run(folder, statistics, chosen, stop=after(stopped))
    begun = checkpoints.latest(folder / "checkpoints")
    with pytest.raises(BrokenOffError):
        run(folder, statistics, chosen, resume=begun, progress=breaks_off(broken))
    resumed = run(folder, statistics, chosen, resume=checkpoints.latest(folder / "checkpoints"))
    assert digests(resumed) == digests(whole)
    assert resumed.package.digest == whole.package.digest
    assert sorted(path.name for path in (folder / "experience").iterdir()) == sorted(p.name for p in whole.shards)


KILLED = """
import os, signal, sys
from pathlib import Path
from agentpipe_tests.learning.samples.test_stream import *
def kill(stage, done, *_):
    if stage == "training" and done >= 5 * AN_UPDATE:
        os.kill(os.getpid(), signal.SIGKILL)
statistics = gather_statistics(line(), RandomPlayer(), steps=30)
run(Path(sys.argv[1]), statistics, options(6, checkpoint_every=2), progress=kill)
"""


def test_training_goes_on_after_kill_9_as_if_nothing_had_happened(tmp_path, statistics):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "killed")], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    chosen = options(6, checkpoint_every=2)
    found = checkpoints.latest(tmp_path / "killed" / "checkpoints")
    assert found.name.startswith("update-000004")
    resumed = run(tmp_path / "killed", statistics, chosen, resume=found)
    whole = run(tmp_path / "whole", statistics, chosen)
    assert resumed.package.digest == whole.package.digest
    assert digests(resumed) == digests(whole)
    assert checkpoints.load(resumed.checkpoint).digest == checkpoints.load(whole.checkpoint).digest


def test_resuming_a_finished_run_leaves_the_same_shards(tmp_path, statistics):
    chosen = options(2)
    first = run(tmp_path, statistics, chosen)
    expected = digests(first)
    again = run(tmp_path, statistics, chosen, resume=first.checkpoint)
    assert again.checkpoint == first.checkpoint
    assert digests(again) == expected


def test_no_shard_is_left_open_where_no_episode_ended(tmp_path):
    """Rollouts of two steps, episodes of four: the last update ends none, and its shard would be empty."""
    chosen = tiny_options(budget_steps=64 * 2 * 3, checkpoint_every=2)
    chosen = dataclasses.replace(chosen, stream=StreamOptions(), ppo=dataclasses.replace(chosen.ppo, rollout_steps=2))
    first = tiny_run(tmp_path, chosen)
    again = tiny_run(tmp_path, chosen, resume=first.checkpoint)
    for result in (first, again):
        assert [path.name for path in result.shards] == ["updates-000001", "running-000003"]
        assert sorted(path.name for path in (tmp_path / "experience").iterdir()) == sorted(
            p.name for p in result.shards
        )


def test_a_checkpoint_in_which_no_episode_had_ended_can_be_gone_on_with_once_its_shard_was_sealed(tmp_path, statistics):
    """Ended after an update of one step, gone on with until the shard is full and sealed, and broken off."""
    chosen = options(6, StreamOptions(shard_steps=SIZE))
    chosen = dataclasses.replace(chosen, ppo=dataclasses.replace(chosen.ppo, rollout_steps=1))
    folder, experience = tmp_path / "part", tmp_path / "part" / "experience"
    whole = run(tmp_path / "whole", statistics, chosen)
    part = run(folder, statistics, chosen, stop=after(1))
    assert [one["episodes"] for one in checkpoints.load(part.checkpoint).content["trajectory_index"]] == [0]
    with pytest.raises(BrokenOffError):
        run(folder, statistics, chosen, resume=part.checkpoint, progress=breaks_off(5))
    assert not is_open(experience / "updates-000001")
    resumed = run(folder, statistics, chosen, resume=checkpoints.latest(folder / "checkpoints"))
    assert resumed.package.digest == whole.package.digest
    assert digests(resumed) == digests(whole)


def test_going_on_with_other_options_is_refused_before_a_shard_is_touched(tmp_path, statistics):
    chosen = options(6, StreamOptions(shard_steps=AN_UPDATE), checkpoint_every=2)
    run(tmp_path, statistics, chosen)
    first, _ = sorted((tmp_path / "checkpoints").glob("update-*"))
    before = {path: path.read_bytes() for path in (tmp_path / "experience").rglob("*") if path.is_file()}
    other = dataclasses.replace(chosen, validate_every=9)
    with pytest.raises(CheckpointError, match="other training options: validate_every"):
        run(tmp_path, statistics, other, resume=first)
    assert before == {path: path.read_bytes() for path in (tmp_path / "experience").rglob("*") if path.is_file()}


def test_a_new_run_in_the_same_folder_replaces_the_shards(tmp_path, statistics):
    run(tmp_path, statistics, options(6, StreamOptions(shard_steps=AN_UPDATE)))
    result = run(tmp_path, statistics, options(1))
    assert sorted(path.name for path in (tmp_path / "experience").iterdir()) == sorted(p.name for p in result.shards)


def test_missing_shard_is_named_when_resuming(tmp_path, statistics):
    chosen = options(3, checkpoint_every=1)
    part = run(tmp_path, statistics, chosen, stop=after(2))
    shutil.rmtree(tmp_path / "experience" / "updates-000001")
    with pytest.raises(CheckpointError, match="names another shard") as caught:
        run(tmp_path, statistics, chosen, resume=part.checkpoint)
    assert str(caught.value.where["file"]).endswith("updates-000001")


def test_older_shards_shrink_to_what_brings_them_back(tmp_path, statistics):
    stream = StreamOptions(shard_steps=AN_UPDATE, full_bytes=1)
    plain = run(tmp_path / "plain", statistics, options(6, dataclasses.replace(stream, full_bytes=2**40)))
    result = run(tmp_path / "small", statistics, options(6, stream), source=source(_whole_pool))
    manifests = [read_manifest(path / MANIFEST) for path in result.shards]
    assert [manifest.get("shrunk", False) for manifest in manifests] == [True] * (len(manifests) - 1) + [False]
    assert [manifest["digest"] for manifest in manifests] == [digest for _, digest in digests(plain)]
    again = regenerate_shard(result.shards[0], _whole_pool)
    full = open_shard(plain.shards[0])
    assert again.records["observation"].tobytes() == full.records["observation"].tobytes()


def _whole_pool(manifest, names):
    chosen = [catalog().environment(names[index]) for index in sorted(names)]
    return make_pool(chosen, seed=manifest["origin"]["seed"])


def test_shrinking_that_fails_keeps_the_full_records_and_the_training(tmp_path, statistics):
    def wrong_pool(manifest, names):
        return make_pool([catalog().environment(names[index]) for index in sorted(names)], seed=6)

    stream = StreamOptions(shard_steps=AN_UPDATE, full_bytes=1)
    result = run(tmp_path, statistics, options(6, stream), source=source(wrong_pool))
    assert result.reason == "budget"
    assert all(not read_manifest(path / MANIFEST).get("shrunk") for path in result.shards)
    assert "does not come back" in result.unshrunk or "environment" in result.unshrunk


def test_warm_up_is_not_recorded(tmp_path, statistics):
    chosen = options(3, warm_up=tiny_warm_up(episodes=100))
    result = run(tmp_path, statistics, chosen, expert=DemonstratorPlayer())
    counts = steps_by_ordinal(result)
    assert set(counts) == {1, 2, 3}
    assert counts[1] < counts[3] <= AN_UPDATE  # the rest of the episodes that the expert began is left out
    for path in result.shards:
        shard = open_shard(path)
        assert (shard.records["step"][shard.episodes["first"].astype(int)] == 0).all()
        assert (shard.records["last_action"][shard.episodes["first"].astype(int)] == ACTION_COUNT).all()


def test_source_of_another_pool_is_refused(tmp_path, statistics):
    with pytest.raises(LearningError, match="a source of 3 environments"):
        run(tmp_path, statistics, options(1), source=LiveSource(np.arange(3, dtype=np.uint32)))


class ToldPool(TinyPool):
    """With the outcomes that a shard keeps of an episode; it does not say what its steps made or used."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        for name in ("mode", "machine"):
            setattr(self, f"result_{name}", np.zeros(self.size, np.int8))
        self.result_elapsed_seconds = np.zeros(self.size, np.float32)


def tiny_run(directory, chosen, **changes):
    changes.setdefault("action_names", ACTION_NAMES)
    pool = ToldPool(truncating=changes.pop("truncating", False))
    return train(pool, tiny_statistics(), chosen, directory=directory, simulator_version="tiny 1", **changes)


def test_any_pool_can_be_recorded(tmp_path):
    chosen = dataclasses.replace(tiny_options(budget_steps=1_024), stream=StreamOptions())
    result = tiny_run(tmp_path, chosen, truncating=True)
    shard = open_shard(result.shards[0])
    assert len(shard.records) == 1_024
    assert shard.names[3] == "tiny-3"
    assert (shard.episodes["final"] >= 0).all()
    assert shard.parents(0).tolist() == [[0], [1], [2], [4]]
    assert "origin" not in shard.manifest


def test_resuming_in_a_pool_that_cannot_be_played_again_leaves_out_what_was_running(tmp_path):
    changes = {"ppo": {}, "checkpoint_every": NOT_DUE}
    chosen = tiny_options(budget_steps=64 * 6 * 3, **changes)
    chosen = dataclasses.replace(chosen, stream=StreamOptions(), ppo=dataclasses.replace(chosen.ppo, rollout_steps=6))
    whole = tiny_run(tmp_path / "whole", chosen)
    part = tiny_run(tmp_path / "part", chosen, stop=after(1))
    resumed = tiny_run(tmp_path / "part", chosen, resume=part.checkpoint)
    assert resumed.package.digest == whole.package.digest
    assert sum(steps_by_ordinal(whole).values()) == 64 * 18
    assert sum(steps_by_ordinal(resumed).values()) == 64 * 14


def test_replay_needs_the_trajectories_of_the_checkpoint(tmp_path):
    chosen = tiny_options(budget_steps=1_024)
    recorded = tiny_shard(size=8)
    first = tiny_run(tmp_path, chosen)
    with pytest.raises(CheckpointError, match="without recorded trajectories"):
        tiny_run(tmp_path, chosen, resume=first.checkpoint, recorded=[_with_sizes(recorded)])


def _with_sizes(shard):
    """What a sample set wants besides: an array whose address it may take."""
    shard.files, shard.policies, shard.graph = (), [{"ordinal": 0}], np.zeros(len(shard.records), np.uint64)
    shard.still_whole = lambda: None
    return shard
