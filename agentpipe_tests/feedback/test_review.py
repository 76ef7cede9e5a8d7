"""Which decisions are to be labelled first, and what answers become."""

from __future__ import annotations

import csv
import datetime as dt

import pytest

from agentpipe.errors import FeedbackError
from agentpipe.feedback.labelled import read_labelled
from agentpipe.feedback.review import (
    Answer,
    action_name,
    action_number,
    drop_answers,
    read_sheet,
    worst_first,
    write_sheet,
)
from agentpipe.feedback.store import read_day
from agentpipe_tests.feedback.examples import DAY, NOW, decision, label

ANSWER = Answer("d1", "wrong", "planning", 0.5, "kim", 0)


def ids(rows):
    return [row.decision_id for row in rows]


def test_failed_results_come_first_then_the_least_probable_action(home):
    home.drop(
        "a.jsonl",
        decision("sure", probabilities=[0.1, 0.9]),
        decision("unsure", probabilities=[0.6, 0.4]),
        decision("failed", probabilities=[0.01, 0.99], result="timeout"),
        decision("failed unsure".replace(" ", "-"), probabilities=[0.5, 0.5], result="Escalated"),
        decision("unknown", probabilities=[0.55, 0.45], result=""),
        decision("labelled", probabilities=[0.9, 0.1], time="2026-03-28T00:00:00Z"),
        decision("other-day", probabilities=[0.7, 0.3], time="2026-03-28T00:00:00Z"),
        label(decision_id="labelled"),
    )
    home()
    expected = ["failed-unsure", "failed", "other-day", "unsure", "unknown", "sure"]
    assert ids(worst_first(home.store, limit=10)) == expected
    assert ids(worst_first(home.store, limit=2)) == expected[:2]
    assert ids(worst_first(home.store, limit=10, of_days=[dt.date(2026, 3, 28)])) == ["other-day"]
    (row, *_) = worst_first(home.store, limit=1)
    assert (row.action, row.probability, row.result) == (1, 0.5, "Escalated")
    assert row.to_json()["action_name"] == action_name(1)


def test_equal_decisions_come_by_id_over_parts(home):
    for name in ("c", "a", "b"):
        home.drop("a.jsonl", decision(name))
        home()
    assert ids(worst_first(home.store, limit=2)) == ["a", "b"]


def test_nothing_is_there_to_label_before_the_first_intake(home):
    assert worst_first(home.store, limit=5) == []


def test_a_sheet_is_written_filled_in_and_becomes_labels(home, tmp_path):
    masked = decision("d2", mask=[False, True], probabilities=[0, 1])
    home.drop("a.jsonl", decision("d1"), masked, decision("d3", result="timeout"))
    home()
    path = tmp_path / "sheet.csv"
    write_sheet(path, worst_first(home.store, limit=5))
    rows = list(csv.DictReader(path.open(newline="")))
    assert [row["decision_id"] for row in rows] == ["d3", "d1", "d2"]
    assert rows[0]["action"] == action_name(1)
    assert [row["allowed_actions"] for row in rows] == ["measure_0 measure_1", "measure_0 measure_1", "measure_1"]
    rows[0].update(verdict="wrong", error_type="execution", confidence="0.7", corrected_action=action_name(0))
    rows[2].update(verdict="correct", annotator="ann")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    answers = read_sheet(path, "kim")
    assert answers == [
        Answer("d3", "wrong", "execution", 0.7, "kim", 0),
        Answer("d2", "correct", None, 1.0, "ann", None),
    ]
    dropped = drop_answers(home.store, home.inbox, answers, NOW)
    assert (dropped.labels, dropped.already) == (2, 0)
    assert home()["quarantined"] == {}
    found = read_labelled(home.store, NOW.date())
    assert sorted(zip(found.decision_id, found.verdict.tolist(), found.corrected_action.tolist(), strict=True)) == [
        ("d2", 0, -1),
        ("d3", 1, 0),
    ]
    assert ids(worst_first(home.store, limit=5)) == ["d1"]


