"""Files on their way into the inbox: whole, under a name of their own, whoever else submits at the moment."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentpipe.errors import HomeError
from agentpipe.feedback.inbox import digests, ignored, listing, submit
from agentpipe_tests.feedback.examples import decision, drop


def without_links(*_):
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_files_of_one_name_submitted_at_once_all_arrive(home, tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", without_links)
    paths = [tmp_path / str(number) / "a.jsonl" for number in range(16)]
    for number, path in enumerate(paths):
        drop(path.parent, path.name, [decision(f"d{number}")])
    with ThreadPoolExecutor(8) as executor:
        placed = list(executor.map(lambda path: submit(path, home.inbox), paths))
    assert len(set(placed)) == 16
    assert home.names() == sorted(path.name for path in placed)
    assert [path.read_text() for path in placed] == [path.read_text() for path in paths]
    assert home()["decisions"] == 16


def test_a_name_that_is_taken_is_given_with_the_digest_and_then_with_a_number(home, tmp_path):
    drop(tmp_path, "a.jsonl", [decision()])
    first, second, third, fourth = (submit(tmp_path / "a.jsonl", home.inbox) for _ in range(4))
    assert first.name == "a.jsonl"
    assert second.name.startswith("a-")
    assert len(second.stem) == len("a-") + 12
    assert (third.name, fourth.name) == (f"{second.stem}-2.jsonl", f"{second.stem}-3.jsonl")
    assert home()["rows_already"] == 3


def test_a_link_that_leads_nowhere_is_not_replaced(home, tmp_path):
    drop(tmp_path, "a.jsonl", [decision()])
    home.inbox.mkdir()
    (home.inbox / "a.jsonl").symlink_to(tmp_path / "nowhere")
    assert submit(tmp_path / "a.jsonl", home.inbox).name.startswith("a-")
    assert (home.inbox / "a.jsonl").is_symlink()


def test_what_is_not_looked_at_is_listed_with_the_reason(home):
    for name in (".hidden.jsonl", ".x", "a.json", "notes", ".staging-1", "a.jsonl"):
        home.put(name, b"{}")
    for name in ("folder", "taken", "refused"):
        (home.inbox / name).mkdir()
    found = ignored(home.inbox)
    assert set(found) == {".hidden.jsonl", ".x", "a.json", "notes", "folder"}
    assert found[".hidden.jsonl"] == found[".x"]
    assert "a hidden name" in found[".x"]
    assert found["a.json"] == "ending .json; .jsonl, .ndjson, .csv and .parquet are read"
    assert [path.name for path in listing(home.inbox)] == ["a.jsonl"]


def test_whatever_lies_in_the_inbox_has_a_digest_and_nothing_is_waited_for(home, tmp_path):
    home.put("a.jsonl", b"{}")
    home.put("b.jsonl", b"{}")
    (home.inbox / "folder.jsonl").mkdir()
    os.mkfifo(home.inbox / "pipe.jsonl")  # who opens it as a file waits for ever
    (home.inbox / "link.jsonl").symlink_to(tmp_path / "nowhere")
    (home.inbox / "ring.jsonl").symlink_to(home.inbox / "ring.jsonl")
    (home.inbox / os.fsdecode(b"\xff.jsonl")).write_bytes(b"{}")
    found = digests(home.inbox)
    assert len(found) == 7
    assert len(set(found)) == 5  # three of equal content
    assert digests(home.inbox) == found
    home()
    assert home.names() == ["refused", "taken"]
    assert digests(home.inbox) == []


def test_an_inbox_that_is_not_there_holds_nothing_and_one_that_is_no_folder_is_said(home):
    assert (listing(home.inbox), ignored(home.inbox), digests(home.inbox)) == ([], {}, [])
    home.inbox.write_text("x")
    for look in (listing, ignored, digests):
        with pytest.raises(HomeError):
            look(home.inbox)
