"""What a line may say, and how nonsense is refused."""

from __future__ import annotations

import contextlib
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.serving.agent.messages import (
    LONGEST_LINE,
    ForeignLineError,
    NonsenseError,
    Reader,
    encode,
    load,
    question,
)
from agentpipe.serving.agent.types import OrderEnded, Takeover
from agentpipe_tests.serving.agent.questions import LINE, SMALL, frame


def asked(**changes):
    return {**question(frame(), 2.0), **changes}


def refusal(**changes):
    with pytest.raises(NonsenseError) as caught:
        Reader(SMALL, 0.5).message(encode(asked(**changes)))
    return caught.value


def test_a_question_comes_back_as_it_went():
    sent = frame(3, mask=(True, False, True, False))
    before = time.monotonic()
    got = Reader(SMALL, 0.5).message(encode(question(sent, 2.0)))
    assert (got.decision_id, got.line_id, got.order_id, got.number) == ("l1-o1-3", "l1", "o1", 3)
    assert got.observation.tobytes() == sent.observation.tobytes()
    assert got.mask.tolist() == [True, False, True, False]
    assert before + 2.0 <= got.deadline <= time.monotonic() + 2.0
    assert got.time.utcoffset().total_seconds() == 0


def test_a_question_without_a_deadline_has_the_usual_one():
    content = asked()
    del content["seconds"]
    got = Reader(SMALL, 0.5).message(encode(content))
    assert got.deadline == got.received + 0.5


def test_a_lost_sensor_is_null_and_declared():
    values = [0.0, None, 2.0, 3.0, 4.0]
    got = Reader(SMALL, 0.5).message(encode(asked(observation=values, lost=[1])))
    assert np.isnan(got.observation).tolist() == [False, True, False, False, False]
    assert "not declared lost" in refusal(observation=values, lost=[2]).message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"observation": [0.0] * 4}, "observation"),
        ({"observation": [0.0] * 4 + [None]}, "observation"),
        ({"observation": [0.0] * 4 + ["1"]}, "observation"),
        ({"observation": [0.0] * 4 + [1e39]}, "observation"),
        ({"observation": [0.0] * 4 + [10**400]}, "observation"),
        ({"observation": [0.0] * 4 + [True]}, "observation"),
        ({"observation": {}}, "observation"),
        ({"mask": [False] * 4}, "mask"),
        ({"mask": [True] * 5}, "mask"),
        ({"mask": [1, 0, 1, 0]}, "mask"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": -3.5}, "seconds"),
        ({"seconds": 1e9}, "seconds"),
        ({"number": -1}, "number"),
        ({"number": 1.5}, "number"),
        ({"last_action": 5}, "last_action"),
        ({"elapsed_minutes": -1}, "elapsed_minutes"),
        ({"line_id": "two words"}, "line_id"),
        ({"order_id": ""}, "order_id"),
        ({"order_id": "x" * 201}, "order_id"),
        ({"decision_id": 7}, "decision_id"),
        ({"colour": "red"}, "'colour'"),
        ({"lost": [9], "observation": [0.0] * 5}, "lost"),
        ({"type": "questoin"}, "type"),
    ],
)
def test_a_question_that_cannot_be_is_refused_with_its_field(changes, field):
    error = refusal(**changes)
    assert error.where["field"] == field
    assert error.decision_id == ("" if "decision_id" in changes else "l1-o1-0")
    assert len(str(error)) < 1_000


def test_a_missing_field_is_named():
    content = asked()
    del content["mask"]
    with pytest.raises(NonsenseError, match="a question without mask"):
        Reader(SMALL, 0.5).message(encode(content))


def test_numbers_of_an_order_only_grow_and_a_question_asked_again_keeps_its_own():
    reader = Reader(SMALL, 0.5)
    for number in (0, 1, 1, 4):
        reader.message(question(frame(number), 1.0))
    with pytest.raises(NonsenseError, match="question 3 of the order comes after number 4"):
        reader.message(question(frame(3), 1.0))
    with pytest.raises(NonsenseError, match="comes again as number 5"):
        reader.message(question(frame(5, name="l1-o1-4"), 1.0))
    reader.message(question(frame(0, order="o2"), 1.0))
    reader.message(question(frame(3, line="l2"), 1.0))


def test_persons_and_ends_of_orders():
    reader = Reader(SMALL, 0.5)
    taken = {"type": "takeover", "line_id": "l1", "active": True, "who": "ann"}
    over = {"type": "ended", "line_id": "l1", "order_id": "o1", "result": "late", "success": False}
    assert reader.message(taken) == Takeover("l1", True, "ann")
    assert reader.message(over) == OrderEnded("l1", "o1", "late", False)
    for wrong in (
        {**taken, "active": 1},
        {**taken, "who": None},
        {**over, "success": "no"},
        {**over, "result": "a\nb"},
    ):
        with pytest.raises(NonsenseError):
            reader.message(wrong)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b'"question"',
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b'{"a": ' + b"9" * 5_000 + b"}",
        b"x" * (LONGEST_LINE + 1),
    ],
)
def test_a_line_that_is_no_message_is_refused(line):
    with pytest.raises(NonsenseError):
        load(line)


def hello(signature=SMALL, **changes):
    return encode({"type": "hello", "protocol": 1, "signature": signature.to_json(), "lines": ["l1"], **changes})


def test_a_line_of_another_policy_is_refused_for_good():
    assert Reader(SMALL, 0.5).hello(hello(beat=1.0)).lines == ("l1",)
    with pytest.raises(ForeignLineError, match="observation_size of the line is"):
        Reader(SMALL, 0.5).hello(hello(LINE))
    with pytest.raises(ForeignLineError, match="protocol 2"):
        Reader(SMALL, 0.5).hello(hello(protocol=2))
    with pytest.raises(ForeignLineError, match="signature"):
        Reader(SMALL, 0.5).hello(hello(signature=SMALL).replace(b'"inputs"', b'"imputs"'))
    with pytest.raises(NonsenseError):
        Reader(SMALL, 0.5).hello(encode(asked()))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(asked())), JSON, max_size=4))
def test_whatever_a_field_holds_the_question_is_read_or_refused(changes):
    with contextlib.suppress(NonsenseError):
        got = Reader(SMALL, 0.5).message(json.dumps(asked(**changes)).encode())
        assert not hasattr(got, "mask") or got.mask.any()


@given(st.binary(max_size=200))
def test_whatever_bytes_come_they_are_read_or_refused(data):
    with contextlib.suppress(NonsenseError):
        Reader(SMALL, 0.5).message(data)
