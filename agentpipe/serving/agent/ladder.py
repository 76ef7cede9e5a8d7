"""The declared ladder: who answers, who answers where that one cannot, and how one comes back up."""

from __future__ import annotations

import collections
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from agentpipe.closing import Closing
from agentpipe.errors import AgentpipeError
from agentpipe.serving.agent.probes import Change, Part, Prober

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentpipe.serving.agent.types import Answer, Decider, Frame
    from agentpipe.settings import AgentSettings

LEAST_NEED: Final = 0.005
"""seconds that are always kept for a rung below, whatever it took so far"""
SLOW_SHARE: Final = 0.9
"""of the time that a rung was given, beyond which its answer counts as a failure (and is used all the same)"""
SHARE: Final = 0.5
"""of what is left of a question's time that one rung may use: the rest is for those below it, recording and sending"""
HISTORY: Final = 1_000


@dataclass(frozen=True)
class Level:
    """Where on the ladder the agent stands: 0 is the top rung."""

    index: int
    name: str


class Ladder(Closing):
    """Asks the highest rung that is up; where that one fails, the next within the same deadline; at last the rules.

    A rung is lost after ``failures_to_degrade`` failed probes and requests in a row and back after
    ``successes_to_recover`` good probes, see :class:`~agentpipe.serving.agent.probes.Health`. A rung that no probe has
    reached yet is not asked (servers are looked for in the background), unless its name is in ``ready``.

    A rung is waited for no longer than four times what it took at most of late (or twice its quickest probe, or
    ``patience_seconds``), and half as long after each failure in a row: several stations share one agent, and a server
    that hangs must not hold up those that queue. Within that, each rung is given half of what is left until the
    deadline, less ``reserve_seconds`` and less what the rungs below it that are up took at most of late (half of that
    at most). :meth:`decide` belongs to one thread; a decider's ``probe`` runs in another one meanwhile.

    Args:
        deciders: the rungs, best first; the last one never fails and is not probed.
        settings: intervals, counts, reserve.
        parts: what else is probed (the line's network, sensors, the disk): named as they are lost, no rungs.
        ready: rungs that are asked before their first probe, such as a graph that is already loaded.
        on_change: told of each loss and return of a rung or part; must neither block nor raise.
    """

    def __init__(
        self,
        deciders: Sequence[Decider],
        settings: AgentSettings,
        *,
        parts: Sequence[Part] = (),
        ready: Sequence[str] = (),
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        self._rungs, self._last = tuple(deciders[:-1]), deciders[-1]
        self._settings, self._ready, self._told = settings, frozenset(ready), on_change
        self._took = {rung.name: collections.deque([LEAST_NEED], maxlen=64) for rung in self._rungs}
        self._probed: dict[str, collections.deque[float]] = {
            rung.name: collections.deque(maxlen=8) for rung in self._rungs
        }
        self._failed = dict.fromkeys(self._took, 0)
        self._history: collections.deque[Change] = collections.deque(maxlen=HISTORY)
        self._lock = threading.Lock()
        self._prober = Prober(
            [*(Part(rung.name, self._timed(rung)) for rung in self._rungs), *parts],
            every=settings.probe_every,
            timeout=settings.probe_timeout,
            failures=settings.failures_to_degrade,
            successes=settings.successes_to_recover,
            on_change=self._changed,
        )
        self._prober.start()

    @property
    def level(self) -> Level:
        """The rung that would be asked first now."""
        for index, rung in enumerate(self._rungs):
            if self._usable(rung.name):
                return Level(index, rung.name)
        return Level(len(self._rungs), self._last.name)

    @property
    def names(self) -> tuple[str, ...]:
        """All rungs, best first."""
        return (*(rung.name for rung in self._rungs), self._last.name)

    def up(self, name: str) -> bool:
        """Whether the rung ``name`` would be asked now."""
        return self._usable(name)

    def lost(self) -> dict[str, str]:
        """Rungs and other parts that are lost, and why."""
        return self._prober.lost()

    def history(self) -> tuple[Change, ...]:
        """The newest thousand losses and returns, oldest first."""
        with self._lock:
            return tuple(self._history)

    def note(self, part: str, error: str | None) -> None:
        """Tells how a use of another part ended: ``None`` for well, else what went wrong. Any thread."""
        self._prober.note(part, error)

    def decide(self, frame: Frame) -> Answer:
        """An answer, always: of the highest rung that gives one in time, with a note for each that did not."""
        notes: list[str] = []
        for index, rung in enumerate(self._rungs):
            if not self._usable(rung.name):
                continue
            left = SHARE * (frame.deadline - time.monotonic()) - self._settings.reserve_seconds
            budget = min(left - min(self._needed(index + 1), left / 2), self._patience(rung.name))
            if budget <= 0:
                notes.append(f"{rung.name}: no time left")
                continue
            answer = self._ask(rung, frame, budget, notes)
            if answer is not None:
                return answer if not notes else replace(answer, notes=(*answer.notes, *notes))
        answer = self._last.decide(frame, max(0.0, frame.deadline - time.monotonic()))
        return replace(answer, notes=(*answer.notes, *notes))

    def _ask(self, rung: Decider, frame: Frame, budget: float, notes: list[str]) -> Answer | None:
        started = time.monotonic()
        answer: Answer | None = None
        try:
            answer = rung.decide(frame, budget)
        except AgentpipeError as error:
            failure: str | None = error.message
            notes.append(f"{rung.name}: {error.message}")
        else:
            took = time.monotonic() - started
            self._took[rung.name].append(took)
            slow = took > SLOW_SHARE * budget
            failure = f"an answer took {took * 1e3:.0f} of {budget * 1e3:.0f} ms" if slow else None
        self._failed[rung.name] = 0 if failure is None else self._failed[rung.name] + 1
        self._prober.note(rung.name, failure)
        return answer

    def _timed(self, rung: Decider) -> Callable[[float], None]:
        """The probe of a rung, whose times are kept."""

        def probe(timeout: float) -> None:
            started = time.monotonic()
            rung.probe(timeout)
            self._probed[rung.name].append(time.monotonic() - started)

        return probe

    def _patience(self, name: str) -> float:
        """Seconds after which an answer of a rung is not expected any more."""
        quickest = min(tuple(self._probed[name]), default=0.0)
        usual = max(self._settings.patience_seconds, 4.0 * max(self._took[name]), 2.0 * quickest)
        return usual / 2.0 ** min(self._failed[name], self._settings.failures_to_degrade - 1)

    def _needed(self, below: int) -> float:
        """Seconds that the usable rungs from ``below`` on are kept."""
        return sum(max(LEAST_NEED, *self._took[rung.name]) for rung in self._rungs[below:] if self._usable(rung.name))

    def _usable(self, name: str) -> bool:
        up = self._prober.up(name)
        return name in self._ready if up is None else up

    def _changed(self, change: Change) -> None:
        with self._lock:
            self._history.append(change)
        if self._told is not None:
            self._told(change)

    def close(self) -> None:
        """Ends the probes and lets go of every decider."""
        self._prober.close()
        for decider in (*self._rungs, self._last):
            decider.close()
