"""Nothing a player sees depends on the hidden state except through packets, a verification, and the end of the episode.

And one disturbance off leaves every other draw as it was.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from agentpipe.environments import orders, physics
from agentpipe.environments.layout import (
    A_CLOSE,
    A_MODE,
    A_REJECT,
    A_VERIFY,
    CHANNELS,
    FALSE_ALARM,
    MACHINES,
    PHYSICAL_MODES,
    PLC_OVERLOAD,
    block_start,
)
from agentpipe.environments.players import RandomPlayer
from agentpipe.environments.state import ORDER_VERIFIED
from agentpipe_tests.environments.line import catalog, make_pool, only_modes, pool_with, record

O_READING, O_PRESENT = block_start("reading"), block_start("present")
O_PLC, O_ORDER = block_start("plc"), block_start("order")
READINGS = slice(O_READING, O_READING + 2 * MACHINES * CHANNELS)  # last readings and means
PLC = slice(O_PLC, O_PLC + 2)
VISIBLE = ("observation", "mask", "segment", "last_action", "time")
ENDS = (A_REJECT, A_CLOSE)
STEPS, ENOUGH = 60, 2_000


def scramble(pool, seed, *, keep=()):
    """Another hidden state: everything that only the simulator knows, but for ``keep`` and the random key."""
    random = np.random.default_rng(seed)
    hidden, n = pool.hidden(), pool.size
    other = {
        "mode": random.integers(0, 10, n),
        "machine": random.integers(0, 7, n),
        "channel": random.integers(0, CHANNELS, n),
        "severity": random.uniform(0, 0.9, n),
        "growth": np.zeros(n),
        "base": random.normal(size=hidden.base.shape),
        "effect": random.normal(size=hidden.effect.shape) * 5,
        "drift": random.normal(size=hidden.drift.shape),
        "offset": random.normal(size=hidden.offset.shape) * 0.1,
        "repaired": random.integers(0, 2, n),
        "botched": random.integers(0, 2, n),
        "touched": random.integers(0, 2, n),
    }
    for name, values in other.items():
        if name not in keep:
            getattr(hidden, name)[:] = values


def step_both(one, other, running, step):
    """The same random legal action in both pools, chosen by what is visible in ``one``; none that ends an episode.

    Returns the actions, and the rows that are still in their first episode: those without any other legal action leave.
    """
    mask = one.mask.copy()
    mask[:, ENDS] = False
    mask[::2, A_MODE + FALSE_ALARM] = False  # a declared false alarm can only be rejected
    stuck = ~mask.any(axis=1)
    mask[stuck] = one.mask[stuck]
    actions = (np.random.default_rng(step).random(mask.shape) * mask).argmax(axis=1)
    rows = np.arange(one.size)
    theirs = np.where(other.mask[rows, actions], actions, other.mask.argmax(axis=1))
    assert np.array_equal(actions[running], theirs[running])
    one.step(actions)
    other.step(theirs)
    running = running & ~stuck
    assert not (one.terminated | other.terminated | one.truncated | other.truncated)[running].any()
    return actions, running


def visible(pool):
    return {name: getattr(pool, name).copy() for name in VISIBLE}


def public(pool):
    return {name: array.copy() for name, array in pool.plant()._asdict().items() if name != "total"}


def same(first, second, rows):
    for name in first:
        assert first[name][rows].tobytes() == second[name][rows].tobytes(), f"{name} depends on the hidden state"


def twins(parameters, count=245):
    """Two equal pools in which no fault grows; plenty of time, so that nothing but an action ends an episode."""
    pools = [pool_with(parameters, catalog().environments("validation")[:count]) for _ in range(2)]
    for pool in pools:
        pool.hidden().growth[:] = 0.0
        pool.plant().deadline[:] = 1e5
    return pools


LOST = {"network_loss_good": 1.0, "network_loss_bad": 1.0}


@pytest.mark.parametrize("seed", range(3))
def test_without_packets_any_two_hidden_states_look_the_same(seed):
    """Everything sent is lost: whatever the fault, whatever was repaired, all that is visible is the same bytes."""
    one, other = twins(LOST)
    scramble(other, seed)
    running, compared = np.ones(one.size, bool), 0
    for step in range(STEPS):
        _, running = step_both(one, other, running, step)
        same(visible(one), visible(other), running)
        same(public(one), public(other), running)
        compared += running.sum()
    assert compared > ENOUGH


@pytest.mark.parametrize("seed", range(3))
def test_behind_the_same_packets_other_faults_look_the_same(seed):
    """With the same values in every packet, machine, mode, severity and mistakes made leave no trace."""
    one, other = twins({})
    scramble(other, seed, keep=("base", "drift", "offset"))
    for pool, key in ((one, 0), (other, seed + 1)):
        pool.hidden().effect[:] = 0.0  # the fault does not show, and is no overload, which the PLC itself reports
        pool.hidden().mode[:] = np.random.default_rng(key).integers(0, PLC_OVERLOAD, pool.size)
    running, compared = np.ones(one.size, bool), 0
    for step in range(STEPS):
        for pool in (one, other):
            pool.hidden().repaired[:] = step % 2  # what a verification tells is the same in both
        _, running = step_both(one, other, running, step)
        same(visible(one), visible(other), running)
        same(public(one), public(other), running)
        compared += running.sum()
    assert compared > ENOUGH


@pytest.mark.parametrize("seed", range(3))
def test_all_that_differs_is_what_packets_carried(seed):
    """Any two hidden states: readings, PLC report and verdict may differ; clock, stock, orders, link, mask do not."""
    one, other = twins({})
    scramble(other, seed)
    running, compared, differing = np.ones(one.size, bool), 0, 0
    for step in range(STEPS):
        actions, running = step_both(one, other, running, step)
        verified = running & (actions == A_VERIFY)  # the verdict of ``one`` is told to both
        other.plant().order[verified, ORDER_VERIFIED] = one.plant().order[verified, ORDER_VERIFIED]
        other.mask[verified] = one.mask[verified]
        other.plant().offset_sum[:] = one.plant().offset_sum
        differing += (one.observation[running, READINGS] != other.observation[running, READINGS]).any(axis=1).sum()
        for pool in (one, other):
            pool.observation[:, READINGS], pool.observation[:, PLC] = 0.0, 0.0
            pool.observation[verified, O_ORDER + 2 : O_ORDER + 4] = 0.0
        same(visible(one), visible(other), running)
        same(public(one), public(other), running)
        compared += running.sum()
    assert compared > ENOUGH
    assert differing > compared / 4  # the comparison can tell


def test_verdict_of_a_verification_is_the_repair_and_nothing_else():
    pool = pool_with({})
    player = RandomPlayer()
    checked = 0
    for _ in range(400):
        actions = player.act(pool).actions
        actions = np.where(pool.mask[:, A_VERIFY], A_VERIFY, actions)
        healthy = (pool.hidden().repaired == 1) | (pool.hidden().mode == FALSE_ALARM)
        exchanges_failed = pool.plant().link[:, 3].copy()
        pool.step(actions)
        rows = (actions == A_VERIFY) & ~pool.terminated & ~pool.truncated
        told = rows & (pool.plant().link[:, 3] == exchanges_failed)
        assert (pool.plant().order[told, ORDER_VERIFIED] == np.where(healthy[told], 1, 2)).all()
        assert (pool.plant().order[rows & ~told, ORDER_VERIFIED] == 0).all()
        checked += told.sum()
    assert checked > 500


def test_what_writes_clock_orders_and_mask_is_not_given_the_hidden_state():
    assert list(inspect.signature(orders.refresh.py_func).parameters) == ["n", "fixed", "plant", "visible"]


def test_stock_people_and_deadline_are_drawn_without_looking_at_the_fault():
    """The same episodes with every fault changed, by other prevalences, have the same plant."""
    line = only_modes({"p1": 0.5, "sensor_failure": 0.5})
    one, other = make_pool(), make_pool(line=line)
    assert (one.hidden().mode != other.hidden().mode).mean() > 0.1
    for name in ("stock", "position", "busy", "deadline", "next_poll", "sent", "weight", "link"):
        assert getattr(one.plant(), name).tobytes() == getattr(other.plant(), name).tobytes()


def test_the_environments_own_mode_occurs_with_its_probability_else_by_prevalence():
    """0.7 + 0.3 × prevalence for the template's own mode; false alarms only by prevalence."""
    line = only_modes({"p0": 0.6, "false_alarm": 0.4})
    pool = make_pool(catalog().environments("train"), line=line)
    own, mode = pool._fixed.own_mode, pool.hidden().mode
    assert (mode == FALSE_ALARM).mean() == pytest.approx(0.3 * 0.4, abs=0.015)
    assert (mode == own)[own != 0].mean() == pytest.approx(physics.OWN_MODE_PROBABILITY, abs=0.02)
    assert (mode == 0)[own == 0].mean() == pytest.approx(0.7 + 0.3 * 0.6, abs=0.03)
    assert set(np.unique(mode[(mode != own)])) <= {0, FALSE_ALARM}


