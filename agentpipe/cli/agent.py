"""``agentpipe agent`` and ``agentpipe line``: an agent at work, and a simulated line to work at."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from agentpipe.cli.labelling import counted
from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import INTERRUPTED, print_json, reporting, say

if TYPE_CHECKING:
    from agentpipe.serving.agent.session import Session
    from agentpipe.serving.agent.simulated_line import SimulatedLine

app = typer.Typer(name="agent", invoke_without_command=True)
line_app = typer.Typer(name="line", invoke_without_command=True)
Url = Annotated[str, typer.Option("--line", help="Address of the line: tcp://127.0.0.1:PORT.")]


@app.callback()
def agent(  # noqa: PLR0913, PLR0917 - the options of a command
    context: typer.Context,
    line: Annotated[
        str, typer.Option("--line", help="tcp://HOST:PORT, or with --mapping a file, a fifo, - for standard input.")
    ] = "",
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Folder of a bundle.", show_default="the champion's")
    ] = None,
    champion: Annotated[bool, typer.Option("--champion", help="The champion's bundle; so without --bundle.")] = False,
    name: Annotated[str, typer.Option("--name", help="Its folder is HOME/agent/NAME.")] = "agent",
    interlocks: Annotated[
        Path | None, typer.Option("--interlocks", help="TOML or JSON file of hard limits on actions.")
    ] = None,
    shadow: Annotated[
        Path | None, typer.Option("--shadow", help="Bundle of a candidate that decides beside it without acting.")
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option("--mapping", help="JSON file: which columns of a stream mean what.")
    ] = None,
    feedback: Annotated[
        Literal["inbox", "stream"], typer.Option("--feedback", help="Where decisions are handed on to.")
    ] = "inbox",
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Look up similar cases.")] = True,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Answers the questions of a line until Ctrl-C: in time, within its limits, each decision on record.

    With --json every event is a line of JSON on standard output: ready, complete, another policy, what was lost and is
    back, the end. Another champion is followed: orders that begin from then on get it.
    """
    if context.invoked_subcommand is not None:
        return
    with reporting(as_json):
        from agentpipe.errors import InputError
        from agentpipe.serving.agent.session import AgentOptions, Session, process_age
        from agentpipe.settings import load_settings

        if not line:
            raise InputError("which line?", field="line", remedy="name it with --line tcp://127.0.0.1:PORT")
        if champion and bundle is not None:
            raise InputError("--champion and --bundle exclude each other", field="bundle", remedy="give one of them")
        options = AgentOptions(line, bundle, name, interlocks, shadow, mapping, feedback, memory)
        settings = load_settings(home=home)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            with Session(options, settings, say=_teller(as_json)) as session:
                _event(as_json, "ready", f"ready after {process_age():.2f} s", seconds=round(process_age(), 3))
                interrupted = _work(session)
            _tell_end(session, as_json, interrupted)
        finally:
            signal.signal(signal.SIGTERM, previous)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _work(session: Session) -> bool:
    """Works until the line ends or a signal comes; whether that was it. The question in hand is answered first."""
    interrupted = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        session.stop()

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        session.run()
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    return interrupted


def _tell_end(session: Session, as_json: bool, interrupted: bool) -> None:
    figures = session.figures()
    text = f"{counted(figures['decisions'], 'decision')}, {figures['fallbacks']:,} by the fallback"
    text += f", {figures['asked']:,} asked"
    _event(as_json, "ended", text, ok=True, interrupted=interrupted, **figures)


def _event(as_json: bool, event: str, text: str, **fields: object) -> None:
    """Tells an event. Where nobody reads any more, or the disk behind it is full, the work goes on all the same."""
    try:
        if as_json:
            sys.stdout.write(json.dumps({"event": event, **fields}, ensure_ascii=True, allow_nan=False) + "\n")
            sys.stdout.flush()
        else:
            say(text)
    except (OSError, ValueError) as error:  # ValueError: it is closed
        if not isinstance(error, OSError) or error.errno == errno.EPIPE:
            _speak_into_the_void(sys.stdout if as_json else sys.stderr)


def _speak_into_the_void(stream: TextIO) -> None:
    """A pipe without a reader stays one: what is left in the buffer must not fail at the end either."""
    with contextlib.suppress(OSError, ValueError):
        void = os.open(os.devnull, os.O_WRONLY)
        os.dup2(void, stream.fileno())
        os.close(void)


