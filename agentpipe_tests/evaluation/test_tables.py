import pytest

from agentpipe.environments.layout import REASONS
from agentpipe.evaluation.tables import (
    LIMIT,
    failures_markdown,
    interval,
    markdown_table,
    percent,
    scoreboard,
    scoreboard_markdown,
    slice_rows,
    slices_markdown,
)
from agentpipe_tests.evaluation.test_plots import CELLS, example_summary


@pytest.fixture
def summary():
    summary = example_summary()
    for figures in summary["players"].values():
        figures["mean_steps"] = 14.25
    return summary


def test_shares_are_read_as_percentages():
    assert (percent(0.8974), percent(None), interval([0.5, 0.25])) == ("89.7 %", "–", "50.0 % – 25.0 %")


def test_the_scoreboard_lists_the_best_first(summary):
    assert [row["player"] for row in scoreboard(summary)] == ["oracle", "policy", "diagnoser", "rules", "random"]
    lines = scoreboard_markdown(summary).splitlines()
    assert len(lines) == 2 + 5
    assert "3.10 s" in lines[3]
    assert "12,000" in lines[3]


def test_slices_have_one_row_each_and_all_players(summary):
    assert [row["cell"] for row in slice_rows(summary, "policy", "cell")] == CELLS
    text = slices_markdown(summary, "cell")
    assert text.splitlines()[0] == "| cell | policy | random | rules | diagnoser | oracle | episodes |"
    assert len(text.splitlines()) == 2 + 15


def test_failures_are_counted_and_shared(summary):
    text = failures_markdown(summary, "policy")
    assert "| segment | identify | 500 | 41.7 % |" in text
    assert f"| reason | {REASONS[1]} | 400 | 33.4 % |" in text


def test_no_failures_are_said_so(summary):
    summary["players"]["policy"]["failures"] = 0
    assert failures_markdown(summary, "policy") == "No failures in 12,000 episodes."


def test_a_long_table_is_cut_and_says_so():
    text = markdown_table(["a", "b"], [["x" * 50, index] for index in range(1000)])
    assert len(text.encode()) <= LIMIT
    assert text.splitlines()[-1].startswith("… and ")
    kept = len(text.splitlines()) - 4
    assert f"… and {1000 - kept} more rows" in text


def test_a_bar_in_a_cell_does_not_break_the_table():
    assert markdown_table(["a"], [["x|y"]]).splitlines()[-1] == "| x/y |"