# Switching one disturbance off.


def hidden_state(pool):
    return {name: array.copy() for name, array in pool.hidden()._asdict().items()}


@pytest.mark.parametrize(
    ("kind", "hidden_may", "plant_may", "seen_may"),
    [
        ("sensor", {"drift"}, set(), (READINGS,)),
        ("load", {"offset"}, {"offset_sum"}, (READINGS, PLC)),
    ],
)
def test_sensor_or_load_off_changes_readings_alone(kind, hidden_may, plant_may, seen_may):
    """Episode by episode, step by step: the same faults, times, losses, masks, rewards and outcomes."""
    environments = catalog().environments("train")[::20]
    on, off = make_pool(environments), make_pool(environments, off=frozenset({kind}))
    player, changed = RandomPlayer(), 0
    for _ in range(80):
        one, other = hidden_state(on), hidden_state(off)
        for name in set(one) - hidden_may:
            assert one[name].tobytes() == other[name].tobytes(), name
        for name, array in on.plant()._asdict().items():
            assert name in plant_may or array.tobytes() == getattr(off.plant(), name).tobytes(), name
        seen, theirs = on.observation.copy(), off.observation.copy()
        changed += (seen != theirs).sum()
        for block in seen_may:
            seen[:, block], theirs[:, block] = 0.0, 0.0
        assert seen.tobytes() == theirs.tobytes()
        assert on.mask.tobytes() == off.mask.tobytes()
        actions = player.act(on).actions
        assert np.array_equal(actions, player.act(off).actions)
        on.step(actions)
        off.step(actions)
        assert on.reward.tobytes() == off.reward.tobytes()
        assert np.array_equal(on.terminated, off.terminated)
    assert changed > 1000  # it was on


