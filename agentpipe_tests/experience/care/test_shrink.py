"""Shrinking: seeds and actions stay, and every byte comes back."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from agentpipe.errors import CorruptError, DiskFullError, InputError, ShrunkError, VersionError
from agentpipe.experience.care import shrink as shrinking
from agentpipe.experience.care.check import check_folder
from agentpipe.experience.care.shrink import regenerate_shard, restore, shrink
from agentpipe.experience.origin import home_pools, origin
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import fill
from agentpipe.experience.store.manifest import complete, read_manifest
from agentpipe.experience.store.shard import is_shrunk, open_shard
from agentpipe.storage import write_json
from agentpipe_tests.experience.fakes import write_shard
from agentpipe_tests.experience.store.contract import EpisodeStoreContract, split

from .homes import make_home, record_line


@pytest.fixture
def home(tmp_path):
    make_home(tmp_path / "home", cells=())
    return tmp_path / "home"


@pytest.fixture
def shard(home):
    return record_line(home / "trajectories/sensor-1/key")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rewrite(path, **changes):
    manifest = read_manifest(path / "manifest.json")
    write_json(path / "manifest.json", complete({**manifest, **changes}, manifest["sealed"]["files"]))


def test_shrinking_keeps_the_digest_and_restoring_brings_every_byte_back(home, shard):
    before = content(shard.path)
    freed = shrink(shard.path, home_pools(home))
    left = content(shard.path)
    assert freed == sum(map(len, before.values())) - sum(map(len, left.values())) + len(left["manifest.json"]) - len(
        before["manifest.json"]
    )
    assert set(before) - set(left) == {rec.RECORDS, rec.FINALS, rec.GRAPH}
    assert len(left["compact.bin"]) == 32 * len(shard.records)
    assert is_shrunk(shard.path)
    assert read_manifest(shard.path / "manifest.json")["digest"] == shard.digest
    with pytest.raises(ShrunkError):
        open_shard(shard.path)
    assert restore(shard.path, home_pools(home)).digest == shard.digest
    assert content(shard.path) == before


@pytest.mark.parametrize("purpose", ["COLLECT", "TRAIN"])
def test_a_shrunk_shard_can_be_read_in_memory(home, purpose):
    shard = record_line(home / "shard", purpose=purpose, first_episode=5)
    expected = [np.array(part).tobytes() for part in (shard.records, shard.episodes, shard.finals, shard.graph)]
    shrink(shard.path, verify=False)
    again = regenerate_shard(shard.path, home_pools(home))
    assert [part.tobytes() for part in (again.records, again.episodes, again.finals, again.graph)] == expected
    assert again.digest == shard.digest
    assert (again.episodes["cut"] == 1).any()
    assert is_shrunk(shard.path)


def test_shrinking_and_restoring_twice_changes_nothing(home, shard):
    assert restore(shard.path, home_pools(home)).digest == shard.digest
    assert shrink(shard.path, home_pools(home)) > 0
    left = content(shard.path)
    assert shrink(shard.path, home_pools(home)) == 0
    assert content(shard.path) == left


def test_a_reader_keeps_its_records_while_the_shard_shrinks(home, shard):
    rewards = shard.records["reward"].copy()
    shrink(shard.path, home_pools(home))
    shard.still_whole()
    np.testing.assert_array_equal(shard.records["reward"], rewards)


def test_what_does_not_come_back_as_it_was_stays_full(home, shard):
    records = np.fromfile(shard.path / rec.RECORDS, shard.records.dtype)
    records["reward"][17] += 1
    fill(records)
    records.tofile(shard.path / rec.RECORDS)
    with pytest.raises(CorruptError):
        shrink(shard.path, home_pools(home))
    assert (shard.path / rec.RECORDS).exists()
    assert not (shard.path / "compact.bin").exists()


def test_another_seed_is_found_out_before_anything_goes(home, shard):
    rewrite(shard.path, origin=origin(4, "COLLECT", shard.manifest["origin"]["line_profile"]))
    before = content(shard.path)
    with pytest.raises(CorruptError, match="plays otherwise"):
        shrink(shard.path, home_pools(home))
    assert content(shard.path) == before


def test_other_environments_and_other_simulators_are_refused_by_name(home, shard, tmp_path):
    own = write_shard(tmp_path / "own")
    with pytest.raises(InputError, match="not episodes of the built-in line"):
        shrink(own.path, home_pools(home))
    rewrite(shard.path, simulator_version="0.9.0")
    with pytest.raises(VersionError, match=r"recorded by simulator 0\.9\.0, this program has 1\.0\.0"):
        shrink(shard.path, home_pools(home))


def test_verifying_needs_a_pool(shard):
    with pytest.raises(InputError, match="nothing to verify with"):
        shrink(shard.path)


def test_a_line_profile_or_table_version_that_is_gone_is_named(home, shard):
    rewrite(shard.path, origin=origin(3, "COLLECT", "f" * 64))
    with pytest.raises(InputError, match="no line profile ffffffffffffffff"):
        shrink(shard.path, home_pools(home))


@pytest.mark.parametrize("killed_at", ["compact.bin", "manifest.json"])
def test_a_process_that_dies_on_the_way_leaves_a_whole_shard(home, shard, monkeypatch, killed_at):
    """Before the manifest the full one, after it the shrunk one."""

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shrinking, "write_json" if killed_at == "compact.bin" else "remove_files", die)
    with pytest.raises(KeyboardInterrupt):
        shrink(shard.path, home_pools(home))
    monkeypatch.undo()
    assert check_folder(shard.path).ok
    assert is_shrunk(shard.path) == (killed_at == "manifest.json")
    shrink(shard.path, home_pools(home))
    assert not (shard.path / rec.RECORDS).exists()
    assert restore(shard.path, home_pools(home)).digest == shard.digest


def test_a_full_disk_leaves_the_shard_as_it_was(home, shard, monkeypatch):
    before = content(shard.path)

    def full(path, _):
        raise DiskFullError("the disk is full", file=path) from OSError(errno.ENOSPC, "")

    monkeypatch.setattr(shrinking, "write_bytes", full)
    with pytest.raises(DiskFullError):
        shrink(shard.path, home_pools(home))
    assert content(shard.path) == before


def test_damaged_actions_are_named_before_anything_is_played(home, shard):
    shrink(shard.path, verify=False)
    data = bytearray((shard.path / "compact.bin").read_bytes())
    data[5 * 32 + 20] ^= 1
    (shard.path / "compact.bin").write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        regenerate_shard(shard.path, home_pools(home))
    assert caught.value.where == {"file": shard.path / "compact.bin", "record": 5}


class TestShardMadeAgainFromSeedsAndActions(EpisodeStoreContract):
    """The contract of stores, against what is not stored at all."""

    @pytest.fixture
    def stored(self, tmp_path):
        make_home(tmp_path, cells=())
        path = tmp_path / "trajectories/sensor-1/key"
        full = record_line(path)
        batch = tuple(np.array(part) for part in (full.records, full.episodes, full.finals, full.graph))
        shrink(path, home_pools(tmp_path))
        return regenerate_shard(path, home_pools(tmp_path)), list(split(batch))
