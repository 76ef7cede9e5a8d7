"""The ladder: who answers while others fail, within the deadline, and how one comes back up."""

from __future__ import annotations

import threading
import time

import pytest

from agentpipe.errors import ServiceError
from agentpipe.serving.agent.deciders import RulesDecider, read_policy
from agentpipe.serving.agent.ladder import Ladder, Level
from agentpipe.serving.agent.probes import Part
from agentpipe.serving.agent.triton_decider import TritonDecider
from agentpipe.serving.signature import policy_signature
from agentpipe.settings import AgentSettings
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.serving.agent.fake_triton import FakeTriton
from agentpipe_tests.serving.agent.frames import FakeDecider, frame
from agentpipe_tests.serving.agent.proxy import Proxy
from agentpipe_tests.serving.agent.waiting import until

AWAY = ServiceError("away")


def rungs():
    return [FakeDecider("triton"), FakeDecider("other"), FakeDecider("local"), FakeDecider("rules")]


def ladder(deciders, **settings):
    given = {"probe_every": 60.0, "probe_timeout": 5.0, "patience_seconds": 60.0, **settings}
    made = Ladder(deciders, AgentSettings(**given))
    until(lambda: all(decider.probed for decider in deciders[:-1]))
    return made


def wait_for(made, name):
    until(lambda: made.level.name == name)


def test_the_highest_rung_answers():
    deciders = rungs()
    with ladder(deciders) as made:
        wait_for(made, "triton")
        assert made.level == Level(0, "triton")
        assert made.decide(frame()).decided_by == "triton"
    assert [decider.asked for decider in deciders] == [1, 0, 0, 0]
    assert all(decider.closed for decider in deciders)


def test_a_rung_that_fails_is_left_for_this_decision_and_lost_after_three():
    deciders = rungs()
    with ladder(deciders) as made:
        wait_for(made, "triton")
        deciders[0].error = AWAY
        for expected in ("triton", "triton", "other"):
            answer = made.decide(frame())
            assert (answer.decided_by, answer.notes) == ("other", ("triton: away",))
            assert made.level.name == expected
        assert made.decide(frame()).notes == ()
        assert made.lost() == {"triton": "away"}
    assert [decider.asked for decider in deciders] == [3, 4, 0, 0]


def test_when_all_fail_the_rules_answer():
    deciders = rungs()
    with ladder(deciders) as made:
        until(lambda: len(made.history()) == 3)
        for decider in deciders[:-1]:
            decider.error = AWAY
        answers = [made.decide(frame()) for _ in range(5)]
        assert [answer.decided_by for answer in answers] == ["rules"] * 5
        assert answers[0].notes == ("triton: away", "other: away", "local: away")
        assert answers[-1].notes == ()
        assert made.level == Level(3, "rules")


def test_a_lost_rung_comes_back_after_as_many_good_probes_as_are_declared():
    deciders = rungs()
    with ladder(deciders, probe_every=0.01) as made:
        wait_for(made, "triton")
        deciders[0].probe_error = AWAY
        wait_for(made, "other")
        deciders[0].probe_error = None
        before = deciders[0].probed
        wait_for(made, "triton")
        assert deciders[0].probed - before >= 2  # the third may have been under way
        story = [(change.part, change.up, change.reason) for change in made.history() if change.part == "triton"]
    assert story == [("triton", True, "good probes"), ("triton", False, "away"), ("triton", True, "good probes")]


def test_a_rung_that_no_probe_has_reached_is_not_asked_unless_it_is_ready():
    gate = threading.Event()
    deciders = rungs()[1:]
    for decider in deciders[:2]:
        decider.probe = lambda timeout: gate.wait(30) and None
    with Ladder(deciders, AgentSettings(probe_every=60.0), ready=("local",)) as made:
        assert made.decide(frame()).decided_by == "local"
        gate.set()
        wait_for(made, "other")
        assert made.decide(frame()).decided_by == "other"


def test_each_rung_gets_what_is_left_less_the_reserve_and_what_those_below_need():
    deciders = rungs()
    with ladder(deciders, reserve_seconds=0.1) as made:
        until(lambda: len(made.history()) == 3)
        deciders[1].delay = 0.2
        deciders[0].error = AWAY
        made.decide(frame(seconds=5.0))
        deciders[0].error = None
        made.decide(frame(seconds=5.0))
        first = deciders[0].timeouts
    assert 1.0 < first[0] <= 2.5 - 0.1 - 2 * 0.005
    assert first[1] <= 2.5 - 0.1 - 0.2 - 0.005


def test_a_server_is_waited_for_no_longer_than_it_has_ever_taken_several_times_over():
    deciders = rungs()
    with ladder(deciders, patience_seconds=0.1) as made:
        until(lambda: len(made.history()) == 3)
        made._probed["triton"].extend([9.0, 0.04])
        made.decide(frame(seconds=60.0))
        made._took["triton"].append(0.5)
        made.decide(frame(seconds=60.0))
        made._probed["other"].clear()
        made._probed["other"].append(3.0)
        deciders[0].error = AWAY
        made.decide(frame(seconds=60.0))
        made.decide(frame(seconds=60.0))
    assert deciders[0].timeouts == [0.1, 2.0, 2.0, 1.0]  # half as long after a failure
    assert deciders[1].timeouts == [6.0, 6.0]


