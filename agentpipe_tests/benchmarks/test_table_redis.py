"""The benchmark of the table through Redis runs, and its section shows what it found."""

import json

import pytest

from benchmarks import table_redis


@pytest.mark.redis
def test_a_smoke_run_leaves_figures_that_the_section_shows(tmp_path, capsys):
    table_redis.main(["--smoke", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "table_redis.json").read_text())
    assert [figure["size"] for figure in content["figures"]] == [75] * 3
    text = table_redis.section(content)
    assert text in capsys.readouterr().out
    assert all(f"| {figure['name']} | {figure['size']:,} |" in text for figure in content["figures"])


def test_a_duration_is_shown_in_milliseconds():
    notes = {"rows": 75, "limit_ms": 50.0}
    figure = {"name": "a read", "rates": [200.0, 250.0, 500.0], "median": 250.0, "worst": 200.0, "notes": notes}
    content = {"figures": [figure], "server": "valkey 9", "round_trip_ms": 0.25}
    assert "| a read | 75 | 4.0 | 5.0 | 50 |" in table_redis.section(content)
