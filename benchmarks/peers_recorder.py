"""The clock of a race, and what is kept of a run: its weights at certain steps and seconds."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

End = Literal["steps", "seconds", "both"]
"""what a run goes on to"""
Axis = Literal["steps", "seconds"]


@dataclass(frozen=True)
class Snapshot:
    """The last weights that a run had at ``at`` steps or seconds, not later."""

    axis: Axis
    at: float
    steps: int
    """that they were trained on"""
    seconds: float
    """after which they were there"""
    weights: Any


class Recorder:
    """Told after every update; keeps the weights of the last update before each mark.

    The clock runs from :meth:`begin` and stands still while weights are copied, or whatever else is done within
    :meth:`paused`.

    Args:
        steps: marks, in order.
        seconds: marks, in order.
        end: which last marks must be passed.
        longest: seconds after which a run ends whatever it has come to.
    """

    def __init__(self, steps: Sequence[float], seconds: Sequence[float], end: End, longest: float) -> None:
        self.end, self.longest = end, longest
        self._last = {"steps": steps[-1] if steps else 0.0, "seconds": seconds[-1] if seconds else 0.0}
        self._pending: list[tuple[Axis, float]] = [("steps", at) for at in steps] + [("seconds", at) for at in seconds]
        self.snapshots: list[Snapshot] = []
        self.steps, self.ended = 0, 0.0
        self._began = self._paused = 0.0
        self._before: tuple[int, float, Any] = (0, 0.0, None)

    def begin(self) -> None:
        """Starts the clock."""
        self._began, self._paused = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Of training since :meth:`begin`."""
        return time.perf_counter() - self._began - self._paused

    @property
    def last_second(self) -> float:
        """The last mark in seconds."""
        return self._last["seconds"]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within does not count."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    @property
    def progress(self) -> float:
        """Share of the run that is done, by steps or by seconds as ``end`` says: what a falling rate goes by."""
        if self.end == "steps":
            return min(1.0, self.steps / self._last["steps"])
        return min(1.0, self.seconds / self._last["seconds"])

    def look(self, steps: int, weights: Callable[[], Any]) -> bool:
        """After an update (and once before the first one): whether the run is over.

        Args:
            steps: done by now.
            weights: gives a copy.
        """
        seconds = self.seconds
        with self.paused():
            self.steps, self.ended = steps, seconds
            now = (steps, seconds, weights())
            self._keep(now)
            self._before = now
        return self._over(steps, seconds)

    def _keep(self, now: tuple[int, float, Any]) -> None:
        passed = [(axis, at) for axis, at in self._pending if (now[0] if axis == "steps" else now[1]) >= at]
        for axis, at in passed:
            exactly = axis == "steps" and now[0] == at
            known = now if exactly or self._before[2] is None else self._before
            self.snapshots.append(Snapshot(axis, at, *known))
            self._pending.remove((axis, at))

    def _over(self, steps: int, seconds: float) -> bool:
        done = {"steps": steps >= self._last["steps"], "seconds": seconds >= self._last["seconds"]}
        enough = all(done.values()) if self.end == "both" else done[self.end]
        return enough or seconds >= self.longest

    def finish(self) -> None:
        """Marks that the run did not come to keep its last weights: it was over before (:attr:`Snapshot.steps`)."""
        for axis, at in self._pending:
            self.snapshots.append(Snapshot(axis, at, *self._before))
        self._pending = []
