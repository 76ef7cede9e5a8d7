"""A real Triton that is killed while it is asked, and comes back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from agentpipe.errors import ServiceError
from agentpipe.serving.agent.deciders import LocalDecider, RulesDecider, read_policy
from agentpipe.serving.agent.ladder import Ladder
from agentpipe.serving.agent.triton_decider import TritonDecider
from agentpipe.serving.server import TritonServer, install_triton
from agentpipe.settings import AgentSettings
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.serving.agent.frames import frame
from agentpipe_tests.serving.agent.waiting import until

pytestmark = [pytest.mark.triton, pytest.mark.slow]
SETTINGS = AgentSettings(probe_every=0.1, probe_timeout=5.0, reserve_seconds=1.0, patience_seconds=60.0)


@pytest.fixture(scope="module")
def triton():
    try:
        return install_triton()
    except ServiceError as error:
        pytest.skip(f"no Triton here: {error}")


class Asking:
    """A line that asks one question after the other in a thread of its own."""

    def __init__(self, ladder):
        self._ladder, self._stop = ladder, threading.Event()
        self.answers, self.late = [], 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stop.is_set():
            asked = frame((1.0, 2.0), (False, True, True), number=len(self.answers), seconds=5.0)
            self.answers.append(self._ladder.decide(asked))
            self.late += time.monotonic() > asked.deadline

    def since(self, count):
        return {answer.decided_by for answer in self.answers[count:]}

    def stop(self):
        self._stop.set()
        self._thread.join()


def test_a_triton_killed_under_load_costs_no_decision_and_is_found_again(triton, tmp_path):
    save_bundle(tmp_path / "bundle", 0)
    files = read_policy(tmp_path / "bundle")
    server = TritonServer(tmp_path / "bundle", triton)
    port = int(server.grpc.rpartition(":")[2])
    deciders = [TritonDecider(server.grpc, files), LocalDecider(files), RulesDecider(files.signature)]
    with Ladder(deciders, SETTINGS, ready=("local",)) as ladder:
        until(lambda: ladder.level.name == "triton", 60.0)
        line = Asking(ladder)
        until(lambda: len(line.answers) > 50)
        os.killpg(server._process.pid, signal.SIGKILL)
        server._process.wait()
        until(lambda: ladder.level.name == "local")
        count = len(line.answers)
        until(lambda: len(line.answers) > count + 50)
        assert line.since(count + 1) == {"local"}
        server.stop()
        with TritonServer(tmp_path / "bundle", triton, grpc_port=port):
            until(lambda: ladder.level.name == "triton", 60.0)
            until(lambda: line.answers[-1].decided_by == "triton")
            line.stop()
            story = [(change.part, change.up) for change in ladder.history() if change.part == "triton"]
    assert line.late == 0
    assert {answer.action for answer in line.answers} == {1}
    assert line.since(0) == {"triton", "local"}
    assert story == [("triton", True), ("triton", False), ("triton", True)]
