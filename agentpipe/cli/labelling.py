"""What ``agentpipe feedback label`` shows and asks."""

from __future__ import annotations

import datetime as dt
import getpass
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from agentpipe.cli.output import print_json, say, typed
from agentpipe.errors import AgentpipeError, InputError, LockHeldError

if TYPE_CHECKING:
    from agentpipe.feedback.review import Answer, Unlabelled

_VERDICTS = {"c": "correct", "w": "wrong", "n": "needs_improvement"}
_ERRORS = {"p": "perception", "l": "planning", "e": "execution", "": None}


class Work(NamedTuple):
    """Where labels come from and go to, and how what lies in the inbox is taken in.

    ``take`` returns why the stream could not be read, after the inbox was.
    """

    store: Path
    inbox: Path
    take: Callable[[], AgentpipeError | None]


def on_terminal() -> bool:
    """True where a person can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def find(work: Work, limit: int, day: str | None) -> list[Unlabelled]:
    """Unlabelled decisions, worst first."""
    from agentpipe.feedback.review import worst_first

    try:
        chosen = None if day is None else [dt.date.fromisoformat(day)]
    except ValueError as error:
        raise InputError(f"not a day: {day!r}", field="day", remedy="write it as 2026-03-29") from error
    return worst_first(work.store, limit=limit, of_days=chosen)


def check_sheet(path: Path, force: bool) -> None:
    """Raises ``InputError`` where the sheet would replace a file, which may be filled in already."""
    if path.exists() and not force:
        raise InputError("the file is there already", file=path, remedy="give another name, or --force to replace it")


def write_sheet(path: Path, rows: Sequence[Unlabelled], home: Path | None, as_json: bool) -> None:
    """The decisions as a CSV file to be filled in."""
    from agentpipe.feedback.review import write_sheet as write

    write(path, rows)
    if as_json:
        print_json({"ok": True, "file": str(path), "decisions": len(rows)})
    else:
        then = typed(home, "feedback", "label", "--answers", str(path))
        typer.echo(f"{path}: {counted(len(rows), 'decision')}; fill in, then {then}")


def read_answers(path: Path, annotator: str | None) -> list[Answer]:
    """The answers in a CSV file."""
    from agentpipe.feedback.review import read_sheet

    return read_sheet(path, annotator or user())


def take_answers(work: Work, answers: Sequence[Answer], as_json: bool) -> None:
    """Answers become a file in the inbox, which is taken in at once where the home is free."""
    from agentpipe.feedback.review import drop_answers

    dropped = drop_answers(work.store, work.inbox, answers, dt.datetime.now(dt.UTC))
    taken = dropped.file is not None
    if dropped.file is not None:
        try:
            failure = work.take()
            if failure is not None:  # the labels came through the inbox all the same
                say_error(failure)
        except LockHeldError as error:
            taken = False
            say(f"{error.message}: the next intake takes the labels")
    if as_json:
        print_json({"ok": True, "labels": dropped.labels, "already": dropped.already, "taken": taken})
    else:
        typer.echo(f"{counted(dropped.labels, 'label')}, {dropped.already:,} said before")


def say_error(error: AgentpipeError) -> None:
    """A typed error for people, beside what was done in spite of it."""
    say(f"{type(error).__name__}: {error}")


def user() -> str:
    """Who is at the terminal; empty where the system does not know."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return ""


def print_rows(rows: Sequence[Unlabelled]) -> None:
    """The decisions as a table."""
    from agentpipe.feedback.review import action_name

    columns = ("decision", "time", "line", "policy", "action", "probability", "result")
    lines = [
        (
            row.decision_id,
            f"{row.time:%Y-%m-%d %H:%M:%S}",
            row.line_id,
            row.policy_version[:16],
            action_name(row.action),
            f"{row.probability:.3f}",
            row.result or "–",
        )
        for row in rows
    ]
    print_table(columns, lines, flush_left=tuple(name for name in columns if name != "probability"))


def counted(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], flush_left: Sequence[str]) -> None:
    """Plain columns; nothing is wrapped or cut, whatever reads it."""
    lines = [columns, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        cells = [
            text.ljust(width) if name in flush_left else text.rjust(width)
            for name, text, width in zip(columns, line, widths, strict=True)
        ]
        typer.echo("  ".join(cells).rstrip())


def ask(rows: Sequence[Unlabelled], annotator: str | None) -> list[Answer]:
    """Asks for one decision after the other; ``q``, the end of input and Ctrl-C end it and keep the answers so far."""
    from agentpipe.feedback.review import action_name, check_annotator

    who = check_annotator(annotator or user())
    answers: list[Answer] = []
    for number, row in enumerate(rows, 1):
        typer.echo(
            f"\n{number} of {len(rows)}: {row.decision_id}  {row.time:%Y-%m-%d %H:%M:%S} UTC  line {row.line_id}"
        )
        typer.echo(
            f"  {action_name(row.action)} with probability {row.probability:.3f}, result {row.result or 'unknown'}"
        )
        try:
            verdict = _choose("correct, wrong, needs improvement, skip, quit [c/w/n/s/q]", {*_VERDICTS, "s", "q"}, "s")
            if verdict in _VERDICTS:
                answers.append(_answer(row, verdict, who))
        except typer.Abort:
            verdict = "q"
            typer.echo()
        if verdict == "q":
            break
    return answers


def _answer(row: Unlabelled, verdict: str, who: str) -> Answer:
    from agentpipe.feedback.review import Answer

    error, corrected = None, None
    if verdict != "c":
        error = _ERRORS[_choose("fault: perception, planning, execution, none [p/l/e/]", set(_ERRORS), "")]
        corrected = _action()
    confidence = typer.prompt("confidence", default=1.0, type=float)
    while not 0 < confidence <= 1:
        confidence = typer.prompt("confidence, above 0 and at most 1", default=1.0, type=float)
    return Answer(row.decision_id, _VERDICTS[verdict], error, confidence, who, corrected)


def _choose(question: str, allowed: set[str], default: str) -> str:
    while True:
        given = typer.prompt(question, default=default, show_default=False).strip().lower()
        if given in allowed:
            return str(given)


def _action() -> int | None:
    from agentpipe.feedback.review import action_number

    while True:
        given = typer.prompt("better action, by name or number (empty: not known)", default="", show_default=False)
        number = action_number(given.strip())
        if number is not None or not given.strip():
            return number
        typer.echo("  no such action; names are measure_0, declare_machine_3, depth_replace, close, ...")
