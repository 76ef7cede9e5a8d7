from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import typer

from agentpipe.cli import output
from agentpipe.cli.output import typed
from agentpipe.cli.progress import _Lines
from agentpipe.errors import GateError


def test_an_error_is_one_json_document_and_a_line_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    with pytest.raises(typer.Exit) as ended, output.reporting(as_json=True):
        raise GateError("no bundle", remedy="train longer", file="x")
    captured = capsys.readouterr()
    assert ended.value.exit_code == 1
    expected = {"type": "GateError", "message": "no bundle", "where": {"file": "x"}, "remedy": "train longer"}
    assert json.loads(captured.out) == {"ok": False, "error": expected}
    assert captured.err == "GateError: no bundle [file x] - train longer\n"


def test_without_json_standard_output_stays_empty_on_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), output.reporting(as_json=False):
        raise GateError("no bundle")
    assert capsys.readouterr().out == ""


def test_an_interrupt_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, output.reporting(as_json=False):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert "goes on" in capsys.readouterr().err


def test_an_error_that_nobody_meant_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), output.reporting(as_json=True):
        raise ZeroDivisionError


@pytest.mark.parametrize(("share", "text"), [(0.897, "89.7 %"), (0.0, "0.0 %"), (None, "–")])
def test_percent(share: float | None, text: str) -> None:
    assert output.percent(share) == text


def test_what_is_to_be_typed_next_is_for_the_same_home() -> None:
    assert typed(None, "feedback", "take") == "agentpipe feedback take"
    assert typed(Path("/a b"), "feedback", "take") == "agentpipe feedback take --home '/a b'"


def test_lines_show_every_finished_part_and_the_rest_seldom() -> None:
    terminal = io.StringIO()
    show = _Lines("main job", terminal)
    show("main job", 1, 56, "line done")
    for done in range(1000):
        show("policy_checkpoint: training", done, 1000)
    show("main job", 2, 56, "cell done")
    lines = [re.sub(r"^\[ *[\d.]+ s\] ", "", line) for line in terminal.getvalue().splitlines()]
    assert lines == ["main job: 1 of 56 · line done", "main job: 2 of 56 · cell done"]


def test_long_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr("agentpipe.cli.progress._SILENCE_SECONDS", 0.5)
    terminal = io.StringIO()
    show = _Lines("main job", terminal)
    with show.watched():
        show("main job", 1, 56, "cell[sensor-1]: trajectories")
        time.sleep(1.4)
    assert "still at it: cell[sensor-1]: trajectories" in terminal.getvalue()
