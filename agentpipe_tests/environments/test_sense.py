"""Sensors, network and PLC against closed forms, literal values and naive references."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest

from agentpipe.environments import physics, sense
from agentpipe.environments.layout import A_MODE, CHANNELS, FALSE_ALARM, PROTOCOLS, block_start
from agentpipe.environments.parameters import PARAMETER_INDEX
from agentpipe_tests.environments.line import RefLink, make_pool, pool_with, ref_bits, ref_normal, table

O_LINK, O_READING, O_MEAN, O_PLC = (block_start(name) for name in ("link", "reading", "mean", "plc"))
STEPS = 4_000
CLEAN = {  # no disturbance at all
    **dict.fromkeys(PARAMETER_INDEX, 0.0),
    "sensor_cycle_period_s": 60.0,
    "network_bandwidth_khz": 1000.0,
    "network_snr_db": 40.0,
    "network_to_good_probability": 1.0,
    "load_cycle_period_s": 60.0,
}
LOSSY = {
    **CLEAN,
    "network_rtt_ms": 80.0,
    "network_jitter_ms": 50.0,
    "network_loss_good": 0.05,
    "network_loss_bad": 0.6,
    "network_to_bad_probability": 0.1,
    "network_to_good_probability": 0.25,
}


@numba.njit
def exchanges(steps, seconds, delivered, link, fixed, hidden, plant):
    for step in range(steps):
        seconds[step], delivered[step] = sense.exchange(0, step, fixed, hidden, plant)
        link[step] = plant.link[0]


@numba.njit
def transmissions(steps, lost, bad, fixed, hidden):
    for step in range(steps):
        lost[step], _ = sense._lost(0, sense.bits(hidden.key[0], step, 0), fixed, hidden)
        bad[step] = hidden.burst[0]


@numba.njit
def load_steps(offsets, fixed, hidden):
    for step in range(offsets.shape[1]):
        for n in range(offsets.shape[0]):
            sense.advance_load(n, step, fixed, hidden)
            offsets[n, step] = hidden.offset[n, 0]


def run_exchanges(pool, steps=STEPS):
    seconds, delivered, link = np.zeros(steps), np.zeros(steps, bool), np.zeros((steps, 4))
    pool.plant().link[:], pool.plant().window[:], pool.hidden().burst[:] = 0.0, 8, 0
    exchanges(steps, seconds, delivered, link, pool._fixed, pool.hidden(), pool.plant())
    return seconds, delivered, link


@pytest.mark.parametrize(
    "parameters",
    [LOSSY, {**LOSSY, "network_loss_good": 0.0, "network_loss_bad": 0.0}, {**LOSSY, "network_rtt_ms": 30.0}],
    ids=["bursty", "lossless", "jitter above the mean"],
)
def test_exchange_equals_the_naive_rfc_6298_reference(parameters):
    pool = pool_with(parameters)
    seconds, delivered, link = run_exchanges(pool)
    reference = RefLink(int(pool.hidden().key[0]), parameters)
    for step in range(STEPS):
        expected, arrived = reference.exchange(step)
        assert delivered[step] == arrived
        assert seconds[step] == pytest.approx(expected, rel=1e-6)
        state = (reference.srtt, reference.rttvar, reference.exchanges, reference.failed)
        assert link[step].tolist() == pytest.approx(list(state), rel=1e-6)
    assert pool.plant().window[0] == reference.window


def test_steady_round_trip_brings_the_estimate_to_it_and_the_variation_to_nothing():
    pool = pool_with({**CLEAN, "network_rtt_ms": 40.0})
    seconds, delivered, link = run_exchanges(pool, 100)
    assert delivered.all()
    assert seconds == pytest.approx(np.full(100, 0.04))
    assert link[0, :2] == pytest.approx([0.04, 0.02])  # first measurement R: SRTT = R, RTTVAR = R/2
    assert link[1, :2] == pytest.approx([0.04, 0.015])
    assert link[99, :2] == pytest.approx([0.04, 0.02 * 0.75**99], abs=1e-6)


def test_everything_lost_costs_three_time_outs_with_doubling_and_gives_no_estimate():
    pool = pool_with({**CLEAN, "network_loss_good": 1.0, "network_loss_bad": 1.0})
    seconds, delivered, link = run_exchanges(pool, 10)
    assert not delivered.any()
    assert seconds == pytest.approx(np.full(10, 0.2 + 0.4 + 0.8))
    assert link[9].tolist() == [0.0, 0.0, 10.0, 10.0]
    assert pool.plant().window[0] == 1


def test_loss_rate_and_burst_length_of_the_gilbert_elliott_chain():
    """Stationary loss is (g·loss_good·… ): share of bad = to_bad / (to_bad + to_good); mean burst = 1 / to_good."""
    pool = pool_with(LOSSY)
    count = 400_000
    lost, bad = np.zeros(count, bool), np.zeros(count, np.int8)
    pool.hidden().burst[:] = 0
    transmissions(count, lost, bad, pool._fixed, pool.hidden())
    share = 0.1 / (0.1 + 0.25)
    assert bad.mean() == pytest.approx(share, abs=0.004)
    assert lost.mean() == pytest.approx((1 - share) * 0.05 + share * 0.6, abs=0.005)
    assert lost[bad == 1].mean() == pytest.approx(0.6, abs=0.005)
    assert lost[bad == 0].mean() == pytest.approx(0.05, abs=0.002)
    bursts = (np.diff(bad) == 1).sum()
    assert bad.sum() / bursts == pytest.approx(1 / 0.25, rel=0.02)


def test_round_trip_has_the_mean_of_the_table_and_never_less_than_its_fixed_part():
    pool = pool_with({**CLEAN, "network_rtt_ms": 80.0, "network_jitter_ms": 50.0})
    seconds, _, _ = run_exchanges(pool, 40_000)
    assert seconds.mean() == pytest.approx(0.080, rel=0.02)
    assert seconds.std() == pytest.approx(0.050, rel=0.03)
    assert seconds.min() >= 0.030


def test_scan_offset_is_the_ar2_process_of_its_formula():
    pool = pool_with({**CLEAN, "load_sigma": 0.05})
    key, sigma = int(pool.hidden().key[0]), np.float32(0.05)
    x1, x2 = (np.float32(value) for value in pool.hidden().offset[0])
    offsets = np.zeros((1, 50), np.float32)
    load_steps(offsets, pool._fixed, pool.hidden())
    for step in range(50):
        noise = sigma * ref_normal(ref_bits(key, step, 32) >> 32)
        x1, x2 = np.float32(0.7) * x1 + np.float32(0.2) * x2 + noise, x1
        assert offsets[0, step] == pytest.approx(float(x1), abs=1e-6)


def test_scan_offset_has_the_closed_form_variance():
    """Var = σ² (1 - b) / ((1 + b) ((1 - b)² - a²)) with a = 0.7, b = 0.2 (Box and Jenkins, 3.2.4)."""
    a, b, sigma = 0.7, 0.2, 0.05
    expected = sigma**2 * (1 - b) / ((1 + b) * ((1 - b) ** 2 - a**2))
    pool = pool_with({**CLEAN, "load_sigma": sigma})
    begun = pool.hidden().offset[:, 0].copy()
    offsets = np.zeros((pool.size, 4_000), np.float32)
    load_steps(offsets, pool._fixed, pool.hidden())
    settled = offsets[:, 200:]
    assert settled.var() == pytest.approx(expected, rel=0.02)
    correlation = (settled[:, 1:] * settled[:, :-1]).mean() / settled.var()
    assert correlation == pytest.approx(a / (1 - b), abs=0.01)
    assert begun.std() == pytest.approx(math.sqrt(expected), rel=0.15)  # an episode begins settled


def test_reference_intensity_has_the_sigma_of_the_specification():
    column = PARAMETER_INDEX["load_sigma"]
    assert table().parameters[table().cell_rows("load-3")[0], column] == np.float32(0.05)


@pytest.mark.parametrize(
    ("bandwidth_khz", "snr_db", "protocol", "packets"),
    [
        (1.0, 0.0, "modbus_tcp", 1),  # 1 kHz · log2(2) = 1,000 bit/s · 3 s / 2,400 bit = 1.25
        (1.0, 10.0, "ethercat", 2),  # 3,459 bit/s · 1 s / 1,200 bit = 2.88
        (2.0, 10.0, "opc_ua", 2),  # 6,919 bit/s · 2.5 s / 6,400 bit = 2.70
        (2.5, 15.0, "profinet", 8),  # 12,570 bit/s · 1.5 s / 1,600 bit = 11.8, all eight
        (2.0, 3.0, "io_link", 3),  # 3,165 bit/s · 2 s / 1,800 bit = 3.52
        (0.1, -20.0, "opc_ua", 1),  # next to nothing: one machine at least
    ],
)
def test_packets_a_cycle_by_shannon_and_hartley(bandwidth_khz, snr_db, protocol, packets):
    found = physics.packets_a_cycle(
        np.array([bandwidth_khz], np.float32), np.array([snr_db], np.float32), np.array([PROTOCOLS.index(protocol)])
    )
    assert found.tolist() == [packets]


def test_first_snapshot_is_what_was_sent_and_the_mean_of_one_sample_is_that_sample():
    pool = pool_with(CLEAN)
    seen = pool.observation
    assert (pool.plant().weight[pool._fixed.machines == 8] == 1).all()
    assert np.array_equal(seen[:, O_READING : O_READING + 40], seen[:, O_MEAN : O_MEAN + 40])


def test_historian_keeps_the_weighted_mean_of_what_arrived():
    """A fresh measurement counts as four samples of a poll."""
    pool = pool_with({**CLEAN, "sensor_sigma": 1.0})
    pool.hidden().growth[:] = 0.0
    first = pool.observation[0, O_READING : O_READING + CHANNELS].astype(float)
    pool._fixed.capacity[:] = 0  # no poll in between
    pool.step(np.zeros(pool.size, np.int64))
    second = pool.observation[0, O_READING : O_READING + CHANNELS].astype(float)
    mean = pool.observation[0, O_MEAN : O_MEAN + CHANNELS]
    assert mean == pytest.approx((first + 4 * second) / 5, abs=1e-5)


def test_a_stuck_channel_repeats_its_last_value():
    pool = pool_with({**CLEAN, "sensor_stuck_probability": 1.0})
    first = pool.observation[:, O_READING : O_READING + CHANNELS].copy()
    pool.step(np.zeros(pool.size, np.int64))
    assert np.array_equal(pool.observation[:, O_READING : O_READING + CHANNELS], first)


def polled(parameters, jump=0.0):
    """Readings [packets, channels] of one poll of a line without fault or scatter, and the same without disturbance."""
    pools = pool_with(CLEAN), pool_with({**CLEAN, **parameters})
    for pool in pools:
        pool.hidden().effect[:], pool.hidden().base[:] = 0.0, 0.0
        pool.hidden().base[:, sense.CURRENT :: CHANNELS] = jump
        pool.plant().next_poll[:], pool.plant().pointer[:], pool.plant().weight[:] = 0.0, 0, 0.0
        pool.step(np.full(pool.size, A_MODE + FALSE_ALARM, np.int64))  # measures nothing; the poll follows
        assert (pool.plant().weight[:, : physics.POLL_SHARE] == 1).all()
    block = slice(O_READING, O_READING + physics.POLL_SHARE * CHANNELS)
    clean, hurt = (pool.observation[:, block].reshape(-1, CHANNELS).astype(float) for pool in pools)
    return clean, hurt


def test_gaussian_noise_has_the_sigma_of_the_table():
    clean, hurt = polled({"sensor_sigma": 2.0})
    assert (hurt - clean).std() == pytest.approx(2.0, rel=0.03)
    assert abs((hurt - clean).mean()) < 0.1


def test_gain_step_multiplies_the_raw_reading():
    """A reading is ten healthy SD above zero: with p = 0.5 a step of 10 % adds 1 + 0.1·value, else nothing."""
    clean, hurt = polled({"sensor_step_amplitude": 0.1, "sensor_step_probability": 0.5})
    stepped = np.abs(hurt - clean) > 1e-4
    assert stepped.mean() == pytest.approx(0.5, abs=0.03)
    own_noise = 3.7 * physics.TYPE_NOISE.max()  # added after the gain
    assert (np.abs((hurt - clean - 1.0) - 0.1 * clean)[stepped] < 0.1 * own_noise + 1e-4).all()


def test_impulses_come_as_often_and_as_large_as_the_table_says():
    clean, hurt = polled({"sensor_impulse_sigma": 6.0, "sensor_impulse_probability": 0.25})
    size = np.abs(hurt - clean)
    hit = size > 1e-4
    assert hit.mean() == pytest.approx(0.25, abs=0.02)
    assert size[hit] == pytest.approx(np.full(hit.sum(), 6.0), abs=1e-4)
    assert ((hurt - clean)[hit] > 0).mean() == pytest.approx(0.5, abs=0.05)


def test_impulses_are_likelier_where_the_motor_current_jumps():
    """Chance = coupling × size of the current's deviation: 0.05·E|0.55 z| = 0.022 at rest, 0.05·8 = 0.4 in a jump."""
    parameters = {"sensor_impulse_sigma": 6.0, "sensor_impulse_coupling": 0.05}
    for jump, expected in ((0.0, 0.05 * 0.55 * math.sqrt(2 / math.pi)), (8.0, 0.4)):
        clean, hurt = polled(parameters, jump)
        assert (np.abs(hurt - clean) > 1e-4).mean() == pytest.approx(expected, abs=0.012)


