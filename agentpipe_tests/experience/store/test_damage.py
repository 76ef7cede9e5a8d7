"""Files of an open shard that are cut, altered or gone: a typed error, never a signal, never nothing."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest

from agentpipe.environments.layout import REASONS
from agentpipe.errors import CorruptError, DiskFullError
from agentpipe.experience.care.check import check_folder
from agentpipe.experience.care.operations import check
from agentpipe.experience.store import recovery
from agentpipe.experience.store.header import read_header
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.recovery import recover
from agentpipe.experience.store.writer import ShardWriter
from agentpipe_tests.experience.fakes import header, make_episodes, names


@pytest.fixture
def folder(tmp_path):
    """Twenty episodes, LevelDB in a table of its own."""
    with ShardWriter.open(tmp_path / "open", header(), capacity=16) as writer:
        writer.append(*make_episodes(np.random.default_rng(0), 20))
    ShardWriter.open(tmp_path / "open", header(), capacity=16).close()
    return tmp_path / "open"


def change(path, place, bit=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["missing", "empty", "folder"])
def test_a_lost_counter_does_not_make_an_empty_shard(folder, damage):
    counter = folder / "counter.bin"
    counter.unlink()
    if damage == "empty":
        counter.touch()
    elif damage == "folder":
        counter.mkdir()
    assert not check_folder(folder).ok
    if damage == "folder":
        return
    with pytest.raises(CorruptError, match="counter"):
        ShardWriter.open(folder, header())
    assert check(folder.parent / "nohome", folder=folder, fix=True).episodes == 20


def test_records_outlive_the_loss_of_header_and_counter_at_once(folder):
    (folder / "header.json").unlink()
    for place in (3, 67):
        change(folder / "counter.bin", place)
    before = (folder / "records.bin").read_bytes()
    with pytest.raises(CorruptError):
        ShardWriter.open(folder, header())
    assert (folder / "records.bin").read_bytes() == before


@pytest.mark.parametrize("name", ["records.bin", "episodes.bin", "graph.bin"])
@pytest.mark.parametrize("how", ["seal", "view", "recorded", "find"])
def test_a_file_that_is_cut_under_its_writer_is_an_error_and_no_signal(folder, name, how):
    if (name != "episodes.bin" and how == "recorded") or (name != "records.bin" and how == "find"):
        return
    with ShardWriter.open(folder, header()) as writer:
        first = writer.recorded[0].copy()
        os.truncate(folder / name, 0)
        process = os.fork()
        if not process:  # a signal would end the tests
            writer._lock.process = os.getpid()
            try:
                if how == "seal":
                    writer.seal(folder, names=names(), reasons=REASONS)
                elif how == "find":
                    writer.find_step(int(first["environment"]), int(first["episode"]) << 16, int(first["time_ns"]))
                else:
                    getattr(writer, how)() if how == "view" else writer.recorded
            except CorruptError:
                os._exit(7)
            os._exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7


def test_every_flipped_bit_of_a_header_is_noticed_and_put_back(folder):
    path, rng = folder / "header.json", np.random.default_rng(0)
    whole = path.read_bytes()
    for place in [*rng.integers(0, len(whole), 40).tolist(), 0, len(whole) - 2]:
        change(path, place, 1 << int(rng.integers(0, 7)))
        try:
            told = json.loads(path.read_bytes())
        except ValueError:
            told = None
        if told == json.loads(whole):  # a blank of another kind
            path.write_bytes(whole)
            continue
        assert not check_folder(folder).ok, place
        if told is not None and told.get("format") != 2:  # of another version, as far as anyone can tell
            path.write_bytes(whole)
            continue
        assert check(folder.parent / "nohome", folder=folder, fix=True).ok
        assert len(open_live(folder).episodes) == 20
        path.write_bytes(whole)


def test_a_header_of_before_there_was_a_checksum_is_taken(folder):
    path = folder / "header.json"
    told = json.loads(path.read_bytes())
    told.pop("checksum")
    path.write_text(json.dumps(told))
    assert read_header(folder).content["cell"]
    path.write_text(json.dumps({**told, "checksun": "0"}))
    with pytest.raises(CorruptError, match="checksum"):
        read_header(folder)


def test_leveldb_that_is_damaged_is_made_again_and_never_answers_wrongly(folder):
    table = max((folder / "index").glob("*.ldb"))
    size, rng = table.stat().st_size, np.random.default_rng(1)
    for place in rng.integers(0, size, 25).tolist():
        table = max((folder / "index").glob("*.ldb"))
        change(table, min(place, table.stat().st_size - 1), 64)
        with ShardWriter.open(folder, header()) as writer:
            for row in writer.recorded:
                number = writer.find_step(int(row["environment"]), int(row["episode"]) << 16)
                assert number == int(row["first"])
        ShardWriter.open(folder, header()).close()


def test_a_damaged_table_of_leveldb_is_a_problem(folder):
    change(max((folder / "index").glob("*.ldb")), 30, 64)
    problem = check_folder(folder).problems[0]
    assert problem.file == "index"
    assert check(folder.parent / "nohome", folder=folder, fix=True).ok


def test_a_recovery_that_is_killed_between_its_renames_leaves_a_shard(folder, monkeypatch):
    change(folder / "records.bin", 40)

    class KilledError(BaseException):
        pass

    def killed(*_):
        raise KilledError

    monkeypatch.setattr(recovery, "move", killed)
    with pytest.raises(KilledError):
        recover(folder)
    assert len(open_live(folder).episodes) == 19


def test_a_shard_is_taken_up_where_there_is_room_for_what_it_holds_and_no_more(folder, monkeypatch):
    allocate = os.posix_fallocate

    def full(descriptor, offset, size):
        if size > 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with ShardWriter.open(folder, header()) as writer:
        assert writer.episodes == 20


def test_a_check_on_a_full_disk_says_that_leveldb_was_not_looked_at(folder, monkeypatch):
    def full(*_, **__):
        raise DiskFullError("the disk is full", file=folder)

    monkeypatch.setattr("agentpipe.experience.care.check.OpenIndex", full)
    report = check_folder(folder)
    assert report.ok
    assert list(report.held.values()) == ["nobody, but the disk is full"]
