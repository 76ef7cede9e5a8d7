import datetime as dt

import pytest

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.label_mix_store import read_observations, read_week
from agentpipe_tests.feedback.examples import Home, decision, label

MONDAY = dt.date(2026, 3, 23)  # its Sunday is a change of clocks in Europe


def test_a_week_comes_out_of_the_store(tmp_path):
    home = Home(tmp_path)
    home.drop(
        "a.jsonl",
        decision("d1", time="2026-03-23T00:00:00Z"),
        decision("d2", time="2026-03-29T23:59:59Z", line_id="L2", result="operator takeover"),
        decision("d3", time="2026-03-30T00:00:00Z"),
        label("l1", decision_id="d1", time="2026-03-24T08:00:00Z"),
        label("l2", decision_id="d2", time="2026-03-30T08:00:00Z", verdict="correct", error_type=None),
    )
    home(late_days=30)
    week = read_week(home.store, MONDAY, quarantine={"late": 2}, minimum_labels=1)
    assert (week.decisions, week.lines, week.labels, week.unlabelled.count) == (2, 2, 1, 0)
    assert (week.taken_over, week.corrected, week.interventions.count) == (1, 1, 2)
    assert week.mix == {"correct": {}, "needs_improvement": {}, "wrong": {"planning": 1}}
    assert week.quarantine == {"late": 2}
    found = read_observations(home.store, MONDAY, 3, seed=0)
    assert found.values.tolist() == [[0.5, -1, 2e3]] * 2
    assert sorted(found.groups) == ["L1", "L2"]
    with pytest.raises(EvaluationError, match="3 features instead of 192"):
        read_observations(home.store, MONDAY, 192, seed=0)


def test_an_empty_store_is_a_week_without_data(tmp_path):
    week = read_week(tmp_path / "store", MONDAY)
    assert (week.status, week.decisions, week.labels) == ("INSUFFICIENT_DATA", 0, 0)
    assert read_observations(tmp_path / "store", MONDAY, 3, seed=0).values.shape == (0, 3)
