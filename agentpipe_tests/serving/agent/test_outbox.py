"""Handing on: every decision reaches the intake once, wherever the process dies."""

from __future__ import annotations

import datetime as dt
import errno
import json
import os
import pathlib
import shutil
import time
from pathlib import Path

import pytest

from agentpipe.errors import DiskFullError, StoreError
from agentpipe.feedback.intake import take
from agentpipe.feedback.rules import Rules
from agentpipe.feedback.schema import FeedbackShape
from agentpipe.feedback.store import days, decisions_of, quarantine_counts
from agentpipe.serving.agent.journal import Journal
from agentpipe.serving.agent.outbox import InboxSink, Shipper, StreamSink
from agentpipe_tests.redis_server import redis_server
from agentpipe_tests.serving.agent.questions import answer, ended, frame


class Home:
    """An agent's folders and the intake of the same home."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.inbox, self.store = root / "feedback" / "inbox", root / "feedback" / "store"
        self.agent = root / "agent" / "a"

    def journal(self):
        return Journal(self.agent / "journal")

    def shipper(self, journal, **options):
        sink = InboxSink(self.agent / "outbox", self.inbox)
        return Shipper(journal, sink, agent="a", **options)

    def taken(self):
        """Takes what lies in the inbox; id and result of every decision there is then."""
        rules = Rules(FeedbackShape(5, 4), dt.datetime.now(dt.UTC))
        take(self.inbox, self.store, rules)
        assert quarantine_counts(self.store) == {}
        tables = decisions_of(self.store, days(self.store), ["decision_id", "result"])
        return sorted((row["decision_id"], row["result"]) for table in tables for row in table.to_pylist())


def played(journal, orders=2, steps=2):
    """Orders that are over; the ids of their decisions."""
    for order in range(orders):
        for number in range(steps):
            asked = frame(number, order=f"o{order}")
            journal.decide(asked, answer(number), until=time.monotonic() + 30)
        journal.ended(ended(f"o{order}", result="late" if order else "done", success=not order))
    return [(f"l1-o{order}-{n}", "late" if order else "done") for order in range(orders) for n in range(steps)]


def test_decisions_of_an_order_arrive_with_its_result(tmp_path):
    home = Home(tmp_path)
    journal = home.journal()
    expected = played(journal)
    assert home.shipper(journal).ship() == 4
    assert journal.backlog == 0
    assert home.taken() == expected
    assert home.shipper(journal).ship() == 0
    assert home.taken() == expected
    journal.close()


class KilledError(BaseException):
    """The process dies here."""


@pytest.mark.parametrize("step", ["write", "note", "noted", "rename", "send", "sent"])
def test_killed_at_any_step_nothing_is_lost_and_nothing_comes_twice(tmp_path, monkeypatch, step):
    home = Home(tmp_path / "before")
    journal = home.journal()
    expected = played(journal)
    kill_at(monkeypatch, step)
    with pytest.raises(KilledError):
        home.shipper(journal).ship()
    monkeypatch.undo()
    after = Home(shutil.copytree(home.root, tmp_path / "after").parent / "after")
    journal.close()
    again = after.journal()
    after.shipper(again).ship()
    assert after.taken() == expected
    after.shipper(again).ship()
    assert after.taken() == expected
    assert list((after.agent / "outbox").iterdir()) == []
    again.close()


def kill_at(monkeypatch, step):
    module = "agentpipe.serving.agent.outbox"
    rename, note, write = pathlib.Path.rename, Journal.shipped, __import__(module, fromlist=["x"]).write_bytes

    def dying(real, before=True):
        def call(*arguments):
            if not before:
                real(*arguments)
            raise KilledError

        return call

    if step == "write":
        monkeypatch.setattr(f"{module}.write_bytes", dying(write, before=False))
    elif step in ("note", "noted"):
        monkeypatch.setattr(Journal, "shipped", dying(note, before=step == "note"))
    else:

        def renaming(path, target):
            own = (target.parent.name == "inbox") == (step in ("send", "sent"))
            if own and step in ("rename", "send"):
                raise KilledError
            found = rename(path, target)
            if own:
                raise KilledError
            return found

        monkeypatch.setattr(pathlib.Path, "rename", renaming)


def test_an_inbox_on_another_file_system_gets_a_copy(tmp_path, monkeypatch):
    home = Home(tmp_path)
    journal = home.journal()
    expected = played(journal)
    rename = pathlib.Path.rename

    def across(path, target):
        if path.parent.name == "outbox" and target.parent.name == "inbox":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", across)
    home.shipper(journal).ship()
    assert [path.suffix for path in home.inbox.iterdir()] == [".jsonl"]
    assert home.taken() == expected
    journal.close()


def test_while_the_inbox_cannot_be_written_decisions_stay_due(tmp_path):
    home = Home(tmp_path)
    journal = home.journal()
    expected = played(journal)
    home.inbox.parent.mkdir()
    home.inbox.touch()  # a file lies where the inbox belongs
    shipper = home.shipper(journal)
    with pytest.raises(StoreError):
        shipper.ship()
    home.inbox.unlink()
    shipper.ship()
    assert home.taken() == expected
    journal.close()


def test_a_full_disk_under_the_outbox_is_tried_again(tmp_path, monkeypatch):
    home = Home(tmp_path)
    journal = home.journal()
    expected = played(journal)
    shipper = home.shipper(journal)

    def full(path, data):
        raise DiskFullError("the disk is full", file=path)

    with monkeypatch.context() as patch:
        patch.setattr("agentpipe.serving.agent.outbox.write_bytes", full)
        with pytest.raises(DiskFullError):
            shipper.ship()
    shipper.ship()
    assert home.taken() == expected
    journal.close()


def test_the_thread_hands_on_by_itself_and_says_why_it_cannot(tmp_path):
    home = Home(tmp_path)
    journal = home.journal()
    home.inbox.parent.mkdir(parents=True)
    home.inbox.touch()
    shipper = home.shipper(journal, every=0.01)
    shipper.start()
    expected = played(journal)
    wait_for(lambda: shipper.trouble)
    home.inbox.unlink()
    shipper.wake()
    wait_for(lambda: not journal.backlog and not shipper.trouble)
    shipper.close()
    journal.close()
    assert home.taken() == expected


def test_what_is_due_at_the_end_is_handed_on_before_the_thread_ends(tmp_path):
    home = Home(tmp_path)
    journal = home.journal()
    shipper = home.shipper(journal, every=1_000.0)
    shipper.start()
    expected = played(journal)
    shipper.close()
    journal.close()
    assert home.taken() == expected


def wait_for(condition, seconds=30.0):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def flipped(path, where):
    """Changes one byte of a record on the disk."""
    data = bytearray(path.read_bytes())
    data[data.index(where.encode()) + len(where)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flipped", "zeros"])
def test_a_record_that_is_damaged_on_the_disk_holds_up_no_other(tmp_path, damage):
    home, said = Home(tmp_path), []
    journal = Journal(home.agent / "journal", damaged=tmp_path / "damaged", say=said.append)
    expected = played(journal)
    (segment,) = (home.agent / "journal").glob("*.log")
    if damage == "flipped":
        flipped(segment, '"decision_id":"l1-o0-1')
    else:
        (entry,) = (known.entry for known in journal.decisions() if known.decision_id == "l1-o0-1")
        data = bytearray(segment.read_bytes())
        data[entry.offset : entry.offset + entry.length] = bytes(entry.length)
        segment.write_bytes(data)
    assert home.shipper(journal).ship() == 3
    assert (journal.backlog, journal.damaged) == (0, 1)
    assert said[0].startswith("damage: decision l1-o0-1 is not handed on: a record is damaged")
    assert len(list((tmp_path / "damaged").iterdir())) == 1
    journal.close()
    journal = Journal(home.agent / "journal", damaged=tmp_path / "damaged", say=said.append)
    assert home.shipper(journal).ship() == 0
    assert home.taken() == [each for each in expected if each[0] != "l1-o0-1"]
    assert len(list((tmp_path / "damaged").iterdir())) == 1, "the same bytes are kept once"
    assert said[1].startswith("damage: 1 records of the journal cannot be read")
    journal.close()


def test_a_segment_that_is_gone_costs_its_decisions_alone(tmp_path):
    home, said = Home(tmp_path), []
    journal = Journal(home.agent / "journal", say=said.append, segment_bytes=1)
    expected = played(journal)
    entry = next(known.entry for known in journal.decisions())
    journal.log.path(entry.segment).unlink()
    home.shipper(journal).ship()
    assert home.taken() == expected[1:]
    assert len(said) == 1
    assert "the segment is gone" in said[0]
    journal.close()


def test_a_disk_that_cannot_be_read_now_costs_no_decision(tmp_path, monkeypatch):
    home = Home(tmp_path)
    journal = home.journal()
    expected = played(journal)
    with monkeypatch.context() as patch:
        real = pathlib.Path.open

        def failing(path, *arguments):
            if path.suffix == ".log":
                raise OSError(errno.EIO, "Input/output error")
            return real(path, *arguments)

        patch.setattr(pathlib.Path, "open", failing)
        with pytest.raises(StoreError, match="Input/output error"):
            home.shipper(journal).ship()
    assert journal.backlog == 4
    home.shipper(journal).ship()
    assert home.taken() == expected
    journal.close()


def test_what_is_not_the_agents_in_the_outbox_is_passed_over_and_said_once(tmp_path):
    home, said = Home(tmp_path), []
    outbox = home.agent / "outbox"
    for name in ("folder", "folder.jsonl", ".staged-folder.jsonl"):
        (outbox / name).mkdir(parents=True)
    (outbox / "notes.txt").write_text("mine")
    (outbox / "link.jsonl").symlink_to(outbox / "notes.txt")
    (outbox / ".staging-xyz").write_text("half")
    journal = home.journal()
    expected = played(journal)
    shipper = home.shipper(journal, say=said.append)
    shipper.ship()
    shipper._recovered = False
    shipper.ship()
    assert home.taken() == expected
    left = {"folder", "folder.jsonl", ".staged-folder.jsonl", "notes.txt", "link.jsonl"}
    assert {path.name for path in outbox.iterdir()} == left
    assert len(said) == len(left)
    assert all("is passed over" in text for text in said)
    journal.close()


def test_trouble_in_handing_on_is_said_when_it_begins_and_ends_and_what_waits_is_counted(tmp_path):
    home, said = Home(tmp_path), []
    journal = home.journal()
    expected = played(journal)
    home.inbox.parent.mkdir()
    home.inbox.touch()  # a file lies where the inbox belongs
    shipper = home.shipper(journal, every=0.01, on_trouble=said.append)
    assert shipper.backlog == 4
    shipper.start()
    wait_for(lambda: said)
    assert (journal.backlog, shipper.backlog) == (0, 4), "what lies in the outbox has not arrived"
    assert home.shipper(journal).backlog == 4, "also after a restart"
    home.inbox.unlink()
    shipper.wake()
    wait_for(lambda: len(said) == 2)
    assert shipper.backlog == 0
    assert said[0]
    assert said[1] == ""
    shipper.close()
    journal.close()
    assert home.taken() == expected


def test_whatever_a_sink_raises_the_thread_goes_on(tmp_path):
    home, said = Home(tmp_path), []
    journal = home.journal()
    expected = played(journal)
    shipper = home.shipper(journal, every=0.01, on_trouble=lambda why: (said.append(why), 1 / 0))
    real = shipper._sink.hand_on
    failures = [ValueError("odd"), RecursionError("deep")]

    def odd(*arguments):
        if failures:
            raise failures.pop()
        return real(*arguments)

    shipper._sink.hand_on = odd
    shipper.start()
    wait_for(lambda: len(said) == 2)
    shipper.close()
    journal.close()
    assert said == ["RecursionError: deep", ""]
    assert home.taken() == expected


@pytest.fixture
def redis_url():
    with redis_server() as server:
        yield server.url


@pytest.mark.redis
def test_what_a_stream_has_already_is_not_sent_again_after_a_crash(tmp_path, redis_url, monkeypatch):
    from agentpipe.feedback.stream import FeedbackStream, take_stream

    home = Home(tmp_path)
    journal = home.journal()
    expected = played(journal)
    shipper = Shipper(journal, StreamSink(redis_url, "decisions"), agent="a")
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "shipped", lambda *_: False)  # dies before it can note that they are there
        with pytest.raises(StoreError):
            shipper.ship()
    shipper.ship()
    assert shipper.ship() == 0
    shipper.close()
    journal.close()
    rules = Rules(FeedbackShape(5, 4), dt.datetime.now(dt.UTC))
    done = take_stream(FeedbackStream(redis_url, "decisions", "group"), home.store, rules)
    assert (done.rows_taken, done.rows_already, done.quarantined) == (4, 0, {})
    assert home.taken() == expected


def test_names_of_files_say_whose_they_are(tmp_path):
    home = Home(tmp_path)
    journal = home.journal()
    played(journal)
    home.shipper(journal).ship()
    (path,) = home.inbox.iterdir()
    assert path.name.startswith("agent-a-")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"decision"}
    assert os.access(path, os.R_OK)
    journal.close()
