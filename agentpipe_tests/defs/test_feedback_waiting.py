"""The sensor ``feedback`` over whatever lies in the inbox, and a Redis that cannot be used."""

from __future__ import annotations

import os

import dagster as dg
import pytest

from agentpipe.defs.resources import Workspace
from agentpipe_tests.defs.homes import promote
from agentpipe_tests.defs.test_feedback_sensor import LAST, Loop, rows
from agentpipe_tests.production import drop


@pytest.fixture
def loop(tmp_path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setenv("AGENTPIPE_FEEDBACK__MINIMUM_LABELS", "3")
    workspace = Workspace(home=str(tmp_path / "home"), profile="demo")
    promote(workspace, "first")
    return Loop(workspace, instance)


def test_whatever_lies_in_the_inbox_fails_no_tick_and_is_taken_in_once(loop: Loop) -> None:
    loop.inbox.mkdir(parents=True)
    (loop.inbox / "folder.jsonl").mkdir()
    os.mkfifo(loop.inbox / "pipe.jsonl")
    (loop.inbox / "ring.jsonl").symlink_to(loop.inbox / "ring.jsonl")
    (loop.inbox / os.fsdecode(b"\xff.jsonl")).write_text("{}\n")
    (loop.inbox / ".hidden.jsonl").write_text("{}\n")
    assert loop.workspace.consumed("production_feedback", LAST.isoformat())
    assert loop.settle() == "no feedback of a day that is over"
    assert {path.name for path in loop.inbox.iterdir()} == {"taken", "refused", ".hidden.jsonl"}


@pytest.mark.parametrize("url", ["redis://:geheim@localhost/x", "redis://:geheim@127.0.0.1:1"])
def test_a_redis_that_cannot_be_used_is_said_beside_the_usual_answer(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    said = loop.said()
    assert said.startswith("no feedback of a day that is over; the stream is not read: ")
    assert ("REDIS_URL is malformed" in said) == url.endswith("/x")
    assert "geheim" not in said
    drop(rows(LAST, labels=2), loop.inbox, "a.jsonl")
    assert loop.settle().startswith(f"{LAST}: 2 labelled decisions, 3 are needed; the stream is not read: ")


def test_an_inbox_that_cannot_be_read_is_said(loop: Loop) -> None:
    loop.inbox.parent.mkdir(parents=True)
    loop.inbox.write_text("x")
    assert loop.said().startswith("the feedback cannot be judged: ")
