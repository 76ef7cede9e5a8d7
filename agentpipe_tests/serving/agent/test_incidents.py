"""Incidents: one from loss to return, with a report that is kept, sent, and survives a killed process."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from pydantic import SecretStr

from agentpipe.errors import DiskFullError
from agentpipe.serving.agent import incidents
from agentpipe.serving.agent.clocks import ClockWatch
from agentpipe.serving.agent.incident_text import report
from agentpipe.serving.agent.incidents import Incident, IncidentBook, read_incidents
from agentpipe.serving.agent.probes import Change
from agentpipe.settings import AgentSettings
from agentpipe_tests.serving.agent.frames import FakeDecider, frame
from agentpipe_tests.serving.agent.waiting import until
from agentpipe_tests.test_alerts import Receiver

QUICK = AgentSettings(probe_every=0.01)  # quiet after 0.03 s
SLOW = AgentSettings(probe_every=1_000.0)
ANSWER = FakeDecider("local").decide(frame(), 1.0)


def change(part="triton", up=False, reason="away"):
    return Change(part, up, reason, dt.datetime.now(dt.UTC), time.monotonic())


@pytest.fixture
def books():
    made = []

    def make(folder, settings=SLOW, **options):
        made.append(IncidentBook(folder, "line-1", settings, **options))
        return made[-1]

    yield make
    for book in made:
        book.close()


def stored(folder):
    return [(each.part, each.status) for each in read_incidents(folder)]


def test_an_incident_opens_with_a_loss_and_closes_with_the_return(books, tmp_path):
    book = books(tmp_path, QUICK)
    book.note(change())
    until(lambda: stored(tmp_path) == [("triton", "open")])
    assert book.open_count == 1
    book.decided(ANSWER, 0.002)
    book.decided(ANSWER, 0.004, late=True)
    book.note(change(up=True, reason="good probes"))
    until(lambda: stored(tmp_path) == [("triton", "closed")])
    found = read_incidents(tmp_path)[0]
    assert (found.decided, found.late, found.latency_max) == ({"local": 2}, 1, 0.004)
    assert [text for _, text in found.events] == ["lost: away", "back: good probes"]
    assert book.open_count == 0


def test_the_report_says_when_what_effect_what_was_done_and_what_to_do():
    opened = dt.datetime(2026, 11, 30, 6, 0, tzinfo=dt.UTC)
    incident = Incident("x", "line-1", "triton", opened, losses=1)
    incident.tell(opened, "lost: away")
    incident.decided.update({"local": 3})
    incident.latency_sum, incident.latency_max = 0.006, 0.003
    text = report(incident, AgentSettings())
    for line in (
        "# Incident: triton (open)",
        "| opened | 2026-11-30T06:00:00+00:00 |",
        "- 2026-11-30T06:00:00+00:00 lost: away",
        "3 decisions, 0 of them late; 2.0 ms on average, 3.0 ms at most.",
        "| local | 3 |",
        "## What was done",
        "By itself, about 30 s after the cause is gone: it is probed every 10 s and back after 3 good probes.",
        "## What to do by hand",
    ):
        assert line in text.splitlines()


def test_flapping_is_one_incident(books, tmp_path):
    book = books(tmp_path)
    for _ in range(120):
        book.note(change())
        book.note(change(up=True))
    book.close()
    found = read_incidents(tmp_path)
    assert [(each.losses, each.returns, each.status) for each in found] == [(120, 120, "closed")]
    assert (len(found[0].events), found[0].unlisted) == (100, 140)


def test_sensors_of_a_line_are_one_incident_until_all_are_back(books, tmp_path):
    book = books(tmp_path, QUICK)
    book.note(change("sensor line: current of machine 2", reason="frozen"))
    book.note(change("sensor line: force of machine 1", reason="frozen"))
    book.note(change("sensor line: current of machine 2", up=True))
    until(lambda: stored(tmp_path) == [("sensor line", "open")])
    book.note(change("sensor line: force of machine 1", up=True))
    until(lambda: stored(tmp_path) == [("sensor line", "closed")])


def test_the_return_of_what_was_never_lost_is_none(books, tmp_path):
    book = books(tmp_path)
    book.note(change(up=True))
    assert book.open_count == 0


def test_the_end_of_the_process_ends_what_is_open(books, tmp_path):
    book = books(tmp_path)
    book.note(change())
    book.close()
    assert stored(tmp_path) == [("triton", "stopped")]


def test_a_killed_agents_incident_is_found_and_closed_as_interrupted(books, tmp_path):
    code = (
        "import datetime as dt, pathlib, sys, time\n"
        "from agentpipe.serving.agent.incidents import IncidentBook\n"
        "from agentpipe.serving.agent.probes import Change\n"
        "from agentpipe.settings import AgentSettings\n"
        "book = IncidentBook(pathlib.Path(sys.argv[1]), 'line-1', AgentSettings())\n"
        "book.note(Change('triton', False, 'away', dt.datetime.now(dt.UTC), time.monotonic()))\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    until(lambda: stored(tmp_path) == [("triton", "open")])
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    book = books(tmp_path)
    until(lambda: stored(tmp_path) == [("triton", "interrupted")])
    assert book.open_count == 0
    markdown = next(tmp_path.glob("*.md")).read_text()
    assert "# Incident: triton (interrupted)" in markdown
    assert "the one before was killed" in markdown


def test_a_full_disk_delays_the_report_and_blocks_nobody(books, tmp_path, monkeypatch):
    def full(path, data):
        raise DiskFullError("the disk is full", file=path)

    monkeypatch.setattr(incidents, "_SAVE_EVERY", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr(incidents, "write_bytes", full)
        book = books(tmp_path, QUICK)
        book.note(change("disk"))
        book.note(change("triton"))
        book.note(change("triton", up=True))
        book.decided(ANSWER, 0.001)
        until(lambda: book.open_count == 1)
        assert stored(tmp_path) == []
    until(lambda: sorted(stored(tmp_path)) == [("disk", "open"), ("triton", "closed")])


def test_opening_and_closing_are_told_to_the_webhook_which_holds_up_nobody(books, tmp_path):
    receiver = Receiver()
    receiver.answers.append((200, {}, b"ok", 0.5))
    book = books(tmp_path, QUICK, webhook=SecretStr(receiver.url))
    book.note(change())
    until(lambda: stored(tmp_path) == [("triton", "open")])
    book.note(change(up=True))
    until(lambda: len(receiver.got) == 2)
    titles = [message["blocks"][0]["text"]["text"] for message in receiver.got]
    assert titles == ["line-1: triton lost", "line-1: incident of triton closed"]
    assert "What to do by hand" in receiver.got[0]["text"]
    book.close()
    receiver.server.shutdown()
    receiver.server.server_close()


def test_old_reports_go(books, tmp_path, monkeypatch):
    monkeypatch.setattr(incidents, "KEPT", 3)
    for day in range(5):
        opened = dt.datetime(2026, 11, 1 + day, tzinfo=dt.UTC)
        content = Incident(f"202611{day:02d}", "line-1", "disk", opened, "closed").to_json()
        (tmp_path / f"202611{day:02d}.json").write_text(json.dumps(content))
        (tmp_path / f"202611{day:02d}.md").write_text("")
    books(tmp_path)
    until(lambda: len(list(tmp_path.glob("*.md"))) == 3)
    assert [each.name for each in read_incidents(tmp_path)] == ["20261102", "20261103", "20261104"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"name": 1}', "\x00"])
def test_a_damaged_file_is_left_out(tmp_path, text):
    (tmp_path / "20261130.json").write_text(text)
    assert read_incidents(tmp_path) == []


GOOD = Incident("20260101T000000-disk", "a", "disk", dt.datetime(2026, 1, 1, tzinfo=dt.UTC), losses=1).to_json()
DAMAGE = [
    *({"opened": value} for value in ("2026-01-01T00:00:00", 5, None, "tomorrow")),
    *({"ended": value} for value in ("2026-01-01T00:00:00", 5, [])),
    *({"events": value} for value in (None, 3, [["2026-01-01T00:00:00", "x"]], [["x"]], [[1, 2]], [["a", ["b"]]])),
    *({"decided": value} for value in (None, ["a"], {"local": "x"}, {"local": -1}, {"local": 1.5}, {"a\n": 1})),
    *({"latency_sum": value} for value in ("x", None, -1.0, True, [])),
    *({"name": value} for value in ("../../evil", "a/b", "a\x00b", "", 3, None, "20260101T000000-other", "..")),
    *({"part": value} for value in (7, None, "", "a\x00", "a\nb")),
    *({"status": value} for value in ("zzz", None)),
    *({"losses": value} for value in ("1", 1.5, -1, 10**30)),
    {"more": 1},
]


def test_a_malformed_incident_is_left_out_and_said_and_costs_no_other(books, tmp_path):
    """Each kind of damage under a name of its own, in one folder with one that is good."""
    folder, said = tmp_path / "agent" / "incidents", []
    folder.mkdir(parents=True)
    (folder / "20260101T000000-disk.json").write_text(json.dumps(GOOD))
    for number, change_of in enumerate(DAMAGE):
        name = f"20260102T{number:06d}-disk"
        (folder / f"{name}.json").write_text(json.dumps({**GOOD, "name": name, **change_of}))
    (folder / "20260103-folder.json").mkdir()
    (folder / "20260103-link.json").symlink_to(folder / "20260101T000000-disk.json")
    os.mkfifo(folder / "20260103-pipe.json")
    (folder / "20260103-deep.json").write_text("[" * 100_000)
    (folder / "20260103-long.json").write_text(json.dumps({**GOOD, "events": [["x", "y" * incidents.LARGEST]]}))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    book = books(folder, QUICK, say=said.append)
    until(lambda: [each.status for each in read_incidents(folder)] == ["interrupted"])
    book.note(change())
    until(lambda: len(read_incidents(folder)) == 2)
    assert sorted(each.part for each in read_incidents(folder)) == ["disk", "triton"]
    new = {path.name for path in tmp_path.rglob("*")} - set(before)
    assert all(name.endswith(("-triton.md", "-triton.json")) or name == "20260101T000000-disk.md" for name in new)
    faults = []
    read_incidents(folder, faults)
    assert len(faults) == len(DAMAGE) + 5
    assert [text.partition(":")[0] for text in said[:5]] == ["an incident is left out"] * 5
    assert said[5] == f"{len(faults) - 5} more incidents are left out"


def test_an_incident_that_cannot_be_written_costs_no_other(books, tmp_path, monkeypatch):
    said = []
    book = books(tmp_path, QUICK, say=said.append)
    book.note(change("first", reason="half a character: \ud800"))
    until(lambda: any("is not kept" in text for text in said))
    with monkeypatch.context() as patch:
        patch.setattr(incidents, "report", lambda *_: 1 / 0)
        book.note(change("second"))
        until(lambda: stored(tmp_path) == [("second", "open")])
    (path,) = tmp_path.glob("*second.md")
    assert "No report: ZeroDivisionError" in path.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(IncidentBook, "_settle", lambda _: 1 / 0)
        book.note(change("third"))
        until(lambda: any("are not written: ZeroDivisionError" in text for text in said))
    monkeypatch.setattr(incidents, "_SAVE_EVERY", 0.01)
    book.note(change("fourth"))
    until(lambda: {part for part, _ in stored(tmp_path)} == {"second", "third", "fourth"})


# Clocks.


def test_a_wall_clock_that_jumps_is_said_once_and_over_at_the_next_look():
    clocks, told = {"wall": 1_000.0, "monotonic": 5.0}, []
    watch = ClockWatch(told.append, wall=lambda: clocks["wall"], monotonic=lambda: clocks["monotonic"])
    for wall, passed in ((10.0, 10.0), (11.0, 10.0), (3_610.0, 10.0), (10.0, 10.0), (-50.0, 10.0), (10.0, 10.0)):
        clocks["wall"] += wall
        clocks["monotonic"] += passed
        watch.probe()
    assert [(each.up, each.reason.partition(" by ")[2][:8]) for each in told] == [
        (False, "3600.0 s"),
        (True, ""),
        (False, "60.0 s, "),
        (True, ""),
    ]
    assert "back" in told[2].reason
    assert watch.jumps == 2
    assert all(each.time.utcoffset() == dt.timedelta(0) for each in told)
