"""A smoke run never writes over the results that are kept, unless it is told where."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks import __main__ as every
from benchmarks import (
    buffer_learning,
    claims,
    feedback_intake,
    feedback_learning,
    measure,
    peers,
    promotion,
    table_redis,
    worker,
)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder in the place of the committed results."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(measure, "RESULTS", folder)
    return folder


def test_a_smoke_run_of_a_benchmark_leaves_the_committed_results(kept, capsys):
    path = worker.main("buffer", None, ["--smoke", "--cores", "9999"])
    assert list(kept.iterdir()) == []
    assert path.exists()
    said = capsys.readouterr().err
    assert f"A smoke run: its figures mean nothing. Results: {path.parent}" in said


def test_a_measured_run_writes_into_the_committed_results_and_a_smoke_run_where_it_is_told(kept, tmp_path):
    assert worker.main("buffer", None, ["--cores", "9999"]) == kept / "buffer.json"
    assert worker.main("buffer", None, ["--smoke", "--cores", "9999", "--out", str(kept)]) == kept / "buffer.json"


@pytest.mark.parametrize(
    "benchmark", [buffer_learning, claims, feedback_intake, feedback_learning, peers, promotion, table_redis]
)
def test_every_benchmark_asks_for_its_folder_in_the_same_place(benchmark):
    assert benchmark.results_folder is measure.results_folder


def test_a_smoke_run_of_all_benchmarks_writes_into_one_folder_of_its_own(kept, tmp_path, monkeypatch, capsys):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    every.main(["--smoke"])
    page = capsys.readouterr().out.strip()
    folders = {command[command.index("--out") + 1] for command in commands}
    assert len(folders) == 1
    assert page == f"{folders.pop()}/RESULTS.md"
    assert {command[2] for command in commands} >= {f"benchmarks.{name}" for name in every.NAMES}
    assert list(kept.iterdir()) == []
