"""How well orders are executed at one line (S23).

L1 is a step in time, L2 a sub-goal within three alternatives, L3 that the agent diagnoses itself after five failures in
a row.

A *sub-goal* is that an order leaves a segment forwards; of the last one, that the order ends well. Each entry into a
segment is an *alternative*, and so is each action that tries once more (``retry``). A *failure* is a step that was not
answered in time by the one who was to answer it, or a sub-goal that three alternatives did not reach.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentpipe.serving.agent.machine import Event, Machine, State
from agentpipe.serving.agent.messages import MOST_LINES, NonsenseError

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from agentpipe.serving.agent.types import Frame, OrderEnded
    from agentpipe.serving.agent.vocabulary import Vocabulary

ALTERNATIVES: Final = 3
FAILURES_TO_DIAGNOSE: Final = 5


@dataclass
class Order:
    """One order while it is open."""

    order_id: str
    segment: int | None = None
    alternatives: dict[int, int] = field(default_factory=dict)
    """by segment, from 1"""
    missed: set[int] = field(default_factory=set)
    """segments whose sub-goal took too many"""
    questions: int = 0


class Execution:
    """State and figures of one line. Not locked, see :class:`~agentpipe.serving.agent.machine.Machine`.

    Args:
        line_id: whose.
        vocabulary: its segments; without any, sub-goals are not judged.
        clock: monotonic seconds.
    """

    def __init__(self, line_id: str, vocabulary: Vocabulary, clock: Callable[[], float] = time.monotonic) -> None:
        self.line_id = line_id
        self.machine = Machine()
        self.order: Order | None = None
        self.last_actions: list[int] = []
        self.held: Frame | None = None
        """the question that came, or was in hand, while a person had the line"""
        self.ask_reason = ""
        """why a person is to decide the next question"""
        self.reason_for = ""
        """and which one that is, once it has come"""
        self.asked_id = ""
        """the question that a person was last asked to decide"""
        self.generation = 0
        """changes with each takeover: an answer of an earlier one is not sent"""
        self.steps = self.late = self.reached = self.missed = self.orders = self.successes = 0
        self.failures = self.late_in_a_row = 0
        self.missed_in_a_row: dict[int, int] = {}
        """by segment"""
        self._vocabulary, self._clock = vocabulary, clock
        self._since = clock()
        self._frozen_since: float | None = None
        self._frozen_seconds = 0.0

    # -------------------------------------------------------------------------------------------- what happens

    def question(self, frame: Frame) -> State:
        """A question has come; a new order begins with it where it names another one."""
        state = self.machine.fire(Event.QUESTION)
        if self.order is None or self.order.order_id != frame.order_id:
            self.order, self.last_actions = Order(frame.order_id), []
        self.order.questions += 1
        self._enter(self.order, self._vocabulary.segment(frame))
        return state

    def acted(self, action: int, *, in_time: bool) -> None:
        """An action was sent; ``in_time``: by the one who was to answer, not by the fallback."""
        self.last_actions.append(action)
        self.steps += 1
        if in_time:
            self.late_in_a_row = 0
        else:
            self.late += 1
            self.late_in_a_row += 1
            self.failures += 1
        order = self.order
        if order is not None and order.segment is not None and action in self._vocabulary.again:
            self._alternative(order, order.segment)

    def ended(self, message: OrderEnded) -> None:
        """The order is over. What it had reached counts; its last sub-goal is missed unless it ended well."""
        if self.machine.allows(Event.ENDED):
            self.machine.fire(Event.ENDED)
        order, self.order, self.held = self.order, None, None
        self.last_actions = []
        if order is None or order.order_id != message.order_id:
            return
        self.orders += 1
        well = message.success is True or (message.success is None and message.result.lower() in ("done", "success"))
        self.successes += well
        if order.segment is None:
            return
        if well and order.segment not in order.missed:
            self._reach(order.segment)
        elif not well and order.segment not in order.missed:
            self._miss(order, order.segment)

    def taken_over(self) -> State:
        """A person has the line from now on: whatever is being computed for it is not sent."""
        self.generation += 1
        if self.machine.state is not State.FROZEN:
            self._frozen_since = self._clock()
        return self.machine.fire(Event.TAKEN_OVER)

    def handed_back(self) -> State:
        """The person is gone; runs of failures begin anew."""
        if self._frozen_since is not None:
            self._frozen_seconds += self._clock() - self._frozen_since
            self._frozen_since = None
        self.diagnosed()
        self.ask_reason = self.reason_for = ""
        return self.machine.fire(Event.HANDED_BACK)

    def wants_person(self, frame: Frame) -> bool:
        """Whether a person is to decide this question: the first since there is a reason, however often it comes."""
        if self.ask_reason and self.reason_for and self.reason_for != frame.decision_id:
            self.ask_reason = self.reason_for = ""  # somebody has decided it
        if self.ask_reason:
            self.reason_for = frame.decision_id
        return bool(self.ask_reason)

    # -------------------------------------------------------------------------------------------- figures

    @property
    def level(self) -> int:
        """1 while steps go their way, 2 while another alternative is tried, 3 while the agent must diagnose itself."""
        if self.diagnosis_due:
            return 3
        order = self.order
        if order is None or order.segment is None:
            return 1
        return 2 if order.alternatives.get(order.segment, 1) > 1 else 1

    @property
    def diagnosis_due(self) -> bool:
        """Whether five failures of one kind came in a row."""
        return max(self.late_in_a_row, *self.missed_in_a_row.values(), 0) >= FAILURES_TO_DIAGNOSE

    def diagnosed(self) -> None:
        """The diagnosis is written: runs of failures begin anew."""
        self.late_in_a_row = 0
        self.missed_in_a_row.clear()

    @property
    def seconds_at_work(self) -> float:
        """Since the start, without the time that persons had the line."""
        frozen = self._frozen_seconds
        if self._frozen_since is not None:
            frozen += self._clock() - self._frozen_since
        return self._clock() - self._since - frozen

    @property
    def mean_time_between_failures(self) -> float | None:
        """Seconds at work over failures; None before the first."""
        return self.seconds_at_work / self.failures if self.failures else None

    def figures(self) -> dict[str, Any]:
        """All of it as a JSON object."""
        return {
            "line_id": self.line_id,
            "state": str(self.machine.state),
            "level": self.level,
            "orders": self.orders,
            "successes": self.successes,
            "steps": self.steps,
            "late_steps": self.late,
            "sub_goals_reached": self.reached,
            "sub_goals_missed": self.missed,
            "failures": self.failures,
            "mean_seconds_between_failures": self.mean_time_between_failures,
        }

    # -------------------------------------------------------------------------------------------- sub-goals

    def _enter(self, order: Order, segment: int | None) -> None:
        before, order.segment = order.segment, segment
        if segment is None or segment == before:
            return
        if before is not None and segment > before and before not in order.missed:
            self._reach(before)
        self._alternative(order, segment)

    def _alternative(self, order: Order, segment: int) -> None:
        order.alternatives[segment] = order.alternatives.get(segment, 0) + 1
        if order.alternatives[segment] > ALTERNATIVES and segment not in order.missed:
            self._miss(order, segment)

    def _reach(self, segment: int) -> None:
        self.reached += 1
        self.missed_in_a_row[segment] = 0

    def _miss(self, order: Order, segment: int) -> None:
        order.missed.add(segment)
        self.missed += 1
        self.missed_in_a_row[segment] = self.missed_in_a_row.get(segment, 0) + 1
        self.failures += 1


def make_room(executions: MutableMapping[str, Execution]) -> None:
    """Forgets the line that was quiet for longest where there are too many; none that a person has or that is at work.

    Args:
        executions: by line, the one that was heard last at the end.

    Raises:
        NonsenseError: persons have all of them.
    """
    if len(executions) < MOST_LINES:
        return
    resting = (State.IDLE, State.WAITING, State.DEGRADED, State.ASKING, State.STOPPED)
    quiet = next((name for name, each in executions.items() if each.machine.state in resting), None)
    if quiet is None:
        raise NonsenseError(f"more than {MOST_LINES} lines that persons have", field="line_id")
    del executions[quiet]
