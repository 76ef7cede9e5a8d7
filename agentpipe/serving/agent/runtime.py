"""The agent at its line: every question answered once, in time, within its limits, and on record before it is acted on.

Three threads: one listens to the line (so that a person who takes over is heard at once), one decides (the caller of
:meth:`Runtime.run`), one asks the policy (so that it may hang). The order of things, for one question:

1. one that was answered before is answered the same, from the journal;
2. interlocks narrow what may be done; where nothing is left, a person is asked;
3. the fallback is ready before the policy is asked, and is taken where that gives no answer in time;
4. what was chosen is held against interlocks and mask once more;
5. it is recorded; where it cannot be, it is not done, and a person is asked;
6. it is sent, unless a person has taken over meanwhile: then the record is withdrawn.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from agentpipe.errors import AgentpipeError, LineError, StoreError
from agentpipe.serving.agent.diagnosis import write_diagnosis
from agentpipe.serving.agent.execution import Execution
from agentpipe.serving.agent.machine import Event, State
from agentpipe.serving.agent.messages import ForeignLineError, LineEndedError, NonsenseError, check_frame
from agentpipe.serving.agent.primary import Primary
from agentpipe.serving.agent.types import Answer, Frame, OrderEnded, Takeover
from agentpipe.serving.agent.wal import LogFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agentpipe.serving.agent.interlocks import Interlocks
    from agentpipe.serving.agent.journal import Journal
    from agentpipe.serving.agent.types import Decider, LineAdapter, Message
    from agentpipe.serving.agent.vocabulary import Vocabulary

JOURNAL: Final = "journal"
_LISTEN_SECONDS: Final = 0.2
_FLUSH_SHARE: Final = 0.2
"""weight of the newest flush in the running mean of what one takes"""
_MOST_OF_TIME: Final = 0.5
"""of a question's time that is kept for flushing, at most"""


class Policy(Protocol):
    """Who answers, such as :class:`~agentpipe.serving.agent.healing.Healing`."""

    def decide(self, frame: Frame) -> Answer:
        """An answer within the deadline."""

    def degraded(self) -> Mapping[str, str]:
        """What is lost now, and why."""


class Onlooker(Protocol):
    """Who is told of decisions after they were sent, such as memory and shadow; must neither block nor raise."""

    def decided(self, frame: Frame, answer: Answer, seconds: float) -> None:
        """A decision was sent; ``frame`` is the question as the policy saw it, ``seconds`` what the answer took."""

    def ended(self, message: OrderEnded) -> None:
        """An order is over."""


@dataclass
class Counts:
    """What has happened since the start."""

    questions: int = 0
    decisions: int = 0
    repeated: int = 0
    """questions that were answered before"""
    fallbacks: int = 0
    """decisions of the fallback, as the policy gave none in time"""
    refused: int = 0
    """answers that interlocks or mask forbade"""
    asked: int = 0
    """times that a person was asked"""
    withdrawn: int = 0
    """recorded and not sent: a person took over"""
    expired: int = 0
    """questions whose deadline had passed when they were looked at"""
    late: int = 0
    """answers sent after the deadline"""
    nonsense: int = 0
    lost_lines: int = 0


