"""The benchmark of the intake counts right, and its rows are valid for the built-in line."""

from __future__ import annotations

from benchmarks import feedback_intake


def test_rows_of_the_benchmark_are_all_taken_once_and_counted(tmp_path):
    feedback_intake.write_parquet(tmp_path / "inbox" / "a.parquet", 220, 0)
    feedback_intake.write_jsonl(tmp_path / "inbox", 4, 220)
    found = feedback_intake.intake(tmp_path)
    assert (found["rows_taken"], found["quarantined"], found["files"]) == (232, 0, 5)
    figure = feedback_intake.figure("a title", found, tmp_path, 233)
    assert (figure.notes["lost"], figure.notes["doubled"], figure.steps) == (1, 0, 232)
    table = feedback_intake.section({"figures": [{"name": "a title", "median": 10.0, "notes": figure.notes}]})
    assert "| a title |" in table
