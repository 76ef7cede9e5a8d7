"""Where the progress of an asset goes: to whoever listens in this process, and now and then into the log of the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from agentpipe.progress import Progress, silent

_EVERY_SECONDS = 10.0
_listener: Progress = silent


@contextlib.contextmanager
def listening(listener: Progress) -> Iterator[None]:
    """While the body runs, ``listener`` hears the progress of every asset in this process."""
    global _listener  # noqa: PLW0603 - one process, one terminal
    previous, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = previous


def reporter(label: str, log: Callable[[str], None]) -> Progress:
    """A progress receiver for the asset partition ``label``; ``log`` gets a line every ten seconds at most."""
    last = time.monotonic()

    def report(stage: str, done: int, total: int, note: str = "") -> None:
        nonlocal last
        _listener(f"{label}: {stage}", done, total, note)
        now = time.monotonic()
        if now - last >= _EVERY_SECONDS:
            last = now
            log(f"{stage}: {done} of {total}{f' ({note})' if note else ''}")

    return report
