"""What the agent writes of itself after five failures in a row, for the person it asks."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from agentpipe.errors import StoreError
from agentpipe.storage import write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agentpipe.serving.agent.execution import Execution

_NAMES = {
    "line_id": "line",
    "late_steps": "steps that were not answered in time",
    "sub_goals_reached": "sub-goals reached",
    "sub_goals_missed": "sub-goals that three alternatives did not reach",
    "mean_seconds_between_failures": "mean time between failures, seconds",
}


def diagnose(execution: Execution, folder: Path, lost: Mapping[str, str], counts: Mapping[str, int]) -> str:
    """The agent says what it finds, and has a person decide the next question; returns what became of the page."""
    figures = execution.figures()
    execution.ask_reason, execution.reason_for = "five failures in a row: see the diagnosis", ""
    execution.diagnosed()
    try:
        return f"diagnosis of {execution.line_id}: {write_diagnosis(folder, figures, lost, counts)}"
    except StoreError as error:
        return f"the diagnosis of {execution.line_id} cannot be written: {error.message}"


def write_diagnosis(
    folder: Path, figures: Mapping[str, Any], lost: Mapping[str, str], counts: Mapping[str, int]
) -> Path:
    """Writes a Markdown page into ``folder`` and returns where.

    Args:
        folder: made where it is missing.
        figures: of the line's execution.
        lost: parts that are lost, and why.
        counts: of the runtime.

    Raises:
        DiskFullError, HomeError: it cannot be written.
    """
    now = dt.datetime.now(dt.UTC)
    path = folder / f"{now:%Y%m%dT%H%M%S.%f}Z.md"
    write_bytes(path, diagnosis_text(now, figures, lost, counts).encode())
    return path


def diagnosis_text(
    now: dt.datetime, figures: Mapping[str, Any], lost: Mapping[str, str], counts: Mapping[str, int]
) -> str:
    """The page."""
    lines = [
        f"# Five failures in a row at {figures['line_id']}",
        "",
        f"{now.isoformat(timespec='seconds')}. A person is asked to decide the next question.",
        "",
        "## What is lost",
        "",
        *([f"- {part}: {reason}" for part, reason in sorted(lost.items())] or ["Every probe is well."]),
        "",
        "## What to do",
        "",
        *_advice(figures, lost),
        "",
        "## Figures",
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| {_NAMES.get(name, name.replace('_', ' '))} | {_shown(value)} |" for name, value in figures.items()),
        *(f"| {name.replace('_', ' ')} of all lines | {value} |" for name, value in counts.items()),
        "",
    ]
    return "\n".join(lines)


def _advice(figures: Mapping[str, Any], lost: Mapping[str, str]) -> list[str]:
    advice = []
    if lost:
        advice.append("Bring back what is lost; the agent returns to it by itself.")
    if figures["late_steps"]:
        advice.append("Look at the load of this machine, and at how long the line waits for an answer.")
    if figures["sub_goals_missed"]:
        advice.append(
            "Work the order by hand, and label its decisions (`agentpipe feedback label`): the policy learns from them."
        )
    return [f"- {each}" for each in advice]


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
