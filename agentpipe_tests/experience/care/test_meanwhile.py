"""Looking while others write: what changes meanwhile is looked at again, and nobody is disturbed."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from agentpipe.environments.layout import REASONS
from agentpipe.errors import LockHeldError
from agentpipe.experience.care import check as checks
from agentpipe.experience.care.check import check_home, check_shard
from agentpipe.experience.care.holdings import look_at
from agentpipe.experience.store.lock import CHECK, LOCK, WriterLock
from agentpipe.experience.store.shard import open_shard
from agentpipe.experience.store.writer import ShardWriter

from .homes import make_home, record_line, specs

NAMES = {spec.index: spec.environment_id for spec in specs()}


def test_a_shard_that_is_sealed_while_it_is_checked_is_whole_and_gets_no_new_files(tmp_path, monkeypatch):
    folder = tmp_path / "updates-000001"
    writer = record_line(folder, seal=False)
    holder_of = checks.holder_of

    def sealed_now(path):
        if look_at(path).state == "open":
            writer.seal(path, names=NAMES, reasons=REASONS)
        return holder_of(path)

    monkeypatch.setattr(checks, "holder_of", sealed_now)
    assert check_shard(look_at(folder)).damages == []
    assert not (folder / LOCK).exists()
    assert not (folder / "index").exists()


def test_a_shard_that_is_recorded_anew_while_it_is_checked_is_looked_at_again(tmp_path, monkeypatch):
    folder, read, times = tmp_path / "shard", checks.read_manifest, iter((True,))
    record_line(folder)

    def anew(path):
        manifest = read(path)
        if next(times, False):
            shutil.rmtree(folder)
            record_line(folder, steps=60)
        return manifest

    monkeypatch.setattr(checks, "read_manifest", anew)
    checked = check_shard(look_at(folder))
    assert checked.damages == []
    assert checked.steps == len(open_shard(folder).records)


def test_a_shard_that_is_deleted_while_it_is_checked_is_no_problem(tmp_path, monkeypatch):
    home = tmp_path / "home"
    make_home(home, cells=("sensor-1",))
    extra = record_line(home / "trajectories/sensor-1/other", first_episode=70).path
    look = checks._look_once

    def gone(holding):
        if holding.path == extra:
            shutil.rmtree(extra)
        return look(holding)

    monkeypatch.setattr(checks, "_look_once", gone)
    assert check_home(home).ok


def test_a_writer_waits_for_a_check_and_refuses_to_wait_for_another_writer(tmp_path):
    folder = tmp_path / "shard"
    with record_line(folder, seal=False) as writer:
        header = writer.header
        with pytest.raises(LockHeldError, match="a test"):
            WriterLock(folder, "another")
    lock = WriterLock(folder, CHECK)
    release = threading.Timer(0.3, lock.release)
    release.start()
    began = time.monotonic()
    with ShardWriter.open(folder, header) as writer:
        assert writer.episodes
    assert time.monotonic() - began >= 0.25
    release.join()
