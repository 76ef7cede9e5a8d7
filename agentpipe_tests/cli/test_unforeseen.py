"""Whatever happens, ``--json`` gives one JSON document, and a setting that nothing reads is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentpipe.cli import output
from agentpipe.errors import CatalogError, SettingsError
from agentpipe.settings import load_settings


def command(*arguments: str, **more: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "agentpipe", *arguments, "--json"],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("run", "--no-such-option"),
        ("run", "--seed", "many"),
        ("evaluate",),
        ("evaluate", "--package", "x", "--split", "train"),
        ("table", "diff", "current"),
        ("champion",),
        ("ui", "--port", "99999"),
    ],
    ids=" ".join,
)
def test_a_command_line_that_makes_no_sense_left_standard_output_empty(arguments: tuple[str, ...]) -> None:
    code, document, log = command(*arguments)
    assert code == 2
    assert document["ok"] is False
    assert document["error"]["type"] == "UsageError"
    assert document["error"]["message"] in log
    assert "Traceback" not in log


def test_exit_codes_stay_those_of_the_command(tmp_path: Path) -> None:
    assert command("champion", "show", "--home", str(tmp_path))[0] == 0
    assert command("run", "--threads", "0", "--home", str(tmp_path))[0] == 1


def test_an_error_that_nobody_foresaw_left_standard_output_empty(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), output.reporting(as_json=True):
        raise ZeroDivisionError("division by zero")
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["error"]["type"] == "UnexpectedError"
    assert document["error"]["message"] == "ZeroDivisionError: division by zero"
    assert document["error"]["remedy"]


def test_what_is_no_folder_ended_verify_with_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no bundle")
    for path in (tmp_path / "file", tmp_path / "gone", Path("/dev/null")):
        code, document, _ = command("bundle", "verify", str(path))
        assert (code, document["error"]["type"]) == (1, "BundleError")
        assert document["error"]["where"]["file"] == str(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AGENTPIPE_TRAINING", "garbage"),
        ("AGENTPIPE_TRAINING", "[1]"),
        ("AGENTPIPE_TRAINING__NONSENSE", "1"),
        ("AGENTPIPE_TRANING__TOTAL_STEPS", "1"),
        ("AGENTPIPE_TRAINING__LEARNING_RATE", "inf"),
        ("AGENTPIPE_TRAINING__TARGET_SUCCESS", "nan"),
        ("AGENTPIPE_GATES__RANDOM_MARGIN", "nan"),
        ("AGENTPIPE_GATES__RANDOM_MARGIN", "1e400"),
        ("AGENTPIPE_TRAINING__ENVIRONMENTS", "0"),
        ("AGENTPIPE_EVALUATION__ENVIRONMENTS", "-5"),
        ("AGENTPIPE_GATES__SUCCESS_MIN", "2"),
        ("AGENTPIPE_GATES__DECISION_SECONDS_MAX", "-1"),
        ("AGENTPIPE_SEDE", "1"),
    ],
)
def test_a_senseless_setting_is_found_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert name.removeprefix("AGENTPIPE_").lower().replace("__", ".") in str(caught.value).lower().replace("__", ".")
    assert caught.value.remedy


def test_an_empty_variable_made_the_working_directory_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTPIPE_HOME", "AGENTPIPE_SEED", "AGENTPIPE_TABLE_SOURCE"):
        monkeypatch.setenv(name, "")
    settings = load_settings()
    assert settings.home == Path(".agentpipe")
    assert settings.seed == 0
    assert settings.table_source is None


def test_a_terminal_without_utf_8_ended_a_finished_job_with_a_traceback(tmp_path: Path) -> None:
    code = (
        "import sys; from agentpipe.cli import main, output\n"
        "main.app = lambda **_: output.player_table({'policy': {'success': 0.5, 'ci95': [0.4, 0.6], "
        "'decision_seconds': None}})\n"
        "sys.argv = ['agentpipe']\n"
        "main.main()\n"
    )
    for locale in ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        environment = {**os.environ, **locale}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=300)
        assert b"Traceback" not in done.stderr, done.stderr
        assert b"policy" in done.stdout
    document = command("table", "show", "--cell", "zürich…", "--home", str(tmp_path), PYTHONIOENCODING="ascii:strict")[
        1
    ]
    assert "zürich…" in document["error"]["message"]


def test_a_split_file_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentpipe.defs.resources import sized_catalog

    (tmp_path / "templates.csv").write_text("template_id\n")
    monkeypatch.setenv("AGENTPIPE_DATA", str(tmp_path))
    with pytest.raises(CatalogError):
        sized_catalog(load_settings())
