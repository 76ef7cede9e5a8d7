"""The runtime: answered once, in time, within limits, on record before it is acted on; and a person comes first."""

from __future__ import annotations

import contextlib
import datetime as dt
import queue
import threading
import time

import numpy as np
import pytest

from agentpipe.errors import LineError, ServingError
from agentpipe.serving.agent.interlocks import Interlock, Interlocks
from agentpipe.serving.agent.journal import Journal
from agentpipe.serving.agent.machine import State
from agentpipe.serving.agent.messages import ForeignLineError, LineEndedError, NonsenseError
from agentpipe.serving.agent.runtime import Runtime
from agentpipe.serving.agent.types import Takeover
from agentpipe.serving.agent.vocabulary import Vocabulary
from agentpipe.serving.agent.wal import LogFullError
from agentpipe_tests.serving.agent.lines import wait_for
from agentpipe_tests.serving.agent.questions import SMALL, answer, ended, frame

HOUR = dt.timedelta(hours=1)


class FakeLine:
    """Says what it is told to; keeps what it is answered."""

    signature = SMALL

    def __init__(self):
        self.messages: queue.Queue = queue.Queue()
        self.acts: list[tuple[str, int]] = []
        self.answers = []
        self.broken = False

    def receive(self, timeout):
        try:
            message = self.messages.get(timeout=min(timeout, 0.02))
        except queue.Empty:
            return None
        if isinstance(message, Exception):
            raise message
        return message

    def act(self, asked, said):
        if self.broken:
            raise LineError("gone")
        self.answers.append(said)
        self.acts.append((asked.decision_id, said.action))

    def say(self, *messages):
        for message in messages:
            self.messages.put(message)


class FakePolicy:
    """Answers with ``action``; can hang until it is let go, fail, or be degraded."""

    name, policy_version = "fake", "p" * 64

    def __init__(self, action=2):
        self.action, self.seen, self.lost = action, [], {}
        self.failure = None
        self.let_go = threading.Event()
        self.let_go.set()

    def decide(self, asked, timeout=0.0):
        self.seen.append(asked)
        self.let_go.wait(60)
        if self.failure is not None:
            raise self.failure
        return answer(self.action, mask=asked.mask)

    def degraded(self):
        return self.lost


class Rules(FakePolicy):
    """The fallback: the highest allowed action."""

    def decide(self, asked, timeout=0.0):
        action = int(np.flatnonzero(asked.mask)[-1])
        return answer(action, mask=asked.mask, by="rules", version="rules-1")


class Agent:
    """A runtime in a thread."""

    def __init__(self, folder, *limits, policy=None, **options):
        self.folder, self.line, self.policy = folder, FakeLine(), policy or FakePolicy()
        self.journal = Journal(folder / "journal", most_waiting=options.pop("most_waiting", 512))
        self.said: list[str] = []
        self.runtime = Runtime(
            self.line,
            self.policy,
            Rules(),
            self.journal,
            Interlocks(limits, Vocabulary()),
            options.pop("vocabulary", Vocabulary()),
            reserve=0.02,
            folder=folder,
            say=options.pop("say", self.said.append),
            **options,
        )
        self.failure = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.runtime.run()
        except (ServingError, ZeroDivisionError) as error:
            self.failure = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.policy.let_go.set()
        self.runtime.close()
        self.thread.join(30)
        self.journal.close()

    def ask(self, *messages, acts=None):
        """Says something and waits for so many more acts."""
        wanted = len(self.line.acts) + (len(messages) if acts is None else acts)
        self.line.say(*messages)
        wait_for(lambda: len(self.line.acts) >= wanted)
        wait_for(lambda: self.state in (State.WAITING, State.DEGRADED, State.ASKING, State.FROZEN))
        return self.line.acts[-1]

    @property
    def state(self):
        executions = list(self.runtime.executions.values())
        return executions[0].machine.state if executions else None

    def due(self):
        return self.journal.due(dt.datetime.now(dt.UTC) + 2 * HOUR, HOUR)


