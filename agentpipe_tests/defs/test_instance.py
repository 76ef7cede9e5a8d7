"""What an error chain says of the home, whatever its shape."""

from __future__ import annotations

import os
import sqlite3
import subprocess

import pytest

from agentpipe.defs.instance import causes, typed_storage_errors
from agentpipe.errors import DiskFullError, GateError, HomeError


def ring() -> tuple[Exception, Exception]:
    """Two errors, each raised while the other was handled, as re-raising in nested handlers leaves them."""
    first, second = GateError("first"), RuntimeError("second")
    first.__context__, second.__context__ = second, first
    return first, second


def test_a_chain_of_causes_is_walked_once_even_when_it_is_a_ring():
    first, second = ring()
    assert list(causes(first)) == [first, second]


def test_an_error_in_a_ring_reaches_its_caller_unchanged(tmp_path):
    first, _ = ring()
    with pytest.raises(GateError, match="first"), typed_storage_errors(tmp_path):
        raise first


@pytest.mark.parametrize(
    ("said", "typed"), [("database or disk is full", DiskFullError), ("database is locked", HomeError)]
)
def test_what_sqlite_says_becomes_a_typed_error(tmp_path, said, typed):
    error = RuntimeError("an event could not be stored")
    error.__context__ = sqlite3.OperationalError(said)
    with pytest.raises(typed), typed_storage_errors(tmp_path):
        raise error


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two mebibytes; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk, leave):
    """Fills ``disk`` to the last page but ``leave`` bytes."""
    found = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(found.f_bavail * found.f_frsize - leave))


@pytest.mark.parametrize("leave", range(0, 17 * 4096, 4096))
def test_wherever_sqlite_runs_out_of_space_the_disk_is_said_to_be_full(small_disk, leave):
    """With its log's index out of room it answers "disk I/O error", with its log "database or disk is full"."""
    fill(small_disk, leave)
    with pytest.raises(DiskFullError), typed_storage_errors(small_disk):  # noqa: PT012
        log = sqlite3.connect(small_disk / "log.db")
        log.execute("pragma journal_mode=wal")
        log.execute("create table event (body blob)")
        for _ in range(100):
            log.execute("insert into event values (zeroblob(5000))")
            log.commit()


def test_a_full_disk_further_down_the_chain_is_a_full_disk(tmp_path):
    error = RuntimeError("an event could not be stored")
    error.__context__ = sqlite3.OperationalError("disk I/O error")
    error.__context__.__context__ = OSError(28, "No space left on device")
    with pytest.raises(DiskFullError), typed_storage_errors(tmp_path):
        raise error


def test_an_error_of_the_log_on_a_disk_with_room_is_of_the_home(tmp_path):
    error = RuntimeError("an event could not be stored")
    error.__context__ = sqlite3.OperationalError("disk I/O error")
    with pytest.raises(HomeError, match="disk I/O error"), typed_storage_errors(tmp_path):
        raise error