def test_network_off_leaves_faults_plant_and_every_received_reading():
    """Losses and delays go; what is drawn for the fault, the line, the load and each packet stays."""
    environments = catalog().environments("train", "network-4")
    on, off = make_pool(environments), make_pool(environments, off=frozenset({"network"}))
    for name in set(on.hidden()._fields) - {"burst"}:
        assert getattr(on.hidden(), name).tobytes() == getattr(off.hidden(), name).tobytes(), name
    for name in ("stock", "position", "busy", "deadline", "next_poll"):
        assert getattr(on.plant(), name).tobytes() == getattr(off.plant(), name).tobytes(), name
    heard = on.plant().weight > 0
    present = off.observation[:, O_PRESENT : O_PRESENT + MACHINES] > 0
    assert np.array_equal(off.plant().weight > 0, present)
    assert 0.5 < heard[present].mean() < 0.999
    readings = [pool.observation[:, : MACHINES * CHANNELS].reshape(-1, MACHINES, CHANNELS) for pool in (on, off)]
    assert readings[0][heard].tobytes() == readings[1][heard].tobytes()
    for step in range(6):  # the load goes on step by step, whatever the clock says
        for pool in (on, off):
            pool.step(np.full(pool.size, step % 7, np.int64))
        fresh = (on.plant().step == step + 1) & (off.plant().step == step + 1)
        assert on.hidden().offset[fresh].tobytes() == off.hidden().offset[fresh].tobytes()
    assert fresh.mean() > 0.9


def test_everything_off_is_the_clean_line():
    quiet = make_pool(off=frozenset({"sensor", "network", "load"}))
    assert (quiet.hidden().drift == 0).all()
    assert (quiet.hidden().offset == 0).all()
    record(quiet, RandomPlayer(), 30)
    assert (quiet.plant().link[:, [0, 1, 3]] == 0).all()
    assert (quiet.plant().window == 8).all()


def test_switching_off_what_is_not_there_changes_nothing():
    environments = [e for e in catalog().environments("validation") if e.cell == "sensor-1"][:20]
    pool = pool_with({"load_sigma": 0.0, "load_spike_probability": 0.0, "load_cycle_amplitude": 0.0}, environments)
    same_draws = make_pool(environments, off=frozenset({"load"}))
    for _ in range(20):
        assert pool.observation.tobytes() == same_draws.observation.tobytes()
        actions = RandomPlayer().act(pool).actions
        pool.step(actions)
        same_draws.step(actions)


def test_physical_faults_alone_grow():
    pool = make_pool(catalog().environments("train"))
    assert (pool.hidden().severity >= 0.1).all()
    assert (pool.hidden().severity < 0.8).all()
    horizon = (1 - pool.hidden().severity) / pool.hidden().growth / pool.plant().deadline
    physical = pool.hidden().mode < PHYSICAL_MODES
    assert horizon[physical].min() > 0.74
    assert horizon[physical].max() < 2.01
