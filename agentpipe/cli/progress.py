"""Progress on standard error: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from agentpipe.progress import Progress

_EVERY_SECONDS = 5.0
_SILENCE_SECONDS = 15.0


@contextlib.contextmanager
def showing(title: str) -> Iterator[Progress]:
    """Yields a progress receiver; what is reported as ``title`` is the overall progress, the rest the current work."""
    with _terminal() as terminal:
        if terminal.isatty():
            with _bars(title, terminal) as receiver:
                yield receiver
        else:
            lines = _Lines(title, terminal)
            with lines.watched():
                yield lines


@contextlib.contextmanager
def _terminal() -> Iterator[TextIO]:
    """Standard error as it is now: Dagster redirects the original while a step runs."""
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except OSError:  # replaced by something that is no file
        yield sys.stderr
        return
    with os.fdopen(descriptor, "w") as terminal:
        yield terminal


class _Lines:
    """A line for each finished part, one every few seconds in between, and one when nothing was heard for long."""

    def __init__(self, title: str, terminal: TextIO) -> None:
        self._title = title
        self._terminal = terminal
        self._started = self._last = time.monotonic()
        self._latest = "starting"

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        self._latest = note if stage == self._title and note else stage
        if stage == self._title or time.monotonic() - self._last >= _EVERY_SECONDS:
            self._print(f"{stage}: {done:,} of {total:,}{f' · {note}' if note else ''}")

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        print(f"[{self._last - self._started:6.1f} s] {text}", file=self._terminal, flush=True)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While the body runs, long silence (a first compilation, an import) is broken."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(1.0):
                if time.monotonic() - self._last >= _SILENCE_SECONDS:
                    self._print(f"still at it: {self._latest}")

        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


@contextlib.contextmanager
def _bars(title: str, terminal: TextIO) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    )
    with Bars(*columns, console=Console(file=terminal)) as bars:
        overall = bars.add_task(title, total=1, note="starting")
        current = bars.add_task("", total=1, note="", visible=False)
        shown = ""

        def receive(stage: str, done: int, total: int, note: str = "") -> None:
            nonlocal shown
            if stage == title:
                bars.update(overall, completed=done, total=total, note=note)
                return
            if stage != shown:
                bars.reset(current, description=stage, visible=True)
                shown = stage
            bars.update(current, completed=done, total=total, note=note)

        yield receive