def _teller(as_json: bool) -> Callable[[str], None]:
    from agentpipe.serving.agent.journal import DAMAGE
    from agentpipe.serving.agent.session import FEEDBACK, FOLLOWED, NOT_FOLLOWED

    events = {
        "complete after": "complete",
        FOLLOWED: "policy",
        NOT_FOLLOWED: "policy_refused",
        DAMAGE: "damage",
        f"{FEEDBACK} is ": "feedback_trouble",
        "displaced:": "displaced",
    }

    def tell(text: str) -> None:
        event = next((event for start, event in events.items() if text.startswith(start)), "said")
        _event(as_json, event, text, said=text)

    return tell


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@app.command()
def remember(
    most: Annotated[int, typer.Option("--most", min=1, help="Steps that are kept at most.")] = 200_000,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Whose line it is.", show_default="the champion's")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Makes the long-term memory from the recorded trajectories of a home, in place of an earlier one."""
    with reporting(as_json):
        from agentpipe.serving.agent.deciders import read_policy
        from agentpipe.serving.agent.remember import memory_folder, recorded_shards
        from agentpipe.serving.agent.remember import remember as make
        from agentpipe.serving.agent.session import champion_bundle
        from agentpipe.settings import load_settings

        root = load_settings(home=home).home
        signature = read_policy(bundle or champion_bundle(root)).signature
        folder = memory_folder(root, signature)
        manifest = make(recorded_shards(root), folder, signature, most=most)
        if as_json:
            print_json({"ok": True, "folder": str(folder), "rows": manifest["rows"]})
        else:
            typer.echo(f"{manifest['rows']:,} steps remembered in {folder}")


# --------------------------------------------------------------------------------------------------- the line


@line_app.callback()
def line(  # noqa: PLR0913, PLR0917 - the options of a command
    context: typer.Context,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")] = 0,
    stations: Annotated[int, typer.Option("--stations", min=1, max=64, help="Environments side by side.")] = 1,
    split: Annotated[str, typer.Option("--split", help="train, validation or holdout.")] = "holdout",
    cell: Annotated[str | None, typer.Option("--cell", help="Only of this cell, such as sensor-3.")] = None,
    orders: Annotated[
        int | None, typer.Option("--orders", min=1, help="Ends after so many.", show_default="never")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.001, max=86_400.0, help="Until when a question wants its answer.")
    ] = 0.5,
    every: Annotated[
        float, typer.Option("--every", min=0.0, max=86_400.0, help="Least seconds between questions of a station.")
    ] = 0.0,
    operator: Annotated[
        Literal["rules", "none"], typer.Option("--operator", help="Who comes when the agent asks for a person.")
    ] = "rules",
    record: Annotated[Path | None, typer.Option("--record", help="Append each action taken to this file.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Plays the simulator as a line on the loopback address, for an agent to work at, until Ctrl-C.

    Without an answer by the deadline it holds, and asks the same question again.
    """
    if context.invoked_subcommand is not None:
        return
    del home  # a line stands on its own
    interrupted = False
    with reporting(as_json):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            from agentpipe.environments.gym_line import select
            from agentpipe.serving.agent.simulated_line import LineOptions, SimulatedLine

            options = LineOptions(seconds, every, orders, operator, seed, record=record)
            served = SimulatedLine(select(None, cell, split, stations), options)
            interrupted = _serve(served, port, as_json)
        except KeyboardInterrupt:  # before it was ready
            interrupted = True
        finally:
            signal.signal(signal.SIGTERM, previous)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _serve(served: SimulatedLine, port: int, as_json: bool) -> bool:
    """Serves until the line is done or a signal comes; whether that was it."""
    import asyncio

    async def main() -> None:
        started = asyncio.Event()
        serving = asyncio.create_task(served.serve(port, started))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if started.is_set():
            url, lines = f"tcp://127.0.0.1:{served.port}", list(served.stations)
            text = f"{url}  ({counted(len(lines), 'station')}; Ctrl-C ends it)"
            _event(as_json, "ready", text, url=url, lines=lines)
        await serving

    interrupted = False
    try:
        asyncio.run(main())
    except (asyncio.CancelledError, KeyboardInterrupt):  # SIGTERM, Ctrl-C
        interrupted = True
    finally:
        figures = served.figures()
        _event(as_json, "ended", _line_end(figures), interrupted=interrupted, **figures)
    return interrupted


def _line_end(figures: Mapping[str, Any]) -> str:
    text = f"{counted(figures['orders'], 'order')}, {figures['successes']:,} well"
    return f"{text}, {counted(figures['answered'], 'answer')}, {counted(figures['missed'], 'deadline')} missed"


def _operate(url: str, kind: str, who: str, station: str | None, as_json: bool) -> None:
    with reporting(as_json):
        from agentpipe.serving.agent.operator import tell_line

        reply = tell_line(url, kind, who, station)
        if as_json:
            print_json(reply)
        else:
            typer.echo(f"{', '.join(reply['lines'])}: {kind}")


@line_app.command()
def takeover(
    url: Url,
    who: Annotated[str, typer.Option("--who", help="Who takes over.")],
    station: Annotated[str | None, typer.Option("--station", help="Only this one.", show_default="all")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Takes the stations of a running line over from its agent, until they are released."""
    del home
    _operate(url, "takeover", who, station, as_json)


@line_app.command()
def release(
    url: Url,
    who: Annotated[str, typer.Option("--who", help="Who hands back.")],
    station: Annotated[str | None, typer.Option("--station", help="Only this one.", show_default="all")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Hands the stations of a running line back to its agent."""
    del home
    _operate(url, "release", who, station, as_json)
