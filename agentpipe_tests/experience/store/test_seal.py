"""Sealing: whole or not at all, whenever it is cut short."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from agentpipe.errors import DiskFullError, HomeError, RecordError
from agentpipe.experience.store import seal
from agentpipe.experience.store.shard import is_open, open_shard
from agentpipe.experience.store.writer import ShardWriter
from agentpipe_tests.experience.fakes import header, make_episodes, names, write_shard


def filled(path, seed=0, **options):
    writer = ShardWriter.open(path, header(), capacity=16, **options)
    writer.append(*make_episodes(np.random.default_rng(seed), 20, cut_share=0.3))
    return writer


def test_only_names_of_environments_inside_are_kept_and_none_may_lack(tmp_path):
    with filled(tmp_path / "open") as writer:
        with pytest.raises(RecordError) as caught:
            writer.seal(tmp_path / "shard", names={100: "a"}, reasons=[])
        assert caught.value.where["environment"] == 101
    with filled(tmp_path / "other") as writer:
        shard = writer.seal(tmp_path / "shard", names={**names(), 7: "not inside"}, reasons=[])
    assert shard.names == names()


def test_figures_and_measurements_are_kept(tmp_path):
    with filled(tmp_path / "open") as writer:
        shard = writer.seal(
            tmp_path / "shard",
            names=names(),
            reasons=["won"],
            quality=lambda one: {"steps": len(one.records), "found": one.find(100, 0) is not None},
            measurements={"seconds": 1.5},
        )
    assert shard.quality == {"steps": len(shard.records), "found": True}
    assert shard.measurements["seconds"] == 1.5
    assert shard.measurements["write_bytes_per_second"] > 0


def test_what_lies_at_the_final_place_is_replaced_only_at_the_end(tmp_path, monkeypatch):
    old = write_shard(tmp_path / "shard")
    with filled(tmp_path / "open", seed=9) as writer, monkeypatch.context() as patch:
        patch.setattr(seal, "move", lambda *_: (_ for _ in ()).throw(HomeError("no")))
        with pytest.raises(HomeError):
            writer.seal(tmp_path / "shard", names=names(), reasons=[])
    assert open_shard(tmp_path / "shard").digest == old.digest
    with ShardWriter.open(tmp_path / "open", header()) as writer:
        new = writer.seal(tmp_path / "shard", names=names(), reasons=[])
    assert open_shard(tmp_path / "shard").digest == new.digest != old.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard"]
    old.still_whole()


def test_a_shard_can_be_sealed_where_it_is(tmp_path):
    with filled(tmp_path / "shard") as writer:
        writer.seal(tmp_path / "shard", names=names(), reasons=[])
    open_shard(tmp_path / "shard")
    assert not is_open(tmp_path / "shard")


def test_under_power_what_did_not_count_yet_is_sealed_too(tmp_path):
    with filled(tmp_path / "open", durability="power") as writer:
        assert writer.episodes == 0
        assert len(writer.seal(tmp_path / "shard", names=names(), reasons=[]).episodes) == 20


def test_after_sealing_the_place_is_free_for_the_next_shard(tmp_path):
    for name in ("first", "second"):
        with filled(tmp_path / "open") as writer:
            writer.seal(tmp_path / name, names=names(), reasons=[])
    assert open_shard(tmp_path / "first").digest == open_shard(tmp_path / "second").digest


def killed_at(call, path, final):
    """Seals in a child process that dies at its ``call``-th change of the file system; says whether it got there."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [call]

    def dying(real):
        def call_or_die(*arguments, **options):
            left[0] -= 1
            if not left[0]:
                os._exit(9)
            return real(*arguments, **options)

        return call_or_die

    for owner, name in (
        *((os, name) for name in ("rename", "replace", "unlink", "rmdir", "ftruncate", "fsync", "mkdir")),
        *((Path, name) for name in ("rename", "unlink")),
        (shutil, "rmtree"),
    ):
        setattr(owner, name, dying(getattr(owner, name)))
    try:
        with ShardWriter.open(path, header()) as writer:
            writer.seal(final, names=names(), reasons=[])
    finally:
        os._exit(0)


@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_any_change_of_the_file_system_it_leaves_an_open_shard_or_a_sealed_one(quick_path, replaces):
    with filled(quick_path / "open") as writer:
        expected = writer.seal(quick_path / "shard", names=names(), reasons=[]).digest
    seen = set()
    for call in range(1, 200):
        folder = quick_path / str(call)
        if replaces:
            write_shard(folder / "shard", make_episodes(np.random.default_rng(5), 4))
        filled(folder / "open").close()
        reached = killed_at(call, folder / "open", folder / "shard")
        if (folder / "open").exists():
            seen.add("open")
            with ShardWriter.open(folder / "open", header()) as writer:
                assert writer.episodes == 20
                writer.append(*make_episodes(np.random.default_rng(1), 1, first_episode=77))
                assert writer.find(100, 77) == 20
        else:
            seen.add("sealed")
            assert open_shard(folder / "shard").digest == expected
        shutil.rmtree(folder)
        if not reached:
            break
    assert call > 20
    assert seen == {"open", "sealed"}


def test_another_file_system_and_a_file_in_the_way_are_typed_errors(tmp_path, monkeypatch):
    writer = filled(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError):
        writer.seal(tmp_path / "file", names=names(), reasons=[])

    def elsewhere(*_):
        raise OSError(18, "Invalid cross-device link")

    writer = ShardWriter.open(tmp_path / "open", header())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", elsewhere)
        with pytest.raises(HomeError, match="another file system"):
            writer.seal(tmp_path / "shard", names=names(), reasons=[])
    with ShardWriter.open(tmp_path / "open", header()) as writer:
        assert writer.episodes == 20


def test_a_full_disk_while_sealing_leaves_the_open_shard(tmp_path, monkeypatch):
    writer = filled(tmp_path / "open")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(DiskFullError):
            writer.seal(tmp_path / "shard", names=names(), reasons=[])
    with ShardWriter.open(tmp_path / "open", header()) as writer:
        writer.seal(tmp_path / "shard", names=names(), reasons=[]).check()
