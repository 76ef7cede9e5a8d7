"""Compaction: many shards become one, in order, and nobody who is referred to goes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from agentpipe.errors import CorruptError, InputError, RecordError
from agentpipe.experience.care.check import check_folder
from agentpipe.experience.care.compaction import compact
from agentpipe.experience.care.operations import compact_shards
from agentpipe.experience.store.shard import open_shard
from agentpipe_tests.experience.fakes import make_episodes, write_shard

from .homes import checkpoint, make_home, record_line


def contents(shards):
    """Every episode with all that belongs to it, but for places in the files and checksums."""
    found = {}
    for shard in shards:
        for row, episode in enumerate(shard.episodes):
            steps = shard.steps(row).copy()
            policies = [shard.policies[policy]["version"] for policy in steps["policy"]]
            final = shard.final(row)
            fields = ("action", "reward", "observation", "time_ns", "value", "mask", "terminated", "truncated")
            found[int(episode["environment"]), int(episode["episode"])] = (
                [steps[field].tolist() for field in fields],
                policies,
                shard.parents(row).tolist(),
                None if final is None else final["observation"].tolist(),
                [episode[field].item() for field in ("steps", "return", "success", "reason", "mode", "cut", "time_ns")],
            )
    return found


@pytest.fixture
def three(tmp_path):
    rng = np.random.default_rng(1)
    policies = [
        [{"player": "a", "version": "1", "ordinal": 0}, {"player": "b", "version": "2", "ordinal": 1}],
        [{"player": "b", "version": "2", "ordinal": 1}, {"player": "c", "version": "3", "ordinal": 2}],
        [{"player": "d", "version": "4", "ordinal": 3}, {"player": "a", "version": "1", "ordinal": 0}],
    ]
    return [
        write_shard(
            tmp_path / f"part-{number}",
            make_episodes(rng, 40, max_steps=70, cut_share=0.3, first_episode=8 * number),
            changes={"policies": listed},
        )
        for number, listed in enumerate(policies)
    ]


def test_every_episode_is_in_the_merged_shard_as_it_was_and_in_order(three, tmp_path):
    merged = compact([shard.path for shard in three], tmp_path / "all")
    assert contents([merged]) == contents(three)
    keys = merged.episodes["environment"].astype(np.int64) << 32 | merged.episodes["episode"]
    assert (np.diff(keys) > 0).all()
    assert [policy["version"] for policy in merged.policies] == ["1", "2", "3", "4"]
    assert merged.names == three[0].names
    assert check_folder(tmp_path).ok


def test_the_order_of_the_shards_does_not_matter(three, tmp_path):
    one = compact([shard.path for shard in three], tmp_path / "one")
    other = compact([shard.path for shard in reversed(three)], tmp_path / "two")
    assert one.digest == other.digest


def test_the_merged_shard_is_that_of_one_recording(tmp_path):
    """Two halves of the line's episodes are, merged, what one recording of all of them gives."""
    home = tmp_path / "home"
    make_home(home, cells=())
    parts = [record_line(home / f"part-{first}", first_episode=first) for first in (0, 50)]
    merged = compact([part.path for part in parts], home / "merged")
    assert contents([merged]) == contents(parts)
    assert merged.manifest["origin"] == parts[0].manifest["origin"]


def test_an_episode_that_occurs_twice_is_named(tmp_path):
    paths = [write_shard(tmp_path / name).path for name in ("a", "b")]
    with pytest.raises(RecordError, match="an episode occurs twice, in a and b") as caught:
        compact(paths, tmp_path / "all")
    assert caught.value.where == {"environment": 100, "episode": 0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_other_recordings_single_shards_and_occupied_places_are_refused(three, tmp_path):
    stranger = write_shard(
        tmp_path / "load", make_episodes(np.random.default_rng(3), 5, first_episode=99), changes={"cell": "load-1"}
    )
    with pytest.raises(InputError, match="load is another recording than part-0") as caught:
        compact([three[0].path, stranger.path], tmp_path / "all")
    assert caught.value.where["field"] == "cell"
    for paths in ([], [three[0].path], [three[0].path, three[0].path]):
        with pytest.raises(InputError, match="fewer than two"):
            compact(paths, tmp_path / "all")
    with pytest.raises(InputError, match="something lies"):
        compact([three[0].path, three[1].path], three[2].path)


def test_a_damaged_shard_is_named_and_nothing_is_left_behind(three, tmp_path):
    data = bytearray((three[1].path / "records.bin").read_bytes())
    data[1000] ^= 1
    (three[1].path / "records.bin").write_bytes(data)
    with pytest.raises(CorruptError):
        compact([shard.path for shard in three], tmp_path / "all")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-0", "part-1", "part-2"]


def test_rollouts_of_a_training_are_merged_unless_a_checkpoint_names_them(tmp_path):
    home = tmp_path / "home"
    make_home(home)
    folder = home / "policy_checkpoint/2026-01-01_manual/feedfacefeedface/experience"
    parts = [record_line(folder / f"updates-{first:06d}", purpose="TRAIN", first_episode=first) for first in (0, 60)]
    expected = contents(parts)
    checkpoint(home, parts[1])
    with pytest.raises(InputError, match="updates-000060 cannot be merged: checkpoint update-000020-abc"):
        compact_shards(home, [], partition="2026-01-01|manual")
    assert len(list(folder.iterdir())) == 2
    shutil.rmtree(home / "policy_checkpoint/2026-01-01_manual/feedfacefeedface/checkpoints/update-000020-abc")
    merged = compact_shards(home, [], partition="2026-01-01|manual")
    assert contents([open_shard(merged.path)]) == expected
    assert [path.name for path in folder.iterdir()] == ["updates-000000-compact"]
    assert merged.manifest["quality"]["episodes"] == len(expected)


def test_a_merged_shard_inside_one_of_its_sources_would_go_with_it(tmp_path):
    home = tmp_path / "home"
    make_home(home)
    folder = home / "policy_checkpoint/2026-01-01_manual/feedfacefeedface/experience"
    parts = [record_line(folder / f"updates-{first:06d}", purpose="TRAIN", first_episode=first) for first in (0, 60)]
    for out in (parts[0].path / "merged", parts[1].path / "a" / ".." / "merged", parts[0].path):
        with pytest.raises(InputError, match="inside one of those"):
            compact_shards(home, [part.path for part in parts], out=out)
    assert all(open_shard(part.path).digest == part.digest for part in parts)


def test_current_trajectories_are_not_merged(tmp_path):
    home = tmp_path / "home"
    shards = make_home(home)
    other = record_line(home / "trajectories/sensor-1/other", first_episode=70)
    with pytest.raises(InputError, match=r"trajectories\[sensor-1\] refers to it"):
        compact_shards(home, [shards["sensor-1"].path, other.path])
