"""What a policy remembers of an order: from question to question, rung to rung, and over a restart."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest

from agentpipe.environments.layout import ACTION_NAMES, OBSERVATION_NAMES
from agentpipe.errors import ParityError, ServingError
from agentpipe.serving.agent.deciders import LocalDecider, RulesDecider, read_policy
from agentpipe.serving.agent.following import Follower
from agentpipe.serving.agent.generations import Generations
from agentpipe.serving.agent.healing import declared_rungs
from agentpipe.serving.agent.interlocks import Interlock
from agentpipe.serving.agent.journal import Journal
from agentpipe.serving.agent.session import AgentOptions, Session
from agentpipe.serving.agent.shadow import Shadow
from agentpipe.serving.agent.states import LINES, OrderStates, Remembered, checked_state, from_record, to_record
from agentpipe.serving.agent.triton_decider import TritonDecider
from agentpipe.serving.agent.types import Takeover
from agentpipe.serving.agent.vocabulary import Vocabulary
from agentpipe.serving.signature import policy_signature
from agentpipe.settings import load_settings
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.serving.agent.counting import SMALL, UNITS, save_counting_bundle
from agentpipe_tests.serving.agent.fake_triton import FakeTriton
from agentpipe_tests.serving.agent.frames import frame as small_frame
from agentpipe_tests.serving.agent.lines import running_line, wait_for
from agentpipe_tests.serving.agent.questions import LINE, answer, frame
from agentpipe_tests.serving.agent.test_runtime import Agent

P, Q = "p" * 64, "q" * 64


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return read_policy(save_counting_bundle(tmp_path_factory.mktemp("bundle") / "bundle"))


def state(value, size=UNITS):
    return np.full(size, value, np.float32)


def remember(states, asked, value, version=P):
    states.after(asked, Remembered(asked.number, version, state(value)))


# -- the states ----------------------------------------------------------------------------------------------------


def test_a_question_begins_from_the_state_behind_the_one_before_it():
    states = OrderStates()
    for number in range(4):
        found, notes = states.before(frame(number), P, UNITS)
        assert (found.tolist(), notes) == ([float(number)] * UNITS, ())
        remember(states, frame(number), number + 1)


def test_a_question_asked_again_begins_from_where_it_began_the_first_time():
    states = OrderStates()
    for number in range(3):
        remember(states, frame(number), number + 1)
    for _ in range(2):
        assert states.before(frame(2), P, UNITS)[0].tolist() == [2.0, 2.0]
        remember(states, frame(2), 3)


def test_a_gap_is_bridged_and_said():
    states = OrderStates()
    remember(states, frame(0), 1)
    found, notes = states.before(frame(4), P, UNITS)
    assert found.tolist() == [1.0, 1.0]
    assert notes == ("the memory lacks 3 of 4 questions",)


@pytest.mark.parametrize("version", [Q, P])
def test_what_another_policy_or_nobody_remembers_is_nothing_and_that_is_said(version):
    states = OrderStates()
    if version == Q:
        remember(states, frame(0), 1, version)
    found, notes = states.before(frame(1), P, UNITS)
    assert found.tolist() == [0.0, 0.0]
    assert notes == ("the memory is empty: nothing is known of 1 earlier questions",)
    assert states.before(frame(1), P, UNITS + 1)[0].tolist() == [0.0] * (UNITS + 1)


def test_another_order_and_another_line_begin_empty_and_disturb_nothing():
    states = OrderStates()
    remember(states, frame(0), 1)
    assert states.before(frame(0, line="l2"), P, UNITS) == (pytest.approx(np.zeros(UNITS)), ())
    assert states.before(frame(1), P, UNITS)[0].tolist() == [1.0, 1.0]
    assert states.before(frame(0, order="o2"), P, UNITS)[0].tolist() == [0.0, 0.0]
    remember(states, frame(0, order="o2"), 1)
    assert states.before(frame(1), P, UNITS)[1] == ("the memory is empty: nothing is known of 1 earlier questions",)


def test_what_was_before_this_process_is_asked_for_once_and_of_a_running_order_only():
    asked = []

    def recover(line, order):
        asked.append((line, order))
        return Remembered(6, P, state(7.0))

    states = OrderStates(recover)
    assert states.before(frame(0, order="o0"), P, UNITS)[0].tolist() == [0.0, 0.0]
    assert asked == []
    found, notes = states.before(frame(7), P, UNITS)
    assert (found.tolist(), notes) == ([7.0, 7.0], ())
    assert states.before(frame(8), P, UNITS)[1] == ("the memory lacks 1 of 8 questions",)
    assert asked == [("l1", "o1")]


def test_lines_that_were_silent_longest_are_left_to_the_journal():
    states = OrderStates()
    for line in range(LINES + 1):
        remember(states, frame(0, line=f"l{line}"), 1)
    assert states.before(frame(1, line="l0"), P, UNITS)[1]
    assert states.before(frame(1, line=f"l{LINES}"), P, UNITS)[1] == ()


@pytest.mark.parametrize(
    "found",
    [np.zeros((1, 3), np.float32), np.zeros((2, 2), np.float32), np.zeros((1, 2)), np.full((1, 2), np.nan, np.float32)],
)
def test_a_state_that_is_none_makes_an_answer_none(found):
    with pytest.raises(ServingError, match="no answer: memory_next is"):
        checked_state({"memory_next": found}, 2, "triton")


# -- deciders ------------------------------------------------------------------------------------------------------


def asked(number, order="o1"):
    return small_frame(number=number, order=order, last=None if number == 0 else 1)


def test_a_local_policy_counts_the_questions_of_each_order(files):
    decider = LocalDecider(files)
    decider.probe(1.0)
    for order in ("o1", "o2"):
        answers = [decider.decide(asked(number, order), 1.0) for number in range(3)]
        assert [each.value for each in answers] == [1.0, 2.0, 3.0]
        assert [each.memory.number for each in answers] == [0, 1, 2]
        assert all(each.notes == () for each in answers)
    assert decider.decide(asked(2, "o2"), 1.0).value == 3.0


def test_rungs_of_one_ladder_go_on_from_one_anothers_state(files):
    with FakeTriton(SMALL) as server:
        triton, local, _ = declared_rungs(files, [server.url])
        triton.probe(5.0)
        values = [(triton, 0), (triton, 1), (local, 2), (triton, 3), (local, 3)]
        assert [rung.decide(asked(number), 5.0).value for rung, number in values] == [1.0, 2.0, 3.0, 4.0, 4.0]
        triton.close()


def test_a_server_whose_states_are_others_is_another_policy(files):
    with FakeTriton(SMALL) as server:
        server.spoil = lambda outputs: outputs["memory_next"].__iadd__(np.float32(0.1))
        with pytest.raises(ParityError, match="answered otherwise"):
            TritonDecider(server.url, files).probe(5.0)


def test_a_policy_without_a_memory_keeps_nothing(tmp_path):
    save_bundle(tmp_path / "bundle", 0)
    states = OrderStates()
    assert LocalDecider(tmp_path / "bundle", states=states).decide(asked(0), 1.0).memory is None
    assert not states._lines


def test_a_candidate_with_a_memory_may_be_in_the_shadow_of_a_champion_without_and_follow_it(files, tmp_path):
    save_bundle(tmp_path / "champion", 0)
    champion = read_policy(tmp_path / "champion")
    shadow = Shadow(files, champion, tmp_path / "shadow", Vocabulary())
    for number in range(3):
        shadow.decided(asked(number), LocalDecider(champion).decide(asked(number), 1.0), 0.001)
    shadow.close()
    assert (shadow.report()["rows"], shadow.report()["failed"]) == (3, 0)
    generations = Generations(champion, [LocalDecider(champion)])
    follower = Follower(
        generations,
        lambda: files.path,
        lambda found: [LocalDecider(found)],
        up=lambda _: True,
        every=1.0,
        installed=lambda *_: None,
        refused=lambda _: None,
    )
    assert follower.look()
    rung = generations.rungs[0]
    assert [rung.decide(asked(number, "o9"), 1.0).value for number in range(2)] == [1.0, 2.0]


# -- the journal ---------------------------------------------------------------------------------------------------


def test_the_journal_keeps_the_state_behind_each_decision_over_a_restart(tmp_path):
    with_memory = [answer(version=P, memory=Remembered(number, P, state(number + 0.1))) for number in range(3)]
    journal = Journal(tmp_path / "journal")
    for number in range(3):
        journal.decide(frame(number), with_memory[number], until=0.0)
    journal.decide(frame(3), answer(by="rules", version="rules-1"), until=0.0)
    shutil.copytree(tmp_path / "journal", tmp_path / "killed")  # as after kill -9: written, and never closed
    journal.close()
    again = Journal(tmp_path / "killed")
    found = again.remembered("l1", "o1")
    assert (found.number, found.version) == (2, P)
    assert found.state.tobytes() == state(2.1).tobytes()
    again.withdraw("l1-o1-2")
    assert again.remembered("l1", "o1").number == 1
    assert again.remembered("l1", "o2") is None
    assert again.remembered("l2", "o1") is None
    again.close()


def test_a_decision_that_interlocks_changed_keeps_the_state_of_the_policy_that_saw_the_question(tmp_path):
    """Rules acted; the policy saw the question all the same: the record names it as the owner of the state."""
    journal = Journal(tmp_path / "journal")
    journal.decide(frame(0), answer(by="rules", version="rules-1", memory=Remembered(0, P, state(1.0))), until=0.0)
    found, notes = OrderStates(journal.remembered).before(frame(1), P, UNITS)
    assert (found.tolist(), notes) == ([1.0, 1.0], ())
    journal.close()


@pytest.mark.parametrize("broken", ["no base64 !", "AAAA", "", 7])
def test_a_state_that_cannot_be_read_is_none(broken):
    good = to_record(Remembered(4, P, state(0.5)))
    assert from_record(good).state.tolist() == [0.5, 0.5]
    try:
        found = from_record({**good, "state": broken})
    except (TypeError, ValueError):
        return
    assert len(found.state) != UNITS


# -- the runtime ---------------------------------------------------------------------------------------------------


class Counting:
    """The counting policy as a runtime asks it; every answer of question 2 is one that an interlock forbids."""

    def __init__(self, folder):
        self.decider = LocalDecider(save_counting_bundle(folder, policy_signature(5, 4, memory=UNITS)))
        self.let_go = threading.Event()

    def decide(self, asked):
        found = self.decider.decide(asked, 1.0)
        return replace(found, action=1) if asked.number == 2 else found

    def degraded(self):
        return {}


def test_a_takeover_and_a_refused_answer_cost_the_memory_what_it_did_not_see_and_no_more(tmp_path):
    """Question 1 comes while a person has the line, and is answered once they are gone; 2 is refused; 3 and 4 are not
    asked, as the person works them; the next one is 5."""
    limit = Interlock("never 1", frozenset({1}))
    with Agent(tmp_path, limit, policy=Counting(tmp_path / "bundle")) as agent:
        agent.ask(frame(0))
        agent.line.say(Takeover("l1", True, "ann"), frame(1))
        wait_for(lambda: agent.runtime.executions["l1"].held is not None)
        agent.ask(Takeover("l1", False, "ann"), acts=1)
        for number in (2, 5):
            agent.ask(frame(number))
        notes = [[note for note in said.notes if "memory" in note] for said in agent.line.answers]
        seen = [None if said.memory is None else float(said.memory.state[0]) for said in agent.line.answers]
        assert notes == [[], [], [], ["the memory lacks 2 of 5 questions"]]
        assert seen == [1.0, 2.0, 3.0, 4.0]
        assert [said.decided_by for said in agent.line.answers] == ["local", "local", "rules", "local"]
        assert agent.journal.remembered("l1", "o1").number == 5


# -- a whole agent -------------------------------------------------------------------------------------------------


def work(url, bundle, home, until):
    """An agent that works until ``until(its session)``; what it decided, by question: value and notes."""
    settings = load_settings(home=home, agent={"metrics_port": 0, "probe_every": 0.2})
    session = Session(AgentOptions(url, bundle, memory=False), settings)
    thread = threading.Thread(target=session.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: until(session))
        session.stop()
        thread.join(60)
        found = {}
        for each in session.journal.decisions():
            decided = session.journal.find(each.decision_id)
            notes = [note for note in decided.notes if "memory" in note]
            found[each.number] = (decided.value, decided.decided_by, notes)
        return found
    finally:
        session.stop()
        thread.join(60)
        session.close()


@pytest.fixture(scope="module")
def line_bundle(tmp_path_factory):
    names = {"observation_names": OBSERVATION_NAMES, "action_names": ACTION_NAMES}
    signature = policy_signature(LINE.observation_size, LINE.action_count, memory=UNITS, **names)
    return save_counting_bundle(tmp_path_factory.mktemp("line") / "bundle", signature)


@pytest.mark.parametrize("lost", [False, True])
def test_an_agent_that_starts_again_in_the_middle_of_an_order_goes_on_from_what_it_remembered(
    line_bundle, tmp_path, lost
):
    home = tmp_path / "home"
    with running_line(1, seconds=30.0, orders=1) as running:
        first = work(running.url, line_bundle, home, lambda session: session.runtime.counts.decisions >= 5)
        done = max(first)
        assert all(first[number][0] == number + 1 for number in first)
        if lost:
            shutil.rmtree(home / "agent")
        more = work(running.url, line_bundle, home, lambda session: session.runtime.counts.decisions >= 5)
    later = {number: more[number] for number in more if number > done}
    assert len(later) >= 3
    start = min(later)
    if lost:
        assert later[start][2] == [f"the memory is empty: nothing is known of {start} earlier questions"]
        assert [later[number][0] for number in sorted(later)[:3]] == [1.0, 2.0, 3.0]
    else:
        assert all(later[number] == (number + 1.0, "local", []) for number in sorted(later)[:3])


def test_rules_need_no_memory():
    assert RulesDecider(SMALL).decide(asked(0)).memory is None
