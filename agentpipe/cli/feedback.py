"""``agentpipe feedback``: taking in what production says, looking after what could not be taken, labelling."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentpipe.cli import labelling
from agentpipe.cli.labelling import counted
from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import print_json, reporting, say, typed

if TYPE_CHECKING:
    from agentpipe.feedback.intake import Intake
    from agentpipe.feedback.rules import Rules
    from agentpipe.feedback.stream import Taken
    from agentpipe.settings import Settings

app = typer.Typer(
    name="feedback", help="Decisions and labels of production: take in, look after, label.", no_args_is_help=True
)
LateDays = Annotated[
    int | None,
    typer.Option("--late-days", min=0, help="Days after which a row is too late.", show_default="feedback.late_days"),
]
_MOST_SAID = 20
"""files that are named one by one where people read"""
Reason = Annotated[str | None, typer.Option("--reason", help="Only with this reason, such as late.")]


@app.callback()
def group() -> None:
    """Decisions and labels of production: take in, look after, label."""


@app.command()
def submit(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSONL, CSV or Parquet files.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Copies files into the inbox, durably; what cannot be read is refused at once, before anything is copied."""
    with reporting(as_json):
        from agentpipe.feedback.inbox import submit as put

        settings = _settings(home)
        for file in files:
            put(file, None)
        placed = [put(file, inbox_of(settings)) for file in files]
        if as_json:
            print_json({"ok": True, "files": [str(path) for path in placed]})
            return
        for path in placed:
            typer.echo(f"{path}: waits for the next intake ({typed(home, 'feedback', 'take')})")


@app.command()
def take(late_days: LateDays = None, home: Home = None, as_json: Json = False) -> None:
    """Takes in what lies in the inbox, and what the Redis stream has where REDIS_URL is set."""
    with reporting(as_json):
        settings = _settings(home)
        done, failure = take_now(settings, late_days)
        ignored = _ignored(settings)
        if as_json:
            error = {} if failure is None else {"error": failure.as_dict()}
            intakes = {name: intake.to_json() for name, intake in done.items()}
            print_json({"ok": failure is None, **intakes, "ignored": ignored, **error})
        else:
            for name, intake in done.items():
                _print_intake(name, intake, home)
            _say_ignored(ignored)
    if failure is not None:
        labelling.say_error(failure)
        raise typer.Exit(1)


