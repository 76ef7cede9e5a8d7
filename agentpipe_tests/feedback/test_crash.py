"""kill -9 at any instant: everything of a batch or nothing, and in the end every row once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from agentpipe.errors import DiskFullError
from agentpipe.feedback import batch as batch_module
from agentpipe.feedback import intake as intake_module
from agentpipe.feedback.labelled import read_labelled
from agentpipe.feedback.store import day_state, days, quarantined, read_day
from agentpipe_tests.feedback.examples import DAY, Home, decision, label

ROWS = [decision(), label(), decision("d2", time="2026-03-30T00:00:00Z"), "nonsense"]
KILLS = 12
_KILLED = """
import os, signal, sys
from pathlib import Path
from agentpipe.feedback import csvfile, parquetfile
from agentpipe_tests.feedback.examples import Home

kills, steps = int(sys.argv[2]), 0

def counting(last):
    def count(frame, event, argument):
        global steps
        if event == "call" and "agentpipe/feedback" in frame.f_code.co_filename:
            steps += 1
            if steps == last:
                os.kill(os.getpid(), signal.SIGKILL)
    return count

def run(name, last):
    home = Home(Path(sys.argv[1]) / name)
    sys.setprofile(counting(last))
    home()
    sys.setprofile(None)

run("whole", 0)
whole, steps = steps, 0
for number in range(kills):
    if not os.fork():
        run(f"killed-{number}", 1 + number * (whole - 2) // (kills - 1))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def fill(home):
    home.drop("a.jsonl", *ROWS)
    home.drop("b.jsonl", decision("d3"))
    (home.inbox / "c.jsonl").mkdir()


def content(home):
    return (
        [day.isoformat() for day in days(home.store)],
        [day_state(home.store, day).digest for day in days(home.store)],
        [(row.file, row.line, row.reason) for row in quarantined(home.store)],
    )


def test_killed_at_any_call_a_batch_counts_whole_or_not_at_all_and_in_the_end_once(tmp_path):
    whole, *killed = [Home(tmp_path / name) for name in ("whole", *(f"killed-{number}" for number in range(KILLS)))]
    for home in (whole, *killed):
        fill(home)
    script = [sys.executable, "-c", _KILLED, str(tmp_path), str(KILLS)]
    codes = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split()
    assert codes == [str(-signal.SIGKILL)] * KILLS
    expected = content(whole)
    seen = set()
    for home in killed:
        found = content(home)
        assert found in (([], [], []), expected)
        seen.add(found == expected)
        home()
        assert content(home) == expected
        assert home.names() == ["refused", "taken"]
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("module", "step"),
    [(batch_module, "judge"), (batch_module, "part_path"), (intake_module, "put_away"), (batch_module, "end_part")],
)
def test_an_interrupt_in_the_middle_changes_nothing_in_the_end(home, monkeypatch, module, step):
    fill(home)
    original, calls = getattr(module, step), []

    def fail_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(module, step, fail_second)
    with pytest.raises(KeyboardInterrupt):
        home()
    monkeypatch.setattr(module, step, original)
    assert content(home)[0] in ([], ["2026-03-29", "2026-03-30"])
    report = home()
    assert (report["decisions"], report["labels"]) == (2, 1)
    assert read_day(home.store, days(home.store)[1])[0].num_rows == 1
    assert sorted(row.reason for row in quarantined(home.store)) == ["not_a_file", "not_json"]
    assert not [path for path in home.store.rglob("*") if path.name.startswith(".staging-")]


def test_a_full_disk_is_said_and_nothing_was_taken(home, monkeypatch):
    fill(home)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentpipe.feedback.parts.os.fsync", full)
    with pytest.raises(DiskFullError):
        home()
    monkeypatch.undo()
    assert content(home) == ([], [], [])
    assert home()["decisions"] == 2


@pytest.mark.slow
def test_readers_beside_a_writer_see_whole_batches_only(home):
    """The writer takes pairs of a decision and its label; no reader ever sees one without the other."""
    writer = """
import sys
from pathlib import Path
from agentpipe_tests.feedback.examples import Home, decision, label
home = Home(Path(sys.argv[1]))
for number in range(25):
    home.drop("a.jsonl", decision(f"d{number}"), label(f"l{number}", decision_id=f"d{number}"))
    home()
"""
    process = subprocess.Popen([sys.executable, "-c", writer, str(home.inbox.parent)])
    looks = set()
    while process.poll() is None:
        state = day_state(home.store, DAY)
        assert state.decisions == state.labels == state.labelled == state.trainable
        rows = read_labelled(home.store, DAY)
        assert len(rows) >= state.trainable
        looks.add(len(rows))
        time.sleep(0.01)
    assert process.returncode == 0
    assert len(looks) > 3
    assert len(read_labelled(home.store, DAY)) == 25


def test_many_small_files_in_one_call_lose_and_double_nothing(home):
    home.inbox.mkdir()
    for number in range(500):
        (home.inbox / f"{number:05d}.jsonl").write_text(json.dumps(decision(f"d{number}")) + "\n")
    assert home()["decisions"] == 500
    assert len(home.names("taken")) == 500
    assert len(list(home.store.glob("*/*.parquet"))) == 1
