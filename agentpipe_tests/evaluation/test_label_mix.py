import datetime as dt

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.label_mix import (
    ProductionWeek,
    Share,
    compare_weeks,
    difference,
    mix_distance,
    newest_labels,
    production_week,
    share,
)
from agentpipe.feedback.schema import DECISION_TABLE, LABEL_TABLE

MONDAY = dt.date(2026, 3, 23)
NOON = dt.datetime(2026, 3, 23, 12, tzinfo=dt.UTC)


def decisions(rows):
    """From (id, hours after Monday noon, line, result)."""
    columns = ["decision_id", "time", "line_id", "result"]
    schema = pa.schema([DECISION_TABLE.field(name) for name in columns])
    return pa.Table.from_pylist(
        [
            {"decision_id": i, "time": NOON + dt.timedelta(hours=h), "line_id": line, "result": result}
            for i, h, line, result in rows
        ],
        schema=schema,
    )


def labels(rows):
    """From (id, decision, hours after Monday noon, verdict, error type, corrected action)."""
    columns = ["label_id", "decision_id", "time", "verdict", "error_type", "corrected_action"]
    schema = pa.schema([LABEL_TABLE.field(name) for name in columns])
    return pa.Table.from_pylist(
        [
            {**dict(zip(columns, row, strict=True)), "time": NOON + dt.timedelta(hours=row[2])}
            for row in rows
        ],
        schema=schema,
    )  # fmt: skip


def example(**changes):
    """Four decisions of two lines; five labels, of which the second corrects the first."""
    made = decisions(
        [("a", 0, "l1", "done"), ("b", 1, "l1", "Takeover by shift lead"), ("c", 24, "l2", ""), ("d", 30, "l2", "done")]
    )
    said = labels(
        [
            ("1", "a", 2, "wrong", "planning", 3),
            ("2", "a", 3, "correct", None, None),
            ("3", "b", 4, "wrong", "execution", None),
            ("4", "c", 25, "needs_improvement", None, 7),
            ("5", "earlier", 26, "correct", None, None),
        ]
    )
    return production_week(MONDAY, made, said, **{"minimum_labels": 1, **changes})


def test_figures_of_a_small_week():
    week = example(quarantine={"late": 3, "not_json": 1})
    assert (week.decisions, week.lines, week.labels) == (4, 2, 4)
    assert week.mix == {"correct": {"none": 2}, "needs_improvement": {"none": 1}, "wrong": {"execution": 1}}
    assert (week.first_time_right.count, week.first_time_right.of, week.first_time_right.value) == (2, 4, 0.5)
    assert (week.taken_over, week.corrected, week.interventions.count) == (1, 1, 2)  # b by its result, c by its label
    assert (week.unlabelled.count, week.unlabelled.of) == (1, 4)
    assert week.quarantine == {"late": 3, "not_json": 1}
    assert [day.day for day in week.days] == [f"2026-03-{day}" for day in range(23, 30)]
    assert [day.decisions for day in week.days] == [2, 2, 0, 0, 0, 0, 0]
    assert week.days[1].mix == {"correct": {"none": 1}, "needs_improvement": {"none": 1}, "wrong": {}}
    assert week.days[2].first_time_right == Share(0, 0, None, [None, None])


def test_few_labels_give_no_rate():
    week = example(minimum_labels=5)
    assert (week.status, week.first_time_right.value) == ("INSUFFICIENT_DATA", None)
    assert "INSUFFICIENT_DATA" in week.first_time_right.text()


def test_an_empty_week_has_no_shares():
    week = production_week(MONDAY, decisions([]), labels([]))
    assert (week.status, week.decisions, week.lines, week.labels) == ("INSUFFICIENT_DATA", 0, 0, 0)
    assert week.interventions.value is week.unlabelled.value is None


def test_a_label_of_another_week_counts_only_against_unlabelled():
    made = decisions([("a", 0, "l", "done"), ("b", 0, "l", "done")])
    said = labels([("1", "a", 24 * 7, "wrong", None, 2), ("2", "b", -48, "correct", None, None)])
    week = production_week(MONDAY, made, said, minimum_labels=1)
    assert (week.labels, week.unlabelled.count, week.corrected) == (0, 0, 0)


