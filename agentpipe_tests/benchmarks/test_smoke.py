"""Each benchmark runs. What it measures is not asserted: times belong to machines."""

import json
import subprocess
import sys

import pytest

from benchmarks import promotion, report
from benchmarks.measure import ROOT, Contestant, take_turns


def smoke(name, out):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke", "--cores", "1", "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return json.loads((out / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first"), [("simulator", "production line, actions"), ("training", "agentpipe, prod")]
)
def test_a_smoke_run_leaves_results_that_the_page_can_show(name, first, tmp_path):
    content = smoke(name, tmp_path)
    assert content["figures"][0]["name"].startswith(first)
    assert all(figure["worst"] <= figure["median"] <= figure["best"] for figure in content["figures"])
    page = report.results(tmp_path)
    assert "A smoke run" in page
    assert all(figure["name"] in page for figure in content["figures"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("claims", ["--arms", "distillation", "50 demonstrations, else random weights"]),
        ("peers", ["--only", "PPO in one file, CleanRL style"]),
    ],
)
def test_what_was_measured_once_is_not_measured_again(name, some, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke", "--seeds", "0", *some, "--out", str(tmp_path)]
    first = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    content = (tmp_path / f"{name}.json").read_text()
    again = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert "[1 of " in first.stderr
    assert "[1 of " not in again.stderr
    assert again.stdout == first.stdout
    assert json.loads(content)["rows"] == json.loads((tmp_path / f"{name}.json").read_text())["rows"]


def test_promotions_are_counted_and_the_page_can_show_them(tmp_path):
    promotion.main(["--smoke", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "promotion.json").read_text())["rows"]
    by = {(row["lacks"], row["different"], row["episodes"]): row["ours"] for row in rows}
    assert by[0.0, 0.02, 8] == 1.0
    assert max(share for (lacks, *_), share in by.items() if lacks == 0.01) <= 0.5
    assert "## How often a candidate is promoted" in report.results(tmp_path)


def test_more_cores_than_there_are_is_said_and_not_measured(tmp_path):
    command = [sys.executable, "-m", "benchmarks.simulator", "--smoke", "--cores", "9999", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    content = json.loads((tmp_path / "simulator.json").read_text())
    assert content["figures"] == []
    assert "9999 cores" in content["skipped"]


def test_turns_alternate_and_the_first_round_does_not_count():
    order = []

    def turn(name, seconds):
        order.append(name)
        return seconds.pop(0)

    slow, fast = [100.0, 4.0, 2.0, 1.0], [100.0, 0.5, 0.5, 0.5]
    figures = take_turns(
        [
            Contestant("slow", 8, lambda: turn("slow", slow)),
            Contestant("fast", 8, lambda: turn("fast", fast)),
        ],
        cores=1,
        repeats=3,
    )
    assert order == ["slow", "fast"] * 4
    assert figures[0].rates == (2.0, 4.0, 8.0)
    assert (figures[0].median, figures[0].worst, figures[0].best) == (4.0, 2.0, 8.0)
    assert figures[1].median == 16.0


@pytest.mark.parametrize(
    ("rate", "text"), [(1_432_670, "1.43 M"), (22_176_455, "22.2 M"), (140_437, "140 k"), (9_876, "9.88 k"), (12, "12")]
)
def test_rates_are_written_with_three_digits(rate, text):
    assert report.human(rate) == text
