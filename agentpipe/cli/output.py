"""What commands print: one JSON document or text on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from agentpipe.errors import AgentpipeError

INTERRUPTED = 130


def print_json(content: object) -> None:
    """One JSON document on standard output."""
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    typer.echo(json.dumps(content, indent=1, ensure_ascii=ascii_only, allow_nan=False))


def say(text: str) -> None:
    """A line for people, on standard error."""
    typer.echo(text, err=True)


@contextlib.contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Turns a typed error into a line (and a JSON document) and exit code 1; an interrupt into 130.

    What nobody foresaw is a JSON document as well, and goes on as it is.
    """
    try:
        yield
    except AgentpipeError as error:
        if as_json:
            print_json({"ok": False, "error": error.as_dict()})
        say(f"{type(error).__name__}: {error}")
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        interruption = {"type": "Interrupted", "message": "interrupted", "where": {}, "remedy": "run it again to go on"}
        if as_json:
            print_json({"ok": False, "error": interruption})
        say("Interrupted. What was finished is kept: the same command goes on from there.")
        raise typer.Exit(INTERRUPTED) from error
    except Exception as error:
        if as_json:
            remedy = "a fault of agentpipe: report it with what it wrote to standard error"
            message = f"{type(error).__name__}: {error}"
            print_json(
                {"ok": False, "error": {"type": "UnexpectedError", "message": message, "where": {}, "remedy": remedy}}
            )
        raise


def typed(home: Path | None, *words: str) -> str:
    """A command as it is to be typed for the same home: the option ``--home`` is kept where it was given."""
    return shlex.join(["agentpipe", *words, *(["--home", str(home)] if home else [])])


def percent(share: float | None) -> str:
    """``0.897`` as ``89.7 %``."""
    return "–" if share is None else f"{100 * share:.1f} %"


def player_table(players: Mapping[str, Mapping[str, Any]], split: str = "hold-out") -> None:
    """The players' figures on ``split`` as a table, the best first."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=("Hold-out" if split == "holdout" else split.capitalize()), title_justify="left")
    for column in ("player", "success", "95 % interval", "decision, simulated"):
        table.add_column(column, justify="left" if column == "player" else "right")
    for name in sorted(players, key=lambda name: -players[name]["success"]):
        figures = players[name]
        low, high = figures["ci95"]
        seconds = figures["decision_seconds"]
        table.add_row(
            f"[bold]{name}[/bold]" if name == "policy" else name,
            percent(figures["success"]),
            f"{percent(low)} – {percent(high)}",
            "–" if seconds is None else f"{seconds:.2f} s",
        )
    Console(file=sys.stdout).print(table)