def test_a_question_is_answered_by_the_policy_and_recorded_as_it_saw_it(tmp_path):
    with Agent(tmp_path) as agent:
        assert agent.ask(frame(0)) == ("l1-o1-0", 2)
        assert agent.ask(frame(1)) == ("l1-o1-1", 2)
        agent.line.say(ended(result="late", success=False))
        wait_for(lambda: agent.state is State.IDLE)
        rows = [row for _, row in agent.due()]
    assert [(row["decision_id"], row["action"], row["result"]) for row in rows] == [
        ("l1-o1-0", 2, "late"),
        ("l1-o1-1", 2, "late"),
    ]
    assert rows[0]["policy_version"] == "p" * 64
    assert rows[0]["observation"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert agent.runtime.counts.decisions == 2


def test_it_is_on_record_before_it_is_sent(tmp_path):
    with Agent(tmp_path) as agent:
        seen = []
        agent.line.act = lambda asked, said: seen.append(agent.journal.find(asked.decision_id).action == said.action)
        agent.line.say(frame(0))
        wait_for(lambda: seen)
    assert seen == [True]


def test_asked_again_the_same_is_said_without_asking_the_policy(tmp_path):
    with Agent(tmp_path) as agent:
        agent.ask(frame(0))
        agent.policy.action = 3
        assert agent.ask(frame(0)) == ("l1-o1-0", 2)
        assert len(agent.policy.seen) == 1
        assert len(agent.due()) == 1
    with Agent(tmp_path, policy=FakePolicy(3)) as again:  # another process
        assert again.ask(frame(0)) == ("l1-o1-0", 2)
        assert again.ask(frame(1)) == ("l1-o1-1", 3)
        assert again.runtime.counts.repeated == 1


def test_a_policy_that_hangs_is_not_waited_for_beyond_the_deadline(tmp_path):
    with Agent(tmp_path) as agent:
        agent.policy.let_go.clear()
        asked = frame(0, seconds=1.5)
        assert agent.ask(asked) == ("l1-o1-0", 3)
        assert "fallback: no answer in time" in agent.line.answers[0].notes
        assert agent.ask(frame(1, last_action=3)) == ("l1-o1-1", 3), "it still hangs: nobody waits for it"
        agent.policy.let_go.set()
        wait_for(lambda: agent.runtime._primary._job is None)
        assert agent.ask(frame(2, last_action=3)) == ("l1-o1-2", 2)
        assert agent.runtime.counts.fallbacks == 2
        assert {row["policy_version"] for _, row in agent.due()} == {"rules-1", "p" * 64}


def test_a_policy_that_raises_whatever_it_raises_does_not_end_the_agent(tmp_path):
    with Agent(tmp_path) as agent:
        agent.policy.failure = ZeroDivisionError("x")
        assert agent.ask(frame(0)) == ("l1-o1-0", 3)
        assert "fallback: ZeroDivisionError: x" in agent.line.answers[0].notes
        agent.policy.failure = None
        assert agent.ask(frame(1))[1] == 2


def test_a_question_whose_deadline_has_passed_is_not_answered(tmp_path):
    with Agent(tmp_path) as agent:
        agent.line.say(frame(0, seconds=-1.0))
        assert agent.ask(frame(1), acts=1) == ("l1-o1-1", 2)
        assert agent.runtime.counts.expired == 1


# ------------------------------------------------------------------------------------------------ persons


def test_a_person_who_takes_over_while_an_answer_is_computed_is_heard_at_once(tmp_path):
    with Agent(tmp_path) as agent:
        agent.policy.let_go.clear()
        agent.line.say(frame(0, seconds=60.0))
        wait_for(lambda: agent.policy.seen)
        agent.line.say(Takeover("l1", True, "ann"))
        wait_for(lambda: agent.state is State.FROZEN)
        wait_for(lambda: agent.runtime.counts.withdrawn)
        agent.policy.let_go.set()
        agent.line.say(frame(0, seconds=60.0))  # asked again meanwhile: kept
        wait_for(lambda: agent.runtime.executions["l1"].held is not None)
        assert agent.line.acts == []
        assert agent.due() == [], "what was not sent is no decision"
        order = agent.runtime.executions["l1"].order
        agent.line.say(Takeover("l1", False, "ann"))
        wait_for(lambda: agent.line.acts)
        assert agent.line.acts == [("l1-o1-0", 2)]
        assert agent.runtime.executions["l1"].order is order, "the order is as it was"


def test_a_person_who_takes_over_between_record_and_sending_is_heard_too(tmp_path):
    with Agent(tmp_path) as agent:
        decide = agent.journal.decide

        def slow(*arguments, **options):
            done = decide(*arguments, **options)
            agent.runtime._hear(Takeover("l1", True, "ann"))
            return done

        agent.journal.decide = slow
        agent.line.say(frame(0))
        wait_for(lambda: agent.runtime.counts.withdrawn)
        assert (agent.state, agent.line.acts, agent.due()) == (State.FROZEN, [], [])


def test_another_line_goes_on_while_a_person_has_one(tmp_path):
    with Agent(tmp_path) as agent:
        agent.ask(frame(0))
        agent.line.say(Takeover("l1", True, "ann"))
        agent.ask(frame(0, line="l2"))
        assert agent.line.acts[-1] == ("l2-o1-0", 2)
        assert agent.runtime.taken_over == 1
        agent.policy.let_go.clear()
        agent.line.say(frame(1, line="l2", seconds=60.0))
        wait_for(lambda: len(agent.policy.seen) == 3)
        agent.line.say(Takeover("l1", True, "ann"), Takeover("l1", False, "ann"))
        wait_for(lambda: agent.runtime.taken_over == 0)
        agent.policy.let_go.set()
        wait_for(lambda: len(agent.line.acts) == 3)
        assert agent.runtime.counts.fallbacks == 0


# ---------------------------------------------------------------------------------------------- interlocks


def test_interlocks_narrow_what_the_policy_may_choose_and_are_on_record(tmp_path):
    with Agent(tmp_path, Interlock("not two", frozenset({2})), policy=FakePolicy(1)) as agent:
        agent.ask(frame(0))
        assert agent.policy.seen[0].mask.tolist() == [True, True, False, True]
        ((_, row),) = agent.due()
        assert row["mask"] == [True, True, False, True]
        assert row["probabilities"][2] == 0.0
        assert agent.line.answers[0].notes == ("interlock not two: action 2",)


def test_what_was_chosen_against_an_interlock_is_not_done(tmp_path):
    with Agent(tmp_path, Interlock("not two", frozenset({2}))) as agent:
        agent.policy.decide = lambda asked: answer(2)
        assert agent.ask(frame(0)) == ("l1-o1-0", 3)
        assert agent.runtime.counts.refused == 1


def test_where_interlocks_leave_nothing_a_person_is_asked(tmp_path):
    with Agent(tmp_path, Interlock("nothing", frozenset(range(4)))) as agent:
        assert agent.ask(frame(0)) == ("l1-o1-0", -1)
        assert agent.state is State.ASKING
        assert agent.ask(frame(0)) == ("l1-o1-0", -1)
        assert agent.due() == []
        assert agent.runtime.counts.asked == 1
        assert "interlock nothing" in agent.said[0]


def test_a_rate_counts_what_was_done_before_a_restart(tmp_path):
    limit = Interlock("once", frozenset({2}), at_most=1, per="day")
    with Agent(tmp_path, limit) as agent:
        assert agent.ask(frame(0))[1] == 2
    with Agent(tmp_path, limit, policy=FakePolicy(2)) as again:
        again.policy.decide = lambda asked: answer(2, mask=asked.mask)
        assert again.ask(frame(1))[1] == 3


# ------------------------------------------------------------------------------------------- disk and line


def test_what_cannot_be_recorded_is_not_done(tmp_path):
    with Agent(tmp_path) as agent:

        def full(*arguments, **options):
            raise LogFullError("2 records wait for the disk: No space left on device")

        kept, agent.journal.decide = agent.journal.decide, full
        assert agent.ask(frame(0)) == ("l1-o1-0", -1)
        assert "No space left" in agent.said[0]
        agent.journal.decide = kept
        assert agent.ask(frame(0)) == ("l1-o1-0", 2), "asked again, it is decided"


def test_while_something_is_lost_questions_are_answered_in_the_state_degraded(tmp_path):
    with Agent(tmp_path) as agent:
        agent.ask(frame(0))
        agent.policy.lost = {"triton": "connection refused"}
        agent.runtime.refresh()
        assert agent.state is State.DEGRADED
        agent.ask(frame(1))
        assert agent.state is State.DEGRADED
        agent.policy.lost = {}
        agent.runtime.refresh()
        assert agent.state is State.WAITING
        assert agent.runtime.figures()["degraded"] == {}


def test_an_answer_that_could_not_be_sent_is_sent_when_it_is_asked_again(tmp_path):
    with Agent(tmp_path) as agent:
        agent.line.broken = True
        agent.line.say(frame(0))
        wait_for(lambda: agent.journal.backlog == 1 and agent.state is State.WAITING)
        agent.line.broken = False
        agent.policy.action = 1
        assert agent.ask(frame(0)) == ("l1-o1-0", 2)
        assert len(agent.due()) == 1


def test_nonsense_and_lost_lines_are_counted_and_survived(tmp_path):
    with Agent(tmp_path) as agent:
        agent.line.say(NonsenseError("a mask of nothing"), LineError("reset"), LineError("refused"))
        agent.ask(frame(0), acts=1)
        counts = agent.runtime.counts
        assert (counts.nonsense, agent.runtime.last_nonsense) == (1, "a mask of nothing")
        assert counts.lost_lines <= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"observation": np.zeros(4, np.float32)},
        {"observation": np.zeros(5)},
        {"observation": np.full(5, np.inf, np.float32)},
        {"observation": None},
        {"mask": (True, True)},
        {"mask": (False, False, False, False)},
        {"last_action": 9},
        {"elapsed_minutes": float("nan")},
        {"deadline": float("nan")},
        {"time": dt.datetime(2026, 1, 1)},  # noqa: DTZ001 - that is what is wrong with it
        {"line_id": ""},
    ],
)
def test_a_question_that_an_adapter_should_not_have_let_through_is_refused(tmp_path, changes):
    with Agent(tmp_path) as agent:
        agent.line.say(frame(0, **changes))
        assert agent.ask(frame(1), acts=1) == ("l1-o1-1", 2)
        assert agent.runtime.counts.nonsense == 1
        assert len(agent.due()) == 1


