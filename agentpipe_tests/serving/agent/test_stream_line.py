"""A stream of rows as a line: columns by name, answers as JSON, nonsense passed over."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.environments.layout import block_start
from agentpipe.errors import LineError
from agentpipe.serving.agent.action_file import ActionFile
from agentpipe.serving.agent.messages import ForeignLineError, LineEndedError, NonsenseError
from agentpipe.serving.agent.stream_line import Mapped, StreamLine, decision_id, open_stream_line
from agentpipe.serving.agent.types import Frame, OrderEnded, Takeover
from agentpipe_tests.serving.agent.questions import LINE, SMALL, answer

MAPPING = {
    "format": "csv",
    "line_id": "press-4",
    "order_id": {"column": "order"},
    "elapsed_minutes": {"column": "minutes"},
    "observation": ["temp", {"column": "speed", "scale": 2, "offset": 1}, 7, "temp", 0],
    "mask": {"column": "allowed"},
    "result": {"column": "result"},
    "operator": {"column": "operator"},
    "seconds": 30,
}
HEADER = "order,minutes,temp,speed,allowed,result,operator"


def opened(tmp_path, text, signature=SMALL, **changes):
    mapping = tmp_path / "mapping.json"
    mapping.write_text(json.dumps({**MAPPING, "actions": str(tmp_path / "actions.jsonl"), **changes}))
    source = tmp_path / "rows"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_stream_line(str(source), mapping, signature, 0.5)


def everything(line):
    """All messages, answering each question with its lowest allowed action; nonsense as its text."""
    found = []
    with contextlib.suppress(LineEndedError):
        while True:
            try:
                message = line.receive(10.0)
            except NonsenseError as error:
                found.append(error.message)
                continue
            found.append(message)
            if isinstance(message, Frame):
                line.act(message, answer(int(message.mask.argmax())))
    return found


def test_rows_become_questions_and_answers_lines_of_json(tmp_path):
    rows = f"{HEADER}\no1,0.5,20,3,0 2,,\no1,1.5,21,4,2 3,,\no1,2,21,4,,done,\n"
    with opened(tmp_path, rows) as line:
        first, second, over = everything(line)
    assert first.observation.tolist() == [20.0, 7.0, 7.0, 20.0, 0.0]
    assert first.mask.tolist() == [True, False, True, False]
    assert (first.decision_id, first.number, first.last_action, first.elapsed_minutes) == ("press%2D4-o1-0", 0, 4, 0.5)
    assert (second.decision_id, second.number, second.last_action) == ("press%2D4-o1-1", 1, 0)
    assert over == OrderEnded("press-4", "o1", "done")
    said = [json.loads(text) for text in (tmp_path / "actions.jsonl").read_text().splitlines()]
    assert [(each["decision_id"], each["action"]) for each in said] == [("press%2D4-o1-0", 0), ("press%2D4-o1-1", 2)]


def test_json_lines_say_the_same(tmp_path):
    rows = [{"order": "o1", "minutes": 1, "temp": None, "speed": 2, "allowed": "1"}, {"order": "o1", "result": "late"}]
    text = "\n".join(json.dumps(row) for row in rows)
    with opened(tmp_path, text, format="jsonl") as line:
        first, over = everything(line)
    assert np.isnan(first.observation).tolist() == [True, False, False, True, False], "a lost sensor"
    assert over == OrderEnded("press-4", "o1", "late")


def test_features_and_actions_by_the_names_of_the_built_in_line(tmp_path):
    rows = "order,minutes,t\no1,0,3.5\n"
    changes = {"observation": {"reading.0.1": "t", "segment.identify": 1}, "mask": "measure_0 declare_p1"}
    changes |= dict.fromkeys(("result", "operator"), "")
    with opened(tmp_path, rows, LINE, **changes) as line:
        (first,) = everything(line)
    assert np.flatnonzero(first.observation).tolist() == [1, block_start("segment")]
    assert first.observation[1] == 3.5
    assert int(first.mask.sum()) == 2


def test_a_person_named_in_a_column_has_the_line(tmp_path):
    rows = f"{HEADER}\no1,0,1,1,1,,\no1,1,1,1,1,,ann\no1,2,1,1,1,,\n"
    with opened(tmp_path, rows) as line:
        kinds = everything(line)
    assert [type(each) for each in kinds] == [Frame, Takeover, Frame, Takeover, Frame]
    assert kinds[1] == Takeover("press-4", True, "ann")
    assert kinds[3] == Takeover("press-4", False, "ann")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("o1,0,1,1", "row 2 has 4 cells, the header 7"),
        ("o1,0,warm,1,1,,", "temp is 'warm', no number"),
        ("o1,0,nan,1,1,,", "temp is 'nan', no number"),
        ("o1,0,1_0,1,1,,", "temp is '1_0', no number"),
        ("o1,0,1e400,1,1,,", "temp is '1e400', no number"),
        ("o1,0,1,1,9,,", "the line has no action '9'"),
        ("o1,0,1,1,,,", "mask allows no action"),
        ("two words,0,1,1,1,,", "decision_id is 'press%2D4-two words-0'"),
        ("o1,-1,1,1,1,,", "elapsed_minutes is -1.0"),
        ('"o1,0,1,1,1,,', "row 2"),
        (b"\xff\xfe,0,1,1,1,,", "row 2: not UTF-8"),
        (b"x" * ((1 << 20) + 9), "row 2: a row of more than"),
    ],
)
def test_nonsense_is_passed_over_with_its_reason_and_the_next_row_is_answered(tmp_path, row, reason):
    data = b"\n".join([HEADER.encode(), row if isinstance(row, bytes) else row.encode(), b"o1,0,1,1,1,,", b""])
    with opened(tmp_path, data) as line:
        said, question = everything(line)
    assert said.startswith(reason)
    assert question.decision_id == "press%2D4-o1-0"


def test_a_byte_order_mark_blank_lines_and_crlf_are_fine(tmp_path):
    data = b"\xef\xbb\xbf" + HEADER.encode() + b"\r\n\r\no1,0,1,1,1,,\r\n"
    with opened(tmp_path, data) as line:
        (question,) = everything(line)
    assert question.order_id == "o1"


def test_the_next_row_waits_for_the_answer(tmp_path):
    with opened(tmp_path, f"{HEADER}\no1,0,1,1,1,,\no1,1,1,1,1,,\n") as line:
        first = line.receive(10.0)
        assert line.receive(0.05) is None
        line.act(first, answer(1))
        assert line.receive(10.0).number == 1


def test_a_row_that_nobody_answers_in_time_is_left_behind(tmp_path):
    with opened(tmp_path, f"{HEADER}\no1,0,1,1,1,,\no1,1,1,1,1,,\n", seconds=0.05) as line:
        assert line.receive(10.0).number == 0
        assert line.receive(10.0).number == 1


@pytest.mark.parametrize("rows", ["", HEADER, HEADER + "\n"])
def test_a_stream_without_rows_has_ended(tmp_path, rows):
    with opened(tmp_path, rows) as line:
        for _ in range(2):
            with pytest.raises(LineEndedError):
                line.receive(10.0)


def test_a_stream_that_lacks_a_column_is_not_this_line(tmp_path):
    with (
        opened(tmp_path, "order,minutes\no1,1\n") as line,
        pytest.raises(ForeignLineError, match="no column 'allowed'"),
    ):
        line.receive(10.0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": "xml"}, "format"),
        ({"colour": 1}, "colour"),
        ({"observation": ["a"]}, "observation"),
        ({"observation": {"reading.0.0": "t"}}, "observation"),
        ({"observation": [{"colum": "x"}, 0, 0, 0, 0]}, "observation 0"),
        ({"observation": [{"column": "x", "scale": "2"}, 0, 0, 0, 0]}, "observation 0"),
        ({"observation": 3}, "observation"),
        ({"actions": 3}, "actions"),
        ({"otherwise": None}, "otherwise"),
        ({"line_id": ["x"]}, "line_id"),
        ({"seconds": -1}, "seconds"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": "x"}, "seconds"),
        ({"elapsed_minutes": "minutes"}, "elapsed_minutes"),
        ({"number": "step"}, "number"),
    ],
)
def test_a_mapping_that_cannot_be_used_is_refused_with_file_and_field(tmp_path, changes, field):
    with pytest.raises(ForeignLineError) as caught:
        opened(tmp_path, HEADER, **changes)
    assert (caught.value.where["field"], caught.value.where["file"]) == (field, tmp_path / "mapping.json")


def test_a_stream_or_mapping_that_is_not_there(tmp_path):
    opened(tmp_path, HEADER).close()
    with pytest.raises(LineError, match="No such file"):
        open_stream_line(str(tmp_path / "none"), tmp_path / "mapping.json", SMALL, 0.5)
    with pytest.raises(ForeignLineError, match="missing"):
        open_stream_line("-", tmp_path / "none", SMALL, 0.5)


def test_rows_come_over_a_socket_and_a_fifo(tmp_path):
    data = f"{HEADER}\no1,0,1,1,1,,\n".encode()
    opened(tmp_path, b"").close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with open_stream_line(url, tmp_path / "mapping.json", SMALL, 0.5) as line:
            connection, _ = server.accept()
            connection.sendall(data)
            assert line.receive(10.0).order_id == "o1"
            connection.close()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    threading.Thread(target=fifo.write_bytes, args=(data,), daemon=True).start()
    with open_stream_line(str(fifo), tmp_path / "mapping.json", SMALL, 0.5) as line:
        assert len(everything(line)) == 1


CELLS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.lists(st.lists(CELLS, max_size=8), max_size=6))
@settings(max_examples=60)
def test_whatever_rows_hold_they_are_read_or_passed_over(tmp_path_factory, rows):
    mapping = tmp_path_factory.mktemp("stream") / "mapping.json"
    mapping.write_text(json.dumps(MAPPING))
    data = [HEADER.encode(), *(",".join(row).encode() for row in rows)]
    with ActionFile(Path(os.devnull)) as actions:
        lines = StreamLine(
            iter(data), Mapped(mapping, SMALL), SMALL, seconds=0.5, actions=actions, close=contextlib.ExitStack()
        )
        assert len(everything(lines)) <= 2 * len(rows)


NAMES = st.text("a-%25D", min_size=1, max_size=6)


@given(st.tuples(NAMES, NAMES, st.integers(0, 12)), st.tuples(NAMES, NAMES, st.integers(0, 12)))
def test_another_line_order_or_number_gives_another_decision_id(one, other):
    assert (decision_id(*one) == decision_id(*other)) == (one == other)


def test_names_that_join_to_the_same_text_have_ids_of_their_own(tmp_path):
    rows = "line,order,minutes\na-b,c,1\na,b-c,1\n"
    changes = {"line_id": {"column": "line"}, "observation": [0] * 5}
    changes |= {"mask": {"column": "line"}, "result": "", "operator": ""}
    mapping = {**MAPPING, **changes, "actions": str(tmp_path / "actions.jsonl")}
    del mapping["mask"]
    (tmp_path / "mapping.json").write_text(json.dumps(mapping))
    (tmp_path / "rows").write_text(rows)
    with open_stream_line(str(tmp_path / "rows"), tmp_path / "mapping.json", SMALL, 0.5) as line:
        assert [each.decision_id for each in everything(line)] == ["a%2Db-c-0", "a-b-c-0"]


# ------------------------------------------------------------------------------------------ where actions go


@contextlib.contextmanager
def file_size_limit(size):
    """Files may not grow beyond ``size`` bytes: what a full disk does, in this process, without a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("room", [0, 1, 40])
