"""A signal at any moment ends the main job, also while Dagster has handlers of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_dagster_records_a_run_was_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    from dagster._utils.interrupts import capture_interrupts

    done = []

    def main_job(_definitions: Any, _options: Any, _day: Any, progress: Any) -> None:
        with capture_interrupts():  # as every run of Dagster's does around its steps
            os.kill(os.getpid(), number)
        progress("policy_checkpoint: training", 1, 2)  # inside a run: Dagster decides
        done.append("run")
        progress("main job", 1, 56, "cell[sensor-1] done")
        done.append("next run")

    monkeypatch.setattr("agentpipe.defs.main_job.run_main_job", main_job)
    result = CliRunner().invoke(app, ["run", "--home", str(tmp_path), "--json"])
    assert done == ["run"]
    assert result.exit_code == 130
    assert json.loads(result.stdout)["error"]["type"] == "Interrupted"
    assert signal.set_wakeup_fd(-1) == -1, "the process listens no longer"
