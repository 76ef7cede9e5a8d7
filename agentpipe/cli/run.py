"""``agentpipe run``: the main job."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentpipe.cli.options import Home, Json, MachineHistory, Seed, TableSource, Threads
from agentpipe.cli.output import percent, player_table, print_json, reporting, say
from agentpipe.cli.progress import showing
from agentpipe.errors import SettingsError

if TYPE_CHECKING:
    from agentpipe.defs.main_job import Outcome


def run(
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            help="demo: a few hundred environments, about a minute, must beat random, not promotable. "
            "standard: the whole catalogue, trained until no further gain, or the budget.",
            show_default="standard",
        ),
    ] = None,
    machine_history: MachineHistory = None,
    table_source: TableSource = None,
    day: Annotated[
        str | None,
        typer.Option("--day", help="The candidate's day (UTC).", show_default="the last day that is over"),
    ] = None,
    seed: Seed = None,
    threads: Threads = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Runs everything: from the disturbance table to a checked Triton bundle, through Dagster.

    Interrupted and started again, it goes on where it was. What is finished under the same settings is not repeated.
    Ends with a scoreboard and the line to type for the UI.
    """
    with reporting(as_json):
        options = {
            "home": home,
            "profile": profile,
            "machine_history": machine_history,
            "table_source": table_source,
            "seed": seed,
            "threads": threads,
        }
        content = _main_job(options, _day(day))
        if as_json:
            print_json(content)
        else:
            _show(content)


def _day(text: str | None) -> dt.date | None:
    if text is None:
        return None
    try:
        return dt.date.fromisoformat(text)
    except ValueError as error:
        raise SettingsError(f"not a day: {text!r}", field="day", remedy="write it as 2026-01-31") from error


def _main_job(options: dict[str, Any], day: dt.date | None) -> dict[str, Any]:
    from agentpipe.settings import load_settings

    started = time.monotonic()
    home = load_settings(**options).home  # what is wrong with the settings is said before anything is loaded
    os.environ["AGENTPIPE_HOME"] = str(home)  # the partitions of the definitions begin where the home says
    _interrupt_on_terminate()
    say(f"Home: {home}")
    with showing("main job") as show, _signals_seen() as seen:

        def progress(stage: str, done: int, total: int, note: str = "") -> None:
            show(stage, done, total, note)
            if stage == "main job" and seen():  # between two partitions
                raise KeyboardInterrupt

        progress("main job", 0, 1, "loading Dagster")
        outcome = _run(options, day, progress)
    from agentpipe.defs.scoreboard import document

    return document(outcome, time.monotonic() - started)


def _run(options: dict[str, Any], day: dt.date | None, progress: Any) -> Outcome:  # noqa: ANN401 - a Progress
    from dagster import DagsterExecutionInterruptedError

    from agentpipe.definitions import defs
    from agentpipe.defs.main_job import run_main_job

    try:
        return run_main_job(defs, options, day, progress)
    except DagsterExecutionInterruptedError as error:
        raise KeyboardInterrupt from error


def _interrupt_on_terminate() -> None:
    """SIGTERM ends like Ctrl-C: whole artefacts, released lock, a run that Dagster knows has failed."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell has it ignored


@contextlib.contextmanager
def _signals_seen() -> Iterator[Callable[[], bool]]:
    """Yields whether SIGINT or SIGTERM has come, whatever its handler did.

    While Dagster records a run it has handlers of its own, and what came then it forgets at the end of that run.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    came: set[int] = set()

    def seen() -> bool:
        with contextlib.suppress(BlockingIOError):
            came.update(reader.recv(4096))
        return not came.isdisjoint((signal.SIGINT, signal.SIGTERM))

    with reader, writer:
        earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield seen
        finally:
            signal.set_wakeup_fd(earlier)


def _show(content: dict[str, Any]) -> None:
    player_table(content["players"])
    failed = {name: gate for name, gate in content["gates"].items() if not gate["passed"]}
    typer.echo(f"Gates: {len(content['gates']) - len(failed)} of {len(content['gates'])} pass")
    for name, gate in failed.items():
        typer.echo(f"  {gate['severity']}: {name} (gate {gate['gate']}) - {gate['remedy']}")
    bundle = content["bundle"]
    promotable = "promotable" if bundle["promotable"] else f"not promotable: {'; '.join(bundle['reasons'])}"
    typer.echo(f"Package: {content['package']['path']}")
    typer.echo(f"Bundle:  {bundle['path']} ({promotable})")
    checked = bundle["server_check"]
    if checked["status"] == "SKIPPED":
        effect = "" if content["champion"]["promoted"] else ", so the bundle is not promoted"
        typer.echo(f"Server check: SKIPPED{effect} - {checked['reason']}")
    else:
        typer.echo(f"Server check: {checked['status']} in {checked['server']}")
    settled = content["champion"]
    whose = "this candidate" if settled["promoted"] else f"not this candidate ({settled['fate']})"
    typer.echo(f"Champion: {whose} - {settled['reason']}")
    typer.echo(f"Largest difference to the policy: {bundle['parity_max_abs_diff']:.1e}")
    attributed = content["attribution"].get("attributed")
    typer.echo(f"Failures attributed to a disturbance: {percent(attributed)}")
    runs = content["runs"]
    typer.echo(
        f"{runs['materialised']} partitions materialised, {runs['reused']} reused, {content['wall_seconds']:.0f} s"
    )
    found = shutil.which("agentpipe")
    program = "agentpipe" if found else str(Path(sys.executable).with_name("agentpipe"))
    typer.echo(f"\nSee it in the UI:  {program}{content['ui'].removeprefix('agentpipe')}")
