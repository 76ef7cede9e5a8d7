"""Probing the parts that an agent lives on, each in its own thread, with hysteresis both ways."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from agentpipe.errors import AgentpipeError, DiskFullError
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

LEAST_FREE_BYTES: Final = 16 * 2**20
"""free bytes of the home's file system below which its disk counts as full"""
Found = Literal["probe", "request"]


@dataclass(frozen=True)
class Part:
    """Something an agent lives on. ``probe`` is given seconds and raises where the part does not work."""

    name: str
    probe: Callable[[float], None]


@dataclass(frozen=True)
class Change:
    """A part was lost, or is back."""

    part: str
    up: bool
    reason: str
    """of the last failure, or how it was found to be back"""
    time: dt.datetime
    """UTC"""
    moment: float
    """monotonic seconds"""


@dataclass
class Health:
    """What is known of one part.

    Lost after ``failures`` failures: failed probes in a row and failed requests in a row count together, and a success
    of one kind clears that kind only, so that a server whose known row is fine but whose answers are not is lost all
    the same. Back after ``successes`` good probes in a row. Until the first probe has ended, a part is neither.
    """

    failures: int
    successes: int
    up: bool | None = None
    reason: str = "not probed yet"
    _failed: dict[Found, int] = field(default_factory=lambda: {"probe": 0, "request": 0})
    _good: int = 0

    def succeed(self, found: Found) -> bool:
        """Notes a success; true where it changes ``up``."""
        self._failed[found] = 0
        if found == "request" or self.up:
            return False
        self._good += 1
        if self.up is None or self._good >= self.successes:
            return self._become(up=True, reason="")
        return False

    def fail(self, found: Found, reason: str) -> bool:
        """Notes a failure; true where it changes ``up``."""
        self._good = 0
        self._failed[found] += 1
        self.reason = reason
        if self.up is False or sum(self._failed.values()) < self.failures:
            return False
        return self._become(up=False, reason=reason)

    def _become(self, *, up: bool, reason: str) -> bool:
        self.up, self.reason, self._good = up, reason, 0
        self._failed = {"probe": 0, "request": 0}
        return True


class Prober:
    """Probes every part at once when started and then every ``every`` seconds, each in a thread of its own.

    A probe that raises has failed, as has one that takes longer than ``timeout``. Safe to use from any thread.

    Args:
        parts: with different names.
        every: seconds from the end of a probe to the next one.
        timeout: seconds that a probe may take.
        failures: see :class:`Health`.
        successes: see :class:`Health`.
        on_change: told of each change, in the thread that found it; must neither block nor raise.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        every: float,
        timeout: float,
        failures: int,
        successes: int,
        on_change: Callable[[Change], None],
    ) -> None:
        self._every, self._timeout, self._on_change = every, timeout, on_change
        self._lock = threading.RLock()
        self._health = {part.name: Health(failures, successes) for part in parts}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(part,), name=f"probe {part.name}", daemon=True) for part in parts
        ]

    def start(self) -> None:
        """Begins to probe."""
        for thread in self._threads:
            thread.start()

    def up(self, name: str) -> bool | None:
        """Whether a part works; ``None`` where no probe has ended yet."""
        with self._lock:
            return self._health[name].up

    def lost(self) -> dict[str, str]:
        """The parts that are lost, and why."""
        with self._lock:
            return {name: health.reason for name, health in self._health.items() if health.up is False}

    def note(self, name: str, error: str | None, found: Found = "request") -> None:
        """Notes how a request (or a probe) of a part ended: ``None`` for well, else what went wrong."""
        with self._lock:
            health = self._health[name]
            changed = health.succeed(found) if error is None else health.fail(found, error)
            up = health.up
        if changed:
            reason = error or f"good {found}s"
            self._on_change(Change(name, bool(up), reason, dt.datetime.now(dt.UTC), time.monotonic()))

    def close(self, wait: float = 1.0) -> None:
        """Ends the threads; one that hangs in a probe is left behind after ``wait`` seconds."""
        self._stop.set()
        end = time.monotonic() + wait
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))

    def _run(self, part: Part) -> None:
        while not self._stop.is_set():
            reason = self.probe_once(part)
            if self._stop.is_set():
                return
            self.note(part.name, reason, "probe")
            self._stop.wait(self._every)

    def probe_once(self, part: Part) -> str | None:
        """Probes a part now: ``None`` where it works, else what went wrong."""
        started = time.monotonic()
        try:
            part.probe(self._timeout)
        except AgentpipeError as error:
            return error.message
        except OSError as error:
            return error.strerror or type(error).__name__
        except Exception as error:  # noqa: BLE001 - a thread that dies of it would leave the part unwatched
            return f"{type(error).__name__}: {error}"
        took = time.monotonic() - started
        return f"the probe took {took:.1f} s, {self._timeout:g} are allowed" if took > self._timeout else None


def disk_probe(folder: Path, least_free: int = LEAST_FREE_BYTES) -> Callable[[float], None]:
    """A probe of the disk below ``folder``: room is left, and a page written there arrives.

    The probe raises ``DiskFullError`` or ``HomeError``.
    """

    def probe(timeout: float) -> None:
        del timeout
        path = folder / ".probe"
        with typed_os_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < least_free:
                text = f"{free // 2**20} MiB are free, {least_free // 2**20} are wanted"
                raise DiskFullError(text, file=folder, remedy="free space")
            with path.open("wb") as file:
                file.write(bytes(4_096))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()

    return probe
