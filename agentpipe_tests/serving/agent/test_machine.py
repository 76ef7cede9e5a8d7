"""Execution at a line: which states follow which, and what counts as a failure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.environments.layout import A_RETRY
from agentpipe.serving.agent.execution import Execution
from agentpipe.serving.agent.machine import TRANSITIONS, Event, IllegalTransitionError, Machine, State
from agentpipe.serving.agent.vocabulary import BUILT_IN, vocabulary_of
from agentpipe_tests.serving.agent.questions import LINE, SMALL, ended, frame, line_frame

REST = {State.IDLE, State.WAITING, State.DEGRADED}


def machine(*events):
    made = Machine()
    for event in events:
        made.fire(event)
    return made


def test_an_order_goes_from_question_to_question():
    seen = [Machine().fire(Event.QUESTION)]
    at_work = machine(Event.QUESTION)
    seen += [at_work.fire(event) for event in (Event.CHOSEN, Event.SENT, Event.QUESTION, Event.CHOSEN, Event.SENT)]
    seen += [at_work.fire(Event.ENDED)]
    expected = ["deciding", "acting", "waiting", "deciding", "acting", "waiting", "idle"]
    assert [str(state) for state in seen] == expected


def test_an_answer_that_was_computed_when_a_person_took_over_cannot_be_sent():
    frozen = machine(Event.QUESTION, Event.TAKEN_OVER)
    with pytest.raises(IllegalTransitionError, match="chosen cannot happen while frozen"):
        frozen.fire(Event.CHOSEN)
    assert frozen.state is State.FROZEN
    assert frozen.fire(Event.HANDED_BACK) is State.WAITING, "the order is as it was"


def test_losing_something_shows_only_while_nothing_is_being_decided():
    lost = machine(Event.QUESTION, Event.DEGRADED)
    assert lost.state is State.DECIDING
    assert [lost.fire(event) for event in (Event.CHOSEN, Event.SENT)] == [State.ACTING, State.DEGRADED]
    assert lost.fire(Event.RECOVERED) is State.WAITING


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_no_sequence_of_events_leads_where_the_table_does_not(events):
    made = Machine()
    for event in events:
        before = made.state
        if (before, event) in TRANSITIONS:
            after = made.fire(event)
            assert after in (REST if TRANSITIONS[before, event] is None else {TRANSITIONS[before, event]})
            assert (after is State.DEGRADED) <= made.degraded
        else:
            with pytest.raises(IllegalTransitionError):
                made.fire(event)
            assert made.state is before
        if State.FROZEN in (before, made.state) and event is not Event.TAKEN_OVER and before is not made.state:
            assert event in (Event.HANDED_BACK, Event.STOPPED), "only a person ends what a person began"


def test_every_state_can_be_reached_and_stopped():
    reached = {State.IDLE} | {target for target in TRANSITIONS.values() if target is not None} | REST
    assert reached == set(State)
    assert all((state, Event.STOPPED) in TRANSITIONS for state in State if state is not State.STOPPED)
    assert not [event for state, event in TRANSITIONS if state is State.STOPPED]


# ------------------------------------------------------------------------------------------------ levels


def play(execution, *segments, order="o1"):
    for number, segment in enumerate(segments):
        execution.question(line_frame(segment, number, order=order))
        execution.machine.fire(Event.CHOSEN)
        execution.acted(0, in_time=True)
        execution.machine.fire(Event.SENT)


def test_each_segment_left_forwards_is_a_sub_goal_reached():
    execution = Execution("l1", BUILT_IN)
    play(execution, "identify", "identify", "assess", "dispatch", "execute")
    execution.ended(ended())
    assert (execution.reached, execution.missed, execution.steps, execution.level) == (4, 0, 5, 1)
    assert execution.mean_time_between_failures is None


def test_the_fourth_alternative_is_one_too_many():
    execution = Execution("l1", BUILT_IN)
    play(execution, "identify", "assess", "dispatch", "execute")
    levels = []
    for _ in range(3):
        execution.acted(A_RETRY, in_time=True)
        levels.append((execution.level, execution.missed))
    assert levels == [(2, 0), (2, 0), (2, 1)]
    execution.ended(ended())
    assert (execution.reached, execution.missed, execution.failures) == (3, 1, 1)


def test_five_orders_in_a_row_that_end_badly_ask_for_a_diagnosis():
    execution = Execution("l1", BUILT_IN)
    due = []
    for number in range(5):
        play(execution, "identify", "assess", "dispatch", "execute", order=f"o{number}")
        execution.ended(ended(f"o{number}", result="wrong_depth", success=False))
        due.append(execution.diagnosis_due)
    assert due == [False, False, False, False, True]
    assert execution.level == 3
    execution.diagnosed()
    assert (execution.diagnosis_due, execution.missed, execution.reached) == (False, 5, 15)


def test_one_good_order_ends_the_run():
    execution = Execution("l1", BUILT_IN)
    for number in range(9):
        play(execution, "identify", "assess", "dispatch", "execute", order=f"o{number}")
        execution.ended(ended(f"o{number}", result="late" if number != 4 else "done", success=number == 4))
    assert not execution.diagnosis_due


def test_five_late_steps_in_a_row_ask_for_a_diagnosis_and_the_mean_time_between_failures_counts_them():
    now = [100.0]
    execution = Execution("l1", vocabulary_of(SMALL), clock=lambda: now[0])
    for number in range(5):
        execution.question(frame(number))
        execution.machine.fire(Event.CHOSEN)
        now[0] += 2.0
        execution.acted(0, in_time=False)
        execution.machine.fire(Event.SENT)
    assert execution.diagnosis_due
    assert execution.mean_time_between_failures == 2.0
    execution.taken_over()
    now[0] += 50.0
    execution.handed_back()
    assert execution.mean_time_between_failures == 2.0, "what a person does is no time at work"
    assert not execution.diagnosis_due, "the person has seen to it"


def test_a_line_without_names_has_no_sub_goals():
    execution = Execution("l1", vocabulary_of(SMALL))
    execution.question(frame())
    execution.ended(ended(success=False, result="late"))
    assert (execution.orders, execution.successes, execution.missed) == (1, 0, 0)


def test_the_built_in_line_is_known_by_its_digests():
    assert vocabulary_of(LINE) == BUILT_IN
    assert vocabulary_of(SMALL).actions == ()