def test_the_last_second_of_sunday_belongs_to_the_week_and_the_next_does_not():
    last = 24 * 6 + 12 - 1 / 3600
    assert production_week(MONDAY, decisions([("a", last, "l", "")]), labels([])).days[6].decisions == 1
    with pytest.raises(EvaluationError, match="not in the week"):
        production_week(MONDAY, decisions([("a", last + 1 / 3600, "l", "")]), labels([]))
    with pytest.raises(EvaluationError, match="Monday"):
        production_week(dt.date(2026, 3, 24), decisions([]), labels([]))


def test_a_verdict_that_does_not_exist_is_refused():
    with pytest.raises(EvaluationError, match="is no verdict"):
        production_week(MONDAY, decisions([]), labels([("1", "a", 0, "splendid", None, None)]))


@pytest.mark.parametrize(
    ("result", "counts"),
    [
        ("takeover", 1), ("TAKE_OVER: arm frozen", 1), ("taken over by operator", 1), ("manual override", 1),
        ("overridden", 1), ("done", 0), ("", 0), ("timeout", 0), ("handover done", 0), ("overridex", 0), (None, 0),
    ],
)  # fmt: skip
def test_what_is_an_intervention(result, counts):
    assert production_week(MONDAY, decisions([("a", 0, "l", result)]), labels([])).taken_over == counts


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.sampled_from(["correct", "wrong"])),
        max_size=12,
    )
)
def test_the_newest_label_is_that_of_a_naive_search(rows):
    table = labels(
        [(f"{n:02}", decision, hour, verdict, None, None) for n, (decision, hour, verdict) in enumerate(rows)]
    )
    expected = {}
    for n, (decision, hour, _) in enumerate(rows):
        expected[decision] = max(expected.get(decision, (-1, "")), (hour, f"{n:02}"))
    found = newest_labels(table)
    kept = dict(zip(found.column("decision_id").to_pylist(), found.column("label_id").to_pylist(), strict=True))
    assert kept == {decision: label for decision, (_, label) in expected.items()}


def test_a_week_survives_json():
    week = example(quarantine={"late": 3})
    assert ProductionWeek.from_dict(week.to_dict()) == week
    for content in ({}, {**week.to_dict(), "colour": 1}, {**week.to_dict(), "days": [{}]}):
        with pytest.raises(EvaluationError, match="not the figures"):
            ProductionWeek.from_dict(content)


# Against the week before ----------------------------------------------------------------------------------------------


def test_the_interval_of_a_difference_is_newcombes_own_example():
    # Newcombe 1998, table II, row (a), method 10: 56/70 - 48/80
    value, (low, high) = difference(share(56, 70), share(48, 80))
    assert value == pytest.approx(0.2)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


def week_of(right, labelled=1000, taken=50):
    empty = production_week(MONDAY, decisions([]), labels([])).to_dict()
    rates = {"first_time_right": share(right, labelled, 50), "interventions": share(taken, 1000)}
    mix = {"correct": {"none": right}, "needs_improvement": {}, "wrong": {"planning": labelled - right}}
    return ProductionWeek.from_dict(
        {**empty, **{name: vars(rate) for name, rate in rates.items()}, "mix": mix, "labels": labelled, "status": "OK"}
    )


@pytest.mark.parametrize(
    ("now", "before", "status"),
    [
        (week_of(900), week_of(900), "OK"),
        (week_of(800), week_of(900), "REVIEW"),  # fewer are right
        (week_of(900), week_of(800), "OK"),  # more are right
        (week_of(890), week_of(900), "OK"),  # within chance
        (week_of(900, taken=90), week_of(900, taken=50), "REVIEW"),  # more are taken over
        (week_of(10, labelled=11), week_of(900), "INSUFFICIENT_DATA"),
        (week_of(900), week_of(0, labelled=0), "INSUFFICIENT_DATA"),
    ],
)
def test_a_worse_week_asks_for_review(now, before, status):
    change = compare_weeks(now, before)
    assert change.status == status
    assert change.reason()
    assert (change.mix_distance is None) == (status == "INSUFFICIENT_DATA")


def test_the_distance_of_two_mixes_is_the_share_that_moved():
    first = {"correct": {"none": 6}, "wrong": {"planning": 4}}
    second = {"correct": {"none": 60}, "wrong": {"planning": 20, "execution": 20}}
    assert mix_distance(first, second) == pytest.approx(0.2)
    assert mix_distance(first, first) == 0.0


def test_a_share_has_a_wilson_interval():
    assert share(8, 10) == Share(8, 10, 0.8, [0.490162, 0.943318])
    assert np.isclose(share(0, 50).ci95[1], 0.071348, atol=1e-6)