def test_the_same_answer_again_is_no_new_label_and_another_one_supersedes(home):
    home.drop("a.jsonl", decision())
    home()
    for number, (answer, new) in enumerate(
        [(ANSWER, 1), (ANSWER, 0), (ANSWER._replace(verdict="correct"), 1), (ANSWER, 1), (ANSWER, 0)]
    ):
        now = NOW - dt.timedelta(hours=10 - number)
        assert drop_answers(home.store, home.inbox, [answer], now).labels == new
        assert home()["quarantined"] == {}
    labels = [label for day in (DAY, dt.date(2026, 3, 31)) for label in read_day(home.store, day)[1].to_pylist()]
    assert len(labels) == 3
    assert read_labelled(home.store, dt.date(2026, 3, 31)).verdict.tolist() == [1]


@pytest.mark.parametrize(
    ("answers", "message"),
    [([ANSWER._replace(decision_id="d9")], "no such decision"), ([ANSWER, ANSWER], "answered twice")],
)
def test_answers_that_make_no_sense_are_refused_and_nothing_is_dropped(home, answers, message):
    home.drop("a.jsonl", decision())
    home()
    with pytest.raises(FeedbackError, match=message):
        drop_answers(home.store, home.inbox, answers, NOW)
    assert home.names() == ["taken"]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("decision_id\nd1\n", "verdict"),
        ("decision_id,verdict\nd1,maybe\n", "verdict"),
        ("decision_id,verdict\n,wrong\n", "decision_id"),
        ("decision_id,verdict,error_type\nd1,wrong,mood\n", "error_type"),
        ("decision_id,verdict,confidence\nd1,wrong,2\n", "confidence"),
        ("decision_id,verdict,corrected_action\nd1,wrong,fly\n", "corrected_action"),
        ("decision_id,verdict,corrected_action\nd1,wrong,99\n", "corrected_action"),
        ("decision_id,verdict,annotator\nd1,wrong,kim lee\n", "annotator"),
    ],
)
def test_a_sheet_with_an_answer_that_makes_no_sense_names_the_field(tmp_path, text, field):
    path = tmp_path / "sheet.csv"
    path.write_text(text)
    with pytest.raises(FeedbackError, match=field):
        read_sheet(path, "kim")


def test_a_sheet_whose_last_line_may_be_cut_off_is_refused_until_its_line_ends(tmp_path):
    """``25`` that was cut off after its first digit is another action, and ``decision-1`` another decision."""
    path, whole = tmp_path / "sheet.csv", "decision_id,verdict,corrected_action\nd1,wrong,25"
    for cut in range(len("decision_id,verdict,corrected_action\nd1,"), len(whole) + 1):
        path.write_text(whole[:cut])
        with pytest.raises(FeedbackError, match="last line has no line break") as caught:
            read_sheet(path, "kim")
        assert "add a line break at its end" in caught.value.remedy
    for end in ("\n", "\r\n", "\n\n"):
        path.write_bytes((whole + end).encode())
        assert [answer.corrected_action for answer in read_sheet(path, "kim")] == [25]


@pytest.mark.parametrize(("text", "action"), [("25", 25), ("25.0", 25), ("25.", 25), ("25.000", 25), ("0.0", 0)])
def test_whole_numbers_are_read_as_spreadsheets_write_them(tmp_path, text, action):
    path = tmp_path / "sheet.csv"
    path.write_text(f"decision_id,verdict,confidence,corrected_action\nd1,wrong,1.0,{text}\nd2,correct,1,\n")
    assert [answer.corrected_action for answer in read_sheet(path, "kim")] == [action, None]


def test_actions_have_names_and_numbers():
    assert action_number("measure_3") == 3
    assert action_number("45") == 45
    nothing = ("46", "46.0", "-1", "", "x", "9" * 5000, "²", "1.5", "2.50", ".0", "1e1", "1.0.0", "25,0", "1_0")
    assert [action_number(text) for text in nothing] == [None] * len(nothing)
    assert action_name(99) == "99"
