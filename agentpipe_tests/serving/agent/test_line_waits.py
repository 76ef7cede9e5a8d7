"""A line that is not heard at once: what waited unread is not taken for new; two agents do not fight over a line."""

from __future__ import annotations

import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from agentpipe.errors import LineError
from agentpipe.serving.agent import socket_line
from agentpipe.serving.agent.messages import DisplacedError, NonsenseError, Reader, encode, question
from agentpipe.serving.agent.session import Session
from agentpipe.serving.agent.socket_line import SocketLine
from agentpipe.serving.agent.types import Frame
from agentpipe_tests.serving.agent.lines import running_line, wait_for
from agentpipe_tests.serving.agent.questions import LINE, SMALL, ended, frame
from agentpipe_tests.serving.agent.test_lines import next_of
from agentpipe_tests.serving.agent.test_runtime import Agent


class Raw:
    """A line that says what it is told to, and a client that is connected to it."""

    def __enter__(self):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.client = SocketLine(f"tcp://127.0.0.1:{self._server.getsockname()[1]}", SMALL)
        hello = {"type": "hello", "protocol": 1, "signature": SMALL.to_json(), "lines": ["l1"]}

        def accept():
            self._connection, _ = self._server.accept()
            self._connection.sendall(encode(hello))

        thread = threading.Thread(target=accept)
        thread.start()
        assert self.client.receive(0.01) is None
        thread.join(30)
        return self

    def ask(self, number, seconds):
        self._connection.sendall(encode(question(frame(number), seconds)))

    def __exit__(self, *_):
        self.client.close()
        self._connection.close()
        self._server.close()


def test_what_is_read_at_once_has_all_its_time():
    with Raw() as raw:
        for number in range(3):
            raw.ask(number, 30.0)
            before = time.monotonic()
            heard = wait_for(lambda: raw.client.receive(0.2))
            assert heard.deadline == pytest.approx(heard.received + 30.0)
            assert heard.received >= before - 5.0


def test_what_came_while_nobody_looked_is_as_old_as_that_may_be():
    with Raw() as raw:
        left = time.monotonic()
        raw.ask(0, 0.3)
        time.sleep(2 * socket_line.STOOD_STILL)
        heard = wait_for(lambda: raw.client.receive(0.2))
        assert heard.doubtful
        assert heard.received <= left
        assert heard.deadline < time.monotonic()


def test_what_came_while_the_process_stood_still_in_its_waiting_is_doubtful_too(monkeypatch):
    real = socket_line.select.select

    class Stopped:
        @staticmethod
        def select(*arguments):
            found = real(*arguments)
            time.sleep(arguments[-1] + 2 * socket_line.STOOD_STILL)
            return found

    with Raw() as raw:
        asked = time.monotonic()
        raw.ask(0, 0.3)
        monkeypatch.setattr(socket_line, "select", Stopped)
        heard = raw.client.receive(0.0)
        assert heard.doubtful
        assert heard.received <= asked
        assert heard.deadline < time.monotonic()


def test_a_doubtful_question_whose_time_may_have_passed_is_answered_late_by_the_fallback(tmp_path):
    with Agent(tmp_path) as agent:
        assert agent.ask(frame(0, seconds=-1.0, doubtful=True)) == ("l1-o1-0", 3)
        assert agent.policy.seen == []
        assert "waited unread" in agent.line.answers[0].notes[0]
        assert (agent.runtime.counts.late, agent.runtime.counts.fallbacks, agent.runtime.counts.expired) == (1, 1, 0)
        assert agent.runtime.executions["l1"].late == 1
        assert agent.ask(frame(1, last_action=3, doubtful=True)) == ("l1-o1-1", 2), "there is time"
        assert len(agent.due()) == 2


def test_a_deadline_of_no_time_at_all_has_passed_zero_seconds_ago():
    for seconds in (0, 0.0, -0.0):
        with pytest.raises(NonsenseError, match="has passed 0 s ago"):
            Reader(SMALL, 0.5).message(encode({**question(frame(0), 1.0), "seconds": seconds}))


def test_the_last_questions_of_endless_lines_are_forgotten():
    reader = Reader(SMALL, 0.5)
    for number in range(1_200):
        reader.message(question(frame(5, line=f"made up {number}".replace(" ", "-")), 1.0))
    assert len(reader._last) == 1_024
    with pytest.raises(NonsenseError):
        reader.message(question(frame(4, line="made-up-1199"), 1.0))


# ----------------------------------------------------------------------------------------------- two agents


def test_a_displaced_agent_says_so_and_keeps_away_longer_each_time(monkeypatch):
    monkeypatch.setattr(socket_line, "FIRST_DISPLACED", 0.02)
    monkeypatch.setattr(socket_line, "LONGEST_DISPLACED", 0.05)
    with (
        running_line(1, seconds=30.0) as running,
        SocketLine(running.url, LINE, agent="one") as one,
        SocketLine(running.url, LINE, agent="two") as two,
    ):
        pauses = []
        for _ in range(3):
            next_of(one, Frame)
            assert one.connected
            next_of(two, Frame)
            with pytest.raises(DisplacedError, match="the agent two has taken this one's place"):
                next_of(one, type(None), lost=True)
            pauses.append(one._next_try - time.monotonic())
            assert (one.displaced, one.connected) == ("two", False)
        assert one._away == 0.05
        next_of(one, Frame)
        assert one.displaced == "two", "a connection that is new is not its own yet"
        monkeypatch.setattr(socket_line, "UNCONTESTED", 0.0)
        assert (one.displaced, one._away) == ("", 0.02)
    assert max(pauses) <= 0.05


def test_an_agent_tells_of_its_displacement_and_of_the_loss_of_its_line(tmp_path):
    with Agent(tmp_path) as agent:
        agent.ask(frame(0))
        agent.line.say(DisplacedError("the agent two has taken this one's place; the next try is in 1 s"), ended())
        wait_for(lambda: agent.said)
        assert agent.said[0].startswith("displaced: the agent two")
        assert agent.runtime.counts.lost_lines == 1


def test_a_line_ends_in_good_order_with_an_agent_and_an_operator_connected(capfd):
    with running_line(1, seconds=30.0) as running, SocketLine(running.url, LINE) as line:
        next_of(line, Frame)
        host = socket.create_connection(("127.0.0.1", running.line.port))
        host.sendall(json.dumps({"type": "hello", "protocol": 1, "role": "operator", "who": "x"}).encode() + b"\n")
        running.stop()
        host.close()
    assert capfd.readouterr().err == ""


def test_the_probe_of_the_line_fails_while_another_agent_has_its_place():
    agent = SimpleNamespace(
        line=SimpleNamespace(displaced="two"), runtime=SimpleNamespace(presence=SimpleNamespace(connected=True))
    )
    with pytest.raises(LineError, match="the agent two has taken this one's place"):
        Session._probe_line(agent, 1.0)
    agent.line.displaced = ""
    Session._probe_line(agent, 1.0)