def test_an_adapter_that_raises_whatever_it_raises_does_not_make_the_agent_deaf(tmp_path):
    with Agent(tmp_path) as agent:
        agent.line.say(frame(0), ZeroDivisionError("x"))
        agent.ask(frame(1), acts=2)
        act, agent.line.act = agent.line.act, None  # not callable
        agent.line.say(frame(2))
        wait_for(lambda: agent.journal.backlog == 3 and agent.state is State.WAITING)
        agent.line.act = act
        assert agent.ask(frame(2)) == ("l1-o1-2", 2)


def test_a_decision_that_the_line_did_not_follow_is_withdrawn(tmp_path):
    with Agent(tmp_path) as agent:
        agent.ask(frame(0))
        agent.ask(frame(1, last_action=3))  # somebody did 3 instead of the 2 that was decided
        agent.ask(frame(2, last_action=2))
        assert [name for name, _ in agent.due()] == ["l1-o1-1", "l1-o1-2"]
        assert agent.runtime.counts.withdrawn == 1


def test_a_foreign_line_ends_the_agent_and_the_end_of_a_stream_does_so_when_all_is_answered(tmp_path):
    with Agent(tmp_path / "a") as agent:
        agent.line.say(ForeignLineError("another protocol"))
        agent.thread.join(30)
        assert isinstance(agent.failure, ForeignLineError)
    with Agent(tmp_path / "b") as agent:
        agent.line.say(frame(0), ended(), LineEndedError("the end"))
        agent.thread.join(30)
        assert not agent.thread.is_alive()
        assert (agent.line.acts, agent.failure) == ([("l1-o1-0", 2)], None)


