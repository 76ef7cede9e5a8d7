"""Lost sensors: found, estimated so that the policy sees how much is known, given back; healthy ones left alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentpipe.environments.layout import (
    ACTION_COUNT,
    ACTION_NAMES,
    OBSERVATION_NAMES,
    OBSERVATION_SIZE,
    Purpose,
    block_start,
)
from agentpipe.serving.agent.deciders import RulesDecider
from agentpipe.serving.agent.sensors import SensorWatch
from agentpipe.serving.signature import policy_signature
from agentpipe.settings import AgentSettings
from agentpipe_tests.environments.line import catalog, make_pool
from agentpipe_tests.serving.agent.frames import frame, pool_frame

LINE = policy_signature(OBSERVATION_SIZE, ACTION_COUNT, observation_names=OBSERVATION_NAMES, action_names=ACTION_NAMES)
O_READING, O_MEAN, O_AGE, O_COUNT, O_PRESENT = (
    block_start(name) for name in ("reading", "mean", "age", "count", "present")
)
CURRENT = O_READING + 2 * 5 + 2  # motor current of machine 2
CURRENT_MEAN = O_MEAN + 2 * 5 + 2
NAME = "line: current of machine 2"


class Plant:
    """Six machines that send a packet each time they are asked, with a historian that averages."""

    def __init__(self):
        self.random = np.random.default_rng(0)
        self.now = 0.0
        self.begin("o1")

    def begin(self, order):
        self.order, self.number = order, 0
        self.sums, self.counts = np.zeros((8, 5)), np.zeros(8)
        self.reading = np.zeros((8, 5))
        self.sent = np.full(8, self.now)

    def ask(self, *, frozen=None, silent=(), nothing=False, seconds=2.0):
        """The next question. ``frozen``: what motor current of machine 2 says; ``silent``: machines without packets."""
        self.now += seconds
        for machine in range(6):
            if machine not in silent:
                self.reading[machine] = self.random.normal(0.0, 0.6, 5)
                if frozen is not None and machine == 2:
                    self.reading[2, 2] = frozen
                self.sums[machine] += self.reading[machine]
                self.counts[machine] += 1
                self.sent[machine] = self.now
        seen = np.zeros(OBSERVATION_SIZE, np.float32)
        seen[O_READING:O_MEAN] = self.reading.reshape(-1)
        seen[O_MEAN:O_AGE] = (self.sums / np.maximum(self.counts, 1)[:, None]).reshape(-1)
        seen[O_AGE : O_AGE + 8] = (self.now - self.sent) / 10.0
        seen[O_COUNT : O_COUNT + 8] = np.log2(1 + self.counts)
        seen[O_PRESENT : O_PRESENT + 6] = 1.0
        if nothing:
            seen[[CURRENT, CURRENT_MEAN]] = np.nan
        self.number += 1
        asked = frame(seen, np.ones(ACTION_COUNT, np.bool_), number=self.number, order=self.order)
        return replace(asked, received=self.now)


@pytest.fixture
def told():
    return []


@pytest.fixture
def watch(told):
    return SensorWatch(LINE, AgentSettings(), on_change=told.append)


def test_questions_of_healthy_sensors_pass_untouched(watch):
    plant = Plant()
    for _ in range(50):
        asked = plant.ask()
        seen = watch.look(asked)
        assert seen.frame is asked
        assert (seen.estimated, seen.ask) == ((), "")
    assert watch.lost() == ()


def test_a_frozen_reading_is_estimated_from_the_fourth_packet_on(watch, told):
    plant = Plant()
    for _ in range(30):
        watch.look(plant.ask())
    mean = plant.sums[2, 2] / 30
    names = [watch.look(plant.ask(frozen=4.0)).estimated for _ in range(5)]  # the first is a change to 4.0
    assert names == [(), (), (), (), (NAME,)]
    asked = plant.ask(frozen=4.0)
    seen = watch.look(asked).frame.observation
    assert seen[CURRENT] == pytest.approx((mean * 30 + 4.0) / 31, abs=0.05)  # only the first of them was taken
    assert seen[CURRENT_MEAN] == seen[CURRENT]
    assert [(change.part, change.up, change.reason) for change in told] == [
        (f"sensor {NAME}", False, "the same reading in 4 packets")
    ]
    changed = np.flatnonzero(seen != asked.observation).tolist()
    assert changed == [CURRENT, CURRENT_MEAN, O_COUNT + 2]


def test_the_packet_count_is_lowered_to_what_the_estimate_knows(watch):
    plant = Plant()
    seen = [watch.look(plant.ask(frozen=4.0 if step > 20 else None)).frame.observation for step in range(80)]
    heard = np.exp2([each[O_COUNT + 2] for each in seen]) - 1
    assert heard[20] == pytest.approx(21)
    assert heard[-1] == pytest.approx(4 / 5 * 80 + 1 / 5 * 22, rel=0.05)  # four channels have 80 samples, one has 22


def test_a_sensor_is_back_after_three_new_readings_and_its_order_stays_estimated(watch, told):
    plant = Plant()
    for step in range(30):
        watch.look(plant.ask(frozen=4.0 if step > 9 else None))
    seen = [watch.look(plant.ask()) for _ in range(30)]
    assert told[-1].up
    assert [change.up for change in told] == [False, True]
    assert seen[0].frame.observation[CURRENT] != plant.reading[2, 2]
    last = seen[-1].frame.observation
    assert last[CURRENT] == np.float32(plant.reading[2, 2])  # what it says now
    assert abs(last[CURRENT_MEAN]) < 0.5 < plant.sums[2, 2] / plant.counts[2]  # the historian has the frozen ones
    plant.begin("o2")
    assert watch.look(plant.ask()).estimated == ()


def test_a_sensor_that_stays_frozen_is_estimated_from_the_first_question_of_the_next_order(watch):
    plant = Plant()
    for _ in range(10):
        watch.look(plant.ask(frozen=4.0))
    plant.begin("o2")
    seen = watch.look(plant.ask(frozen=4.0))
    assert seen.estimated == (NAME,)
    assert abs(seen.frame.observation[CURRENT_MEAN]) < 1.5


def test_a_reading_that_is_no_number_is_estimated_at_once(watch, told):
    plant = Plant()
    for _ in range(20):
        watch.look(plant.ask())
    seen = watch.look(plant.ask(nothing=True))
    assert seen.estimated == (NAME,)
    assert np.isfinite(seen.frame.observation).all()
    assert told[0].reason == "no reading"


def test_a_machine_of_which_nothing_at_all_is_known_leaves_no_nan(watch):
    plant = Plant()
    asked = plant.ask()
    for start, size in ((O_READING + 10, 5), (O_MEAN + 10, 5), (O_AGE + 2, 1), (O_COUNT + 2, 1)):
        asked.observation[start : start + size] = np.nan
    seen = watch.look(asked)
    assert len(seen.estimated) == 5
    assert np.isfinite(seen.frame.observation).all()


def test_a_machine_that_falls_silent_while_others_report_is_lost(watch, told):
    plant = Plant()
    for _ in range(10):
        watch.look(plant.ask())
    for _ in range(18):
        assert watch.look(plant.ask(silent=(2,))).estimated == ()
    assert len(watch.look(plant.ask(silent=(2,))).estimated) == 5  # 38 s, of which 30 are borne and 4 questions waited
    assert {change.reason for change in told} == {"no packet for 30 s"}
    for _ in range(4):
        watch.look(plant.ask())
    assert watch.lost() == ()


def test_a_long_repair_in_which_nobody_is_polled_loses_no_sensor(watch):
    plant = Plant()
    for _ in range(10):
        watch.look(plant.ask())
    watch.look(plant.ask(silent=range(6), seconds=180.0))
    watch.look(plant.ask(silent=(3, 4, 5)))
    watch.look(plant.ask())
    assert watch.lost() == ()


def test_beyond_the_declared_limit_a_person_is_asked(told):
    watch = SensorWatch(LINE, AgentSettings(estimate_growth=10.0, estimate_limit=2.0), on_change=told.append)
    plant = Plant()
    asks = [watch.look(plant.ask(frozen=4.0, seconds=600.0)).ask for _ in range(30)]
    first = next(index for index, ask in enumerate(asks) if ask)
    assert first > 5
    assert asks[first].startswith(f"{NAME} is known to ±2.")
    assert all(asks[first:])


def test_another_lines_questions_are_left_alone():
    watch = SensorWatch(policy_signature(2, 3, observation_names=["a", "b"]), AgentSettings())
    asked = frame((np.nan, 1.0))
    assert watch.look(asked).frame is asked


def test_two_lines_are_watched_apart(watch):
    plant, other = Plant(), Plant()
    for _ in range(10):
        watch.look(plant.ask(frozen=4.0))
        watch.look(replace(other.ask(), line_id="line 2"))
    assert watch.lost() == (NAME,)


def test_a_line_that_keeps_changing_its_name_takes_no_more_memory(watch, monkeypatch):
    monkeypatch.setattr("agentpipe.serving.agent.sensors.MOST_LINES", 3)
    plant = Plant()
    for number in range(10):
        watch.look(replace(plant.ask(), line_id=f"line {number}"))
    assert list(watch._lines) == ["line 7", "line 8", "line 9"]


def test_impulses_are_counted(watch):
    plant = Plant()
    for step in range(40):
        watch.look(plant.ask(frozen=20.0 if step == 30 else None))
    assert watch.impulses == 1
    assert watch.readings > 1_000


# On the simulator.


def play(watched, freeze, environments):
    """Success of the rules in the second order of each environment, and what was told of its sensors.

    A sensor of each is frozen at +4 if ``freeze``.
    """
    pool, decider, told = make_pool(environments, purpose=Purpose.REPORT), RulesDecider(LINE), []
    random = np.random.default_rng(1)
    sensors = random.integers(0, 25, pool.size)
    watches = [SensorWatch(LINE, AgentSettings(), on_change=told.append) for _ in environments]
    orders, won = np.zeros(pool.size, np.int64), np.zeros(pool.size)
    while (orders < 2).any():
        actions = np.zeros(pool.size, np.int64)
        for row, watch in enumerate(watches):
            asked = replace(pool_frame(pool, row), order_id=str(orders[row]))
            if freeze and asked.observation[O_COUNT + sensors[row] // 5] > 0:
                asked.observation[[O_READING + sensors[row], O_MEAN + sensors[row]]] = 4.0
            actions[row] = decider.decide(watch.look(asked).frame if watched else asked).action
        pool.step(actions)
        over = pool.terminated | pool.truncated
        won[over & (orders == 1)] = pool.result_success[over & (orders == 1)]
        orders += over
    return won.mean(), [change.reason for change in told]


def test_disturbed_but_working_sensors_of_the_simulator_are_never_taken_for_frozen():
    environments = catalog().environments("holdout", "sensor-5")[::10]
    reasons = play(True, False, environments)[1]  # a network in a burst of losses may silence a machine
    assert all(reason in ("no packet for 30 s", "new readings") for reason in reasons)
    assert len(reasons) <= 5 * len(environments) // 4


@pytest.mark.slow
def test_with_one_sensor_frozen_the_line_keeps_four_fifths_of_its_success():
    environments = catalog().environments("holdout")[::40]
    healthy, _ = play(False, False, environments)
    unwatched, _ = play(False, True, environments)
    watched, reasons = play(True, True, environments)
    assert reasons.count("the same reading in 4 packets") == len(environments)
    assert watched >= 0.8 * healthy > unwatched


# Lost, and no sensor's.


READINGS = frozenset((*range(O_READING, O_MEAN + 40), *range(O_AGE, O_AGE + 8), *range(O_COUNT, O_COUNT + 8)))


@pytest.mark.parametrize("place", [place for place in range(OBSERVATION_SIZE) if place not in READINGS][::5])
def test_what_is_lost_and_no_sensors_reading_has_a_person_asked_by_watch_and_rules(watch, place):
    plant = Plant()
    watch.look(plant.ask())
    asked = plant.ask()
    asked.observation[place] = np.nan
    assert watch.look(asked).ask == f"{OBSERVATION_NAMES[place]} cannot be estimated"
    said = RulesDecider(LINE).decide(asked)
    assert (said.action, said.notes) == (-1, (f"{OBSERVATION_NAMES[place]} cannot be estimated: a person is asked",))


def test_a_question_in_which_everything_is_lost_has_a_person_asked(watch):
    nothing = frame(np.full(OBSERVATION_SIZE, np.nan, np.float32), np.ones(ACTION_COUNT, np.bool_))
    seen = watch.look(nothing)
    assert seen.ask.endswith(f" and {OBSERVATION_SIZE - len(READINGS) - 3} more cannot be estimated")
    assert RulesDecider(LINE).decide(nothing).action == -1


def test_a_reading_that_is_lost_alone_is_no_reason_to_ask(watch):
    plant = Plant()
    for _ in range(30):
        watch.look(plant.ask())
    seen = watch.look(plant.ask(nothing=True))
    assert (seen.estimated, seen.ask) == ((NAME,), "")
