"""A wall clock that jumps: the runtime counts monotonic seconds, so only stamps could suffer; still it is said."""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Final

from agentpipe.serving.agent.probes import Change

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE: Final = 2.0
"""seconds by which the clocks may part between two looks: a clock that is slewed parts by less"""
PART: Final = "clock"


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
