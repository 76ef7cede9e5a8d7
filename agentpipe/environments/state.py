"""The arrays of a pool: what is fixed for each environment, what is hidden, and what a player sees.

Struct of arrays: one row an environment, every array contiguous, allocated once. The compiled kernels receive the three
tuples below; what a player sees is in :class:`Visible` alone, so the hidden state cannot leak by accident.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import (
    ACTION_COUNT,
    CHANNELS,
    DEPOTS,
    MACHINES,
    OBSERVATION_SIZE,
    PARTS,
    TECHNICIANS,
)

Array = npt.NDArray[Any]
READINGS: Final = MACHINES * CHANNELS

# Fields of a work order; the first six are -1 until decided.
ORDER_MACHINE, ORDER_MODE, ORDER_SEVERITY, ORDER_DEPTH, ORDER_DEPOT, ORDER_TECHNICIAN = range(6)
ORDER_EXPEDITED, ORDER_STARTED, ORDER_VERIFIED, ORDER_ESCALATIONS, ORDER_RETRIES = range(6, 11)
ORDER_FIELDS: Final = 11


class Fixed(NamedTuple):
    """What does not change within an episode. ``N`` environments, ``L`` lines, ``K`` fault modes of the profile.

    Where an environment ``waits``, its next episode begins with the disturbance of the ``next_`` arrays; their ``M`` is
    ``N`` for pools whose environments may be given another one, and 0 for all others.
    """

    root: Array  # u64[1] key of (seed, purpose)
    identity: Array  # u64[N] stable hash of the environment id
    line: Array  # i32[N] row of the per-line arrays
    topology: Array  # i8[N]
    machines: Array  # i8[N]
    sensor_type: Array  # i8[N]
    protocol: Array  # i8[N]
    own_mode: Array  # i8[N] the template's fault mode slot
    capacity: Array  # i8[N] packets that fit one poll cycle (Shannon and Hartley)
    parameters: Array  # f32[N, P] disturbance parameters
    fingerprint: Array  # u32[N] CRC-32 of the disturbance that they are
    compound: Array  # u8[N, 3] whose parameters they are, see agentpipe.environments.compound; 0 = the own row's
    waits: Array  # bool[N]
    next_capacity: Array  # i8[M]
    next_parameters: Array  # f32[M, P]
    next_fingerprint: Array  # u32[M]
    next_compound: Array  # u8[M, 3]
    route: Array  # f32[L, 11, 11] seconds
    gain: Array  # f32[L, 40]
    skills: Array  # u8[L, TECHNICIANS]
    feeds: Array  # f32[6, 8, 8]
    prevalence: Array  # f64[10] cumulative over the mode slots
    shift: Array  # f32[10, 5] mean shift of the faulty machine at full severity, healthy SDs
    down: Array  # f32[10, 5] shift of the machines it feeds
    up: Array  # f32[10, 5] shift of the machines that feed it
    healthy_factor: Array  # f32[5, 5] Cholesky factor of the healthy covariance
    mode_factor: Array  # f32[10, 5, 5] the same within each mode
    physical: Array  # i64[1] number of physical modes in use


class Hidden(NamedTuple):
    """The true state. Only the simulator, the oracle and the evaluation look at it."""

    key: Array  # u64[N]
    episode: Array  # i64[N]
    mode: Array  # i8[N] slot in layout.MODES
    machine: Array  # i8[N]
    channel: Array  # i8[N] the failed sensor's channel
    severity: Array  # f32[N] at the alarm
    growth: Array  # f32[N] per second
    base: Array  # f32[N, 40] operating point of this episode
    effect: Array  # f32[N, 40] fault pattern over the line at full amplitude
    drift: Array  # f32[N, 40] bias drift after one minute, healthy SDs
    offset: Array  # f32[N, 2] the last two AR(2) values
    burst: Array  # i8[N] Gilbert-Elliott state, 1 = bad
    repaired: Array  # i8[N] 1 = the true fault is gone
    botched: Array  # i8[N] right fault, not repaired: 1 = depth too shallow, 2 = nobody skilled, 3 = mishap
    touched: Array  # i8[N] 1 = some repair has been done


class Plant(NamedTuple):
    """What the plant itself knows: clocks, stock, people, the work order, link estimates. Public."""

    step: Array  # i32[N]
    elapsed: Array  # f64[N] seconds since the alarm
    deadline: Array  # f64[N] seconds
    next_poll: Array  # f64[N]
    pointer: Array  # i8[N] next machine to be polled
    window: Array  # i8[N] packets a poll may carry
    sent: Array  # f64[N, 8] when the last received packet of each machine was sent
    weight: Array  # f32[N, 8] samples behind the historian's mean
    offset_sum: Array  # f64[N]
    offset_count: Array  # i32[N]
    link: Array  # f64[N, 4] smoothed round trip, variation, exchanges, losses
    stock: Array  # i8[N, PARTS, DEPOTS]
    position: Array  # i8[N, TECHNICIANS] route node
    busy: Array  # f32[N, TECHNICIANS] seconds from the alarm until free
    order: Array  # i8[N, ORDER_FIELDS] the work order, see the ORDER_... indices
    part_at: Array  # f64[N]
    technician_at: Array  # f64[N]
    decision_seconds: Array  # f64[N]
    total: Array  # f64[N] return so far


class Visible(NamedTuple):
    """What a player sees, and what it is told after the step."""

    observation: Array  # f32[N, D]
    mask: Array  # bool[N, A]
    segment: Array  # i8[N]
    last_action: Array  # i64[N]
    time: Array  # f32[N] minutes since the alarm
    reward: Array  # f32[N]
    terminated: Array  # bool[N]
    truncated: Array  # bool[N]
    produced: Array  # u32[N] tokens that the step made, layout.TOKENS
    used: Array  # u32[N] tokens that it needed
    earned: Array  # bool[N] the reward is not just the running cost of time
    final_observation: Array  # f32[N, D]
    final_mask: Array  # bool[N, A]
    final_segment: Array  # i8[N]
    final_last_action: Array  # i64[N]
    final_time: Array  # f32[N]


class Result(NamedTuple):
    """The outcome of the episode that ended in this step; rows of other environments are stale."""

    success: Array  # bool[N]
    reason: Array  # i8[N]
    segment: Array  # i8[N]
    decisions: Array  # i32[N]
    decision_seconds: Array  # f32[N]
    elapsed_seconds: Array  # f32[N]
    mode: Array  # i8[N]
    machine: Array  # i8[N]
    total: Array  # f32[N]
    steps: Array  # i32[N]
    episode: Array  # i64[N]


def allocate_hidden(n: int) -> Hidden:
    """Zeroed hidden state of ``n`` environments."""
    return Hidden(
        key=np.zeros(n, np.uint64),
        episode=np.zeros(n, np.int64),
        mode=np.zeros(n, np.int8),
        machine=np.zeros(n, np.int8),
        channel=np.zeros(n, np.int8),
        severity=np.zeros(n, np.float32),
        growth=np.zeros(n, np.float32),
        base=np.zeros((n, READINGS), np.float32),
        effect=np.zeros((n, READINGS), np.float32),
        drift=np.zeros((n, READINGS), np.float32),
        offset=np.zeros((n, 2), np.float32),
        burst=np.zeros(n, np.int8),
        repaired=np.zeros(n, np.int8),
        botched=np.zeros(n, np.int8),
        touched=np.zeros(n, np.int8),
    )


def allocate_plant(n: int) -> Plant:
    """Zeroed plant state of ``n`` environments."""
    return Plant(
        step=np.zeros(n, np.int32),
        elapsed=np.zeros(n, np.float64),
        deadline=np.zeros(n, np.float64),
        next_poll=np.zeros(n, np.float64),
        pointer=np.zeros(n, np.int8),
        window=np.zeros(n, np.int8),
        sent=np.zeros((n, MACHINES), np.float64),
        weight=np.zeros((n, MACHINES), np.float32),
        offset_sum=np.zeros(n, np.float64),
        offset_count=np.zeros(n, np.int32),
        link=np.zeros((n, 4), np.float64),
        stock=np.zeros((n, PARTS, DEPOTS), np.int8),
        position=np.zeros((n, TECHNICIANS), np.int8),
        busy=np.zeros((n, TECHNICIANS), np.float32),
        order=np.zeros((n, ORDER_FIELDS), np.int8),
        part_at=np.zeros(n, np.float64),
        technician_at=np.zeros(n, np.float64),
        decision_seconds=np.zeros(n, np.float64),
        total=np.zeros(n, np.float64),
    )


def allocate_visible(n: int) -> Visible:
    """Zeroed player-side arrays of ``n`` environments."""
    return Visible(
        observation=np.zeros((n, OBSERVATION_SIZE), np.float32),
        mask=np.zeros((n, ACTION_COUNT), np.bool_),
        segment=np.zeros(n, np.int8),
        last_action=np.zeros(n, np.int64),
        time=np.zeros(n, np.float32),
        reward=np.zeros(n, np.float32),
        terminated=np.zeros(n, np.bool_),
        truncated=np.zeros(n, np.bool_),
        produced=np.zeros(n, np.uint32),
        used=np.zeros(n, np.uint32),
        earned=np.zeros(n, np.bool_),
        final_observation=np.zeros((n, OBSERVATION_SIZE), np.float32),
        final_mask=np.zeros((n, ACTION_COUNT), np.bool_),
        final_segment=np.zeros(n, np.int8),
        final_last_action=np.zeros(n, np.int64),
        final_time=np.zeros(n, np.float32),
    )


def allocate_result(n: int) -> Result:
    """Zeroed results of ``n`` environments."""
    return Result(
        success=np.zeros(n, np.bool_),
        reason=np.zeros(n, np.int8),
        segment=np.zeros(n, np.int8),
        decisions=np.zeros(n, np.int32),
        decision_seconds=np.zeros(n, np.float32),
        elapsed_seconds=np.zeros(n, np.float32),
        mode=np.zeros(n, np.int8),
        machine=np.zeros(n, np.int8),
        total=np.zeros(n, np.float32),
        steps=np.zeros(n, np.int32),
        episode=np.zeros(n, np.int64),
    )