def test_a_rung_below_that_was_slow_leaves_the_upper_one_half():
    deciders = rungs()
    with ladder(deciders, reserve_seconds=0.001) as made:
        until(lambda: len(made.history()) == 3)
        made._took["other"].append(100.0)
        made.decide(frame(seconds=4.0))
    assert 0.3 < deciders[0].timeouts[0] <= 1.0


def test_no_time_is_left_for_anybody_but_the_rules():
    deciders = rungs()
    with ladder(deciders) as made:
        until(lambda: len(made.history()) == 3)
        answer = made.decide(frame(seconds=0.0))
    assert answer.decided_by == "rules"
    assert answer.notes == ("triton: no time left", "other: no time left", "local: no time left")


def test_answers_near_the_deadline_are_used_and_count_as_failures():
    deciders = rungs()
    with ladder(deciders, reserve_seconds=0.001) as made:
        wait_for(made, "triton")
        deciders[0].delay = 60.0  # as long as it may
        for _ in range(3):
            assert made.decide(frame(seconds=0.2)).decided_by == "triton"
        assert made.level.name == "other"
        assert "an answer took" in made.lost()["triton"]


def test_other_parts_are_named_as_lost_and_move_no_rung():
    def broken(timeout):
        raise ServiceError("no room")

    told = []
    settings = AgentSettings(probe_every=0.01)
    with Ladder(rungs(), settings, parts=[Part("disk", broken)], on_change=told.append) as made:
        until(lambda: made.lost() == {"disk": "no room"})
        wait_for(made, "triton")
        assert ("disk", False, "no room") in [(change.part, change.up, change.reason) for change in told]


def test_uses_of_a_part_count_like_requests():
    with Ladder(rungs(), AgentSettings(probe_every=60.0), parts=[Part("line", lambda timeout: None)]) as made:
        for _ in range(3):
            made.note("line", "connection lost")
        assert made.lost() == {"line": "connection lost"}


# With real connections.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("even") / "bundle"
    save_bundle(folder, 0)
    return read_policy(folder)


FAST = AgentSettings(probe_every=0.05, probe_timeout=5.0, patience_seconds=60.0)


def play(made, decisions, seconds=5.0):
    """Who decided each, and by how much the slowest answer was late (negative: in time)."""
    who, late = [], []
    for number in range(decisions):
        asked = frame(number=number, seconds=seconds)
        who.append(made.decide(asked).decided_by)
        late.append(time.monotonic() - asked.deadline)
    return who, max(late)


def three_rungs(url, files):
    foreign = policy_signature(2, 3, observation_names=["a", "b"], action_names=["x", "y", "z"])
    return [TritonDecider(url, files), FakeDecider("local"), RulesDecider(foreign)]


def test_a_server_that_is_killed_under_load_is_left_at_once_and_found_again(files):
    server = FakeTriton(files.signature)
    with Ladder(three_rungs(server.url, files), FAST) as made:
        wait_for(made, "triton")
        assert play(made, 5)[0] == ["triton"] * 5
        server.stop()
        who, late = play(made, 20)
        assert set(who) == {"local"}
        assert late < 0
        wait_for(made, "local")
        with FakeTriton(files.signature, server.port):
            wait_for(made, "triton")
            assert made.decide(frame(seconds=20.0)).decided_by == "triton"


@pytest.mark.parametrize("mode", ["swallow", "half", "reset", "refuse"])
def test_a_network_that_misbehaves_delays_no_decision_and_heals(files, mode):
    with FakeTriton(files.signature) as server, Proxy(server.url) as proxy:
        settings = AgentSettings(probe_every=0.05, probe_timeout=0.5, reserve_seconds=0.7, patience_seconds=60.0)
        with Ladder(three_rungs(proxy.address, files), settings) as made:
            wait_for(made, "triton")
            proxy.set(mode)
            who, late = play(made, 3, seconds=2.0)  # a server is given 0.3 s of them
            assert set(who) == {"local"}
            assert late < 0
            wait_for(made, "local")
            proxy.set("pass")
            wait_for(made, "triton")


def test_a_server_that_answers_probes_well_and_questions_with_nonsense_is_lost(files):
    with FakeTriton(files.signature) as server, Ladder(three_rungs(server.url, files), FAST) as made:
        wait_for(made, "triton")

        def spoil(outputs):
            if len(outputs["value"]) == 1:  # a question; probes ask several rows
                outputs["value"] *= float("nan")

        server.spoil = spoil
        assert set(play(made, 3, seconds=20.0)[0]) == {"local"}
        assert made.history()[-1].part == "triton"
        assert "value is not finite" in made.history()[-1].reason
