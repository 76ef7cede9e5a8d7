"""Signals that wait for a safe moment: a run that is told to end finishes its update and writes a checkpoint first."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@contextlib.contextmanager
def deferred_signals(*numbers: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Holds signals back while the body runs; yields a function that tells whether one has come.

    Afterwards the earlier handlers are back, and the first signal that came is delivered to them. A second signal of
    the same kind is not held back. Outside the main thread nothing is held back, since only that one may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came: list[int] = []
    earlier = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}

    def remember(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, earlier[signal.Signals(number)])

    for number in earlier:
        signal.signal(number, remember)
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