def test_ripple_follows_its_sine():
    """Amplitude × (value + 10) × sin(2π(t / period + phase)): over random phases the mean square is half."""
    clean, hurt = polled({"sensor_cycle_amplitude": 0.2, "sensor_cycle_period_s": 60.0})
    ripple = (hurt - clean) / (clean + 10.0)
    assert np.abs(ripple).max() < 0.2 * 1.15
    assert (ripple**2).mean() == pytest.approx(0.2**2 / 2, rel=0.15)


def test_plc_reports_its_offset_with_every_packet_and_keeps_the_mean():
    pool = pool_with({**CLEAN, "load_spike_probability": 1.0, "load_spike_offset": 0.5})
    pool.hidden().mode[:] = 0
    pool.step(np.zeros(pool.size, np.int64))
    assert pool.observation[:, O_PLC] == pytest.approx(np.full(pool.size, 0.5))


def test_sensor_readings_do_not_move_the_clock():
    """Only network and protocol decide how long a decision takes."""
    noisy, quiet = make_pool(), make_pool(off=frozenset({"sensor"}))
    for pool in (noisy, quiet):
        for _ in range(5):
            pool.step(np.zeros(pool.size, np.int64))
    assert np.array_equal(noisy.plant().elapsed, quiet.plant().elapsed)
    assert np.array_equal(noisy.observation[:, O_LINK : O_LINK + 4], quiet.observation[:, O_LINK : O_LINK + 4])
