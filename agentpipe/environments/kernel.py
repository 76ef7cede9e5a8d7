"""Compiled: one decision of one environment, from the clock to the reward; :func:`run` steps a slice of a pool."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentpipe.environments import physics
from agentpipe.environments.begin import begin
from agentpipe.environments.jit import entry, inlined
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
    FALSE_ALARM,
    MAX_STEPS,
    PHYSICAL_MODES,
    SENSOR_FAILURE,
    block_start,
)
from agentpipe.environments.orders import depot_seconds, refresh, technician_seconds
from agentpipe.environments.rng import bits, uniform
from agentpipe.environments.sense import (
    BURST_SAMPLES,
    C_MEASURE,
    C_PLAYER,
    C_REPAIR,
    C_VERIFY,
    advance_load,
    exchange,
    packet,
    poll,
    report_offset,
    scan_offset,
    severity_at,
)
from agentpipe.environments.state import (
    ORDER_DEPOT,
    ORDER_DEPTH,
    ORDER_ESCALATIONS,
    ORDER_EXPEDITED,
    ORDER_MACHINE,
    ORDER_MODE,
    ORDER_RETRIES,
    ORDER_SEVERITY,
    ORDER_STARTED,
    ORDER_TECHNICIAN,
    ORDER_VERIFIED,
)
from agentpipe.environments.tokens import CLOCK, made, needed

(SUCCESS, WRONG_DIAGNOSIS, WRONG_DEPTH, LATE, SECONDARY, FALSE_REJECTION, NEEDLESS, STEP_LIMIT) = range(8)
UNSKILLED, REPAIR_FAILED = 8, 9
GOES_ON = -1
O_TRIED = block_start("tried")
POLL_SECONDS, REPAIR_SECONDS = physics.POLL_SECONDS, physics.REPAIR_SECONDS
PART_OF_MODE, SKILL_OF_MODE = physics.PART_OF_MODE, physics.SKILL_OF_MODE
LOW_LIMIT, HIGH_LIMIT = physics.SEVERITY_LIMITS
ACTION_SECONDS, BURST_CYCLE_SHARE = physics.ACTION_SECONDS, physics.BURST_CYCLE_SHARE
MISHAP = physics.MISHAP_PROBABILITY
POLL_SHARE = physics.POLL_SHARE


@inlined
def level(severity: float) -> int:
    """0 low, 1 medium, 2 high."""
    if severity < LOW_LIMIT:
        return 0
    return 1 if severity < HIGH_LIMIT else 2


@inlined
def depth_needed(mode: int, severity: float) -> int:
    """The shallowest repair that removes ``mode`` at ``severity``: 0 adjust, 1 repair, 2 replace."""
    if mode < PHYSICAL_MODES:
        return level(severity)
    return 2 if mode == SENSOR_FAILURE else 0


@inlined
def _identify(n: int, action: int, hidden: Any, plant: Any, visible: Any) -> float:
    order = plant.order[n]
    first = order[ORDER_ESCALATIONS] == 0
    if action < A_MODE:
        machine = action - A_MACHINE
        order[ORDER_MACHINE] = machine
        if hidden.mode[n] == FALSE_ALARM:
            return -0.1
        if not first:
            return 0.0
        return 0.5 if machine == hidden.machine[n] else -0.5
    mode = action - A_MODE
    order[ORDER_MODE] = mode
    visible.segment[n] = 1
    if not first:
        return 0.0
    return 0.5 if mode == hidden.mode[n] else -0.5


@inlined
def _assess(n: int, action: int, now: float, hidden: Any, plant: Any, visible: Any) -> float:
    order = plant.order[n]
    mode = hidden.mode[n]
    if action < A_DEPTH:
        order[ORDER_SEVERITY] = action - A_SEVERITY
        if mode >= PHYSICAL_MODES:
            return 0.0
        miss = abs(order[ORDER_SEVERITY] - level(severity_at(n, now, hidden)))
        return 0.2 - 0.2 * miss
    order[ORDER_DEPTH] = action - A_DEPTH
    visible.segment[n] = 2
    if mode == FALSE_ALARM or order[ORDER_ESCALATIONS] > 0:
        return 0.0
    excess = order[ORDER_DEPTH] - depth_needed(mode, severity_at(n, now + 40.0, hidden))
    if excess < 0:
        return -0.5
    return 0.3 - 0.15 * excess


@inlined
def _dispatch(n: int, action: int, now: float, fixed: Any, plant: Any, visible: Any) -> float:
    order = plant.order[n]
    if action == A_EXPEDITE:
        order[ORDER_EXPEDITED] = 1
        return -0.3
    reward = 0.0
    if action < A_TECHNICIAN:
        depot = action - A_DEPOT
        seconds = depot_seconds(n, depot, fixed, plant)
        order[ORDER_DEPOT] = depot
        plant.part_at[n] = now + seconds
        part = PART_OF_MODE[order[ORDER_MODE]]
        plant.stock[n, part, depot] = max(plant.stock[n, part, depot] - 1, 0)
        reward = -0.1 * seconds / 60.0
    else:
        technician = action - A_TECHNICIAN
        seconds = technician_seconds(n, technician, now, fixed, plant)
        order[ORDER_TECHNICIAN] = technician
        plant.technician_at[n] = now + seconds
        reward = -0.1 * seconds / 60.0
        if not _skilled(n, technician, fixed, plant):
            reward -= 0.5
    if order[ORDER_DEPOT] >= 0 and order[ORDER_TECHNICIAN] >= 0:
        visible.segment[n] = 3
    return reward


@inlined
def _skilled(n: int, technician: int, fixed: Any, plant: Any) -> bool:
    skill = SKILL_OF_MODE[plant.order[n, ORDER_MODE]]
    return (fixed.skills[fixed.line[n], technician] >> skill) & 1 == 1


@inlined
def _repair(n: int, start: float, step: int, fixed: Any, hidden: Any, plant: Any) -> float:
    """Does the ordered repair from ``start`` on; returns when it ends."""
    order = plant.order[n]
    mode = hidden.mode[n]
    hidden.touched[n] = 1
    right = order[ORDER_MACHINE] == hidden.machine[n] and order[ORDER_MODE] == mode
    if right and mode != FALSE_ALARM and hidden.repaired[n] == 0:
        enough = order[ORDER_DEPTH] >= depth_needed(mode, severity_at(n, start, hidden))
        if mode < PHYSICAL_MODES and severity_at(n, start, hidden) >= 1.0:
            enough = False
        if not _skilled(n, order[ORDER_TECHNICIAN], fixed, plant):
            hidden.botched[n] = 2
        elif not enough:
            hidden.botched[n] = 1
        elif uniform(bits(hidden.key[n], step, C_REPAIR)) < MISHAP:
            hidden.botched[n] = 3
        else:
            hidden.repaired[n] = 1
            hidden.botched[n] = 0
    return start + REPAIR_SECONDS[order[ORDER_DEPTH]]


@inlined
def _escalate(n: int, plant: Any, visible: Any) -> None:
    order = plant.order[n]
    if order[ORDER_VERIFIED] == 2:
        visible.observation[n, O_TRIED + order[ORDER_MACHINE]] = 1.0
        visible.observation[n, O_TRIED + 8 + order[ORDER_MODE]] = 1.0
    escalations = order[ORDER_ESCALATIONS] + 1
    order[:ORDER_EXPEDITED] = -1
    order[ORDER_EXPEDITED:] = 0
    order[ORDER_ESCALATIONS] = escalations
    visible.segment[n] = 0


@inlined
def _closing(n: int, hidden: Any) -> int:
    if hidden.repaired[n] == 1:
        return SUCCESS
    if hidden.mode[n] == FALSE_ALARM:
        return NEEDLESS
    botched = hidden.botched[n]
    if botched == 1:
        return WRONG_DEPTH
    if botched == 2:
        return UNSKILLED
    return REPAIR_FAILED if botched == 3 else WRONG_DIAGNOSIS


@inlined
def _finish(n: int, reason: int, segment: int, hidden: Any, plant: Any, visible: Any, result: Any) -> None:
    if reason in (WRONG_DIAGNOSIS, FALSE_REJECTION, NEEDLESS):
        segment = 0
    elif reason == WRONG_DEPTH:
        segment = 1
    elif reason == UNSKILLED:
        segment = 2
    result.success[n] = reason == SUCCESS
    result.reason[n] = reason
    result.segment[n] = segment
    result.decisions[n] = plant.step[n]
    result.decision_seconds[n] = plant.decision_seconds[n]
    result.elapsed_seconds[n] = plant.elapsed[n]
    result.mode[n] = hidden.mode[n]
    result.machine[n] = hidden.machine[n]
    result.total[n] = plant.total[n]
    result.steps[n] = plant.step[n]
    result.episode[n] = hidden.episode[n]
    visible.terminated[n] = reason != STEP_LIMIT
    visible.truncated[n] = reason == STEP_LIMIT
    for index in range(visible.observation.shape[1]):
        visible.final_observation[n, index] = visible.observation[n, index]
    for index in range(visible.mask.shape[1]):
        visible.final_mask[n, index] = visible.mask[n, index]
    visible.final_segment[n] = visible.segment[n]
    visible.final_last_action[n] = visible.last_action[n]
    visible.final_time[n] = visible.time[n]


@inlined
def step_one(n: int, action: int, fixed: Any, hidden: Any, plant: Any, visible: Any, result: Any) -> None:
    """Takes ``action`` in environment ``n``; on the episode's end the next one begins in the same step."""
    plant.step[n] += 1
    step = plant.step[n]
    segment = visible.segment[n]
    observation = visible.observation[n]
    order = plant.order[n]
    used = needed(n, action, fixed, plant)
    advance_load(n, step, fixed, hidden)
    before = plant.elapsed[n]
    cycle = np.float64(POLL_SECONDS[fixed.protocol[n]])
    seconds, delivered = exchange(n, step, fixed, hidden, plant)
    seconds += ACTION_SECONDS
    if action < A_MACHINE:
        seconds += max(plant.next_poll[n] - before, 0.0) + BURST_CYCLE_SHARE * cycle
    now = before + seconds
    cost = -0.01 - 0.004 * seconds
    reward = cost
    reason = GOES_ON
    physical_wait = 0.0

    if action < A_MACHINE:
        if delivered:
            offset = scan_offset(n, now, step, fixed, hidden)
            packet(n, action, now, BURST_SAMPLES, step, C_MEASURE, offset, fixed, hidden, plant, observation)
            report_offset(n, offset, plant, observation)
    elif segment == 0:
        reward += _identify(n, action, hidden, plant, visible)
    elif action == A_REJECT:
        reason = SUCCESS if hidden.mode[n] == FALSE_ALARM else FALSE_REJECTION
    elif segment == 1:
        reward += _assess(n, action, now, hidden, plant, visible)
    elif segment == 2:
        reward += _dispatch(n, action, now, fixed, plant, visible)
    elif action in (A_START, A_RETRY):
        begun = max(now, plant.part_at[n], plant.technician_at[n])
        if action == A_RETRY:
            order[ORDER_DEPTH] += 1
            order[ORDER_RETRIES] += 1
            reward -= 0.3
        already = hidden.repaired[n]
        ended = _repair(n, begun, step, fixed, hidden, plant)
        physical_wait = ended - now
        if hidden.repaired[n] > already:
            reward += 1.0
        order[ORDER_STARTED] = 1
        order[ORDER_VERIFIED] = 0
    elif action == A_VERIFY:
        if delivered:
            healthy = hidden.repaired[n] == 1 or hidden.mode[n] == FALSE_ALARM
            order[ORDER_VERIFIED] = 1 if healthy else 2
            offset = scan_offset(n, now, step, fixed, hidden)
            machine = order[ORDER_MACHINE]
            packet(n, machine, now, BURST_SAMPLES, step, C_VERIFY, offset, fixed, hidden, plant, observation)
            report_offset(n, offset, plant, observation)
    elif action == A_ESCALATE:
        reward -= 0.3
        _escalate(n, plant, visible)
    elif action == A_CLOSE:
        reason = _closing(n, hidden)

    now += physical_wait
    plant.elapsed[n] = now
    plant.decision_seconds[n] += seconds
    reward -= 0.001 * physical_wait
    cost -= 0.001 * physical_wait
    failing = hidden.mode[n] < PHYSICAL_MODES and hidden.repaired[n] == 0
    if failing and severity_at(n, now, hidden) >= 1.0 and reason != SUCCESS:
        reason = SECONDARY
    elif now > plant.deadline[n]:
        reason = LATE
    if reason == GOES_ON and step >= MAX_STEPS:
        reason = STEP_LIMIT

    if now >= plant.next_poll[n]:
        count = min(fixed.capacity[n], plant.window[n], POLL_SHARE)
        poll(n, now, count, step, fixed, hidden, plant, observation)
        plant.next_poll[n] = now + cycle - (now - plant.next_poll[n]) % cycle
    visible.last_action[n] = action
    visible.time[n] = now / 60.0
    if reason == SUCCESS:
        reward += 4.0
    elif reason == SECONDARY:
        reward -= 4.0
    elif reason != GOES_ON:
        reward -= 3.0
    visible.reward[n] = reward
    visible.earned[n] = reward != cost
    if reason in (LATE, SECONDARY):
        used |= CLOCK
    visible.used[n] = used
    visible.produced[n] = made(n, action, delivered, physical_wait > 0.0, plant)
    plant.total[n] += reward
    refresh(n, fixed, plant, visible)
    if reason == GOES_ON:
        visible.terminated[n] = False
        visible.truncated[n] = False
        return
    _finish(n, reason, segment, hidden, plant, visible, result)
    begin(n, hidden.episode[n] + 1, fixed, hidden, plant, visible)


