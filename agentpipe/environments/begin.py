"""Compiled: the alarm. Draws an episode's hidden state and takes the line's first snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentpipe.environments import physics
from agentpipe.environments.jit import inlined
from agentpipe.environments.layout import (
    ACTION_COUNT,
    CHANNELS,
    DEPOTS,
    FALSE_ALARM,
    MACHINES,
    PARTS,
    PHYSICAL_MODES,
    PLC_OVERLOAD,
    SENSOR_FAILURE,
    SKILLS,
    TECHNICIANS,
    block_start,
)
from agentpipe.environments.orders import PICK_SECONDS, SUPPLIER_SECONDS, refresh
from agentpipe.environments.rng import bits, episode_key, normal_high, normal_low, uniform
from agentpipe.environments.sense import C_EPISODE, DRIFT, LOAD_SIGMA, poll
from agentpipe.environments.state import ORDER_EXPEDITED

O_PRESENT, O_TOPOLOGY, O_LINK = block_start("present"), block_start("topology"), block_start("link")
OPERATING_SCATTER = np.float32(physics.OPERATING_SCATTER)
OVERLOAD_GAIN = np.float32(physics.OVERLOAD_GAIN)
LOAD_RESPONSE, POLL_SECONDS = physics.LOAD_RESPONSE, physics.POLL_SECONDS
LONGEST_REPAIR = float(physics.REPAIR_SECONDS[-1])
OWN_MODE = physics.OWN_MODE_PROBABILITY
UNHEARD_SECONDS = 60.0

# Channels of the draws made once an episode; blocks of 40 hold one draw for each reading.
D_MODE, D_MACHINE, D_SEVERITY, D_CHANNEL = C_EPISODE, C_EPISODE + 1, C_EPISODE + 2, C_EPISODE + 3
D_DEADLINE, D_LOAD, D_GROWTH, D_LIKE = C_EPISODE + 4, C_EPISODE + 5, C_EPISODE + 6, C_EPISODE + 7
D_BASE, D_DRIFT, D_STOCK, D_PEOPLE, D_SIGNATURE = (C_EPISODE + start for start in (32, 128, 224, 256, 300))


@inlined
def _draw_fault(n: int, fixed: Any, hidden: Any) -> None:
    key = hidden.key[n]
    word = bits(key, 0, D_MODE)
    own = fixed.own_mode[n]
    physical = fixed.physical[0]
    hidden.machine[n] = int(uniform(bits(key, 0, D_MACHINE)) * fixed.machines[n])
    if uniform(word) < OWN_MODE:
        hidden.mode[n] = own if own >= PHYSICAL_MODES else own % physical
        return
    drawn = uniform(bits(key, 0, D_LIKE + 1))
    mode = 0
    while mode < FALSE_ALARM and drawn >= fixed.prevalence[mode]:
        mode += 1
    hidden.mode[n] = mode


@inlined
def _write_effect(n: int, fixed: Any, hidden: Any) -> None:
    effect = hidden.effect[n]
    effect[:] = 0.0
    key = hidden.key[n]
    mode, machine = hidden.mode[n], hidden.machine[n]
    at = machine * CHANNELS
    if mode == SENSOR_FAILURE:
        channel = int(uniform(bits(key, 0, D_CHANNEL)) * CHANNELS)
        hidden.channel[n] = channel
        word = bits(key, 0, D_CHANNEL + 8)
        size = np.float32(2.0 + 3.0 * uniform(word))
        effect[at + channel] = size if word & np.uint64(1) else -size
        return
    if mode == PLC_OVERLOAD:
        for channel in range(CHANNELS):
            effect[at + channel] = OVERLOAD_GAIN * LOAD_RESPONSE[channel]
        return
    like = mode
    if mode == FALSE_ALARM:  # a passing disturbance that looked like one of the physical modes
        like = int(uniform(bits(key, 0, D_LIKE)) * fixed.physical[0])
    gain = fixed.gain[fixed.line[n]]
    feeds = fixed.feeds[fixed.topology[n]]
    for channel in range(CHANNELS):
        effect[at + channel] = fixed.shift[like, channel] * gain[at + channel]
    if mode == FALSE_ALARM:
        return
    for other in range(fixed.machines[n]):
        downstream, upstream = feeds[machine, other], feeds[other, machine]
        if downstream == 0.0 and upstream == 0.0:
            continue
        for channel in range(CHANNELS):
            index = other * CHANNELS + channel
            spread = downstream * fixed.down[like, channel] + upstream * fixed.up[like, channel]
            effect[index] += spread * gain[index]


@inlined
def _write_base(n: int, fixed: Any, hidden: Any) -> None:
    key = hidden.key[n]
    mode = hidden.mode[n]
    base = hidden.base[n]
    for machine in range(fixed.machines[n]):
        at, slot = machine * CHANNELS, D_BASE + 4 * machine
        w0, w1, w2 = bits(key, 0, slot), bits(key, 0, slot + 1), bits(key, 0, slot + 2)
        e0, e1, e2 = normal_high(w0), normal_low(w0), normal_high(w1)
        e3, e4 = normal_low(w1), normal_high(w2)
        faulty = machine == hidden.machine[n] and mode < PHYSICAL_MODES
        factor = fixed.mode_factor[mode] if faulty else fixed.healthy_factor
        for channel in range(CHANNELS):
            base[at + channel] = OPERATING_SCATTER * (
                factor[channel, 0] * e0 + factor[channel, 1] * e1 + factor[channel, 2] * e2
                + factor[channel, 3] * e3 + factor[channel, 4] * e4
            )  # fmt: skip
    sigma = fixed.parameters[n, DRIFT]
    drift = hidden.drift[n]
    if sigma == 0.0:
        drift[:] = 0.0
        return
    for pair in range(fixed.machines[n] * CHANNELS // 2 + 1):
        word = bits(key, 0, D_DRIFT + pair)
        if 2 * pair < drift.shape[0]:
            drift[2 * pair] = sigma * normal_high(word)
            drift[2 * pair + 1] = sigma * normal_low(word)


@inlined
def _draw_plant(n: int, fixed: Any, hidden: Any, plant: Any) -> None:
    """Stock, people and deadline: drawn without looking at the fault."""
    key = hidden.key[n]
    for part in range(PARTS):
        word = bits(key, 0, D_STOCK + part)
        sure = int(uniform(word) * DEPOTS)
        for depot in range(DEPOTS):
            level = (word >> np.uint64(4 * depot)) & np.uint64(3)
            plant.stock[n, part, depot] = 1 if depot == sure else max(int(level) - 1, 0)
    for technician in range(TECHNICIANS):
        word = bits(key, 0, D_PEOPLE + technician)
        plant.position[n, technician] = int(uniform(word) * fixed.machines[n])
        free = (word & np.uint64(1)) == np.uint64(0)
        share = np.float32(np.int64((word >> np.uint64(1)) & np.uint64(1023))) / np.float32(1024.0)
        plant.busy[n, technician] = np.float32(0.0) if free else np.float32(60.0) * share
    slack = uniform(bits(key, 0, D_DEADLINE))
    plant.deadline[n] = (_worst_order(n, fixed, plant) + LONGEST_REPAIR + 25.0) * (1.0 + slack)


@inlined
def _worst_order(n: int, fixed: Any, plant: Any) -> float:
    """Longest over machines, parts and skills of the shortest time to have part and technician there."""
    route = fixed.route[fixed.line[n]]
    skills = fixed.skills[fixed.line[n]]
    worst = 0.0
    for machine in range(fixed.machines[n]):
        for part in range(PARTS):
            best = 1e9
            for depot in range(DEPOTS):
                seconds = PICK_SECONDS + route[MACHINES + depot, machine]
                if plant.stock[n, part, depot] == 0:
                    seconds += SUPPLIER_SECONDS
                best = min(best, seconds)
            worst = max(worst, best)
        for skill in range(SKILLS):
            best = 1e9
            for technician in range(TECHNICIANS):
                if (skills[technician] >> skill) & 1:
                    best = min(best, plant.busy[n, technician] + route[plant.position[n, technician], machine])
            worst = max(worst, best)
    return worst


@inlined
def _take_over(n: int, fixed: Any) -> None:
    """The disturbance that waits for environment ``n`` is in force from now on."""
    fixed.waits[n] = False
    fixed.capacity[n] = fixed.next_capacity[n]
    fixed.fingerprint[n] = fixed.next_fingerprint[n]
    for index in range(fixed.parameters.shape[1]):
        fixed.parameters[n, index] = fixed.next_parameters[n, index]
    for kind in range(fixed.compound.shape[1]):
        fixed.compound[n, kind] = fixed.next_compound[n, kind]


@inlined
def begin(n: int, episode: int, fixed: Any, hidden: Any, plant: Any, visible: Any) -> None:
    """Begins ``episode`` in environment ``n``: all follows from root key, environment, episode and disturbance."""
    if fixed.waits[n]:
        _take_over(n, fixed)
    key = episode_key(fixed.root[0], fixed.identity[n], episode)
    hidden.key[n] = key
    hidden.episode[n] = episode
    hidden.repaired[n] = 0
    hidden.botched[n] = 0
    hidden.touched[n] = 0
    hidden.burst[n] = 0
    _draw_fault(n, fixed, hidden)
    _write_effect(n, fixed, hidden)
    _write_base(n, fixed, hidden)
    _draw_plant(n, fixed, hidden, plant)
    hidden.severity[n] = 0.1 + 0.7 * uniform(bits(key, 0, D_SEVERITY))
    horizon = (plant.deadline[n] - 0.0) * (0.75 + 1.25 * uniform(bits(key, 0, D_GROWTH)))
    hidden.growth[n] = (1.0 - hidden.severity[n]) / horizon
    word = bits(key, 0, D_LOAD)
    sigma = np.float32(2.1) * fixed.parameters[n, LOAD_SIGMA]  # stationary spread of the AR(2) process
    hidden.offset[n, 0] = sigma * normal_high(word)
    hidden.offset[n, 1] = hidden.offset[n, 0]

    plant.step[n] = 0
    plant.elapsed[n] = 0.0
    cycle = np.float64(POLL_SECONDS[fixed.protocol[n]])
    plant.next_poll[n] = cycle
    plant.pointer[n] = 0
    plant.window[n] = 8
    plant.sent[n, :] = -UNHEARD_SECONDS
    plant.weight[n, :] = 0.0
    plant.offset_sum[n] = 0.0
    plant.offset_count[n] = 0
    plant.link[n, :] = 0.0
    plant.order[n, :ORDER_EXPEDITED] = -1
    plant.order[n, ORDER_EXPEDITED:] = 0
    plant.part_at[n] = 0.0
    plant.technician_at[n] = 0.0
    plant.decision_seconds[n] = 0.0
    plant.total[n] = 0.0

    observation = visible.observation[n]
    observation[:] = 0.0
    for machine in range(fixed.machines[n]):
        observation[O_PRESENT + machine] = 1.0
    observation[O_TOPOLOGY + fixed.topology[n]] = 1.0
    observation[O_LINK + 3] = cycle
    visible.segment[n] = 0
    visible.last_action[n] = ACTION_COUNT
    visible.time[n] = 0.0
    poll(n, 0.0, fixed.machines[n], 0, fixed, hidden, plant, observation)
    refresh(n, fixed, plant, visible)
