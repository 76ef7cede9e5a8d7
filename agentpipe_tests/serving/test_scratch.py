"""A server's folder of temporary files: whose process is gone is removed at the next start, nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentpipe.errors import ServiceError
from agentpipe.serving import scratch
from agentpipe.serving.scratch import Scratch, remove_abandoned
from agentpipe.serving.server import TritonServer
from agentpipe.serving.triton_install import TritonInstallation

HOLDER = """
import sys
from agentpipe.serving.scratch import Scratch
made = Scratch(sys.argv[1])
(made.path / "server.log").touch()
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of temporary files, and in it one in place of shared memory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(scratch, "_SHARED", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    yield tmp_path
    tempfile.tempdir = None


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_is_removed_with_its_shared_memory_and_a_second_time_is_fine(folder):
    made = Scratch("agentpipe_1_2")
    assert (made.path / "lock").read_text() == "agentpipe_1_2"
    (folder / "shm" / "agentpipe_1_2region").touch()
    (folder / "shm" / "agentpipe_1_3region").touch()
    for _ in range(2):
        made.remove()
    assert names(folder) == ["shm"]
    assert names(folder / "shm") == ["agentpipe_1_3region"]


def test_what_a_killed_process_left_is_removed_at_the_next_start_and_a_living_one_s_is_not(folder):
    (folder / "shm" / "agentpipe_7_8region").touch()
    command = [sys.executable, "-c", HOLDER, "agentpipe_7_8"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        theirs = Path(holder.stdout.readline().strip())
        mine = Scratch("agentpipe_1_2")
        assert theirs.is_dir()
        assert theirs.parent == folder
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert remove_abandoned() == 1
    assert names(folder) == sorted(["shm", mine.path.name])
    assert names(folder / "shm") == []
    mine.remove()


def test_old_folders_without_a_lock_go_and_young_ones_links_and_files_stay(folder):
    for name in ("agentpipe-triton-old", "agentpipe-triton-young", "other"):
        (folder / name).mkdir()
    for name in ("agentpipe-triton-old", "other"):
        os.utime(folder / name, (1, 1))
    (folder / "agentpipe-triton-file").touch()
    (folder / "agentpipe-triton-link").symlink_to("other")
    assert remove_abandoned() == 1
    left = ["agentpipe-triton-file", "agentpipe-triton-link", "agentpipe-triton-young", "other", "shm"]
    assert names(folder) == left


@pytest.mark.parametrize("text", ["../x", "*", "", "agentpipe_1_2/../../x", "\xff"])
def test_a_lock_that_names_anything_else_removes_no_more_than_its_folder(folder, text):
    for place in ("agentpipe-triton-a", "shm/kept"):
        (folder / place).mkdir()
    (folder / "agentpipe-triton-a" / "lock").write_text(text)
    assert remove_abandoned() == 1
    assert names(folder) == ["shm"]
    assert names(folder / "shm") == ["kept"]


def test_a_server_that_cannot_be_started_leaves_no_folder(folder, tmp_path):
    with pytest.raises(ServiceError, match="cannot be started"):
        TritonServer(tmp_path, TritonInstallation(tmp_path / "none", tmp_path / "none"))
    assert names(folder) == ["shm"]
