"""The memory that is made while the agent works, by a process that gives way to it."""

from __future__ import annotations

import os
import threading

import pytest

from agentpipe.errors import InputError, ServingError, StoreError
from agentpipe.serving.agent import remembering
from agentpipe.serving.agent.remember import memory_folder
from agentpipe.serving.agent.remembering import MemoryMaker
from agentpipe.serving.agent.session import AgentOptions, Session
from agentpipe.settings import load_settings
from agentpipe_tests.serving.agent.line_bundle import save_line_bundle
from agentpipe_tests.serving.agent.lines import running_line, wait_for
from agentpipe_tests.serving.agent.questions import LINE
from agentpipe_tests.serving.agent.test_memory import record


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    save_line_bundle(folder)
    return folder


def test_a_first_start_makes_it_while_decisions_go_on_and_is_complete_when_it_is_there(tmp_path, bundle):
    record(tmp_path / "trajectories" / "sensor-1" / "k")
    said = []
    with running_line(seconds=30.0, every=0.005) as running:
        settings = load_settings(home=tmp_path, agent={"metrics_port": 0})
        with Session(AgentOptions(running.url, bundle), settings, say=said.append) as session:
            thread = threading.Thread(target=session.run, daemon=True)
            thread.start()
            wait_for(lambda: session.maker.running)
            before, incomplete = session.runtime.counts.decisions, not session.complete.is_set()
            wait_for(lambda: os.getpriority(os.PRIO_PROCESS, session.maker.running) == 19)
            wait_for(lambda: session.runtime.counts.decisions > before)
            wait_for(session.complete.is_set, 300)
            wait_for(lambda: any(hasattr(each, "looked_up") and each.looked_up for each in session._onlookers))
            session.stop()
            thread.join(60)
    assert incomplete
    assert "the memory is being made from recorded trajectories" in said
    assert (memory_folder(tmp_path, LINE) / "manifest.json").is_file()
    assert session.runtime.counts.fallbacks == 0


def test_an_agent_that_ends_ends_it_as_well_and_leaves_nothing_half_made(tmp_path, bundle):
    record(tmp_path / "trajectories" / "sensor-1" / "k")
    maker, made = MemoryMaker(), []
    thread = threading.Thread(target=lambda: made.append(maker.make(tmp_path, bundle)))
    thread.start()
    wait_for(lambda: maker.running)
    maker.close()
    thread.join(60)
    assert made == [False]
    assert not list(tmp_path.glob("memory/*/manifest.json"))
    assert maker.make(tmp_path, bundle) is False


def test_why_there_can_be_none_is_told(tmp_path, bundle):
    record(tmp_path / "trajectories" / "sensor-1" / "k")
    for path in (tmp_path / "trajectories" / "sensor-1" / "k").iterdir():
        if path.suffix != ".json":
            path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(StoreError):
        MemoryMaker().make(tmp_path, bundle)


@pytest.mark.parametrize(
    ("output", "kind", "text"),
    [
        ('{"ok": false, "error": {"type": "InputError", "message": "nothing"}}', InputError, "nothing"),
        ('{"ok": false, "error": {"type": "HomeError", "message": "no"}}', StoreError, "no"),
        ('{"ok": false, "error": {"type": "BundleError", "message": "bad"}}', ServingError, "bad"),
        ("", ServingError, "the process ended with -9"),
        ("[]", ServingError, "the process ended with -9"),
    ],
)
def test_what_the_process_said_is_the_error_that_it_was(output, kind, text):
    error = remembering._error(output, -9)
    assert (type(error), error.message) == (kind, text)
