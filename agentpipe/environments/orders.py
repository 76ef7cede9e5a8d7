"""Compiled: what the plant knows of orders, stock and people, in observation and mask. Public state only."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentpipe.environments import physics
from agentpipe.environments.jit import inlined
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
    ACTION_COUNT,
    DEPOTS,
    FALSE_ALARM,
    MACHINES,
    MAX_STEPS,
    MODES,
    PHYSICAL_MODES,
    TECHNICIANS,
    block_start,
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

O_AGE, O_LINK = block_start("age"), block_start("link")
O_SEGMENT, O_MACHINE, O_MODE = block_start("segment"), block_start("declared_machine"), block_start("declared_mode")
O_SEVERITY, O_DEPTH = block_start("severity"), block_start("depth")
O_STOCK, O_LEAD = block_start("stock"), block_start("lead")
O_TRAVEL, O_SKILLED = block_start("travel"), block_start("skilled")
O_DEPOT, O_TECHNICIAN, O_ORDER = block_start("depot"), block_start("technician"), block_start("order")
O_CLOCK = block_start("clock")
MODE_SLOTS = len(MODES)
MAX_ESCALATIONS = 3
PART_OF_MODE, SKILL_OF_MODE = physics.PART_OF_MODE, physics.SKILL_OF_MODE
PICK_SECONDS, SUPPLIER_SECONDS, EXPEDITE_FACTOR = (
    physics.PICK_SECONDS,
    physics.SUPPLIER_SECONDS,
    physics.EXPEDITE_FACTOR,
)


@inlined
def depot_seconds(n: int, depot: int, fixed: Any, plant: Any) -> float:
    """Time until the part that the declared mode needs is at the declared machine, taken from ``depot``."""
    order = plant.order[n]
    seconds = PICK_SECONDS + fixed.route[fixed.line[n], MACHINES + depot, order[ORDER_MACHINE]]
    if plant.stock[n, PART_OF_MODE[order[ORDER_MODE]], depot] == 0:
        seconds += SUPPLIER_SECONDS
    return seconds * EXPEDITE_FACTOR if order[ORDER_EXPEDITED] == 1 else seconds


@inlined
def technician_seconds(n: int, technician: int, now: float, fixed: Any, plant: Any) -> float:
    """Time until ``technician`` is at the declared machine."""
    order = plant.order[n]
    busy = max(plant.busy[n, technician] - now, 0.0)
    seconds = busy + fixed.route[fixed.line[n], plant.position[n, technician], order[ORDER_MACHINE]]
    return seconds * EXPEDITE_FACTOR if order[ORDER_EXPEDITED] == 1 else seconds


@inlined
def _one_hot(observation: Any, start: int, size: int, chosen: int) -> None:
    for index in range(size):
        observation[start + index] = 0.0
    if chosen >= 0:
        observation[start + chosen] = 1.0


@inlined
def _write_order(n: int, now: float, fixed: Any, plant: Any, visible: Any) -> None:
    observation = visible.observation[n]
    order = plant.order[n]
    _one_hot(observation, O_SEGMENT, 4, visible.segment[n])
    _one_hot(observation, O_MACHINE, MACHINES, order[ORDER_MACHINE])
    _one_hot(observation, O_MODE, MODE_SLOTS, order[ORDER_MODE])
    _one_hot(observation, O_SEVERITY, 3, order[ORDER_SEVERITY])
    _one_hot(observation, O_DEPTH, 3, order[ORDER_DEPTH])
    _one_hot(observation, O_DEPOT, DEPOTS, order[ORDER_DEPOT])
    _one_hot(observation, O_TECHNICIAN, TECHNICIANS, order[ORDER_TECHNICIAN])
    mode = order[ORDER_MODE]
    known = mode >= 0 and order[ORDER_MACHINE] >= 0 and visible.segment[n] < 3
    for depot in range(DEPOTS):
        observation[O_STOCK + depot] = plant.stock[n, PART_OF_MODE[mode], depot] if known else 0
        observation[O_LEAD + depot] = depot_seconds(n, depot, fixed, plant) / 60.0 if known else 0.0
    for technician in range(TECHNICIANS):
        seconds = technician_seconds(n, technician, now, fixed, plant) if known else 0.0
        observation[O_TRAVEL + technician] = seconds / 60.0
        skilled = known and (fixed.skills[fixed.line[n], technician] >> SKILL_OF_MODE[mode]) & 1 == 1
        observation[O_SKILLED + technician] = 1.0 if skilled else 0.0
    observation[O_ORDER] = order[ORDER_EXPEDITED]
    observation[O_ORDER + 1] = order[ORDER_STARTED]
    observation[O_ORDER + 2] = 1.0 if order[ORDER_VERIFIED] == 1 else 0.0
    observation[O_ORDER + 3] = 1.0 if order[ORDER_VERIFIED] == 2 else 0.0
    observation[O_ORDER + 4] = order[ORDER_ESCALATIONS]
    observation[O_ORDER + 5] = order[ORDER_RETRIES]


@inlined
def _write_mask(n: int, fixed: Any, plant: Any, visible: Any) -> None:
    mask = visible.mask[n]
    order = plant.order[n]
    for action in range(ACTION_COUNT):
        mask[action] = False
    machines = fixed.machines[n]
    segment = visible.segment[n]
    if segment == 0:
        for machine in range(machines):
            mask[machine] = True
            mask[A_MACHINE + machine] = order[ORDER_MACHINE] < 0
        if order[ORDER_MACHINE] >= 0:
            for mode in range(fixed.physical[0]):
                mask[A_MODE + mode] = True
            for mode in range(PHYSICAL_MODES, MODE_SLOTS):
                mask[A_MODE + mode] = True
        mask[A_MODE + FALSE_ALARM] = True
    elif segment == 1:
        mask[A_REJECT] = True
        if order[ORDER_MODE] != FALSE_ALARM:
            start = A_SEVERITY if order[ORDER_SEVERITY] < 0 else A_DEPTH
            for choice in range(3):
                mask[start + choice] = True
    elif segment == 2:
        for depot in range(DEPOTS):
            mask[A_DEPOT + depot] = order[ORDER_DEPOT] < 0
        for technician in range(TECHNICIANS):
            mask[A_TECHNICIAN + technician] = order[ORDER_TECHNICIAN] < 0
        mask[A_EXPEDITE] = order[ORDER_EXPEDITED] == 0
    else:
        started = order[ORDER_STARTED] == 1
        mask[A_START] = not started
        mask[A_VERIFY] = started and order[ORDER_VERIFIED] == 0
        mask[A_RETRY] = started and order[ORDER_VERIFIED] != 1 and order[ORDER_DEPTH] < 2
        mask[A_ESCALATE] = order[ORDER_VERIFIED] != 1 and order[ORDER_ESCALATIONS] < MAX_ESCALATIONS
        mask[A_CLOSE] = started


@inlined
def refresh(n: int, fixed: Any, plant: Any, visible: Any) -> None:
    """Brings everything but the readings up to date in environment ``n``'s observation and mask."""
    observation = visible.observation[n]
    now = plant.elapsed[n]
    for machine in range(MACHINES):
        observation[O_AGE + machine] = min(now - plant.sent[n, machine], 600.0) * 0.1
    link = plant.link[n]
    observation[O_LINK] = link[0]
    observation[O_LINK + 1] = link[1]
    observation[O_LINK + 2] = link[3] / max(link[2], 1.0)
    observation[O_CLOCK] = now / 60.0
    observation[O_CLOCK + 1] = (plant.deadline[n] - now) / 60.0
    observation[O_CLOCK + 2] = np.float32(1.0) - np.float32(plant.step[n]) / np.float32(MAX_STEPS)
    _write_order(n, now, fixed, plant, visible)
    _write_mask(n, fixed, plant, visible)