@app.command()
def status(
    limit: Annotated[int, typer.Option("--limit", min=1, help="The newest so many days.")] = 14,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Shows the newest days, what waits in the inbox, and what is in quarantine."""
    with reporting(as_json):
        from agentpipe.feedback.store import day_state, days, quarantine_counts

        settings = _settings(home)
        store = store_of(settings)
        states = [day_state(store, day) for day in days(store)[-limit:]]
        waiting, ignored, counts = _inbox_files(settings), _ignored(settings), quarantine_counts(store)
        if as_json:
            listed = [{**vars(state), "unlabelled": state.unlabelled} for state in states]
            print_json({"ok": True, "days": listed, "inbox": waiting, "ignored": ignored, "quarantine": counts})
            return
        columns = ("day", "decisions", "labelled", "labels", "trainable", "superseded", "orphans", "verdicts")
        rows = [
            (
                state.day,
                *(f"{getattr(state, name):,}" for name in columns[1:-1]),
                ", ".join(f"{name} {count:,}" for name, count in state.verdicts.items()) or "–",
            )
            for state in states
        ]
        labelling.print_table(columns, rows, flush_left=("day", "verdicts"))
        typer.echo(f"inbox: {counted(len(waiting), 'file')}" + (f", such as {waiting[0]}" if waiting else ""))
        _say_ignored(ignored)
        typer.echo(f"quarantine: {_counts(counts) or 'nothing'}")


@app.command()
def quarantine(
    reason: Reason = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 20,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Lists rows and files that were not taken: why, and where they stand."""
    with reporting(as_json):
        from agentpipe.feedback.store import quarantine_counts, quarantined

        store = store_of(_settings(home))
        counts, rows = quarantine_counts(store), quarantined(store, reason=reason, limit=limit)
        if as_json:
            print_json({"ok": True, "counts": counts, "rows": [row.to_json() for row in rows]})
            return
        for row in rows:
            place = row.file if row.line == 0 else f"{row.file}:{row.line}"
            typer.echo(f"{row.number:>6}  {row.reason:<22}  {place}  {row.detail}")
        total = sum(counts.values()) if reason is None else counts.get(reason, 0)
        if total > len(rows):
            typer.echo(f"{len(rows):,} of {total:,} shown; --limit {total} shows all")
        typer.echo(f"in quarantine: {_counts(counts) or 'nothing'}")
        if reason is not None and not total:
            say(f"nothing in quarantine has the reason {reason}")


@app.command()
def retry(
    reason: Reason = None,
    numbers: Annotated[list[int] | None, typer.Option("--id", help="Only this row, by its number; repeatable.")] = None,
    late_days: LateDays = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Judges rows in quarantine again, as they would be judged today; the valid ones go to their day."""
    with reporting(as_json):
        from agentpipe.feedback.retry import retry as again
        from agentpipe.feedback.store import quarantined
        from agentpipe.storage import home_lock

        settings = _settings(home)
        rules = _rules(settings, late_days)
        store, wanted, unknown = store_of(settings), set(numbers or ()), []
        with home_lock(settings.home, "agentpipe feedback retry"):
            if wanted:
                there = {
                    row.number for row in quarantined(store, reason=reason, numbers=tuple(wanted)) if row.line != 0
                }
                unknown = sorted(wanted - there)
            done = again(store, rules, reason=reason, numbers=wanted)
        judged = done.rows_taken + sum(done.quarantined.values())
        if as_json:
            left_over = {"rows_taken": done.rows_taken, "still_quarantined": done.quarantined, "unknown_ids": unknown}
            print_json({"ok": True, **left_over})
            return
        such = "" if reason is None else f" with the reason {reason}"
        for number in unknown:
            say(f"no row {number}{such} in quarantine")
        if such and not wanted and not judged:
            say(f"no row{such} in quarantine")
        left = _counts(done.quarantined)
        typer.echo(f"{counted(done.rows_taken, 'row')} taken" + (f"; still in quarantine: {left}" if left else ""))


@app.command()
def label(
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many decisions.")] = 20,
    day: Annotated[
        str | None, typer.Option("--day", help="Only decisions of this UTC day, such as 2026-03-29.")
    ] = None,
    sheet: Annotated[Path | None, typer.Option("--csv", help="Write them to this CSV file, to be filled in.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the CSV file where it is there already.")] = False,
    answers: Annotated[Path | None, typer.Option("--answers", help="Take the answers from this CSV file.")] = None,
    annotator: Annotated[
        str | None, typer.Option("--annotator", help="Who answers.", show_default="the user's name")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Lists unlabelled decisions, worst first: failed results, then the least probable actions.

    On a terminal it asks for them one by one. Answers go the same way as dropped files, and are taken in at once where
    nobody else holds the home.
    """
    with reporting(as_json):
        settings = _settings(home)
        work = labelling.Work(store_of(settings), inbox_of(settings), lambda: take_now(settings, None).failure)
        if answers is not None:
            labelling.take_answers(work, labelling.read_answers(answers, annotator), as_json)
            return
        if sheet is not None:
            labelling.check_sheet(sheet, force)
        rows = labelling.find(work, limit, day)
        if sheet is not None:
            labelling.write_sheet(sheet, rows, home, as_json)
        elif as_json:
            print_json({"ok": True, "decisions": [row.to_json() for row in rows]})
        elif labelling.on_terminal() and rows:
            labelling.take_answers(work, labelling.ask(rows, annotator), as_json)
        else:
            labelling.print_rows(rows)


# --------------------------------------------------------------------------------------------------- inside


def inbox_of(settings: Settings) -> Path:
    """Where files are dropped."""
    return settings.home / "feedback" / "inbox"


def store_of(settings: Settings) -> Path:
    """Where rows lie."""
    return settings.home / "feedback" / "store"


def take_now(settings: Settings, late_days: int | None) -> Taken:
    """One intake of the inbox, and of the stream where there is one, under the home's lock."""
    from agentpipe.feedback.stream import stream_of, take_all
    from agentpipe.storage import home_lock

    rules = _rules(settings, late_days)
    with home_lock(settings.home, "agentpipe feedback take"):
        return take_all(inbox_of(settings), store_of(settings), rules, stream_of(settings))


def _settings(home: Path | None) -> Settings:
    from agentpipe.settings import load_settings
    from agentpipe.storage import check_home_format, typed_os_errors

    settings = load_settings(home=home)
    with typed_os_errors(settings.home):
        check_home_format(settings.home)
    return settings


def _rules(settings: Settings, late_days: int | None) -> Rules:
    from agentpipe.defs.resources import Workspace
    from agentpipe.feedback.intake import rules_for

    known = Workspace(home=str(settings.home)).known_policies()
    days = settings.feedback.late_days if late_days is None else late_days
    return rules_for(now=dt.datetime.now(dt.UTC), late_days=days, versions=known)


def _inbox_files(settings: Settings) -> list[str]:
    from agentpipe.feedback.inbox import listing, shown

    return [shown(path.name) for path in listing(inbox_of(settings))]


def _ignored(settings: Settings) -> dict[str, str]:
    from agentpipe.feedback.inbox import ignored

    return ignored(inbox_of(settings))


def _say_ignored(ignored: Mapping[str, str]) -> None:
    for file, why in list(ignored.items())[:_MOST_SAID]:
        say(f"ignored: {file}: {why}")
    if len(ignored) > _MOST_SAID:
        say(f"ignored: {len(ignored) - _MOST_SAID:,} more; --json lists all")


def _print_intake(name: str, intake: Intake, home: Path | None) -> None:
    parts = [counted(len(intake.files_taken), "file")] if intake.files_taken else []
    parts.append(counted(intake.rows_taken, "row"))
    if intake.rows_already:
        parts.append(f"{counted(intake.rows_already, 'row')} taken before")
    typer.echo(f"{name}: {', '.join(parts)}")
    for file, why in intake.files_waiting.items():
        say(f"waits: {file}: {why}")
    for file, why in intake.files_refused.items():
        say(f"refused: {file}: {why}")
    if intake.quarantined:
        typer.echo(f"quarantined: {_counts(intake.quarantined)} ({typed(home, 'feedback', 'quarantine')})")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