# ------------------------------------------------------------------------------------------------- level 3


def test_after_five_late_steps_in_a_row_the_agent_diagnoses_itself_and_asks_a_person(tmp_path):
    with Agent(tmp_path) as agent:
        agent.policy.failure = ServingError("it is broken")
        agent.policy.lost = {"local": "broken"}
        for number in range(5):
            agent.ask(frame(number))
        agent.policy.failure = None
        for _ in range(2):
            assert agent.ask(frame(5)) == ("l1-o1-5", -1), "however often it is asked"
        assert agent.ask(frame(6)) == ("l1-o1-6", 2), "somebody has decided the one before"
        (page,) = (tmp_path / "diagnoses").iterdir()
    text = page.read_text()
    assert "Five failures in a row at l1" in text
    assert "- local: broken" in text
    assert "| steps that were not answered in time | 5 |" in text


def test_onlookers_are_told_of_what_was_sent(tmp_path):
    class Onlooker:
        def __init__(self):
            self.told = []

        def decided(self, asked, said, seconds):
            self.told.append((asked.decision_id, said.action, seconds >= 0))

        def ended(self, message):
            self.told.append(message.order_id)

    looker = Onlooker()
    with Agent(tmp_path, onlookers=(looker,)) as agent:
        agent.ask(frame(0))
        agent.line.say(ended())
        wait_for(lambda: len(looker.told) == 2)
    assert looker.told == [("l1-o1-0", 2, True), "o1"]


def test_a_line_that_floods_its_agent_with_questions_is_still_answered_once_each(tmp_path):
    with Agent(tmp_path) as agent:
        questions = [frame(number, order=f"o{number % 7}", line=f"l{number % 3}") for number in range(60)]
        agent.ask(*questions)
        assert sorted(agent.line.acts) == sorted((asked.decision_id, 2) for asked in questions)
        assert len(agent.due()) == 60
        with contextlib.suppress(IndexError):
            assert time.monotonic() < questions[0].deadline


@pytest.mark.parametrize("lost", [(), (1, 3)])
def test_what_nobody_estimated_is_recorded_as_a_number(tmp_path, lost):
    values = np.arange(5, dtype=np.float32)
    values[list(lost)] = np.nan
    with Agent(tmp_path) as agent:
        agent.ask(frame(0, observation=values))
        ((_, row),) = agent.due()
    assert row["observation"] == [0.0 if place in lost else float(place) for place in range(5)]
