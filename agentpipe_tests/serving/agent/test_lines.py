"""The simulated line and its client: questions, deadlines, persons, lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import numpy as np
import pytest

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.layout import A_MODE, ACTION_COUNT, FALSE_ALARM
from agentpipe.errors import LineError
from agentpipe.serving.agent.messages import ForeignLineError, NonsenseError, encode, load
from agentpipe.serving.agent.operator import tell_line
from agentpipe.serving.agent.simulated_line import LineOptions, SimulatedLine
from agentpipe.serving.agent.socket_line import SocketLine, parse_url
from agentpipe.serving.agent.types import Answer, Frame, OrderEnded, Takeover
from agentpipe_tests.serving.agent.lines import Operator, running_line, wait_for
from agentpipe_tests.serving.agent.questions import LINE, SMALL


def says(action):
    return Answer(action, np.zeros(ACTION_COUNT, np.float32), 0.0, "test", "v", ("no idea",) if action < 0 else ())


def next_of(line, kind, seconds=30.0, *, lost=False):
    """The next message of a kind; others are passed over, and lost connections made anew unless ``lost`` is wanted."""

    def look():
        with contextlib.nullcontext() if lost else contextlib.suppress(LineError):
            message = line.receive(0.2)
            return message if isinstance(message, kind) else None
        return None

    return wait_for(look, seconds)


def lowest(frame):
    return says(int(frame.mask.argmax()))


def test_orders_are_worked_to_their_end():
    with running_line(2, seconds=30.0, orders=3) as running, SocketLine(running.url, LINE) as line:
        ended = []
        while not running.line.done or not ended:
            message = line.receive(1.0)
            if isinstance(message, Frame):
                # a false alarm, whatever it is: the shortest order
                action = A_MODE + FALSE_ALARM if message.mask[A_MODE + FALSE_ALARM] else int(message.mask.argmax())
                line.act(message, says(action))
            elif isinstance(message, OrderEnded):
                ended.append(message)
        running.wait()
        figures = running.line.figures()
    assert figures["orders"] >= 3
    assert figures["missed"] == figures["illegal"] == 0
    assert figures["answered"] == len(running.line.taken)
    assert len({identifier for identifier, _, _ in running.line.taken}) == len(running.line.taken)
    assert ended[0].order_id == "r-0-0" or ended[0].order_id == "r-1-0"
    assert (ended[0].result == "done") == ended[0].success


def test_a_missed_deadline_holds_the_line_and_the_same_question_comes_again():
    with running_line(seconds=0.05) as running, SocketLine(running.url, LINE) as line:
        first = next_of(line, Frame)
        again = next_of(line, Frame)
        assert again.decision_id == first.decision_id
        assert again.observation.tobytes() == first.observation.tobytes()
        wait_for(lambda: running.line.figures()["missed"] >= 2)
        assert running.line.taken == []
        line.act(first, lowest(first))  # late, and still an answer to this question
        wait_for(lambda: running.line.taken)
        assert running.line.taken[0][0] == first.decision_id


def test_after_a_lost_connection_the_open_question_is_asked_again():
    with running_line(seconds=60.0) as running, SocketLine(running.url, LINE) as line:
        first = next_of(line, Frame)
        line._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(LineError):
            line.receive(5.0)
        again = next_of(line, Frame)
        assert again.decision_id == first.decision_id
        line.act(again, lowest(again))
        assert next_of(line, Frame).number == first.number + 1


def test_a_newer_connection_takes_the_place_of_an_older_one():
    with running_line(seconds=60.0) as running, SocketLine(running.url, LINE) as older:
        first = next_of(older, Frame)
        with SocketLine(running.url, LINE) as newer:
            assert next_of(newer, Frame).decision_id == first.decision_id
            with pytest.raises(LineError):
                next_of(older, OrderEnded, lost=True)


def test_a_person_takes_over_acts_and_hands_back():
    with running_line(seconds=60.0) as running, SocketLine(running.url, LINE) as line:
        first = next_of(line, Frame)
        operator = Operator(running.url)
        assert operator.say("act", action=0) == {"ok": False, "reason": "take it over first"}
        assert operator.say("takeover", line_id=first.line_id)["ok"]
        assert next_of(line, Takeover) == Takeover(first.line_id, True, "ann")
        line.act(first, lowest(first))  # too late: a person has it
        assert operator.say("act", action=ACTION_COUNT)["ok"] is False
        assert operator.say("act", action=1)["ok"]
        assert operator.say("release")["ok"]
        assert next_of(line, Takeover) == Takeover(first.line_id, False, "ann")
        after = next_of(line, Frame)
        assert (after.number, after.last_action) == (first.number + 1, 1)
        assert running.line.taken == [(first.decision_id, 1, "ann")]
        assert operator.say("figures")["orders"] == 0
        operator.close()


def test_who_released_a_line_is_named_not_who_had_taken_it_over():
    with running_line(2, seconds=60.0) as running, SocketLine(running.url, LINE) as line:
        first = next_of(line, Frame)
        tell_line(running.url, "takeover", "ann", first.line_id)
        assert next_of(line, Takeover) == Takeover(first.line_id, True, "ann")
        assert tell_line(running.url, "release", "bob")["lines"] == [first.line_id], "the other one nobody had"
        assert next_of(line, Takeover) == Takeover(first.line_id, False, "bob")
        line._socket.shutdown(socket.SHUT_RDWR)
        told = [next_of(line, Takeover) for _ in running.line.stations]
        assert Takeover(first.line_id, False, "bob") in told, "who connects again is told the same"


def test_a_release_where_nobody_has_the_line_is_refused_and_the_agent_hears_nothing():
    with running_line(seconds=60.0) as running, SocketLine(running.url, LINE) as line:
        first = next_of(line, Frame)
        with pytest.raises(LineError, match=f"nobody holds {first.line_id}: nothing to release"):
            tell_line(running.url, "release", "bob")
        assert line.receive(0.1) is None
        tell_line(running.url, "takeover", "ann")
        assert next_of(line, Takeover) == Takeover(first.line_id, True, "ann"), "the first that it hears"


def test_a_person_who_takes_over_from_the_rules_before_they_act_has_the_line():
    line = SimulatedLine(load_catalog().environments("holdout", "sensor-1")[:1], LineOptions())
    (station,) = line.stations.values()

    async def both():
        asked = asyncio.create_task(line._person(station))
        await asyncio.sleep(0)
        line.hold(station, "ann")
        await asked

    asyncio.run(both())
    assert (station.holder, line.taken) == ("ann", [])


def test_a_line_that_is_ended_in_the_moment_of_a_message_ends():
    line = SimulatedLine(load_catalog().environments("holdout", "sensor-1")[:1], LineOptions(seconds=60.0))
    (station,) = line.stations.values()

    async def main():
        answering = asyncio.create_task(line._answer(station))
        await asyncio.sleep(0.01)
        station.inbox.put_nowait({"type": "answer", "decision_id": "of another question", "action": 0})
        await asyncio.sleep(0)
        answering.cancel()
        await asyncio.wait([answering], timeout=5)
        return answering.cancelled()

    assert asyncio.run(main())


def test_a_connection_made_while_a_person_has_the_line_is_told_so():
    with running_line(seconds=60.0) as running:
        station = next(iter(running.line.stations.values()))
        operator = Operator(running.url, "bea")
        operator.say("takeover")
        with SocketLine(running.url, LINE) as line:
            assert next_of(line, Takeover) == Takeover(station.name, True, "bea")
            assert line.receive(0.1) is None
        operator.close()


def test_asked_for_a_person_the_rules_act_once():
    with running_line(seconds=60.0) as running, SocketLine(running.url, LINE) as line:
        first = next_of(line, Frame)
        line.act(first, says(-1))
        after = next_of(line, Frame)
        assert after.number == first.number + 1
        assert running.line.taken[0][2] == "rules"


def test_an_illegal_action_is_not_taken():
    with running_line(seconds=60.0, operator="none") as running, SocketLine(running.url, LINE) as line:
        first = next_of(line, Frame)
        line.act(first, says(int(np.flatnonzero(~first.mask)[0])))
        assert next_of(line, Takeover) is not None
        wait_for(lambda: running.line.figures()["illegal"] == 1)
        assert running.line.taken == []


# ----------------------------------------------------------------------------------- the client by itself


class Script:
    """A server that says given bytes and keeps what it is told."""

    def __init__(self, *parts, end=False):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.heard = bytearray()
        self._parts, self._end = parts, end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self):
        with contextlib.suppress(OSError):
            while not self._stop.is_set():
                connection, _ = self._listener.accept()
                for part in self._parts:
                    connection.sendall(part)
                connection.settimeout(0.05)
                while not self._stop.is_set() and not self._end:
                    with contextlib.suppress(TimeoutError):
                        data = connection.recv(1 << 16)
                        self.heard += data
                        if not data:
                            break
                connection.close()

    def close(self):
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@contextlib.contextmanager
def script(*parts, **options):
    made = Script(*parts, **options)
    try:
        yield made
    finally:
        made.close()


HELLO = encode({"type": "hello", "protocol": 1, "signature": SMALL.to_json(), "lines": ["l1"]})


def test_nonsense_is_answered_with_its_reason_and_the_connection_goes_on():
    over = {"type": "ended", "line_id": "l1", "order_id": "o1", "result": "done"}
    lines = [b"garbage\n", encode({"type": "question", "decision_id": "d7"}), encode(over)]
    with script(HELLO, *lines) as server, SocketLine(server.url, SMALL) as line:
        for _ in range(2):
            with pytest.raises(NonsenseError):
                line.receive(10.0)
        assert line.receive(10.0) == OrderEnded("l1", "o1", "done")
        wait_for(lambda: server.heard.count(b"\n") == 3)
        hello, *refused = (load(bytes(each)) for each in bytes(server.heard).splitlines())
    assert hello["role"] == "agent"
    assert [each["decision_id"] for each in refused] == ["", "d7"]
    assert "without elapsed_minutes" in refused[1]["reason"]


def test_a_giant_message_ends_the_connection():
    with script(HELLO, b"x" * ((1 << 20) + 2)) as server, SocketLine(server.url, SMALL) as line:
        with pytest.raises(LineError, match="more than 1,048,576 bytes"):
            line.receive(10.0)
        assert not line.connected


def test_a_line_of_other_names_is_refused():
    other = pytest.raises(ForeignLineError, match="observation_size")
    with running_line(seconds=60.0) as running, SocketLine(running.url, SMALL) as line, other:
        line.receive(10.0)


def test_who_gives_no_sign_of_life_is_lost():
    beating = encode({"type": "hello", "protocol": 1, "signature": SMALL.to_json(), "lines": [], "beat": 0.02})
    with (
        script(beating) as server,
        SocketLine(server.url, SMALL) as line,
        pytest.raises(LineError, match="nothing for"),
    ):
        line.receive(30.0)


def test_who_does_not_introduce_itself_is_no_line(monkeypatch):
    monkeypatch.setattr("agentpipe.serving.agent.socket_line.CONNECT_SECONDS", 0.1)
    with script() as server, SocketLine(server.url, SMALL) as line, pytest.raises(LineError, match="introduce"):
        line.receive(5.0)


def test_nobody_there_is_said_and_tried_again_at_a_walking_pace():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = SocketLine(f"tcp://127.0.0.1:{port}", SMALL)
    with pytest.raises(LineError, match="no line there"):
        line.receive(0.02)
    assert line.receive(0.0) is None, "not tried again at once"
    with pytest.raises(LineError):
        line._send(b"x")
    line.close()
    with pytest.raises(LineError, match="closed"):
        line.receive(1.0)


@pytest.mark.parametrize("url", ["", "tcp://", "tcp://h", "http://h:1", "tcp://h:0", "tcp://h:99999", "tcp://h:1/x"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(LineError):
        parse_url(url)
