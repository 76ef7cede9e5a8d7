"""What limits count outlives the process, the journal's segments, and a wall clock that jumps."""

from __future__ import annotations

import datetime as dt
import time

import pytest

from agentpipe.errors import DiskFullError
from agentpipe.serving.agent import journal as journals
from agentpipe.serving.agent import taken as takens
from agentpipe.serving.agent.clocks import ADOPTED_SECONDS, SteadyClock
from agentpipe.serving.agent.interlocks import Interlock, Interlocks
from agentpipe.serving.agent.journal import Journal
from agentpipe.serving.agent.taken import Clock, Stamp
from agentpipe.serving.agent.vocabulary import Vocabulary
from agentpipe_tests.serving.agent.questions import answer, ended, frame
from agentpipe_tests.serving.agent.test_runtime import Agent


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(journals, "KEPT_SEGMENTS", 1)
    monkeypatch.setattr(journals, "REMEMBERED", 3)


def limits(per, at_most=2):
    return Interlocks([Interlock("x", frozenset({3}), at_most=at_most, per=per)], Vocabulary())


def counted(journal, per, order="open", **options):
    found = limits(per, **options)
    journal.tell_taken(found)
    return found.refuses(frame(order=order), 3) is not None


def worked(folder, name="l1-open", *, orders=40, end=False):
    """A journal in which action 3 was taken twice, long before its oldest segment."""
    journal = Journal(folder, segment_bytes=2_000)
    for number in range(2):
        journal.decide(frame(number, order="open"), answer(3), until=time.monotonic() + 30)
    assert journal.shipped("first", ["l1-open-0", "l1-open-1"])
    if end:
        journal.ended(ended("open"))
    for number in range(orders):
        asked = frame(0, order=f"{name}-{number}")
        journal.decide(asked, answer(1), until=time.monotonic())
        journal.ended(ended(asked.order_id))
        if number % 4 == 3:
            journal.shipped(f"b{number}", [f"l1-{name}-{each}-0" for each in range(number - 3, number + 1)])
    journal.close()


@pytest.mark.parametrize("per", ["order", "minute", "hour", "day"])
def test_limits_count_what_the_journal_does_not_hold_any_more(tmp_path, per):
    worked(tmp_path)
    for _ in range(2):  # and after each restart
        journal = Journal(tmp_path)
        assert journal.log.segments()[0] > 1
        assert "l1-open-0" not in {known.decision_id for known in journal.decisions()}
        assert counted(journal, per)
        assert not counted(journal, per, at_most=3), "nothing is counted twice"
        assert not (per == "order" and counted(journal, per, order="another"))
        journal.close()


def test_an_order_that_is_over_is_not_kept(tmp_path):
    worked(tmp_path, end=True)
    journal = Journal(tmp_path)
    assert not counted(journal, "order")
    assert counted(journal, "day")
    journal.close()


def test_a_segment_goes_only_when_its_record_is_on_the_disk(tmp_path, monkeypatch):
    def full(*_):
        raise DiskFullError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(takens, "write_bytes", full)
        worked(tmp_path)
    journal = Journal(tmp_path)
    assert journal.log.segments()[0] == 1
    assert counted(journal, "day")
    assert not counted(journal, "day", at_most=3)
    journal.close()


@pytest.mark.parametrize("data", [b"", b"garbage", b"flipped"])
def test_a_damaged_record_costs_what_it_said_alone(tmp_path, data):
    worked(tmp_path)
    path = tmp_path / takens.NAME
    path.write_bytes(path.read_bytes().replace(b"minutes", b"minuter") if data == b"flipped" else data)
    journal = Journal(tmp_path)
    assert not counted(journal, "day")
    journal.close()


def test_ages_are_told_by_the_clock_of_this_start_of_the_machine():
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    clock = Clock(lambda: now)
    ago = clock.up() - 100.0
    assert clock.age(Stamp(now - dt.timedelta(days=9), clock.boot, ago)) == pytest.approx(100.0, abs=20.0)
    assert clock.age(Stamp(now - dt.timedelta(days=9), "another", ago)) == 9 * 86_400.0
    assert clock.age(Stamp(now - dt.timedelta(hours=1))) == 3_600.0
    assert clock.age(Stamp(now + dt.timedelta(days=2))) == 0.0, "a time that lies in the future is none"


def test_stamps_do_not_follow_a_jump_until_it_has_lasted():
    clocks = {"wall": 1_000_000.0, "steady": 10.0}
    clock = SteadyClock(wall=lambda: clocks["wall"], steady=lambda: clocks["steady"])

    def later(seconds, jump=0.0):
        clocks["steady"] += seconds
        clocks["wall"] += seconds + jump
        wall = dt.datetime.fromtimestamp(clocks["wall"], dt.UTC)
        assert clock.correct(wall).timestamp() == pytest.approx(clock.now().timestamp())
        return clock.now().timestamp() - 1_000_000.0

    assert later(5, jump=0.5) == pytest.approx(5.5), "a slewed clock is followed"
    assert later(5, jump=2 * 86_400) == pytest.approx(10.5)
    assert later(60) == pytest.approx(70.5)
    assert later(1, jump=-2 * 86_400) == pytest.approx(71.5)
    assert later(1, jump=-3_600) == pytest.approx(72.5)
    assert later(ADOPTED_SECONDS) == pytest.approx(72.5 + ADOPTED_SECONDS - 3_600), "a clock that was put right"


def test_a_decision_during_a_jump_is_stamped_by_the_steady_clock(tmp_path):
    journal = Journal(tmp_path)
    real = dt.datetime.now(dt.UTC)
    walls = [real.timestamp()]
    journal.clock = SteadyClock(wall=lambda: walls[-1])
    walls.append(walls[0] + 172_800)
    journal.decide(frame(0, time=real + dt.timedelta(days=2)), answer(0), until=time.monotonic() + 30)
    (known,) = journal.decisions()
    assert abs((known.time - real).total_seconds()) < 60
    journal.close()


def test_an_interlock_for_a_line_that_is_not_there_is_said_once(tmp_path):
    limit = Interlock("x", frozenset({3}), lines=frozenset({"l1", "L1"}))
    with Agent(tmp_path, limit) as agent:
        agent.line.lines = ("l1", "l2")
        for number in range(2):
            agent.ask(frame(number))
    assert agent.said == ["interlocks name the line 'L1', which is not there: l1, l2 are"]


@pytest.mark.parametrize("per", ["order", "day"])
def test_a_limit_that_is_reached_stays_reached_for_the_next_agent(tmp_path, per):
    limit = Interlock("x", frozenset({2}), at_most=1, per=per)
    with Agent(tmp_path, limit) as agent:
        assert agent.ask(frame(0))[1] == 2
        assert agent.ask(frame(0, order="o2"))[1] == (2 if per == "order" else 3)
    with Agent(tmp_path, limit) as agent:
        assert agent.ask(frame(1))[1] == 3
