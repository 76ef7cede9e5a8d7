"""The command line as a script sees it: one JSON document, typed errors, exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app

COMMANDS = [
    ("run",),
    ("evaluate",),
    ("ui",),
    ("agent",),
    ("agent", "remember"),
    ("line",),
    ("line", "takeover"),
    ("line", "release"),
    ("bundle", "verify"),
    ("bundle", "serve"),
    ("champion", "show"),
    ("table", "show"),
    ("table", "set"),
    ("table", "diff"),
    ("table", "rollback"),
    ("table", "history"),
]
runner = CliRunner()


def call(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = runner.invoke(app, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_and_takes_home_and_json(command: tuple[str, ...]) -> None:
    result = runner.invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--home" in result.stdout
    assert "--json" in result.stdout
    assert len(result.stdout.splitlines()[3].strip()) > 20


def test_help_lists_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    for command in {first for first, *_ in COMMANDS}:
        assert command in result.stdout


def test_the_module_runs_like_the_script() -> None:
    done = subprocess.run([sys.executable, "-m", "agentpipe", "--help"], capture_output=True, text=True, check=True)
    assert "Usage: agentpipe" in done.stdout or "agentpipe" in done.stdout


def test_there_is_no_champion_before_the_first(tmp_path: Path) -> None:
    assert call("champion", "show", "--home", str(tmp_path)) == (0, {"ok": True, "champion": None, "history": []})


def test_the_champion_is_shown_with_its_history(tmp_path: Path) -> None:
    from agentpipe.learning.succession.champion import ChampionStore

    store = ChampionStore(tmp_path / "champion")
    store.promote("digest-1", "path/to/package", expected=None, reason="the first", figures={"success": 0.9})
    code, document = call("champion", "show", "--home", str(tmp_path))
    assert code == 0
    assert document["champion"]["digest"] == "digest-1"
    assert len(document["history"]) == 1
    text = runner.invoke(app, ["champion", "show", "--home", str(tmp_path)]).stdout
    assert "the first" in text
    assert "90.0 %" in text


@pytest.mark.parametrize(
    ("arguments", "kind", "field"),
    [
        (("run", "--day", "yesterday"), "SettingsError", "day"),
        (("run", "--day", "1999-01-01"), "SettingsError", "day"),
        (("run", "--profile", "huge"), "SettingsError", "profile"),
        (("run", "--threads", "0"), "SettingsError", "threads"),
        (("run", "--seed", "-1"), "SettingsError", "seed"),
        (("run", "--machine-history", "/nowhere.csv"), "MachineHistoryError", "file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_what_cannot_be_used_is_a_typed_error(
    tmp_path: Path, arguments: tuple[str, ...], kind: str, field: str
) -> None:
    code, document = call(*arguments, "--home", str(tmp_path / "home"))
    assert code == 1
    assert document["ok"] is False
    assert document["error"]["type"] == kind
    assert document["error"]["remedy"]
    where = document["error"]["where"]
    assert field in where or where["field"] == field


def test_an_unknown_setting_in_the_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTPIPE_TRAINING__MINIBATCH", "many")
    code, document = call("run", "--home", str(tmp_path))
    assert code == 1
    assert document["error"]["where"]["field"] == "training.minibatch"


def test_demonstrations_that_are_not_there_stop_a_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTPIPE_TRAINING__DEMONSTRATIONS", str(tmp_path / "nowhere.parquet"))
    code, document = call("run", "--home", str(tmp_path / "home"))
    assert code == 1
    assert document["error"]["where"]["field"] == "training.demonstrations"
    assert not (tmp_path / "home").exists()


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("not a folder")
    code, document = call("run", "--home", str(tmp_path / "home"))
    assert (code, document["error"]["type"]) == (1, "HomeError")


def test_a_home_of_a_newer_agentpipe_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "format.json").write_text('{"format": 99}')
    code, document = call("run", "--home", str(tmp_path))
    assert (code, document["error"]["type"]) == (1, "VersionError")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["format.json"]


def test_a_read_only_home_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    folder = "/sys/agentpipe" if os.geteuid() == 0 else str(tmp_path)  # root may write everywhere but into the kernel's
    code, document = call("run", "--home", folder)
    tmp_path.chmod(0o700)
    assert code == 1
    assert document["error"]["type"] == "HomeError"


def test_evaluating_what_is_no_package_names_it(tmp_path: Path) -> None:
    code, document = call("evaluate", "--package", str(tmp_path / "gone"), "--home", str(tmp_path))
    assert code == 1
    assert document["error"]["type"] == "InputError"
    assert document["error"]["where"]["file"].endswith("gone")


def test_verifying_what_is_no_bundle_is_an_error(tmp_path: Path) -> None:
    code, document = call("bundle", "verify", str(tmp_path))
    assert (code, document["error"]["type"]) == (1, "BundleError")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, document = call("ui", "--port", str(port), "--home", str(tmp_path))
    assert code == 1
    assert document["error"]["type"] == "ServiceError"
    assert document["error"]["where"]["port"] == port


def test_a_command_line_that_makes_no_sense_is_exit_code_2() -> None:
    assert runner.invoke(app, ["run", "--no-such-option"]).exit_code == 2
    assert runner.invoke(app, ["evaluate"]).exit_code == 2
