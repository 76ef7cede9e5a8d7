"""What each step makes and needs: token by token, for every branch of an episode."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.geometry import downstream_matrices
from agentpipe.environments.layout import (
    A_CLOSE,
    A_DEPOT,
    A_DEPTH,
    A_ESCALATE,
    A_EXPEDITE,
    A_MACHINE,
    A_MODE,
    A_REJECT,
    A_RETRY,
    A_SEVERITY,
    A_START,
    A_TECHNICIAN,
    A_VERIFY,
    ACCUMULATING,
    FALSE_ALARM,
    MACHINES,
    PLC_OVERLOAD,
    TOKENS,
    TOPOLOGIES,
)
from agentpipe.environments.players import RandomPlayer
from agentpipe_tests.environments.line import catalog, make_pool, pool_with

LOST = {"network_loss_good": 1.0, "network_loss_bad": 1.0}
DELIVERED = {"network_loss_good": 0.0, "network_loss_bad": 0.0}


def names(bits):
    return {token for bit, token in enumerate(TOKENS) if int(bits) >> bit & 1}


class Played:
    """The first episode of one environment; remembers what the last action made and needed."""

    def __init__(self, topology="serial", machines=8, link=DELIVERED, **hidden):
        chosen = next(
            spec
            for spec in catalog().environments("train", "sensor-1")
            if (spec.template.topology, spec.template.machines) == (topology, machines)
        )
        self.pool = pool_with(link, [chosen])
        self.pool.plant().deadline[0] = 1e5
        for name, value in {"mode": 0, "machine": 2, "severity": 0.4, "growth": 0.0, **hidden}.items():
            getattr(self.pool.hidden(), name)[0] = value

    def do(self, *actions):
        for action in actions:
            self.pool.step(np.array([action]))
        return self

    @property
    def made(self):
        return names(self.pool.produced[0])

    @property
    def needed(self):
        return names(self.pool.used[0])

    @property
    def earned(self):
        return bool(self.pool.earned[0])

    def ordered(self, machine=2, mode=0, depth=1):
        """Declared and judged, up to the dispatch."""
        return self.do(A_MACHINE + machine, A_MODE + mode, A_SEVERITY + 1, A_DEPTH + depth)

    def started(self, **order):
        return self.ordered(**order).do(A_DEPOT, A_TECHNICIAN, A_START)


def test_tokens_are_numbered_in_order_and_few_enough_for_one_word():
    assert len(set(TOKENS)) == len(TOKENS) == 20
    assert TOKENS[:9] == (*(f"reading_{machine}" for machine in range(MACHINES)), "plc_offset")
    assert names(ACCUMULATING) == {*TOKENS[:9], "clock"}


def test_a_measurement_makes_its_reading_and_the_plc_offset_and_needs_nothing():
    played = Played().do(3)
    assert (played.made, played.needed) == ({"reading_3", "plc_offset"}, set())
    assert not played.earned


def test_a_lost_exchange_makes_nothing_but_waiting():
    assert Played(link=LOST).do(3).made == {"clock"}
    assert Played(link=LOST).do(A_MACHINE).made == {"machine", "clock"}
    lost = Played(link=LOST).started().do(A_VERIFY)
    assert (lost.made, lost.needed) == ({"clock"}, {"repair", "machine"})


@pytest.mark.parametrize(
    ("topology", "machines", "machine", "evidence"),
    [
        ("serial", 8, 0, {0, 1}),
        ("serial", 8, 3, {2, 3, 4}),
        ("serial", 7, 6, {5, 6}),  # there is no eighth
        ("serial", 8, 6, {5, 6, 7}),
        ("parallel", 8, 6, {1, 2, 3, 4, 5, 6, 7}),
        ("fork_join", 8, 5, {3, 4, 5, 6}),
        ("re_entrant", 8, 2, {1, 2, 3, 5}),
        ("ring", 8, 0, {0, 1, 6, 7}),
        ("tree", 8, 1, {0, 1, 3, 4}),
    ],
)
def test_a_declared_machine_needs_the_readings_around_it(topology, machines, machine, evidence):
    played = Played(topology, machines).do(A_MACHINE + machine)
    assert (played.made, played.needed) == ({"machine"}, {f"reading_{m}" for m in evidence})
    assert played.earned


def test_evidence_is_symmetric_in_the_flow_of_material():
    feeds = downstream_matrices()
    for topology, name in enumerate(TOPOLOGIES):
        for machine in range(MACHINES):
            expected = {
                machine,
                *np.flatnonzero(feeds[topology, machine]),
                *np.flatnonzero(feeds[topology, :, machine]),
            }
            if machine < 7:
                expected -= {7}
                played = Played(name, 7).do(A_MACHINE + machine)
                assert played.needed == {f"reading_{m}" for m in expected}


AROUND_2 = {"reading_1", "reading_2", "reading_3"}


def test_a_declared_mode_needs_the_machine_and_the_readings_around_it():
    played = Played().do(A_MACHINE + 2, A_MODE + 4)
    assert (played.made, played.needed) == ({"mode"}, {"machine", *AROUND_2})
    overload = Played().do(A_MACHINE + 2, A_MODE + PLC_OVERLOAD)
    assert overload.needed == {"machine", "plc_offset", *AROUND_2}


def test_a_false_alarm_needs_every_reading_and_a_machine_only_where_one_was_declared():
    everything = {f"reading_{machine}" for machine in range(MACHINES)}
    assert Played().do(A_MODE + FALSE_ALARM).needed == everything
    assert Played(machines=7).do(A_MODE + FALSE_ALARM).needed == everything - {"reading_7"}
    assert Played().do(A_MACHINE + 2, A_MODE + FALSE_ALARM).needed == {"machine", *everything}


def test_assessment_needs_the_diagnosis():
    played = Played().do(A_MACHINE + 2, A_MODE, A_SEVERITY + 1)
    assert (played.made, played.needed) == ({"severity"}, {"mode", "machine", "reading_2"})
    played.do(A_DEPTH + 1)
    assert (played.made, played.needed) == ({"depth"}, {"severity", "mode"})
    rejected = Played().do(A_MODE + FALSE_ALARM, A_REJECT)
    assert (rejected.made, rejected.needed) == (set(), {"mode"})
    assert rejected.earned


def test_dispatch_needs_the_order_and_being_expedited_where_it_is():
    played, order = Played().ordered(), {"machine", "mode", "depth"}
    played.do(A_DEPOT)
    assert (played.made, played.needed) == ({"part"}, order)
    played.do(A_EXPEDITE)
    assert (played.made, played.needed) == ({"expedite"}, {"depth"})
    played.do(A_TECHNICIAN)
    assert (played.made, played.needed) == ({"technician"}, {*order, "expedite"})


def test_a_repair_needs_part_technician_and_order_and_makes_the_line_wait():
    played = Played().started()
    assert (played.made, played.needed) == (
        {"repair", "clock"},
        {"part", "technician", "machine", "mode", "depth"},
    )


def test_closing_needs_the_repair_and_its_verification_where_there_is_one():
    played = Played().started().do(A_CLOSE)
    assert (played.made, played.needed) == (set(), {"repair"})
    played = Played().started().do(A_VERIFY)
    assert (played.made, played.needed) == (
        {"verification", "reading_2", "plc_offset"},
        {"repair", "machine"},
    )
    assert played.do(A_CLOSE).needed == {"repair", "verification"}


def test_a_retry_goes_deeper_with_the_same_part_and_technician():
    played = Played(severity=0.5).started(depth=0).do(A_RETRY)
    assert (played.made, played.needed) == ({"repair", "depth", "clock"}, {"repair", "part", "technician", "depth"})
    verified = Played(severity=0.5).started(depth=0).do(A_VERIFY, A_RETRY)
    assert verified.needed == {"repair", "part", "technician", "depth", "verification"}
    assert verified.do(A_CLOSE).needed == {"repair"}  # what was verified is another repair


def test_an_escalation_is_why_everything_after_it_is_looked_at_again():
    played = Played().started(machine=3, mode=1).do(A_VERIFY, A_ESCALATE)
    assert (played.made, played.needed) == ({"reopened"}, {"verification", "machine", "mode"})
    assert Played().ordered().do(A_DEPOT, A_TECHNICIAN, A_ESCALATE).needed == {"machine", "mode"}
    played.do(1)
    assert (played.made, played.needed) == ({"reading_1", "plc_offset"}, {"reopened"})
    assert played.do(A_MACHINE + 2).needed == {"reopened", *AROUND_2}
    assert played.do(A_MODE).needed == {"reopened", "machine", *AROUND_2}
    assert "reopened" not in played.do(A_SEVERITY).needed


def test_a_false_alarm_after_an_escalation_does_not_need_the_machine_that_was_given_up():
    played = Played().started(machine=3, mode=1).do(A_VERIFY, A_ESCALATE, A_MODE + FALSE_ALARM)
    assert played.needed == {"reopened", *(f"reading_{machine}" for machine in range(MACHINES))}


def test_the_end_by_time_needs_whoever_spent_it():
    late = Played().ordered().do(A_DEPOT, A_TECHNICIAN)
    late.pool.plant().deadline[0] = late.pool.plant().elapsed[0]
    late.do(A_START)
    assert late.needed == {"part", "technician", "machine", "mode", "depth", "clock"}
    damaged = Played(severity=0.999, growth=1.0).do(1)
    assert (damaged.made, damaged.needed) == ({"reading_1", "plc_offset"}, {"clock"})
    assert damaged.earned


def test_earned_is_all_that_is_not_the_running_cost_of_time():
    """A reward without it is -0.01 - 0.004 a second of deciding - 0.001 a second of waiting."""
    pool, player = make_pool(), RandomPlayer()
    seen = set()
    for _ in range(80):
        decided, elapsed = pool.plant().decision_seconds.copy(), pool.plant().elapsed.copy()
        pool.step(player.act(pool).actions)
        over = pool.terminated | pool.truncated
        seconds = np.where(over, pool.result_decision_seconds, pool.plant().decision_seconds) - decided
        waited = np.where(over, pool.result_elapsed_seconds, pool.plant().elapsed) - elapsed - seconds
        running = -0.01 - 0.004 * seconds - 0.001 * waited
        np.testing.assert_array_equal(pool.earned, np.abs(pool.reward - running) > 1e-4)
        seen |= set(pool.earned.tolist())
    assert seen == {False, True}


@pytest.mark.parametrize("threads", [2, 3])
def test_tokens_are_the_same_for_any_number_of_threads(threads):
    one, other, player = make_pool(), make_pool(threads=threads), RandomPlayer()
    for _ in range(40):
        actions = player.act(one).actions
        one.step(actions)
        other.step(actions)
        for name in ("produced", "used", "earned"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
    assert len(np.unique(one.produced)) > 10
    other.close()


def test_a_fresh_episode_and_a_restored_pool_have_no_step_behind_them():
    pool = make_pool()
    snapshot = pool.snapshot()
    assert not {key for key in snapshot if key.endswith(("produced", "used", "earned"))}
    for begin in (lambda: pool.restore(snapshot), pool.reset):
        pool.step(RandomPlayer().act(pool).actions)
        assert pool.produced.any()
        begin()
        assert not any(array.any() for array in (pool.produced, pool.used, pool.earned))
