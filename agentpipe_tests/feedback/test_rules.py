"""What a valid row is: each fault has its reason, and the vectorised judgement agrees with a naive one."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.feedback import jsonl
from agentpipe.feedback.block import Row, blocks_of
from agentpipe.feedback.figures import sum_of_digests
from agentpipe.feedback.rules import Rules, judge
from agentpipe.feedback.store import quarantined
from agentpipe_tests.feedback.examples import NOW, SHAPE, decision, label
from agentpipe_tests.feedback.reference import is_valid

RULES = Rules(SHAPE, NOW)


def judged(lines):
    """Line number → reason, None where it is valid; over the whole path of JSON lines."""
    results = list(jsonl.read(io.BytesIO(b"\n".join([*lines, b""]))))
    found = {item.line: item.reason for item in results if not isinstance(item, Row)}
    for block in blocks_of([item for item in results if isinstance(item, Row)]):
        accepted, faults = judge(block, RULES)
        found |= {block.lines[row]: None for row in accepted.rows}
        found |= {block.lines[row]: reason for row, (reason, _) in faults.items()}
    return found


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not_json"),
        ("[1]", "not_json"),
        ("42", "not_json"),
        ('{"kind": "decision", "kind": "label"}', "duplicate_field"),
        (json.dumps(decision()).replace("0.5", "NaN"), "number_out_of_range"),
        (json.dumps(decision()).replace("0.5", "-Infinity"), "number_out_of_range"),
        (json.dumps(decision()).replace("0.5", "1e400"), "number_out_of_range"),
        (json.dumps(decision()).replace("0.5", "1e39"), "number_out_of_range"),
        (json.dumps(decision()).replace("0.5", "1" + "0" * 400), "number_out_of_range"),
        (json.dumps(decision()).replace("0.5", "1" + "0" * 5000), "number_out_of_range"),
        (json.dumps(decision()).replace("0.25", "1e400"), "number_out_of_range"),
        ("[" * 100_000, "too_deep"),
        ('{"kind": ' + "[" * 500 + "]" * 500 + "}", "too_deep"),
        ({"kind": "opinion"}, "unknown_kind"),
        ({"kind": ["decision"]}, "unknown_kind"),
        ({}, "unknown_kind"),
        (decision(time="2026-03-29T01:30:00"), "invalid_time"),
        (decision(time="yesterday"), "invalid_time"),
        (decision(time=1774747800), "invalid_time"),
        (decision(time="0001-01-01T00:00:00+10:00"), "invalid_time"),
        (decision(time="2026-04-01T00:06:00Z"), "future_time"),
        (label(time="9999-12-31T00:00:00Z"), "future_time"),
        (decision(decision_id=""), "invalid_field"),
        (decision(decision_id="a b"), "invalid_field"),
        (decision(decision_id="a\u2003b"), "invalid_field"),
        (decision(decision_id="a\u0000"), "invalid_field"),
        (decision(decision_id="x" * 201), "invalid_field"),
        (decision(decision_id="\ud800"), "not_utf8"),
        (decision(decision_id=7), "invalid_field"),
        (decision(result="x" * 201), "invalid_field"),
        (decision(observation="abc"), "invalid_field"),
        (decision(observation=[True, 1, 2]), "invalid_field"),
        (decision(observation=[None, 1, 2]), "invalid_field"),
        (decision(observation=[[1, 2], [3]]), "nested_list"),
        (decision(mask=[1, 1]), "invalid_field"),
        (decision(elapsed_minutes=-1), "invalid_field"),
        (decision(elapsed_minutes=1_000_001), "number_out_of_range"),
        (decision(elapsed_minutes=3.4e38), "number_out_of_range"),
        (decision(elapsed_minutes="1"), "invalid_field"),
        (decision(action=1.0), "invalid_field"),
        (decision(action=True), "invalid_field"),
        (decision(action=-1), "invalid_field"),
        (decision(action=2**70), "number_out_of_range"),
        (decision(surprise=1), "unknown_field"),
        (decision(action=None), "missing_field"),
        ({key: value for key, value in decision().items() if key != "action"}, "missing_field"),
        (decision(observation=[1, 2]), "does_not_fit_policy"),
        (decision(mask=[True], probabilities=[1.0]), "does_not_fit_policy"),
        (decision(mask=[True, True, True]), "does_not_fit_policy"),
        (decision(mask=[True, False]), "does_not_fit_policy"),
        (decision(action=2), "does_not_fit_policy"),
        (decision(last_action=3), "does_not_fit_policy"),
        (decision(probabilities=[0.2, 0.3]), "probabilities"),
        (decision(probabilities=[-0.5, 1.5]), "probabilities"),
        (decision(action=0, mask=[True, False]), "probabilities"),
        (label(verdict="maybe"), "invalid_field"),
        (label(verdict=None), "missing_field"),
        (label(confidence=0), "invalid_field"),
        (label(confidence=1.1), "invalid_field"),
        (label(corrected_action=2), "does_not_fit_policy"),
        (label(corrected_action=-1), "invalid_field"),
        (label(error_type="mood"), "invalid_field"),
        ('{"kind": "decision", "result": "' + "x" * 1_100_000 + '"}', "too_long"),
    ],
)
def test_each_malformed_row_is_quarantined_with_reason_and_line_and_the_good_one_taken(home, row, reason):
    text = row if isinstance(row, str) else json.dumps(row)
    home.drop("a.jsonl", text, decision("good"))
    report = home()
    assert report["quarantined"] == {reason: 1}
    assert report["decisions"] == 1
    (refused,) = quarantined(home.store)
    assert (refused.reason, refused.line, refused.file) == (reason, 1, "a.jsonl")
    assert refused.detail
    assert refused.raw == text.encode() if reason != "too_long" else text.encode().startswith(refused.raw)


def test_of_several_lengths_in_one_block_each_row_is_judged_by_its_own():
    rows = [decision(f"d{number}", observation=[0.5] * number) for number in range(6)]
    assert judged([json.dumps(row).encode() for row in rows]) == {
        number + 1: None if number == 3 else "does_not_fit_policy" for number in range(6)
    }


def test_optional_fields_may_be_left_out_or_null():
    rows = [
        {key: value for key, value in decision().items() if key != "result"},
        decision(result=None),
        {key: value for key, value in label().items() if key not in ("error_type", "confidence", "corrected_action")},
        label(error_type=None, confidence=None, corrected_action=None),
    ]
    assert set(judged([json.dumps(row).encode() for row in rows]).values()) == {None}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60).filter(lambda line: b"\n" not in line)))
def test_every_line_of_any_bytes_gives_exactly_one_result(lines):
    data = b"\n".join([*lines, b""])
    results = list(jsonl.read(io.BytesIO(data)))
    stripped = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [number for number, line in enumerate(stripped, 1) if line.strip()]
    assert [result.line for result in results] == expected


numbers = st.one_of(
    st.sampled_from(
        [0, 1, -1, 0.5, 0.25, 0.75, 1e38, 3.4028234663852886e38, 3.403e38, 1e400, float("nan"), 10**400, 2**63, True]
    ),
    st.integers(-3, 3),
    st.floats(width=32),
)
texts = st.one_of(
    st.sampled_from(["", "a", "a b", "x" * 200, "x" * 201, "é", "\u2003", "\x85", "\ud800", "decision", "wrong"]),
    st.text(max_size=5),
)
times = st.sampled_from(
    ["2026-03-29T01:30:00Z", "2026-03-29T01:30:00", "20260329T013000Z", "2026-W13-7T01:30:00+05:30", "2026-03-29", "x"]
)
anything = st.one_of(
    st.none(), numbers, texts, times, st.lists(numbers, max_size=4), st.lists(st.booleans(), max_size=3), st.just([[1]])
)


@st.composite
def rows(draw):
    row = draw(st.sampled_from([decision, label]))()
    for name in draw(st.lists(st.sampled_from([*row, "surprise"]), max_size=3)):
        if draw(st.booleans()):
            row[name] = draw(anything)
        else:
            row.pop(name, None)
    return row


@settings(max_examples=250, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=6))
def test_the_vectorised_judgement_agrees_with_the_naive_one_row_by_row(drawn):
    lines = [json.dumps(row).encode() for row in drawn]
    found = judged(lines)
    assert {line: reason is None for line, reason in found.items()} == {
        number: is_valid(line, SHAPE, NOW) for number, line in enumerate(lines, 1)
    }


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=20))
def test_the_sum_of_digests_is_that_of_whole_numbers(digests):
    array = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32)
    assert sum_of_digests(array) == sum(int.from_bytes(digest, "big") for digest in digests) % 2**256


def test_a_million_minutes_since_the_order_was_opened_are_the_most(home):
    home.drop("a.jsonl", decision(elapsed_minutes=1_000_000), decision("d2", elapsed_minutes=1_000_000.1))
    report = home()
    assert (report["decisions"], report["quarantined"]) == (1, {"number_out_of_range": 1})
    (refused,) = quarantined(home.store)
    assert refused.detail == "elapsed_minutes: 1000000.1 is more than 1,000,000"
