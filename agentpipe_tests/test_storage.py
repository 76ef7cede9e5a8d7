"""Durable writes: whatever the operating system says of a path is a typed error that names it."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path

import pytest

from agentpipe import storage
from agentpipe.errors import CorruptError, DiskFullError, HomeError
from agentpipe.storage import home_lock, prepare_home, publish_directory, read_json, typed_os_errors, write_bytes


@pytest.mark.parametrize("place", [lambda path: path.symlink_to("gone/lock"), os.mkfifo, lambda path: path.mkdir()])
def test_a_link_a_pipe_or_a_folder_in_place_of_the_lock_is_said(tmp_path, place):
    prepare_home(tmp_path)
    place(tmp_path / "lock")
    with pytest.raises(HomeError, match="lock"), home_lock(tmp_path, "test"):
        raise AssertionError


@pytest.mark.parametrize("name", ["lock", "format.json"])
def test_a_folder_in_place_of_a_file_ended_in_a_traceback(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises((HomeError, CorruptError)) as caught, home_lock(tmp_path, "test"):
        pass
    assert str(caught.value.where["file"]) == str(tmp_path / name)
    assert caught.value.remedy


def test_writing_over_a_folder_names_it_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "last_run.json").mkdir()
    with pytest.raises(HomeError) as caught:
        write_bytes(tmp_path / "last_run.json", b"{}")
    assert caught.value.where["file"] == tmp_path / "last_run.json"
    assert [path.name for path in tmp_path.iterdir()] == ["last_run.json"]


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "line_profile").write_text("junk")
    with pytest.raises(HomeError) as caught:
        write_bytes(tmp_path / "line_profile" / "x.json", b"{}")
    assert "line_profile" in str(caught.value.where["file"])
    with pytest.raises(HomeError), publish_directory(tmp_path / "line_profile" / "x"):
        pass


def test_a_directory_that_is_replaced_is_never_missing(tmp_path: Path) -> None:
    final, missing, over = tmp_path / "shard", [], threading.Event()
    with publish_directory(final) as staging:
        (staging / "0").touch()

    def watch() -> None:
        while not over.is_set():
            if not final.is_dir():
                missing.append(True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(1, 100):
        with publish_directory(final) as staging:
            (staging / str(number)).touch()
    over.set()
    watcher.join()
    assert not missing
    assert [path.name for path in final.iterdir()] == ["99"]
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_file_or_a_directory_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(storage, "exchange", lambda *_: False)  # as on a system that cannot
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    for name in ("file", "folder"):
        with publish_directory(tmp_path / name) as staging:
            (staging / "new").touch()
        assert [path.name for path in (tmp_path / name).iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_json_nested_without_end_is_damage(tmp_path: Path) -> None:
    (tmp_path / "format.json").write_text("[" * 100_000)
    with pytest.raises(CorruptError) as caught:
        prepare_home(tmp_path)
    assert caught.value.where["file"] == tmp_path / "format.json"


def test_json_that_is_a_folder_is_damage(tmp_path: Path) -> None:
    with pytest.raises(CorruptError):
        read_json(tmp_path)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EFBIG, DiskFullError),
        (errno.EROFS, HomeError),
        (errno.EACCES, HomeError),
        (errno.EISDIR, HomeError),
        (errno.EEXIST, HomeError),
        (errno.ENAMETOOLONG, HomeError),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value.__name__,
)
def test_what_the_system_says_of_a_path_is_typed(tmp_path: Path, number: int, kind: type[Exception]) -> None:
    with pytest.raises(kind), typed_os_errors(tmp_path):
        raise OSError(number, os.strerror(number))


def test_the_limit_of_a_files_size_ended_in_a_traceback(tmp_path: Path) -> None:
    write_bytes(tmp_path / "kept", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(DiskFullError):
            write_bytes(tmp_path / "kept", bytes(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("kept", b"old")]


@pytest.mark.parametrize(
    "text",
    ['{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"\\uDFFF": 1}', "1" * 5_000],
)
def test_json_that_nobody_wrote_is_an_error_of_its_file(tmp_path, text):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(CorruptError, match=r"not valid JSON.*file\.json"):
        read_json(tmp_path / "file.json")


def test_a_character_of_two_escapes_is_read(tmp_path):
    (tmp_path / "file.json").write_text('"\\ud83d\\ude00"')
    assert read_json(tmp_path / "file.json") == "😀"


def test_a_full_disk_does_not_keep_anyone_from_making_room(tmp_path, monkeypatch):
    prepare_home(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with home_lock(tmp_path, "retention"):
        pass
