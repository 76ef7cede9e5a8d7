"""One decision, from the clock to the outcome: scripted episodes for every outcome, and what always holds."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments import physics
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
    ACTION_SEGMENT,
    FALSE_ALARM,
    MAX_STEPS,
    OBSERVATION_NAMES,
    PHYSICAL_MODES,
    PLC_OVERLOAD,
    REASONS,
    SENSOR_FAILURE,
    block_start,
)
from agentpipe.environments.observation_bounds import observation_bounds
from agentpipe.environments.parameters import PARAMETERS
from agentpipe.environments.players import RandomPlayer, nearest_depot, nearest_technician
from agentpipe.environments.pool import LinePool
from agentpipe.environments.state import ORDER_DEPTH
from agentpipe_tests.environments.line import catalog, make_pool, only_modes

O_SKILLED, O_CLOCK, O_TRIED, O_ORDER = (block_start(name) for name in ("skilled", "clock", "tried", "order"))


class Episode:
    """The first episode of one environment, played action by action."""

    def __init__(self, **hidden):
        self.pool = make_pool([catalog().environments("train", "sensor-1")[3]])
        self.pool.plant().deadline[0] = 1000.0
        truth = self.pool.hidden()
        defaults = {"mode": 0, "machine": 2, "severity": 0.4, "growth": 0.0}
        for name, value in {**defaults, **hidden}.items():
            getattr(truth, name)[0] = value
        self.rewards = []

    def do(self, *actions):
        for action in actions:
            self.pool.step(np.array([action]))
            self.rewards.append(float(self.pool.reward[0]))
        return self

    def dispatch(self, *, skilled=True):
        """The nearest depot, and the nearest technician who has the skill, or the first who has not."""
        seen = self.pool.observation
        technician = nearest_technician(seen)[0]
        if not skilled:
            technician = int(np.flatnonzero(seen[0, O_SKILLED : O_SKILLED + 4] == 0)[0])
        return self.do(A_DEPOT + nearest_depot(seen)[0], A_TECHNICIAN + technician)

    def order(self, machine, mode, level, depth, **dispatch):
        """From the declaration to the start of the repair."""
        self.do(A_MACHINE + machine, A_MODE + mode, A_SEVERITY + level, A_DEPTH + depth)
        return self.dispatch(**dispatch).do(A_START)

    @property
    def over(self):
        return bool(self.pool.terminated[0] or self.pool.truncated[0])

    @property
    def outcome(self):
        assert self.over
        assert self.pool.terminated[0] != self.pool.truncated[0]
        reason = REASONS[self.pool.result_reason[0]]
        assert self.pool.result_success[0] == (reason == "success")
        return reason, int(self.pool.result_segment[0])


# What counts as success.


def test_the_true_fault_repaired_deep_enough_in_time_is_a_success():
    episode = Episode().order(2, 0, 1, 1).do(A_CLOSE)
    assert episode.outcome[0] == "success"
    assert episode.rewards[-1] > 3.5


@pytest.mark.parametrize("depth", [1, 2])
def test_deeper_than_needed_is_a_success_too(depth):
    assert Episode().order(2, 0, 1, depth).do(A_CLOSE).outcome[0] == "success"


@pytest.mark.parametrize(("severity", "needed"), [(0.2, 0), (0.349, 0), (0.351, 1), (0.649, 1), (0.651, 2), (0.9, 2)])
def test_depth_needed_follows_the_true_severity(severity, needed):
    for depth in range(3):
        episode = Episode(severity=severity).order(2, 0, 1, depth).do(A_CLOSE)
        assert episode.outcome == (("success", 3) if depth >= needed else ("wrong_depth", 1))


@pytest.mark.parametrize(("mode", "needed"), [(SENSOR_FAILURE, 2), (PLC_OVERLOAD, 0)])
def test_a_failed_sensor_is_replaced_and_an_overload_adjusted(mode, needed):
    for depth in range(3):
        episode = Episode(mode=mode).order(2, mode, 0, depth).do(A_CLOSE)
        assert episode.outcome[0] == ("success" if depth >= needed else "wrong_depth")


def test_a_false_alarm_rejected_is_a_success():
    assert Episode(mode=FALSE_ALARM).do(A_MODE + FALSE_ALARM, A_REJECT).outcome == ("success", 1)


def test_a_wrong_diagnosis_can_be_put_right():
    """Verify, escalate, declare anew: what was refuted stays visible."""
    episode = Episode().order(3, 1, 1, 1).do(A_VERIFY)
    assert not episode.pool.hidden().repaired[0]
    episode.do(A_ESCALATE)
    tried = episode.pool.observation[0, O_TRIED : O_TRIED + 18]
    assert np.flatnonzero(tried).tolist() == [3, 8 + 1]
    assert episode.order(2, 0, 1, 1).do(A_VERIFY, A_CLOSE).outcome[0] == "success"


def test_a_repair_too_shallow_can_go_deeper_by_a_retry():
    episode = Episode(severity=0.5).order(2, 0, 1, 0).do(A_VERIFY, A_RETRY)
    assert episode.pool.hidden().repaired[0] == 1
    assert episode.do(A_CLOSE).outcome[0] == "success"


# How it fails.


def test_another_mode_or_machine_repaired_is_a_wrong_diagnosis():
    assert Episode().order(2, 1, 1, 2).do(A_CLOSE).outcome == ("wrong_diagnosis", 0)
    assert Episode().order(3, 0, 1, 2).do(A_CLOSE).outcome == ("wrong_diagnosis", 0)


def test_a_technician_without_the_skill_repairs_nothing():
    episode = Episode().order(2, 0, 1, 2, skilled=False)
    assert episode.pool.hidden().repaired[0] == 0
    assert episode.do(A_CLOSE).outcome == ("unskilled_technician", 2)


def test_a_repair_that_fails_by_mishap_and_is_not_verified_is_a_failed_repair():
    outcomes = {Episode(key=number).order(2, 0, 1, 2).do(A_CLOSE).outcome for number in range(400)}
    assert outcomes == {("success", 3), ("repair_failed", 3)}


def test_after_the_deadline_is_late_even_when_all_is_right():
    episode = Episode()
    episode.pool.plant().deadline[0] = 30.0
    assert episode.do(A_MACHINE + 2, A_MODE, A_SEVERITY + 1, A_DEPTH + 1).dispatch().do(A_START).outcome == ("late", 3)


def test_a_late_rejection_is_late():
    episode = Episode(mode=FALSE_ALARM).do(A_MODE + FALSE_ALARM)
    episode.pool.plant().deadline[0] = episode.pool.plant().elapsed[0]
    assert episode.do(A_REJECT).outcome[0] == "late"


def test_a_fault_that_grows_to_its_limit_first_is_a_secondary_failure():
    episode = Episode(severity=0.5, growth=0.5 / 40.0)
    while not episode.over:
        episode.do(0)
    assert episode.outcome == ("secondary_failure", 0)
    assert episode.pool.result_elapsed_seconds[0] >= 40.0


def test_a_repair_that_begins_too_late_does_not_help():
    episode = Episode(severity=0.5, growth=0.5 / 30.0)
    episode.do(A_MACHINE + 2, A_MODE, A_SEVERITY + 1, A_DEPTH + 2).dispatch()
    assert not episode.over
    assert episode.do(A_START).outcome == ("secondary_failure", 3)


def test_structural_faults_do_no_secondary_damage():
    episode = Episode(mode=SENSOR_FAILURE, severity=0.9, growth=1.0)
    assert episode.order(2, SENSOR_FAILURE, 0, 2).do(A_CLOSE).outcome[0] == "success"


def test_a_real_fault_rejected_is_a_false_rejection():
    assert Episode().do(A_MODE + FALSE_ALARM, A_REJECT).outcome == ("false_rejection", 0)


def test_a_false_alarm_repaired_is_a_needless_repair():
    assert Episode(mode=FALSE_ALARM).order(2, 0, 0, 0).do(A_CLOSE).outcome == ("needless_repair", 0)


def test_sixty_four_steps_are_the_limit_and_a_truncation():
    episode = Episode()
    episode.pool.plant().deadline[0] = 1e6
    episode.do(*[0] * (MAX_STEPS - 1))
    assert not episode.over
    episode.do(0)
    assert episode.pool.truncated[0]
    assert episode.outcome == ("step_limit", 0)
    assert episode.pool.result_steps[0] == episode.pool.result_decisions[0] == MAX_STEPS
    assert episode.pool.final_observation[0, O_CLOCK + 2] == 0.0


def test_every_reason_is_reached_by_one_of_the_above():
    """Keeps the list above complete: names are asserted literally there."""
    assert REASONS == (
        "success",
        "wrong_diagnosis",
        "wrong_depth",
        "late",
        "secondary_failure",
        "false_rejection",
        "needless_repair",
        "step_limit",
        "unskilled_technician",
        "repair_failed",
    )


# Time.


def test_a_decision_costs_network_and_action_and_a_measurement_waits_for_its_poll():
    pool = make_pool(off=frozenset({"network", "sensor", "load"}))
    cycle = physics.POLL_SECONDS[pool._fixed.protocol].astype(float)
    waiting = pool.plant().next_poll.copy()
    pool.step(np.zeros(pool.size, np.int64))
    assert pool.plant().elapsed == pytest.approx(0.6 + waiting + 0.5 * cycle)
    before = pool.plant().elapsed.copy()
    pool.step(np.full(pool.size, A_MACHINE, np.int64))
    assert pool.plant().elapsed - before == pytest.approx(np.full(pool.size, 0.6))


def test_decision_seconds_add_up_and_waiting_for_people_is_not_deciding():
    pool, player = make_pool(catalog().environments("train")[::10]), RandomPlayer()
    plant, seconds = pool.plant(), np.zeros(pool.size)
    ended = 0
    for _ in range(120):
        before, order = plant.elapsed.copy(), plant.order.copy()
        arrives = np.maximum(plant.part_at, plant.technician_at)
        actions = player.act(pool).actions
        decided = plant.decision_seconds.copy()
        pool.step(actions)
        done = pool.terminated | pool.truncated
        spent = np.where(done, pool.result_decision_seconds, plant.decision_seconds) - decided
        clock = np.where(done, pool.result_elapsed_seconds, plant.elapsed) - before
        repair = (actions == A_START) | (actions == A_RETRY)
        depth = order[:, ORDER_DEPTH] + (actions == A_RETRY)
        wait = np.maximum(arrives - before - spent, 0) + physics.REPAIR_SECONDS[np.clip(depth, 0, 2)]
        assert clock == pytest.approx(spent + np.where(repair, wait, 0), abs=2e-3)
        assert (spent > 0.59).all()
        seconds += spent
        assert pool.result_decision_seconds[done] == pytest.approx(seconds[done], rel=1e-4)
        seconds[done] = 0.0
        ended += done.sum()
    assert ended > 3_000


def test_return_is_the_sum_of_rewards_and_steps_are_counted():
    pool, player = make_pool(), RandomPlayer()
    total, steps = np.zeros(pool.size), np.zeros(pool.size)
    for _ in range(200):
        pool.step(player.act(pool).actions)
        total += pool.reward
        steps += 1
        done = pool.terminated | pool.truncated
        assert pool.result_return[done] == pytest.approx(total[done], abs=1e-3)
        assert (pool.result_steps[done] == steps[done]).all()
        total[done], steps[done] = 0.0, 0.0
        assert (np.abs(pool.reward) <= 10).all()


def test_expediting_shortens_the_ways_and_costs():
    plain, fast = Episode(), Episode()
    for episode in (plain, fast):
        episode.do(A_MACHINE + 2, A_MODE, A_SEVERITY + 1, A_DEPTH + 1)
    fast.do(A_EXPEDITE)
    for episode in (plain, fast):
        episode.dispatch()
    part, person = fast.pool.plant().part_at[0], fast.pool.plant().technician_at[0]
    assert part < plain.pool.plant().part_at[0]
    assert person < plain.pool.plant().technician_at[0]
    assert fast.pool.observation[0, O_ORDER] == 1.0


def test_a_reserved_part_leaves_the_shelf_and_an_empty_shelf_waits_for_the_supplier():
    episode = Episode().do(A_MACHINE + 2, A_MODE, A_SEVERITY + 1, A_DEPTH + 1)
    stock = episode.pool.plant().stock
    stock[0, physics.PART_OF_MODE[0]] = [1, 0, 0]
    before = episode.pool.plant().elapsed[0]
    episode.do(A_DEPOT)
    assert stock[0, physics.PART_OF_MODE[0]].tolist() == [0, 0, 0]
    assert episode.pool.plant().part_at[0] - before < 181
    empty = Episode().do(A_MACHINE + 2, A_MODE, A_SEVERITY + 1, A_DEPTH + 1)
    empty.pool.plant().stock[:] = 0
    empty.do(A_DEPOT)
    difference = empty.pool.plant().part_at[0] - episode.pool.plant().part_at[0]
    assert difference == pytest.approx(physics.SUPPLIER_SECONDS)


# What always holds.


def test_random_play_never_meets_an_empty_mask_and_ends_within_64_steps():
    pool, player = make_pool(catalog().environments("train")[::3]), RandomPlayer()
    length, reasons = np.zeros(pool.size, int), set()
    for _ in range(200):
        assert pool.mask.any(axis=1).all()
        decision = player.act(pool)
        assert (ACTION_SEGMENT[decision.actions] == pool.segment).all()
        pool.step(decision.actions)
        pool.check_finite()
        length += 1
        assert length.max() <= MAX_STEPS
        done = pool.terminated | pool.truncated
        assert not (pool.terminated & pool.truncated).any()
        reasons |= {REASONS[reason] for reason in np.unique(pool.result_reason[done])}
        length[done] = 0
    assert set(REASONS) - {"step_limit", "repair_failed"} <= reasons


def test_mask_allows_the_current_segments_actions_only():
    pool, player = make_pool(), RandomPlayer()
    for _ in range(150):
        segments = np.where(pool.mask, ACTION_SEGMENT, pool.segment[:, None])
        assert (segments == pool.segment[:, None]).all()
        pool.step(player.act(pool).actions)


def test_same_step_reset_shows_the_next_episode_and_keeps_the_last_moment():
    pool, player = make_pool(), RandomPlayer()
    checked = 0
    for _ in range(60):
        episode = pool.episode.copy()
        actions = player.act(pool).actions
        pool.step(actions)
        for row in np.flatnonzero(pool.terminated | pool.truncated)[:3]:
            fresh = make_pool(first_episode=int(episode[row]) + 1)
            assert pool.observation[row].tobytes() == fresh.observation[row].tobytes()
            assert pool.mask[row].tobytes() == fresh.mask[row].tobytes()
            assert pool.episode[row] == pool.result_episode[row] + 1 == episode[row] + 1
            assert pool.final_last_action[row] == actions[row]
            assert pool.final_time[row] == pytest.approx(pool.result_elapsed_seconds[row] / 60, rel=1e-5)
            assert pool.final_observation[row, O_CLOCK] == pytest.approx(pool.final_time[row], rel=1e-5)
            assert pool.time[row] == 0.0
            checked += 1
    assert checked > 50


def test_everything_observed_stays_in_its_bounds_under_the_worst_of_all_permitted_tables():
    """Parameters at random and at their limits, the same for no two environments."""
    random = np.random.default_rng(0)
    pool = make_pool(catalog().environments("train")[::20])
    limits = np.array([(p.low, p.high) for p in PARAMETERS], np.float32).T
    drawn = limits[0] + (limits[1] - limits[0]) * random.random(pool._fixed.parameters.shape)
    extreme = np.where(random.random(drawn.shape) < 0.5, limits[random.integers(0, 2, drawn.shape), range(23)], drawn)
    fixed = pool._fixed._replace(parameters=extreme.astype(np.float32))
    pool = LinePool(fixed, pool.names)
    low, high = observation_bounds(fixed)
    assert (low < high).all()
    assert np.isfinite([low, high]).all()
    player = RandomPlayer()
    for _ in range(120):
        pool.check_finite()
        bad = ((pool.observation < low) | (pool.observation > high)).any(axis=0)
        assert not bad.any(), np.array(OBSERVATION_NAMES)[bad]
        pool.step(player.act(pool).actions)
        done = pool.terminated | pool.truncated
        assert ((pool.final_observation >= low) & (pool.final_observation <= high))[done].all()


def test_seven_machine_lines_have_no_eighth():
    environments = [e for e in catalog().environments("train") if e.template.machines == 7][:100]
    pool, player = make_pool(environments), RandomPlayer()
    for _ in range(60):
        assert not pool.mask[:, [7, A_MACHINE + 7]].any()
        assert (pool.hidden().machine < 7).all()
        assert (pool.observation[:, 35:40] == 0).all()
        pool.step(player.act(pool).actions)


def test_signature_shows_on_neighbours_and_strongest_modes_on_their_machine():
    """At full severity, before any disturbance: a fault of a machine reaches those it feeds and those that feed it."""
    pool = make_pool(catalog().environments("train"), line=only_modes({"p0": 1.0}))
    physical = np.flatnonzero((pool.hidden().mode < PHYSICAL_MODES) & (pool._fixed.topology == 0))
    effect = np.abs(pool.hidden().effect[physical]).reshape(-1, 8, 5).max(axis=2)
    machine = pool.hidden().machine[physical]
    inner = (machine > 0) & (machine < pool._fixed.machines[physical] - 1)
    rows, at = np.flatnonzero(inner), machine[inner]
    assert (effect[rows, at] > 0.3).all()
    assert (effect[rows, at + 1] > 0.1).mean() > 0.99
    assert (effect[rows, at - 1] > 0).mean() > 0.9
    far = np.abs(np.arange(8)[None] - at[:, None]) > 1
    assert (effect[rows][far] == 0).all()
