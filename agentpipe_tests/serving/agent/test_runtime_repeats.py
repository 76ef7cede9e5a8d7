"""The runtime: what was decided is said again only to the same question, and only while it is still allowed."""

from __future__ import annotations

import pytest

from agentpipe.serving.agent.interlocks import Interlock
from agentpipe.serving.agent.machine import State
from agentpipe_tests.serving.agent.lines import wait_for
from agentpipe_tests.serving.agent.questions import frame
from agentpipe_tests.serving.agent.test_runtime import Agent, FakePolicy


def decided(folder):
    """An agent's folder in which question 0 of o1 at l1 is decided: action 2."""
    with Agent(folder) as agent:
        assert agent.ask(frame(0)) == ("l1-o1-0", 2)


def test_a_mask_that_now_forbids_what_was_decided_has_a_person_asked_however_often(tmp_path):
    with Agent(tmp_path) as agent:
        agent.ask(frame(0))
        for _ in range(2):
            assert agent.ask(frame(0, mask=(True, True, False, True))) == ("l1-o1-0", -1)
        assert agent.due() == [], "it is withdrawn"
        assert agent.runtime.counts.asked == 1
        assert agent.ask(frame(1)) == ("l1-o1-1", 2)


@pytest.mark.parametrize("per", [None, "order", "day"])
def test_an_interlock_that_came_with_a_restart_holds_for_what_was_decided_before(tmp_path, per):
    limit = Interlock("no two", frozenset({2}), at_most=None if per is None else 1, per=per or "order")
    with Agent(tmp_path) as agent:
        agent.ask(frame(0))
        agent.ask(frame(1))
    with Agent(tmp_path, limit) as again:
        assert again.ask(frame(1)) == ("l1-o1-1", -1)
        assert "interlock no two now forbids what was decided" in again.line.answers[0].notes[0]
        assert again.state is State.ASKING
        assert [name for name, _ in again.due()] == ["l1-o1-0"]


@pytest.mark.parametrize("per", ["order", "day"])
def test_a_limit_counts_a_decision_once_however_often_it_is_said(tmp_path, per):
    limit = Interlock("once", frozenset({2}), at_most=1, per=per)
    with Agent(tmp_path, limit) as agent:
        for _ in range(3):
            assert agent.ask(frame(0)) == ("l1-o1-0", 2)
    with Agent(tmp_path, limit) as again:
        assert again.ask(frame(0)) == ("l1-o1-0", 2)


@pytest.mark.parametrize(
    "other", [{"line": "l2"}, {"order": "o2"}, {"number": 7}, {"line": "l2", "order": "o2", "number": 7}]
)
def test_another_question_under_a_known_id_is_nonsense(tmp_path, other):
    decided(tmp_path)
    with Agent(tmp_path, policy=FakePolicy(3)) as agent:
        told = []
        agent.line.refuse = lambda name, why: told.append((name, why))
        agent.line.say(frame(**{"number": 0, **other}, name="l1-o1-0"))
        wait_for(lambda: told)
        assert told == [("l1-o1-0", "l1-o1-0 is question 0 of order o1 at l1")]
        assert (agent.line.acts, agent.runtime.counts.nonsense) == ([], 1)
        assert agent.runtime.executions == {}, "nothing is remembered of it"
        assert agent.ask(frame(0)) == ("l1-o1-0", 2)


def test_what_is_known_and_cannot_be_read_any_more_has_a_person_asked(tmp_path):
    decided(tmp_path)
    with Agent(tmp_path) as agent:
        for path in (tmp_path / "journal").glob("*.log"):
            path.write_bytes(bytes(len(path.read_bytes())))
        assert agent.ask(frame(0)) == ("l1-o1-0", -1)


def test_a_repeat_is_held_against_hours_and_mask_of_now(tmp_path):
    decided(tmp_path)
    now = frame(0).time
    hours = ((now.hour * 60 + 120) % 1440, (now.hour * 60 + 180) % 1440)
    limit = Interlock("at night", frozenset({2}), hours=hours)
    with Agent(tmp_path, limit) as agent:
        assert agent.ask(frame(0))[1] == -1
