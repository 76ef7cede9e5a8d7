"""Compiled: how the true state reaches the plant, through sensors, network and PLC, each with its disturbance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from agentpipe.environments import physics
from agentpipe.environments.jit import inlined
from agentpipe.environments.layout import (
    CHANNELS,
    FALSE_ALARM,
    PHYSICAL_MODES,
    PLC_OVERLOAD,
    block_start,
)
from agentpipe.environments.parameters import PARAMETER_NAMES
from agentpipe.environments.rng import bits, normal_high, normal_low, uniform

(
    SIGMA, CYCLE, CYCLE_PERIOD, STEP, STEP_P, IMPULSE, IMPULSE_P, COUPLING, DRIFT, STUCK_P,
    RTT, JITTER, BANDWIDTH, SNR, LOSS_GOOD, LOSS_BAD, TO_BAD, TO_GOOD,
    LOAD_SIGMA, SPIKE_P, SPIKE, LOAD_CYCLE, LOAD_PERIOD,
) = range(len(PARAMETER_NAMES))  # fmt: skip

O_READING = block_start("reading")
O_MEAN = block_start("mean")
O_COUNT = block_start("count")
O_PLC = block_start("plc")

# Channels of a step's random draws (below rng.CHANNELS_A_STEP).
C_EXCHANGE, C_POLL, C_LOAD, C_REPAIR = 0, 16, 32, 40
C_PACKET, C_MEASURE, C_VERIFY = 64, 256, 288
C_EPISODE = 1024  # draws made once an episode, at step 0
C_PLAYER = 2000  # a player's own draws, 32 channels
C_PHASE = 2040

_LOW12 = np.uint64(0xFFF)
_S32 = np.uint64(32)
_LOW32 = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_TO_UNIT32 = 1.0 / 4294967296.0
_TO_UNIT12 = np.float32(1.0 / 4096.0)
_TWO_PI = 2.0 * math.pi

FULL_SCALE, LOAD_RESPONSE = physics.FULL_SCALE, physics.LOAD_RESPONSE
TYPE_NOISE, TYPE_LAG = physics.TYPE_NOISE, physics.TYPE_LAG
PROCESS_NOISE = np.float32(physics.PROCESS_NOISE)
AMPLITUDE_LOW, AMPLITUDE_RISE = np.float32(physics.AMPLITUDE_LOW), np.float32(physics.AMPLITUDE_RISE)
TRANSIENT_SECONDS, OVERLOAD_OFFSET = physics.TRANSIENT_SECONDS, physics.OVERLOAD_OFFSET
CURRENT, BURST_SAMPLES = physics.CURRENT, np.float32(physics.BURST_SAMPLES)
MIN_RTO, MAX_RTO = physics.MIN_RTO, physics.MAX_RTO


@inlined
def _lost(n: int, word: Any, fixed: Any, hidden: Any) -> Any:
    """One transmission over the Gilbert-Elliott channel: (lost, leftover uniform in [0, 1) when it was not)."""
    parameters = fixed.parameters[n]
    move = np.float64(word >> _S32) * _TO_UNIT32
    draw = np.float64(word & _LOW32) * _TO_UNIT32
    if hidden.burst[n] == 1:
        if move < parameters[TO_GOOD]:
            hidden.burst[n] = 0
    elif move < parameters[TO_BAD]:
        hidden.burst[n] = 1
    loss = np.float64(parameters[LOSS_BAD]) if hidden.burst[n] == 1 else np.float64(parameters[LOSS_GOOD])
    if draw < loss:
        return True, 0.0
    return False, (draw - loss) / (1.0 - loss)


@inlined
def exchange(n: int, step: int, fixed: Any, hidden: Any, plant: Any) -> Any:
    """A request and its answer, at most three tries: (seconds, delivered).

    Retransmission time-out after RFC 6298 (Karn's rule: retransmitted exchanges give no sample); the packet window
    halves on a loss and grows by one on success.
    """
    parameters = fixed.parameters[n]
    link = plant.link[n]
    link[2] += 1.0
    seconds = 0.0
    for attempt in range(3):
        lost, left = _lost(n, bits(hidden.key[n], step, C_EXCHANGE + attempt), fixed, hidden)
        if not lost:
            trip = (max(parameters[RTT] - parameters[JITTER], 0.0) - parameters[JITTER] * math.log(1.0 - left)) * 1e-3
            seconds += trip
            if attempt == 0:
                if link[0] == 0.0:
                    link[0], link[1] = trip, 0.5 * trip
                else:
                    link[1] = 0.75 * link[1] + 0.25 * abs(link[0] - trip)
                    link[0] = 0.875 * link[0] + 0.125 * trip
            plant.window[n] = min(8, plant.window[n] + 1)
            return seconds, True
        plant.window[n] = max(1, plant.window[n] // 2)
        seconds += min(max(link[0] + 4.0 * link[1], MIN_RTO) * 2.0**attempt, MAX_RTO)
    link[3] += 1.0
    return seconds, False


@inlined
def severity_at(n: int, t: float, hidden: Any) -> float:
    """True severity ``t`` seconds after the alarm."""
    return hidden.severity[n] + hidden.growth[n] * t


@inlined
def scan_offset(n: int, t: float, step: int, fixed: Any, hidden: Any) -> float:
    """Relative PLC scan-period offset: AR(2) state, periodic part, random spike, and the overload fault's own part."""
    parameters = fixed.parameters[n]
    offset = np.float64(hidden.offset[n, 0])
    if parameters[LOAD_CYCLE] != 0.0:
        offset += parameters[LOAD_CYCLE] * math.sin(_TWO_PI * t / parameters[LOAD_PERIOD])
    if uniform(bits(hidden.key[n], step, C_LOAD + 1)) < parameters[SPIKE_P]:
        offset += parameters[SPIKE]
    if hidden.mode[n] == PLC_OVERLOAD and hidden.repaired[n] == 0:
        offset += OVERLOAD_OFFSET
    return offset


@inlined
def advance_load(n: int, step: int, fixed: Any, hidden: Any) -> None:
    """One step of the AR(2) process 0.7, 0.2 (S4)."""
    noise = fixed.parameters[n, LOAD_SIGMA] * normal_high(bits(hidden.key[n], step, C_LOAD))
    previous = hidden.offset[n, 0]
    hidden.offset[n, 0] = np.float32(0.7) * previous + np.float32(0.2) * hidden.offset[n, 1] + noise
    hidden.offset[n, 1] = previous


@inlined
def _unit12(word: Any, field: Any) -> Any:
    return np.float32(np.int64((word >> field) & _LOW12)) * _TO_UNIT12


@inlined
def packet(
    n: int, machine: int, t: float, samples: Any, step: int, slot: int, offset: float,
    fixed: Any, hidden: Any, plant: Any, observation: Any,
) -> None:  # fmt: skip
    """Machine ``machine``'s readings as sent at ``t`` arrive: last reading and historian's mean are updated."""
    key = hidden.key[n]
    parameters = fixed.parameters[n]
    mode = hidden.mode[n]
    w0, w1, w2 = bits(key, step, slot), bits(key, step, slot + 1), bits(key, step, slot + 2)
    e0, e1, e2, e3, e4 = normal_high(w0), normal_low(w0), normal_high(w1), normal_low(w1), normal_high(w2)
    w3, w4, w5 = bits(key, step, slot + 3), bits(key, step, slot + 4), bits(key, step, slot + 5)
    s0, s1, s2, s3, s4 = normal_high(w3), normal_low(w3), normal_high(w4), normal_low(w4), normal_high(w5)
    noise = (s0, s1, s2, s3, s4)
    steps, spikes = bits(key, step, slot + 6), bits(key, step, slot + 7)
    signs, sticks = bits(key, step, slot + 8), bits(key, step, slot + 9)

    ratio = np.float32(0.0)
    if parameters[CYCLE] != 0.0:
        phase = uniform(bits(key, 0, C_PHASE)) + t / parameters[CYCLE_PERIOD]
        ratio = parameters[CYCLE] * np.float32(math.sin(_TWO_PI * phase))
    root = np.float32(1.0) / np.sqrt(samples)
    process = PROCESS_NOISE * root
    active = hidden.repaired[n] == 0
    steady = mode >= PHYSICAL_MODES
    fading = np.float32(1.0)
    if mode == FALSE_ALARM:
        fading = np.float32(math.exp(-t / TRANSIENT_SECONDS))
    kind = fixed.sensor_type[n]
    load = np.float32(offset)
    wander = np.float32(math.sqrt(t / 60.0))
    previous = plant.weight[n, machine]
    share = samples / (previous + samples)
    plant.weight[n, machine] = previous + samples
    plant.sent[n, machine] = t
    factor = fixed.healthy_factor
    jump = abs(
        hidden.base[n, machine * CHANNELS + CURRENT]
        + process * (factor[CURRENT, 0] * e0 + factor[CURRENT, 1] * e1 + factor[CURRENT, 2] * e2)
        + (hidden.effect[n, machine * CHANNELS + CURRENT] if active else np.float32(0.0))
    )
    impulse_p = min(parameters[IMPULSE_P] + parameters[COUPLING] * jump, np.float32(0.5)) * root
    for channel in range(CHANNELS):
        index = machine * CHANNELS + channel
        field = np.uint64(12 * channel)
        if previous > 0 and _unit12(sticks, field) < parameters[STUCK_P]:
            value = observation[O_READING + index]
        else:
            value = hidden.base[n, index]
            if active:
                strength = fading
                if not steady:
                    lagged = max(t - TYPE_LAG[kind, channel], 0.0)
                    grown = min(np.float32(severity_at(n, lagged, hidden)), np.float32(1.0))
                    strength = AMPLITUDE_LOW + AMPLITUDE_RISE * grown
                value += strength * hidden.effect[n, index]
            value += process * (
                factor[channel, 0] * e0 + factor[channel, 1] * e1 + factor[channel, 2] * e2
                + factor[channel, 3] * e3 + factor[channel, 4] * e4
            )  # fmt: skip
            value += LOAD_RESPONSE[channel] * load
            raised = ratio
            if _unit12(steps, field) < parameters[STEP_P]:
                raised += parameters[STEP]
            value += (value + FULL_SCALE[channel]) * raised
            value += (TYPE_NOISE[kind, channel] + parameters[SIGMA]) * root * noise[channel]
            value += hidden.drift[n, index] * wander
            if _unit12(spikes, field) < impulse_p:
                sign = np.float32(1.0) if (signs >> np.uint64(channel)) & _ONE else np.float32(-1.0)
                value += sign * parameters[IMPULSE] * root
        observation[O_READING + index] = value
        observation[O_MEAN + index] += (value - observation[O_MEAN + index]) * share
    observation[O_COUNT + machine] = np.float32(math.log2(1.0 + plant.weight[n, machine]))


@inlined
def poll(n: int, t: float, count: int, step: int, fixed: Any, hidden: Any, plant: Any, observation: Any) -> None:
    """The background poll at ``t``: ``count`` machines in turn send one packet each, which may be lost."""
    offset = scan_offset(n, t, step, fixed, hidden)
    heard = False
    for turn in range(count):
        machine = plant.pointer[n]
        plant.pointer[n] = (machine + 1) % fixed.machines[n]
        lost, _ = _lost(n, bits(hidden.key[n], step, C_POLL + turn), fixed, hidden)
        if lost:
            plant.window[n] = max(1, plant.window[n] // 2)
            continue
        heard = True
        slot = C_PACKET + 16 * machine
        packet(n, machine, t, np.float32(1.0), step, slot, offset, fixed, hidden, plant, observation)
    if heard:
        report_offset(n, offset, plant, observation)


@inlined
def report_offset(n: int, offset: float, plant: Any, observation: Any) -> None:
    """The PLC's own report of its scan offset, sent along with a packet."""
    plant.offset_sum[n] += offset
    plant.offset_count[n] += 1
    observation[O_PLC] = offset
    observation[O_PLC + 1] = plant.offset_sum[n] / plant.offset_count[n]
