"""``agentpipe feedback`` over a home that cannot be written, or not be read: who only reads can, the rest says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.environments.datafiles import data_dir
from agentpipe.errors import LockHeldError
from agentpipe.feedback.index import index_path, reading, writing
from agentpipe.feedback.store import days

SAMPLE = data_dir() / "feedback_sample.jsonl"
KILLED = """
import os, sys
from pathlib import Path
from agentpipe.feedback.index import writing

with writing(Path(sys.argv[1])) as connection:
    connection.execute("UPDATE days SET labelled = 0")
    connection.commit()
    os._exit(9)
"""
READING = [["status"], ["quarantine"], ["label"]]
WRITING = [["submit"], ["take"], ["retry", "--late-days", "10000"], ["label", "--annotator", "kim", "--answers"]]


@pytest.fixture
def disk(tmp_path):
    """A file system of three mebibytes with a home that holds days and a quarantine; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    (tmp_path / "late.jsonl").write_text(SAMPLE.read_text().replace("sample-", "late-"))
    (tmp_path / "sheet.csv").write_text("decision_id,verdict\nsample-0-0,wrong\n")
    for file, late_days in ((SAMPLE, "10000"), (tmp_path / "late.jsonl", "1")):
        assert run(folder, "submit", str(file))["ok"]
        assert run(folder, "take", "--late-days", late_days)["ok"]
    (folder / "home" / "feedback" / "inbox" / "new.jsonl").write_text("{}\n")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def run(folder, *arguments):
    """What a command says as JSON; anything but an answer or a typed error goes through."""
    command = ["feedback", *arguments, "--home", str(folder / "home"), "--json"]
    return json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)


def with_file(tmp_path, command):
    file = {"submit": SAMPLE, "label": tmp_path / "sheet.csv"}.get(command[0])
    return [*command, str(file)] if file and command != ["label"] else command


def is_read(folder):
    """Days and quarantine are what they were."""
    status = run(folder, "status")
    assert [day["decisions"] for day in status["days"]] == [24, 0]
    assert status["quarantine"] == run(folder, "quarantine")["counts"] == {"late": 36}
    assert status["inbox"] == ["new.jsonl"]
    assert len(run(folder, "label")["decisions"]) == 12
    return True


def mount(folder, how):
    subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)


def fill(folder, leave):
    found = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - leave)))


def test_a_home_that_may_only_be_read_is_read_and_the_rest_says_so(disk, tmp_path):
    mount(disk, "ro")
    assert is_read(disk)
    for command in WRITING:
        assert run(disk, *with_file(tmp_path, command))["error"]["type"] == "HomeError", command


@pytest.mark.parametrize("leave", [0, 8 * 1024])
def test_a_home_on_a_full_disk_is_read_and_the_rest_says_so(disk, tmp_path, leave):
    fill(disk, leave)
    assert is_read(disk)
    for command in WRITING:
        error = run(disk, *with_file(tmp_path, command))["error"]
        assert error["type"] == "DiskFullError", command
    (disk / "filler").unlink()
    assert is_read(disk)


@pytest.mark.parametrize("leave", [20 * 1024, 36 * 1024, 64 * 1024, 96 * 1024])
def test_wherever_the_disk_becomes_full_nothing_is_half_done(disk, tmp_path, leave):
    fill(disk, leave)
    assert is_read(disk)
    for command in WRITING[2:]:
        found = run(disk, *with_file(tmp_path, command))
        assert found["ok"] or found["error"]["type"] == "DiskFullError", command
    (disk / "filler").unlink()
    for command in (*WRITING[1:], ["retry", "--late-days", "10000"]):
        assert run(disk, *with_file(tmp_path, command))["ok"]
    status = run(disk, "status")
    assert sum(day["decisions"] for day in status["days"]) == 48
    assert sum(day["labels"] for day in status["days"]) == 25
    assert status["quarantine"] == {"unknown_kind": 1}


def test_what_a_killed_writer_left_is_not_passed_over_on_a_disk_that_may_only_be_read(disk):
    store = disk / "home" / "feedback" / "store"
    subprocess.run([sys.executable, "-c", KILLED, store], check=False)
    assert index_path(store).with_name("index.sqlite3-wal").stat().st_size
    index_path(store).with_name("index.sqlite3-shm").unlink()
    mount(disk, "ro")
    error = run(disk, "status")["error"]
    assert (error["type"], error["where"]["file"]) == ("HomeError", str(index_path(store)))


def test_an_index_that_is_written_while_it_is_read_as_it_lies_there_is_said(disk):
    store = disk / "home" / "feedback" / "store"
    mount(disk, "ro")
    with pytest.raises(LockHeldError, match="written meanwhile"), reading(store) as connection:  # noqa: PT012
        assert connection is not None
        mount(disk, "rw")
        with writing(store) as other:
            other.execute("UPDATE days SET labelled = 0")
    assert len(days(store)) == 2


@pytest.fixture
def nobody():
    """Someone who may not do everything."""
    if os.geteuid():
        pytest.skip("tests as a user that may change to another")
    os.seteuid(65_534)
    yield
    os.seteuid(0)


@pytest.mark.parametrize("place", ["", "feedback", "feedback/inbox", "feedback/store", "feedback/store/index.sqlite3"])
def test_a_place_without_permission_is_a_typed_error(disk, tmp_path, request, place):
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005 and path.owner() == "root":
            path.chmod(path.stat().st_mode | 0o005)
    subprocess.run(["chown", "-R", "nobody", disk], check=True)
    (disk / "home" / place).chmod(0)
    request.getfixturevalue("nobody")
    for command in (*READING, *WRITING):
        found = run(disk, *with_file(tmp_path, command))
        assert found["ok"] or found["error"]["type"] == "HomeError", (command, found)
        assert not (found["ok"] and command == ["status"])
