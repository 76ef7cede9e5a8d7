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
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agentpipe.errors import AgentpipeError, LineError, ServingError, StoreError
from agentpipe.serving.agent.diagnosis import diagnose
from agentpipe.serving.agent.execution import Execution, make_room
from agentpipe.serving.agent.machine import Event, State
from agentpipe.serving.agent.messages import ForeignLineError, LineEndedError, NonsenseError, check_frame
from agentpipe.serving.agent.parties import Counts, HandedBack, TakenOverError, finite, quietly
from agentpipe.serving.agent.presence import Presence
from agentpipe.serving.agent.primary import Primary
from agentpipe.serving.agent.repeats import contradicts, forbids, forbids_again, on_record
from agentpipe.serving.agent.types import Answer, Frame, OrderEnded, Takeover
from agentpipe.serving.agent.wal import LogFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from agentpipe.serving.agent.interlocks import Interlocks
    from agentpipe.serving.agent.journal import Journal
    from agentpipe.serving.agent.parties import Onlooker, Policy
    from agentpipe.serving.agent.types import Decider, LineAdapter, Message
    from agentpipe.serving.agent.vocabulary import Vocabulary

JOURNAL: Final = "journal"
_LISTEN_SECONDS: Final = 0.2
_FLUSH_SHARE: Final = 0.2
"""weight of the newest flush in the running mean of what one takes"""
_MOST_OF_TIME: Final = 0.5
"""of a question's time that is kept for flushing, at most"""


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
        self.failure: AgentpipeError | None = None
        """why it ended by itself"""
        self.last_nonsense = ""
        self._line, self._policy, self._fallback, self._journal = line, policy, fallback, journal
        self._interlocks, self._vocabulary, self._reserve, self._folder = interlocks, vocabulary, reserve, folder
        self._onlookers, self._on_ended, self._say = onlookers, on_ended, quietly(say)
        self.presence = Presence(self._say)
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Frame | OrderEnded | HandedBack | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._lines: Sequence[str] = ()
        """what the line last called its stations"""
        self._ended_working = False
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
            ForeignLineError, ServingError: see ``failure``.
        """
        self._listener.start()
        try:
            while not self._stopping.is_set():
                message = self._queue.get()
                if message is None:
                    break
                try:
                    self._work(message)
                except NonsenseError as error:  # of one line too many
                    self._refuse(error.message)
        finally:
            self._ended_working = True
        if self.failure is not None:
            raise self.failure

    def _work(self, message: Frame | OrderEnded | HandedBack) -> None:
        if isinstance(message, Frame):
            self._question(message)
        elif isinstance(message, OrderEnded):
            self._ended(message)
        else:
            self._handed_back(message)

    @property
    def working(self) -> bool:
        """Whether questions are heard and decided, or will be once :meth:`run` is called."""
        return not self._ended_working and (self._listener.ident is None or self._listener.is_alive())

    def stop(self) -> None:
        """Ends :meth:`run` after the question in hand. Any thread, also a signal's."""
        self._stopping.set()
        self._queue.put(None)

    def close(self) -> None:
        """Ends the threads; what comes afterwards is not answered. Line and journal are the caller's to close."""
        self.stop()
        for execution in tuple(self.executions.values()):
            self._fire(execution, Event.STOPPED)
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
            "connected": self.presence.connected,
            "backlog": self._journal.backlog,
            "waiting_for_disk": self._journal.log.waiting,
            "degraded": self._lost(),
            "lines": lines,
        }

    # ------------------------------------------------------------------------------------------------ the line

    def _listen(self) -> None:
        """A thread. An agent that is deaf is of no use: where this ends by a fault, so does :meth:`run`."""
        try:
            self._hear_all()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is said and ends the process
            text = f"the agent cannot listen any more: {type(error).__name__}: {error}"
            self.failure = ServingError(text, remedy="a fault of agentpipe: start the agent again, and report it")
            self.stop()

    def _hear_all(self) -> None:
        while not self._stopping.is_set():
            try:
                message = self._line.receive(_LISTEN_SECONDS)
                self.presence.seen(connected=bool(getattr(self._line, "connected", True)))
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
        self.counts.lost_lines += self.presence.lost(error)

    def _hear(self, message: Message) -> None:
        if self._stopping.is_set():
            return
        try:
            if isinstance(message, Takeover):
                self._take_over(message)
                return
            if isinstance(message, Frame):
                check_frame(message, self._line.signature)
        except (NonsenseError, AttributeError, TypeError) as error:
            self._refuse(str(error))
        else:
            self._queue.put(message)

    def _refuse(self, why: str, frame: Frame | None = None) -> None:
        """Nonsense is counted and said; where the adapter let it through and can tell the line, the line is told."""
        self.counts.nonsense += 1
        self.last_nonsense = why
        self._say(f"nonsense from the line: {why}")
        tell = getattr(self._line, "refuse", None)
        if frame is not None and tell is not None:
            tell(frame.decision_id, why)

    def _execution(self, line_id: str) -> Execution:
        """Of a line; made where there is none. Under the lock."""
        if line_id not in self.executions:
            make_room(self.executions)
            made = self.executions[line_id] = Execution(line_id, self._vocabulary)
            if self._lost():
                made.machine.fire(Event.DEGRADED)
        self.executions[line_id] = self.executions.pop(line_id)  # the last one in its order
        return self.executions[line_id]

    def _take_over(self, message: Takeover) -> None:
        with self._lock:
            execution = self._execution(message.line_id)
            frozen = execution.machine.state is State.FROZEN
            if message.active:
                execution.taken_over()
            elif frozen:
                execution.handed_back()
        if message.active:
            self._primary.give_up(message.line_id)
            self._say(f"{message.who} has taken {message.line_id} over")
        elif frozen:  # else nobody had it: a line says so to whoever connects
            self._say(f"{message.who} has handed {message.line_id} back")
            self._queue.put(HandedBack(message.line_id))

    def _handed_back(self, message: HandedBack) -> None:
        """Decides the question that a person's time at the line has held up, after all that came before."""
        with self._lock:
            execution = self.executions.get(message.line_id)
            held = None if execution is None or execution.machine.state is State.FROZEN else execution.held
        if held is not None:
            self._question(held)

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
        """Answers a question; one that a person interrupts is held, or begun anew where the person is gone."""
        self.counts.questions += 1
        known = on_record(self._journal, frame)
        if known is not None and (contradiction := contradicts(known, frame)):
            self._refuse(contradiction, frame)
            return
        while True:
            with self._lock:
                execution = self._execution(frame.line_id)
                execution.question(frame)
                execution.held = frame if execution.machine.state is State.FROZEN else None
                if execution.held is not None:
                    return
                generation = execution.generation
            try:
                self._answer(frame, execution, generation)
            except TakenOverError:
                self.counts.withdrawn += 1
                if execution.machine.state is State.STOPPED:
                    return
            else:
                return

    def _answer(self, frame: Frame, execution: Execution, generation: int) -> None:
        """One try to answer.

        Raises:
            TakenOverError: a person has taken the line over meanwhile; nothing was sent.
        """
        self._reconcile(frame)
        try:
            known = self._journal.find(frame.decision_id)
        except StoreError as error:  # recorded, and cannot be read any more: not decided a second time
            self._ask(frame, execution, generation, f"the journal: {error.message}")
            return
        if known is not None:
            self._repeat(frame, known, execution, generation)
        elif time.monotonic() >= frame.deadline and not frame.doubtful:
            self.counts.expired += 1
            self._fire(execution, Event.DROPPED)
        elif execution.wants_person(frame):
            self._ask(frame, execution, generation, execution.ask_reason)
        else:
            self._decide(frame, execution, generation)

    def _repeat(self, frame: Frame, known: Answer, execution: Execution, generation: int) -> None:
        """Says once more what was decided, where that may still be done; a person is asked where it may not."""
        self.counts.repeated += 1
        forbidden = forbids_again(frame, known.action, self._interlocks, self._journal, self._vocabulary)
        if not forbidden:
            self._send(frame, known, execution, generation, in_time=True)
            return
        self.counts.refused += 1
        self._withdraw(frame.decision_id)
        execution.ask_reason, execution.reason_for = f"{forbidden} now forbids what was decided", frame.decision_id
        self._ask(frame, execution, generation, execution.ask_reason)

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
        kept = min(self._flush, _MOST_OF_TIME * max(0.0, frame.deadline - started))
        seen = replace(frame, mask=mask, deadline=frame.deadline - kept)
        answer, in_time = self._choose(seen, execution, generation, notes)
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
    ) -> tuple[Answer, bool]:
        """What to do, and whether the policy said so in time."""
        ready = self._fallback.decide(seen, 0.0)
        if ready.action >= 0 and not seen.mask[ready.action]:
            ready = replace(ready, action=-1, notes=(*ready.notes, "the fallback is not allowed"))
        until = seen.deadline - self._reserve
        answer, why = None, "the policy still hangs in an earlier question"
        if time.monotonic() >= seen.deadline:
            why = "the question waited unread, for too long perhaps"
        elif self._primary.ask(seen, until):
            answer, why = self._primary.answer(until)
        if execution.generation != generation:
            raise TakenOverError
        in_time = answer is not None
        if answer is None:
            self.counts.fallbacks += 1
            answer = replace(ready, notes=(*ready.notes, f"fallback: {why}"))
        elif answer.action >= 0:
            forbidden = forbids(seen, answer.action, self._interlocks)
            if forbidden:
                self.counts.refused += 1
                notes_of = (*ready.notes, f"{forbidden} forbids {answer.action}")
                answer = replace(ready, notes=notes_of, memory=answer.memory)
        return replace(answer, notes=(*notes, *answer.notes)), in_time

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
        try:
            self._commit(execution, generation, Event.CHOSEN)
        except TakenOverError:
            self._withdraw(frame.decision_id)
            raise
        late = time.monotonic() > frame.deadline
        try:
            self._line.act(frame, answer)
        except Exception as error:  # noqa: BLE001 - see _listen
            self._lost_line(error if isinstance(error, LineError) else LineError(f"its adapter fails: {error!r}"))
            self._fire(execution, Event.DROPPED)
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
        self._commit(execution, generation, Event.ASKED)
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

    def _commit(self, execution: Execution, generation: int, event: Event) -> None:
        """Lets an event happen that something is sent with.

        Raises:
            TakenOverError: a person has taken over since ``generation``, or the agent is being stopped.
        """
        with self._lock:
            if generation != execution.generation or not execution.machine.allows(event):
                raise TakenOverError
            execution.machine.fire(event)

    def _fire(self, execution: Execution, event: Event) -> None:
        """Lets an event happen where it can."""
        with self._lock:
            if execution.machine.allows(event):
                execution.machine.fire(event)

    def _diagnose(self, execution: Execution) -> None:
        """Level 3: after five failures in a row a person is to decide the next question."""
        if execution.diagnosis_due:
            self._say(diagnose(execution, self._folder / "diagnoses", self._lost(), vars(self.counts)))
