"""What training reads of a day's labels."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pytest

from agentpipe.errors import CorruptError
from agentpipe.feedback.labelled import read_labelled
from agentpipe.feedback.store import decisions_of
from agentpipe_tests.feedback.examples import DAY, decision, label

NEXT = dt.date(2026, 3, 30)


def test_a_day_without_labels_is_empty(home):
    assert len(read_labelled(home.store, DAY)) == 0
    home.drop("a.jsonl", decision())
    home()
    empty = read_labelled(home.store, DAY)
    assert (len(empty), empty.observation.shape, empty.verdict.dtype) == (0, (0, 0), np.int8)


def test_labels_are_joined_with_decisions_of_any_day_and_sorted_by_id(home):
    home.drop(
        "a.jsonl",
        decision("d1"),
        decision("d2", time="2026-03-25T00:00:00Z", observation=[7, 8, 9], action=0, mask=[True, False],
                 probabilities=[1, 0], line_id="L9", elapsed_minutes=2.5, last_action=0),
        label("b", decision_id="d1"),
        label("a", decision_id="d2", verdict="correct", error_type=None, corrected_action=None, confidence=0.5),
        label("c", decision_id="never came"),
    )  # fmt: skip
    home()
    found = read_labelled(home.store, DAY)
    assert found.label_id == ("a", "b")
    assert found.decision_id == ("d2", "d1")
    assert found.line_id == ("L9", "L1")
    assert found.policy_version == ("p1", "p1")
    np.testing.assert_array_equal(found.observation, np.array([[7, 8, 9], [0.5, -1, 2000]], np.float32))
    np.testing.assert_array_equal(found.mask, [[True, False], [True, True]])
    np.testing.assert_array_equal(found.probabilities, np.array([[1, 0], [0.25, 0.75]], np.float32))
    np.testing.assert_array_equal(found.action, [0, 1])
    np.testing.assert_array_equal(found.last_action, [0, 2])
    np.testing.assert_array_equal(found.time, np.array([2.5, 1.5], np.float32))
    np.testing.assert_array_equal(found.verdict, [0, 1])
    np.testing.assert_array_equal(found.error_type, [-1, 1])
    np.testing.assert_array_equal(found.confidence, np.array([0.5, 0.8], np.float32))
    np.testing.assert_array_equal(found.corrected_action, [-1, 0])
    types = {name: getattr(found, name).dtype for name in ("observation", "last_action", "time", "mask", "confidence")}
    assert types == {
        "observation": np.float32, "last_action": np.int64, "time": np.float32, "mask": bool, "confidence": np.float32
    }  # fmt: skip


def test_a_correction_that_the_mask_forbids_is_none(home):
    wanted = label(corrected_action=1)
    home.drop("a.jsonl", wanted, decision(mask=[True, False], probabilities=[1, 0], action=0))
    home()
    found = read_labelled(home.store, DAY)
    assert (found.label_id, found.verdict.tolist(), found.corrected_action.tolist()) == (("l1",), [1], [-1])


def test_a_superseded_label_teaches_nothing_and_its_successor_does_on_its_own_day(home):
    home.drop("a.jsonl", decision(), label("l1"), label("l2", time="2026-03-29T12:00:00Z", verdict="correct"))
    home()
    before = read_labelled(home.store, DAY)
    assert before.label_id == ("l2",)
    home.drop("b.jsonl", label("l0", time="2026-03-30T12:00:00Z", verdict="needs_improvement"))
    home()
    assert read_labelled(home.store, DAY).label_id == ()
    assert read_labelled(home.store, NEXT).verdict.tolist() == [2]


def test_of_two_labels_of_one_instant_the_greater_id_counts(home):
    home.drop("a.jsonl", decision(), label("l2"), label("l1"))
    home()
    assert read_labelled(home.store, DAY).label_id == ("l2",)


def test_rows_can_be_left_out_and_taken_and_the_digest_says_what_is_there(home):
    rows = [
        row for number in range(4) for row in (decision(f"d{number}"), label(f"l{number}", decision_id=f"d{number}"))
    ]
    home.drop("a.jsonl", *rows)
    home()
    found = read_labelled(home.store, DAY)
    assert found.without(["l1", "l9"]).label_id == ("l0", "l2", "l3")
    assert found.take([3, 0]).decision_id == ("d3", "d0")
    assert found.take(np.array([True, False, False, True])).label_id == ("l0", "l3")
    assert found.take([0, 1, 2, 3]).digest == found.digest == read_labelled(home.store, DAY).digest
    assert found.without(["l1"]).digest != found.digest
    assert found.take([1, 0, 2, 3]).digest != found.digest


def test_a_lost_decision_is_a_typed_error(home):
    home.drop("a.jsonl", decision(), label())
    home()
    for part in home.store.glob("*/decisions-*.parquet"):
        part.unlink()
    with pytest.raises(CorruptError):
        read_labelled(home.store, DAY)


def test_decisions_of_several_days_come_in_pieces_with_the_columns_asked_for(home):
    home.drop("a.jsonl", decision("d1"), decision("d2", time="2026-03-28T00:00:00Z"))
    home()
    home.drop("b.jsonl", decision("d3"))
    home()
    pieces = list(decisions_of(home.store, [dt.date(2026, 3, 28), DAY, NEXT], ["decision_id", "observation"]))
    assert [piece.column("decision_id").to_pylist() for piece in pieces] == [["d2"], ["d1"], ["d3"]]
    assert pieces[0].column_names == ["decision_id", "observation"]
