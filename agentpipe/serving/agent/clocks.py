"""A wall clock that jumps: the runtime counts monotonic seconds, so only stamps could suffer; still it is said."""

from __future__ import annotations

import datetime as dt
import threading
import time
from typing import TYPE_CHECKING, Final

from agentpipe.serving.agent.probes import Change

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE: Final = 2.0
"""seconds by which the clocks may part between two looks: a clock that is slewed parts by less"""
ADOPTED_SECONDS: Final = 600.0
"""a jump that has lasted for so long is a clock that was put right"""
PART: Final = "clock"


class SteadyClock:
    """UTC that does not follow a jump of the wall clock until that has lasted for :data:`ADOPTED_SECONDS`.

    It is the wall clock as it was at first, carried on by a clock that never jumps. A slewed wall clock is followed.
    Safe to use from several threads.

    Args:
        wall: seconds since 1970.
        steady: seconds of a clock that never jumps, and goes on while the machine sleeps.
    """

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._wall, self._steady = wall, steady
        self._lock = threading.Lock()
        self._offset = wall() - steady()
        self._parted: tuple[float, float] | None = None
        """another offset, and since when"""

    def now(self) -> dt.datetime:
        """UTC, aware."""
        with self._lock:
            moment = self._steady()
            offset = self._wall() - moment
            if abs(offset - self._offset) <= TOLERANCE:
                self._offset, self._parted = offset, None
            elif self._parted is None or abs(offset - self._parted[0]) > TOLERANCE:
                self._parted = (offset, moment)
            elif moment - self._parted[1] >= ADOPTED_SECONDS:
                self._offset, self._parted = offset, None
            return dt.datetime.fromtimestamp(moment + self._offset, dt.UTC)

    def correct(self, time: dt.datetime) -> dt.datetime:
        """A time that the wall clock showed just now (aware), without the jump that it has made since the start."""
        jump = dt.datetime.fromtimestamp(self._wall(), dt.UTC) - self.now()
        return time if abs(jump.total_seconds()) <= TOLERANCE else time - jump


class ClockWatch:
    """Compares the wall clock with the monotonic one. Its :meth:`probe` is one of the runtime's, and never fails.

    A jump is told as a loss of the part ``clock``, the next look without one as its return.

    Args:
        on_change: told of each.
        wall: seconds since 1970.
        monotonic: seconds of a clock that never jumps.
    """

    def __init__(
        self,
        on_change: Callable[[Change], None],
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_change, self._wall, self._monotonic = on_change, wall, monotonic
        self._offset = wall() - monotonic()
        self._jumped = False
        self.jumps = 0

    def probe(self, timeout: float = 0.0) -> None:
        """Looks at both clocks."""
        del timeout
        moment = self._monotonic()
        offset = self._wall() - moment
        jump, self._offset = offset - self._offset, offset
        jumped, before = abs(jump) > TOLERANCE, self._jumped
        self._jumped = jumped
        self.jumps += jumped
        if jumped:
            way = "forward" if jump > 0 else "back"
            reason = f"the wall clock jumped {way} by {abs(jump):.1f} s, or this machine slept"
            self._on_change(Change(PART, False, reason, dt.datetime.now(dt.UTC), moment))
        elif before:
            self._on_change(Change(PART, True, "the clocks run together", dt.datetime.now(dt.UTC), moment))
