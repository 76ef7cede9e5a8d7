"""The journal: each decision recorded once, whatever happens to the process or its disk."""

from __future__ import annotations

import datetime as dt
import errno
import json
import os
import shutil
import time

import numpy as np
import pytest

from agentpipe.errors import CorruptError, VersionError
from agentpipe.serving.agent import wal
from agentpipe.serving.agent.journal import Journal, result_text
from agentpipe.serving.agent.wal import Log, LogFullError
from agentpipe_tests.serving.agent.questions import answer, ended, frame

HOUR = dt.timedelta(hours=1)


def soon():
    return time.monotonic() + 30


def decide(journal, number, action=0, **changes):
    asked = frame(number, **changes)
    journal.decide(asked, answer(action), until=soon())
    return asked


def ids(journal):
    return [known.decision_id for known in journal.decisions()]


class Disk:
    """A disk that can be filled, and whose flush can fail."""

    def __init__(self, monkeypatch):
        self.full = self.failing = False
        self.partly = 0
        write, flush = os.pwrite, os.fsync
        monkeypatch.setattr(wal.os, "pwrite", lambda fd, data, at: self.write(write, fd, data, at))
        monkeypatch.setattr(wal.os, "fsync", lambda fd: self.flush(flush, fd))

    def write(self, real, descriptor, data, offset):
        if self.full:
            if self.partly:  # a full disk takes what still fits
                self.partly, data = 0, data[: self.partly]
                return real(descriptor, data, offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    def flush(self, real, descriptor):
        if self.failing:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


# ------------------------------------------------------------------------------------------------ the log


def records(folder):
    log = Log(folder)
    found = [record["n"] for _, record in log.recovered]
    state = (found, log.damaged, log.torn_bytes)
    log.close()
    return state


def filled(folder, count=3, **options):
    log = Log(folder, **options)
    for n in range(count):
        assert log.flushed(log.append({"k": "x", "n": n}), soon())
    log.close()


def test_a_tail_torn_at_any_byte_costs_the_torn_record_alone(tmp_path):
    filled(tmp_path / "whole")
    (segment,) = (tmp_path / "whole").iterdir()
    data = segment.read_bytes()
    last = data[:-1].rfind(b"\n") + 1
    for size in range(last, len(data) + 1):
        folder = tmp_path / f"cut-{size}"
        folder.mkdir()
        (folder / segment.name).write_bytes(data[:size])
        found, damaged, torn = records(folder)
        assert (found, damaged, torn) == (([0, 1, 2], 0, 0) if size == len(data) else ([0, 1], 0, size - last))
        filled(folder, 1)
        assert records(folder)[0] == ([0, 1, 2, 0] if size == len(data) else [0, 1, 0])


def test_a_tail_of_garbage_is_no_record(tmp_path):
    filled(tmp_path)
    (segment,) = tmp_path.iterdir()
    with segment.open("ab") as file:
        file.write(b"00000000 {}\n\x00\x00\x00")
    assert records(tmp_path) == ([0, 1, 2], 0, 15)


def test_what_is_damaged_is_said_at_the_start_and_its_bytes_are_kept(tmp_path):
    folder, aside, said = tmp_path / "journal", tmp_path / "damaged", []
    filled(folder)
    (segment,) = folder.iterdir()
    whole = segment.read_bytes()
    lines = whole.splitlines(keepends=True)
    bad = [lines[1].replace(b'"n":0', b'"n":5'), lines[2][:9] + b"\x00" + lines[2][10:]]
    segment.write_bytes(lines[0] + bad[0] + bad[1] + lines[3] + b"torn")
    (folder / "taken.log").write_bytes(b"what limits count")
    for starts in (1, 2):
        journal = Journal(folder, damaged=aside, say=said.append)
        journal.close()
        assert sorted(path.read_bytes() for path in aside.iterdir()) == sorted(
            [bad[0] + bad[1], b"torn", b"what limits count"]
        )
        assert journal.damaged == (4 if starts == 1 else 2)
    assert [text.startswith("damage: ") for text in said] == [True] * 4
    assert said[0] == f"damage: 2 records of the journal cannot be read and are left out; the bytes are in {aside}"
    assert said[1].startswith("damage: the journal's last 4 bytes are no whole record")
    assert "what limits count is damaged" in said[2]
    assert said[3] == said[0]


def test_a_journal_that_is_whole_says_nothing(tmp_path):
    said = []
    for number in range(2):
        journal = Journal(tmp_path / "journal", damaged=tmp_path / "damaged", say=said.append)
        decide(journal, number)
        journal.close()
    assert (said, journal.damaged, (tmp_path / "damaged").exists()) == ([], 0, False)


@pytest.mark.parametrize("kind", ["zeros", "no line end"])
def test_damage_without_a_line_end_does_not_hide_the_next_record(tmp_path, kind):
    filled(tmp_path)
    (segment,) = tmp_path.iterdir()
    lines = segment.read_bytes().splitlines(keepends=True)
    lines[2] = bytes(len(lines[2])) if kind == "zeros" else lines[2][:-1] + b"?"
    segment.write_bytes(b"".join(lines))
    assert records(tmp_path) == ([0, 2], 1, 0)


def test_damage_in_the_middle_is_counted_and_hides_nothing_behind_it(tmp_path):
    filled(tmp_path)
    (segment,) = tmp_path.iterdir()
    data = bytearray(segment.read_bytes())
    data[data.index(b'"n":1') + 4] ^= 1
    segment.write_bytes(data)
    assert records(tmp_path) == ([0, 2], 1, 0)


def test_an_empty_segment_and_one_of_another_format(tmp_path):
    filled(tmp_path)
    (tmp_path / "journal-00000002.log").touch()
    assert records(tmp_path)[0] == [0, 1, 2]
    filled(tmp_path, 1)
    assert records(tmp_path)[0] == [0, 1, 2, 0]
    (tmp_path / "journal-00000003.log").write_bytes(wal.encode({"k": "log", "format": 9}))
    with pytest.raises(VersionError, match="format 9"):
        Log(tmp_path)


def test_segments_follow_one_another_and_each_record_can_be_read_again(tmp_path):
    log = Log(tmp_path, segment_bytes=120)
    entries = [log.append({"k": "x", "n": n}) for n in range(10)]
    assert log.flushed(entries[-1], soon())
    assert len(log.segments()) > 3
    assert [log.read(entry)["n"] for entry in entries] == list(range(10))
    log.close()
    assert records(tmp_path)[0] == list(range(10))


def test_what_a_full_disk_does_not_take_waits_in_memory_and_is_written_in_order(tmp_path, disk):
    log = Log(tmp_path, most_waiting=3)
    log.append({"k": "x", "n": 0})
    disk.full, disk.partly = True, 5
    waiting = [log.append({"k": "x", "n": n}) for n in (1, 2)]
    assert not log.flushed(waiting[0], soon()), "nobody waits for a full disk"
    assert (log.waiting, log.trouble) == (2, "No space left on device")
    assert log.append_safely({"k": "x", "n": 99}) is None
    assert [log.read(entry)["n"] for entry in waiting] == [1, 2]
    disk.full = False
    log.tend()
    assert log.flushed(waiting[1], soon())
    assert (log.waiting, log.trouble) == (0, "")
    log.close()
    assert records(tmp_path) == ([0, 1, 2], 0, 0)


def test_beyond_the_limit_nothing_is_taken(tmp_path, disk):
    log = Log(tmp_path, most_waiting=2)
    disk.full = True
    for n in range(2):
        log.append({"k": "x", "n": n})
    with pytest.raises(LogFullError, match="2 records wait for the disk: No space left"):
        log.append({"k": "x", "n": 2})
    disk.full = False
    log.append({"k": "x", "n": 3})
    log.close()
    assert records(tmp_path)[0] == [0, 1, 3]


def test_a_flush_that_failed_is_not_believed_the_next_time(tmp_path, disk):
    log = Log(tmp_path)
    first = log.append({"k": "x", "n": 0})
    assert log.flushed(first, soon())
    disk.failing = True
    second = log.append({"k": "x", "n": 1})
    assert not log.flushed(second, time.monotonic() + 0.2)
    disk.failing = False
    deadline = soon()
    while log.trouble and time.monotonic() < deadline:
        time.sleep(0.02)
    assert log.flushed(second, deadline)
    assert second.segment > first.segment, "written again, elsewhere"
    log.close()
    assert set(records(tmp_path)[0]) == {0, 1}


# -------------------------------------------------------------------------------------------- the journal


def test_a_decision_is_recorded_once_and_found_again_after_a_restart(tmp_path):
    journal = Journal(tmp_path)
    asked = decide(journal, 0, action=2)
    decide(journal, 0, action=3)
    found = journal.find(asked.decision_id)
    assert (found.action, found.policy_version, found.notes) == (2, "p" * 64, ("asked again",))
    journal.close()
    again = Journal(tmp_path)
    assert ids(again) == ["l1-o1-0"]
    assert again.find(asked.decision_id).action == 2
    assert again.find("another") is None
    again.close()


def test_a_killed_process_loses_nothing_that_it_acted_on(tmp_path):
    journal = Journal(tmp_path / "a")
    decide(journal, 0)
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # what the system has when the process is gone
    journal.close()
    again = Journal(tmp_path / "b")
    assert ids(again) == ["l1-o1-0"]
    again.close()


def test_what_was_not_acted_on_is_no_decision(tmp_path):
    journal = Journal(tmp_path)
    for number in range(2):
        decide(journal, number)
    journal.withdraw("l1-o1-0")
    journal.ended(ended())
    journal.close()
    again = Journal(tmp_path)
    assert [name for name, _ in again.due(dt.datetime.now(dt.UTC), HOUR)] == ["l1-o1-1"]
    decide(again, 0, action=3)
    assert again.find("l1-o1-0").action == 3
    again.close()


def test_decisions_are_due_with_the_result_of_their_order_or_without_after_a_time(tmp_path):
    journal = Journal(tmp_path)
    now = dt.datetime.now(dt.UTC)
    decide(journal, 0)
    decide(journal, 0, order="o2")
    assert journal.due(now, HOUR) == []
    journal.ended(ended("o2", result="wrong_depth", success=False))
    ((name, row),) = journal.due(now, HOUR)
    assert (name, row["result"]) == ("l1-o2-0", "wrong_depth")
    late = journal.due(now + 2 * HOUR, HOUR)
    assert [(name, row["result"]) for name, row in late] == [("l1-o1-0", ""), ("l1-o2-0", "wrong_depth")]
    assert journal.shipped("batch", ["l1-o2-0"])
    journal.close()
    again = Journal(tmp_path)
    assert again.backlog == 1
    assert again.was_shipped("batch")
    assert again.find("l1-o2-0") is not None, "still known should it be asked again"
    assert [name for name, _ in again.due(now + 2 * HOUR, HOUR)] == ["l1-o1-0"]
    again.close()


@pytest.mark.parametrize(
    ("result", "success", "text"),
    [("done", True, "done"), ("success", None, "success"), ("late", False, "late"), ("done", False, "failed")],
)
def test_results_read_as_the_intake_reads_them(result, success, text):
    assert result_text(ended(result=result, success=success)) == text


def test_segments_with_nothing_left_to_hand_on_are_removed_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("agentpipe.serving.agent.journal.KEPT_SEGMENTS", 2)
    journal = Journal(tmp_path, segment_bytes=600)
    for number in range(8):
        decide(journal, number, order=f"o{number}")
        journal.ended(ended(f"o{number}"))
        if number != 4:
            assert journal.shipped(f"b{number}", [f"l1-o{number}-{number}"])
    first = min(known.entry.segment for known in journal.decisions())
    assert journal.log.segments()[0] == first
    assert "l1-o4-4" in ids(journal), "what is not handed on is kept, and all that follows"
    assert "l1-o0-0" not in ids(journal)
    journal.close()
    again = Journal(tmp_path)
    assert [name for name, _ in again.due(dt.datetime.now(dt.UTC), HOUR)] == ["l1-o4-4"]
    again.close()


def test_while_the_disk_is_full_decisions_wait_and_are_not_handed_on(tmp_path, disk):
    journal = Journal(tmp_path, most_waiting=4)
    decide(journal, 0)
    disk.full = True
    assert not journal.decide(frame(1), answer(1), until=soon())
    journal.ended(ended())
    assert journal.find("l1-o1-1").action == 1
    assert [name for name, _ in journal.due(dt.datetime.now(dt.UTC), HOUR)] == ["l1-o1-0"]
    assert not journal.shipped("batch", ["l1-o1-0"])
    decide(journal, 2)
    decide(journal, 3)
    with pytest.raises(LogFullError):
        decide(journal, 4)
    disk.full = False
    journal.log.tend()
    assert journal.shipped("batch", ["l1-o1-0"])
    journal.close()
    again = Journal(tmp_path)
    assert ids(again) == ["l1-o1-0", "l1-o1-1", "l1-o1-2", "l1-o1-3"]
    assert again.backlog == 3
    again.close()


def test_a_record_that_lacks_a_field_is_said_to_be_corrupt(tmp_path):
    tmp_path.joinpath("journal-00000001.log").write_bytes(wal.encode({"k": "decision", "row": {}}))
    with pytest.raises(CorruptError, match="decision_id"):
        Journal(tmp_path)


def test_numbers_come_back_as_they_went(tmp_path):
    journal = Journal(tmp_path)
    values = np.array([0.1, -1e-30, 3.4e38, 1 / 3, 0], np.float32)
    asked = frame(observation=values)
    journal.decide(asked, answer(), until=soon())
    journal.ended(ended())
    ((_, row),) = journal.due(dt.datetime.now(dt.UTC), HOUR)
    assert np.array(json.loads(json.dumps(row["observation"])), np.float32).tobytes() == values.tobytes()
    journal.close()