def test_an_answer_that_found_no_room_is_never_written_afterwards(tmp_path, room):
    path = tmp_path / "actions.jsonl"
    with opened(tmp_path, f"{HEADER}\n" + "o1,0,1,1,1,,\n" * 4) as line:
        line.act(line.receive(10.0), answer(1))
        with file_size_limit(path.stat().st_size + room):
            for _ in range(2):
                question = line.receive(10.0)
                with pytest.raises(LineError, match="answer cannot be written"):
                    line.act(question, answer(2))
                line._open = None  # its time is over
        last = line.receive(10.0)
        assert last.last_action == 1, "an action that nobody got was not taken"
        line.act(last, answer(3))
    said = [json.loads(text) for text in path.read_text().splitlines()]
    assert [(each["decision_id"][-1], each["action"]) for each in said] == [("0", 1), ("3", 3)]


def test_a_line_that_somebody_left_torn_does_not_spoil_the_next(tmp_path):
    (tmp_path / "actions.jsonl").write_text('{"decision_')
    with opened(tmp_path, f"{HEADER}\no1,0,1,1,1,,\n") as line:
        everything(line)
    torn, whole = (tmp_path / "actions.jsonl").read_text().splitlines()
    assert torn == '{"decision_'
    assert json.loads(whole)["action"] == 1


