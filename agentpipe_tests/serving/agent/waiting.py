"""Waiting for a condition instead of for some time."""

from __future__ import annotations

import time


def until(condition, seconds: float = 30.0) -> None:
    """Returns as soon as ``condition()`` is true; fails the test where it is not in ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)
