"""``agentpipe table``: one JSON document on standard output, errors on standard error, exit code 0 only when well."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from agentpipe.cli.table import app


@pytest.fixture
def table(tmp_path):
    def run(*arguments, ok=True):
        result = CliRunner().invoke(app, [*arguments, "--home", str(tmp_path / "home")])
        assert (result.exit_code == 0) == ok, result.output
        return result

    return run


def test_show_on_an_empty_home_takes_the_project_table_in(table):
    content = json.loads(table("show", "--json", "--cell", "load-3").stdout)
    assert {(row["kind"], row["intensity"]) for row in content["rows"]} == {("load", 3)}
    assert content["rows"][0]["load_sigma"] == 0.05
    assert len(content["cell_digests"]) == 15
    assert "load_sigma=0.05" in table("show").stdout


def test_set_diff_history_and_rollback(table):
    first = json.loads(table("show", "--json").stdout)["version"]
    sign = ("--who", "ann", "--why", "quieter")
    change = json.loads(
        table("set", "sensor_sigma=0.4", "--where", "kind = sensor and intensity = 5", *sign, "--json").stdout
    )
    assert change["cells"] == ["sensor-5"]
    assert change["entry"]["who"] == "ann"
    difference = json.loads(table("diff", first[:8], "current", "--json").stdout)
    assert difference["after"] == change["version"]
    assert {line["column"] for line in difference["changed"]} == {"sensor_sigma"}
    assert "sensor_sigma" in table("diff", first[:8], "current").stdout
    back = json.loads(table("rollback", first[:8], *sign, "--json").stdout)
    assert back["version"] == first
    log = json.loads(table("history", "--json").stdout)["changes"]
    assert [line["action"] for line in log] == ["import", "set", "rollback"]
    assert "quieter" in table("history").stdout
    seen = json.loads(table("history", "--env", "t0001.sensor-5", "--json").stdout)["changes"]
    assert seen[0]["fingerprint"] == seen[-1]["fingerprint"]
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("set", "sensor_sigma=9", "--where", "kind = load", "--who", "a", "--why", "b"), "TableError", "out of range"),
        (("set", "sensor_sigma=x", "--where", "kind = load", "--who", "a", "--why", "b"), "TableError", "assignment"),
        (("set", "load_sigma=0.1", "--where", "kind = heat", "--who", "a", "--why", "b"), "TableError", "filter"),
        (("set", "load_sigma=0.1", "--where", "kind = load"), "TableError", "needs who"),
        (("rollback", "ffffffff", "--who", "a", "--why", "b"), "TableError", "unknown version"),
        (("history", "--env", "t9999.sensor-1"), "CatalogError", "unknown environment"),
        (("show", "--cell", "heat-1"), "TableError", "unknown cell"),
    ],
)
def test_errors_are_one_json_document_and_a_line(table, arguments, error, text):
    table("show")
    result = table(*arguments, "--json", ok=False)
    content = json.loads(result.stdout)
    assert content["error"]["type"] == error
    assert text in content["error"]["message"]
    assert content["error"]["remedy"]
    assert error in result.stderr


def test_bad_source_is_shown_as_a_warning_beside_the_good_version(table, tmp_path):
    good = json.loads(table("show", "--json").stdout)
    source = tmp_path / "home" / "table" / "source.csv"
    source.write_text(source.read_text().replace("sensor,1,0,0.15", "sensor,1,0,NaN"))
    shown = json.loads(table("show", "--json").stdout)
    assert shown["version"] == good["version"]
    assert "NaN" in shown["warning"]
    assert "NaN" in table("show").stderr