class Runtime:
    """One agent at one line adapter, which may speak for several lines.

    Args:
        line: where questions come from.
        policy: who answers them.
        fallback: who answers where the policy does not; never waits.
        journal: what was decided.
        interlocks: hard limits.
        vocabulary: names of the line.
        reserve: seconds of each deadline that are kept for the fallback and for sending.
        folder: ``HOME/agent/<name>``, for diagnoses.
        onlookers: told of what was sent; may grow meanwhile.
        on_ended: called when an order is over.
        say: told what a person should know, one line.
    """

    def __init__(  # noqa: PLR0913 - each is a part that is tested on its own
        self,
        line: LineAdapter,
        policy: Policy,
        fallback: Decider,
        journal: Journal,
        interlocks: Interlocks,
        vocabulary: Vocabulary,
        *,
        reserve: float,
        folder: Path,
        onlookers: Sequence[Onlooker] = (),
        on_ended: Callable[[], None] = lambda: None,
        say: Callable[[str], object] = str,
    ) -> None:
        self.counts = Counts()
        self.executions: dict[str, Execution] = {}
        self.connected = False
        self.failure: AgentpipeError | None = None
        """why it ended by itself"""
        self.last_nonsense = ""
        self._line, self._policy, self._fallback, self._journal = line, policy, fallback, journal
        self._interlocks, self._vocabulary, self._reserve, self._folder = interlocks, vocabulary, reserve, folder
        self._onlookers, self._on_ended, self._say = onlookers, on_ended, say
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Frame | OrderEnded | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._lines: Sequence[str] = ()
        """what the line last called its stations"""
        self._flush = 0.0
        """running mean of what a flush takes, seconds"""
        self._primary = Primary(policy.decide)
        self._listener = threading.Thread(target=self._listen, name="line", daemon=True)
        interlocks.steady = journal.clock.now
        journal.tell_taken(interlocks)

    # ------------------------------------------------------------------------------------------------ life

    def run(self) -> None:
        """Works until :meth:`stop`, until the line has come to its end, or turns out to be another one.

        Raises:
            ForeignLineError: see ``failure``.
        """
        self._listener.start()
        while not self._stopping.is_set():
            message = self._queue.get()
            if isinstance(message, Frame):
                self._question(message)
            elif isinstance(message, OrderEnded):
                self._ended(message)
            else:
                break
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Ends :meth:`run` after the question in hand. Any thread, also a signal's."""
        self._stopping.set()
        self._queue.put(None)

    def close(self) -> None:
        """Ends the threads; what comes afterwards is not answered. Line and journal are the caller's to close."""
        self.stop()
        with self._lock:
            for execution in self.executions.values():
                if execution.machine.allows(Event.STOPPED):
                    execution.machine.fire(Event.STOPPED)
        self._primary.close()
        if self._listener.ident is not None:
            self._listener.join(5.0)

    def refresh(self) -> None:
        """Looks whether something is lost or back; called when it may have changed, from any thread."""
        event = Event.DEGRADED if self._lost() else Event.RECOVERED
        with self._lock:
            for execution in self.executions.values():
                if execution.machine.degraded != (event is Event.DEGRADED) and execution.machine.allows(event):
                    execution.machine.fire(event)

    def _lost(self) -> dict[str, str]:
        trouble = self._journal.log.trouble
        return {**self._policy.degraded(), **({JOURNAL: trouble} if trouble else {})}

    @property
    def taken_over(self) -> int:
        """Lines that a person has."""
        return sum(execution.machine.state is State.FROZEN for execution in tuple(self.executions.values()))

    def figures(self) -> dict[str, Any]:
        """All of it as a JSON object."""
        with self._lock:
            lines = [execution.figures() for execution in self.executions.values()]
        return {
            **vars(self.counts),
            "connected": self.connected,
            "backlog": self._journal.backlog,
            "waiting_for_disk": self._journal.log.waiting,
            "degraded": self._lost(),
            "lines": lines,
        }

    # ------------------------------------------------------------------------------------------------ the line

    def _listen(self) -> None:
        while not self._stopping.is_set():
            try:
                message = self._line.receive(_LISTEN_SECONDS)
                self.connected = bool(getattr(self._line, "connected", True))
                self._look_at_limits()
            except NonsenseError as error:
                self._refuse(error.message)
            except ForeignLineError as error:
                self.failure = error
                self.stop()
            except LineEndedError:
                self._queue.put(None)  # behind what is still to be answered
                return
            except LineError as error:
                self._lost_line(error)
            except Exception as error:  # noqa: BLE001 - an adapter of somebody else: deaf would be worse
                self._lost_line(LineError(f"its adapter fails: {type(error).__name__}: {error}"))
                self._stopping.wait(_LISTEN_SECONDS)
            else:
                if message is not None:
                    self._hear(message)

    def _look_at_limits(self) -> None:
        lines = getattr(self._line, "lines", ())
        if lines is not self._lines:
            self._lines = lines
            for absent in self._interlocks.absent_lines(lines) if lines else ():
                self._say(f"interlocks name the line {absent!r}, which is not there: {', '.join(lines)[:200]} are")

    def _lost_line(self, error: LineError) -> None:
        if self.connected:
            self.counts.lost_lines += 1
            self._say(f"the line is lost: {error.message}")
        self.connected = False

    def _hear(self, message: Message) -> None:
        if self._stopping.is_set():
            return
        if isinstance(message, Takeover):
            self._take_over(message)
        elif isinstance(message, Frame):
            try:
                check_frame(message, self._line.signature)
            except (NonsenseError, AttributeError, TypeError) as error:
                self._refuse(str(error))
            else:
                self._queue.put(message)
        else:
            self._queue.put(message)

    def _refuse(self, why: str) -> None:
        self.counts.nonsense += 1
        self.last_nonsense = why
        self._say(f"nonsense from the line: {why}")

    def _execution(self, line_id: str) -> Execution:
        """Of a line; made where there is none. Under the lock."""
        if line_id not in self.executions:
            made = self.executions[line_id] = Execution(line_id, self._vocabulary)
            if self._lost():
                made.machine.fire(Event.DEGRADED)
        return self.executions[line_id]

    def _take_over(self, message: Takeover) -> None:
        held = None
        with self._lock:
            execution = self._execution(message.line_id)
            if message.active:
                execution.taken_over()
            else:
                execution.handed_back()
                held, execution.held = execution.held, None
        if message.active:
            self._primary.give_up(message.line_id)
            self._say(f"{message.who} has taken {message.line_id} over")
        elif held is not None:
            self._queue.put(held)

    def _ended(self, message: OrderEnded) -> None:
        with self._lock:
            execution = self._execution(message.line_id)
            execution.ended(message)
        try:
            self._journal.ended(message)
        except LogFullError:
            self._say(f"the result of order {message.order_id} cannot be recorded")
        for onlooker in tuple(self._onlookers):
            onlooker.ended(message)
        self._on_ended()
        self._diagnose(execution)

    # ------------------------------------------------------------------------------------------------ a question

    def _question(self, frame: Frame) -> None:
        self.counts.questions += 1
        with self._lock:
            execution = self._execution(frame.line_id)
            execution.question(frame)
            if execution.machine.state is State.FROZEN:
                execution.held = frame
                return
            generation = execution.generation
        self._reconcile(frame)
        try:
            known = self._journal.find(frame.decision_id)
        except StoreError as error:  # recorded, and cannot be read any more: not decided a second time
            self._ask(frame, execution, generation, f"the journal: {error.message}")
            return
        if known is not None:
            self.counts.repeated += 1
            self._send(frame, known, execution, generation, in_time=True)
        elif time.monotonic() >= frame.deadline:
            self.counts.expired += 1
            self._fire(execution, generation, Event.DROPPED)
        elif execution.wants_person(frame):
            self._ask(frame, execution, generation, execution.ask_reason)
        else:
            self._decide(frame, execution, generation)

    def _reconcile(self, frame: Frame) -> None:
        """The question says what was done last: where that is not what was decided, the decision was none."""
        undone = self._journal.undone(frame)
        if undone is not None:
            self.counts.withdrawn += 1
            self._say(f"the line did not do what decision {undone} says")
            self._withdraw(undone)

    def _decide(self, frame: Frame, execution: Execution, generation: int) -> None:
        started = time.monotonic()
        mask, notes = self._interlocks.narrow(frame)
        if not mask.any():
            self._ask(frame, execution, generation, "; ".join(("interlocks leave nothing", *notes)))
            return
        kept = min(self._flush, _MOST_OF_TIME * (frame.deadline - started))
        seen = replace(frame, mask=mask, deadline=frame.deadline - kept)
        answer, in_time = self._choose(seen, execution, generation, notes)
        if answer is None:
            self.counts.withdrawn += 1
            return
        if answer.action < 0:
            self._ask(frame, execution, generation, "; ".join(answer.notes))
            return
        seen = seen.with_inputs(finite(answer.observation, frame.observation), mask)
        if self._record(frame, answer, seen, execution, generation):
            took = time.monotonic() - started
            if self._send(frame, answer, execution, generation, in_time=in_time):
                for onlooker in tuple(self._onlookers):
                    onlooker.decided(seen, answer, took)
            self._diagnose(execution)

    def _choose(
        self, seen: Frame, execution: Execution, generation: int, notes: tuple[str, ...]
    ) -> tuple[Answer | None, bool]:
        """What to do, and whether the policy said so in time; None where a person took over meanwhile."""
        ready = self._fallback.decide(seen, 0.0)
        if ready.action >= 0 and not seen.mask[ready.action]:
            ready = replace(ready, action=-1, notes=(*ready.notes, "the fallback is not allowed"))
        until = seen.deadline - self._reserve
        answer, why = None, "the policy still hangs in an earlier question"
        if self._primary.ask(seen):
            answer, why = self._primary.answer(until)
        if execution.generation != generation:
            return None, False
        in_time = answer is not None
        if answer is None:
            self.counts.fallbacks += 1
            answer = replace(ready, notes=(*ready.notes, f"fallback: {why}"))
        elif answer.action >= 0:
            forbidden = self._forbidden(seen, answer.action)
            if forbidden:
                self.counts.refused += 1
                answer = replace(ready, notes=(*ready.notes, f"{forbidden} forbids {answer.action}"))
        return replace(answer, notes=(*notes, *answer.notes)), in_time

    def _forbidden(self, seen: Frame, action: int) -> str | None:
        """Who forbids an action that was chosen: the mask, or an interlock."""
        if action >= len(seen.mask) or not seen.mask[action]:
            return "the mask"
        name = self._interlocks.refuses(seen, action)
        return f"interlock {name}" if name else None

    def _record(self, frame: Frame, answer: Answer, seen: Frame, execution: Execution, generation: int) -> bool:
        """Records a decision; a person is asked where that cannot be done."""
        started = time.monotonic()
        try:
            self._journal.decide(frame, answer, until=frame.deadline - self._reserve / 2, seen=seen)
        except LogFullError as error:
            self._ask(frame, execution, generation, error.message)
            return False
        took = time.monotonic() - started
        self._flush += _FLUSH_SHARE * (took - self._flush)
        self._interlocks.done(frame.line_id, frame.order_id, answer.action, frame.received)
        if self._journal.log.trouble or execution.machine.degraded:
            self.refresh()
        return True

    def _send(self, frame: Frame, answer: Answer, execution: Execution, generation: int, *, in_time: bool) -> bool:
        if not self._fire(execution, generation, Event.CHOSEN):
            self.counts.withdrawn += 1
            self._withdraw(frame.decision_id)
            return False
        late = time.monotonic() > frame.deadline
        try:
            self._line.act(frame, answer)
        except Exception as error:  # noqa: BLE001 - see _listen
            self._lost_line(error if isinstance(error, LineError) else LineError(f"its adapter fails: {error!r}"))
            self._fire(execution, None, Event.DROPPED)
            return False
        self.counts.decisions += 1
        self.counts.late += late
        with self._lock:
            execution.acted(answer.action, in_time=in_time and not late)
            if execution.machine.allows(Event.SENT):
                execution.machine.fire(Event.SENT)
        return True

    def _withdraw(self, decision_id: str) -> None:
        try:
            self._journal.withdraw(decision_id)
        except LogFullError as error:
            self._say(f"a decision that was not acted on stays on record: {error.message}")

    def _ask(self, frame: Frame, execution: Execution, generation: int, reason: str) -> None:
        """Asks for a person, who decides this question."""
        if not self._fire(execution, generation, Event.ASKED):
            return
        nothing = np.zeros(len(frame.mask), np.float32)
        if execution.asked_id != frame.decision_id:  # the first time
            execution.asked_id = frame.decision_id
            self.counts.asked += 1
            self._say(f"a person is asked at {frame.line_id}: {reason}")
            self._note_asked(frame, reason)
        try:
            self._line.act(frame, Answer(-1, nothing, 0.0, "person", "", (reason,)))
        except Exception as error:  # noqa: BLE001 - see _listen
            self._lost_line(error if isinstance(error, LineError) else LineError(f"its adapter fails: {error!r}"))

    def _note_asked(self, frame: Frame, reason: str) -> None:
        try:
            self._journal.asked(frame, reason)
        except LogFullError:
            self._say("that a person was asked cannot be recorded")

    def _fire(self, execution: Execution, generation: int | None, event: Event) -> bool:
        """Lets an event happen unless a person took over since ``generation``."""
        with self._lock:
            if generation not in (None, execution.generation) or not execution.machine.allows(event):
                return False
            execution.machine.fire(event)
            return True

    # ------------------------------------------------------------------------------------------------ level 3

    def _diagnose(self, execution: Execution) -> None:
        """After five failures in a row the agent says what it finds, and has a person decide the next question."""
        if not execution.diagnosis_due:
            return
        figures, lost = execution.figures(), self._lost()
        execution.ask_reason = "five failures in a row: see the diagnosis"
        execution.diagnosed()
        try:
            path = write_diagnosis(self._folder / "diagnoses", figures, lost, vars(self.counts))
            self._say(f"diagnosis of {execution.line_id}: {path}")
        except StoreError as error:
            self._say(f"the diagnosis of {execution.line_id} cannot be written: {error.message}")


def finite(seen: Any, asked: Any) -> Any:  # noqa: ANN401 - arrays of one shape
    """What the policy saw, where it says so; a lost sensor that nobody estimated is recorded as 0."""
    return np.nan_to_num(asked if seen is None else seen, nan=0.0).astype(np.float32)