def test_behind_another_writer_s_bytes_nothing_is_cut_and_the_next_line_begins_anew(tmp_path, monkeypatch):
    path = tmp_path / "actions.jsonl"
    write, calls = os.write, []

    def half(descriptor, data):
        calls.append(data)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        if len(calls) == 1:
            done = write(descriptor, data[:3])
            with path.open("ab") as other:
                other.write(b"theirs")
            return done
        return write(descriptor, data)

    with ActionFile(path) as actions:
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(LineError, match="No space left"):
            actions.write("first")
        actions.write("second")
        monkeypatch.undo()
    assert path.read_text() == "firtheirs\nsecond\n"


def test_an_answer_after_the_end_is_an_error_and_touches_no_file(tmp_path):
    with opened(tmp_path, f"{HEADER}\no1,0,1,1,1,,\n") as line:
        question = line.receive(10.0)
    with pytest.raises(LineError, match="closed"):
        line.act(question, answer(1))


@pytest.mark.parametrize("place", ["none/actions.jsonl", "."])
def test_a_file_of_actions_that_cannot_be_opened_is_named_as_such(tmp_path, place):
    with pytest.raises(LineError, match="actions cannot be written to") as caught:
        opened(tmp_path, HEADER, actions=str(tmp_path / place))
    assert caught.value.where["field"] == "actions"


def test_without_a_file_answers_go_to_standard_output(tmp_path, capfd):
    mapping = {name: value for name, value in MAPPING.items() if name != "actions"}
    (tmp_path / "mapping.json").write_text(json.dumps(mapping))
    (tmp_path / "rows").write_text(f"{HEADER}\no1,0,1,1,1,,\n")
    with open_stream_line(str(tmp_path / "rows"), tmp_path / "mapping.json", SMALL, 0.5) as line:
        everything(line)
    assert json.loads(capfd.readouterr().out)["action"] == 1
