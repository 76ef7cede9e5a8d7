"""The runtime: what persons, closed terminals and endless names do to it, no question and no ear is lost to."""

from __future__ import annotations

import threading
import time

import pytest

from agentpipe.errors import ServingError
from agentpipe.serving.agent import execution as executions
from agentpipe.serving.agent.machine import State
from agentpipe.serving.agent.messages import NonsenseError
from agentpipe.serving.agent.primary import Primary
from agentpipe.serving.agent.types import Takeover
from agentpipe_tests.serving.agent.lines import wait_for
from agentpipe_tests.serving.agent.questions import answer, ended, frame
from agentpipe_tests.serving.agent.test_runtime import Agent

TAKE, RELEASE = Takeover("l1", True, "ann"), Takeover("l1", False, "ann")


def interrupted(agent, step):
    """Has a person come and go in the middle of answering: ``step`` is when."""
    came = []

    def come_and_go(real):
        def call(*arguments, **options):
            result = real(*arguments, **options)
            if not came:
                came.append(step)
                for message in step[1]:
                    agent.runtime._hear(message)
            return result

        return call

    if step[0] == "record":
        agent.journal.decide = come_and_go(agent.journal.decide)
    elif step[0] == "find":
        agent.journal.find = come_and_go(agent.journal.find)
    else:
        agent.policy.decide = come_and_go(agent.policy.decide)
        agent.runtime._primary._decide = agent.policy.decide


@pytest.mark.parametrize("when", ["policy", "record", "find"])
@pytest.mark.parametrize("later", [False, True])
def test_a_question_in_hand_when_a_person_comes_is_answered_when_they_are_gone(tmp_path, when, later):
    with Agent(tmp_path) as agent:
        interrupted(agent, (when, (TAKE,) if later else (TAKE, RELEASE)))
        agent.line.say(frame(0))
        if later:
            wait_for(lambda: "l1" in agent.runtime.executions and agent.runtime.executions["l1"].held is not None)
            assert (agent.state, agent.line.acts, agent.due()) == (State.FROZEN, [], [])
            agent.line.say(RELEASE)
        wait_for(lambda: agent.line.acts)
        assert agent.line.acts == [("l1-o1-0", 2)]
        assert "fallback" not in "".join(agent.line.answers[0].notes), "the policy was asked, not the fallback"
        assert agent.ask(frame(1)) == ("l1-o1-1", 2)
        assert len(agent.due()) == 2


def test_the_wish_for_a_person_that_a_takeover_interrupts_is_said_afterwards(tmp_path):
    with Agent(tmp_path) as agent:
        interrupted(agent, ("policy", (TAKE, RELEASE)))
        agent.policy.action = -1
        assert agent.ask(frame(0))[1] == -1


def test_takeovers_in_one_burst_with_questions_leave_none_unanswered_and_in_order(tmp_path):
    with Agent(tmp_path) as agent:
        for number in range(20):
            agent.line.say(frame(number), TAKE, RELEASE)
        wait_for(lambda: len(agent.line.acts) == 20)
        assert agent.line.acts == [(f"l1-o1-{number}", 2) for number in range(20)]
        assert len(agent.due()) == 20


def test_what_is_held_is_not_decided_once_its_order_is_over_or_a_newer_question_came(tmp_path):
    with Agent(tmp_path) as agent:
        agent.line.say(TAKE, frame(0))
        wait_for(lambda: "l1" in agent.runtime.executions and agent.runtime.executions["l1"].held is not None)
        agent.line.say(ended(), RELEASE)
        assert agent.ask(frame(0, order="o2"), acts=1) == ("l1-o2-0", 2)
        agent.line.say(TAKE, frame(1, order="o2"), frame(2, order="o2", last_action=1), RELEASE)
        wait_for(lambda: agent.line.acts[-1] == ("l1-o2-2", 2))
        assert ("l1-o1-0", 2) not in agent.line.acts


