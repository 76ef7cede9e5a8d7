"""Whether the line is there, and that each change of it is said once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentpipe.errors import LineError


class Presence:
    """The line as the agent sees it. A line that is away from the start is said too."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.connected = False
        self._say, self._said_away = say, False

    def seen(self, *, connected: bool) -> None:
        """It was listened to without an error."""
        if connected and self._said_away:
            self._said_away = False
            self._say("the line is there")
        self.connected = connected

    def lost(self, error: LineError) -> bool:
        """It cannot be reached; whether it was there before."""
        was, self.connected = self.connected, False
        if was or not self._said_away:
            what = getattr(error, "event", "the line is lost" if was else "the line is away")
            reason = error.message.removeprefix("the line is lost").removeprefix(": ")
            self._say(f"{what}: {reason}" if reason else what)
        self._said_away = True
        return was