@entry
def run(low: int, high: int, actions: Any, fixed: Any, hidden: Any, plant: Any, visible: Any, result: Any) -> int:
    """Steps environments ``low`` to ``high``; returns -1, or the first environment whose action is illegal.

    Legality is checked for the whole slice before anything changes.
    """
    count = visible.mask.shape[1]
    for n in range(low, high):
        if actions[n] < 0 or actions[n] >= count or not visible.mask[n, actions[n]]:
            return n
    for n in range(low, high):
        step_one(n, actions[n], fixed, hidden, plant, visible, result)
    return -1


@entry
def run_begin(low: int, high: int, episodes: Any, fixed: Any, hidden: Any, plant: Any, visible: Any) -> None:
    """Begins episode ``episodes[n]`` in environments ``low`` to ``high``."""
    for n in range(low, high):
        visible.reward[n] = 0.0
        visible.terminated[n] = False
        visible.truncated[n] = False
        visible.produced[n] = 0
        visible.used[n] = 0
        visible.earned[n] = False
        begin(n, episodes[n], fixed, hidden, plant, visible)


@entry
def run_uniforms(low: int, high: int, channel: int, hidden: Any, plant: Any, out: Any) -> None:
    """Fills ``out`` with one uniform an environment, keyed by its episode, its next step and ``channel`` (0 ... 31)."""
    for n in range(low, high):
        out[n] = uniform(bits(hidden.key[n], plant.step[n] + 1, C_PLAYER + channel))