def test_a_policy_that_was_given_up_is_waited_for_once_and_no_longer_than_there_is_time():
    let_go = threading.Event()

    def decide(asked):
        if asked.number == 0:
            let_go.wait(60)
        return answer(asked.number)

    primary = Primary(decide)
    try:
        assert primary.ask(frame(0))
        primary.give_up("l1")
        assert primary.answer(time.monotonic() + 30) == (None, "a person took over")
        assert not primary.ask(frame(1), time.monotonic() + 0.01)
        assert not primary.ask(frame(1), time.monotonic() + 60), "it hangs: not waited for again"
        primary.give_up("l1")
        threading.Timer(0.02, let_go.set).start()
        assert primary.ask(frame(2), time.monotonic() + 60)
        assert primary.answer(time.monotonic() + 60)[0].action == 2
    finally:
        let_go.set()
        primary.close()


def test_a_line_that_nobody_had_is_not_said_to_be_handed_back(tmp_path):
    said = []
    with Agent(tmp_path, say=said.append) as agent:
        agent.line.say(RELEASE)  # a line says so to whoever connects
        assert agent.ask(frame(0), acts=1) == ("l1-o1-0", 2)
        assert said == []
        agent.line.say(TAKE, Takeover("l1", False, "bob"), RELEASE)
        assert agent.ask(frame(1), acts=1) == ("l1-o1-1", 2)
    assert said == ["ann has taken l1 over", "bob has handed l1 back"]


def test_a_line_that_connects_again_does_not_take_back_the_wish_for_a_person(tmp_path):
    with Agent(tmp_path) as agent:
        assert agent.ask(frame(0)) == ("l1-o1-0", 2)
        agent.runtime.executions["l1"].ask_reason = "five failures"
        agent.line.say(RELEASE)
        assert agent.ask(frame(1)) == ("l1-o1-1", -1)


# -------------------------------------------------------------------------------------------------- its ears


class Mute(list):
    """Where nothing can be said."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def append(self, text):
        super().append(text)
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(32, "x"), OSError(28, "x"), ValueError("closed"), RuntimeError("x")])
def test_what_cannot_be_said_costs_nothing_but_the_words(tmp_path, error):
    said = Mute(error)
    with Agent(tmp_path, say=said.append) as agent:
        agent.line.say(NonsenseError("what?"), TAKE, RELEASE, frame(0, mask=(True, True)))
        assert agent.ask(frame(0), acts=1) == ("l1-o1-0", 2)
        agent.policy.action = -1
        assert agent.ask(frame(1)) == ("l1-o1-1", -1)
        assert agent.runtime.working
    assert len(said) == 5  # nonsense twice, a person comes, goes, and is asked


def test_an_agent_that_cannot_hear_any_more_ends_with_an_error_and_is_not_ready(tmp_path):
    with Agent(tmp_path) as agent:
        assert agent.runtime.working
        agent.runtime._refuse = None  # a fault of our own
        agent.line.say(NonsenseError("what?"))
        agent.thread.join(30)
        assert not agent.thread.is_alive()
        assert isinstance(agent.failure, ServingError)
        assert "cannot listen any more: TypeError" in agent.failure.message
        assert not agent.runtime.working


def test_an_agent_that_cannot_decide_any_more_is_not_ready(tmp_path):
    with Agent(tmp_path) as agent:
        agent.runtime._work = lambda message: 1 / 0
        agent.line.say(frame(0))
        agent.thread.join(30)
        assert isinstance(agent.failure, ZeroDivisionError)
        assert not agent.runtime.working


# --------------------------------------------------------------------------------------------- endless names


def test_lines_that_are_only_names_are_forgotten_and_one_that_a_person_has_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(executions, "MOST_LINES", 4)
    with Agent(tmp_path) as agent:
        agent.line.say(TAKE)
        for number in range(20):
            agent.line.say(Takeover(f"made up {number}", False, "x"))
        wait_for(lambda: "made up 19" in agent.runtime.executions)
        assert list(agent.runtime.executions) == ["l1", *(f"made up {number}" for number in (17, 18, 19))]
        for number in range(4):
            agent.line.say(Takeover(f"held {number}", True, "x"))
        agent.line.say(frame(0, line="l2"))
        wait_for(lambda: agent.runtime.counts.nonsense == 2)
        assert "lines that persons have" in agent.runtime.last_nonsense
        assert agent.runtime.taken_over == 4
        agent.line.say(RELEASE)
        assert agent.ask(frame(0), acts=1) == ("l1-o1-0", 2)
