"""Compiled: what a step makes and what it needs, as bit sets of tokens (:data:`layout.TOKENS`).

From these the causal graph of an episode is made: a step depends on the steps that made what it used. "Evidence for m"
are the readings of machine m and of the machines that feed it or that it feeds. What stands behind a semicolon is
needed where it is there.

====================  ==========================================  ================================================
step                  makes                                       needs
====================  ==========================================  ================================================
``measure_m``         reading_m, plc_offset (if answered)         ; reopened
``declare_machine_m`` machine                                     evidence for m; reopened
``declare_<mode>``    mode                                        machine, evidence for it; reopened; with an overload
                                                                  plc_offset, with a false alarm every reading
``judge_<severity>``  severity                                    mode, machine, reading of the machine
``depth_<depth>``     depth                                       severity, mode
``reject_alarm``                                                  mode
``expedite``          expedite                                    depth
``reserve_depot_d``   part                                        machine, mode, depth; expedite
``technician_t``      technician                                  machine, mode, depth; expedite
``start``             repair                                      part, technician, machine, mode, depth
``verify``            verification, reading of the machine,       repair, machine
                      plc_offset (if answered)
``retry``             repair, depth                               repair, part, technician, depth; verification
``escalate``          reopened                                    machine, mode; verification
``close``                                                         repair; verification
any that waits        clock                                       clock, where the episode ends by it
====================  ==========================================  ================================================

A step *waits* when the line stands still for a part, a technician or a repair, or when its exchange was lost. The
clock is needed by the step at which an episode ends too late or in secondary damage. Readings that the background poll
brings belong to no step: the plant sends them whatever is done. What an escalation gives up is not named by a later
step until it is made anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import inlined
from agentpipe.environments.layout import (
    A_CLOSE,
    A_DEPOT,
    A_DEPTH,
    A_ESCALATE,
    A_EXPEDITE,
    A_MACHINE,
    A_MEASURE,
    A_MODE,
    A_REJECT,
    A_RETRY,
    A_SEVERITY,
    A_START,
    A_TECHNICIAN,
    A_VERIFY,
    ACTION_COUNT,
    FALSE_ALARM,
    PLC_OVERLOAD,
    TOKENS,
)
from agentpipe.environments.state import (
    ORDER_ESCALATIONS,
    ORDER_EXPEDITED,
    ORDER_MACHINE,
    ORDER_VERIFIED,
)

if TYPE_CHECKING:
    from agentpipe.environments.state import Fixed, Plant

_BIT = {token: 1 << bit for bit, token in enumerate(TOKENS)}
READING, PLC_OFFSET, MACHINE = _BIT["reading_0"], _BIT["plc_offset"], _BIT["machine"]
EXPEDITE, VERIFICATION, REOPENED, CLOCK = (
    _BIT[token] for token in ("expedite", "verification", "reopened", "clock")
)  # fmt: skip


def _table(tokens: dict[tuple[int, int], str]) -> npt.NDArray[np.int64]:
    """Bit sets by action; keys are the first action and the one behind the last."""
    table = np.zeros(ACTION_COUNT, np.int64)
    for (low, high), names in tokens.items():
        table[low:high] = sum(_BIT[name] for name in names.split())
    return table


_MADE: Final = _table(
    {
        (A_MEASURE, A_MACHINE): "plc_offset",
        (A_MACHINE, A_MODE): "machine",
        (A_MODE, A_SEVERITY): "mode",
        (A_SEVERITY, A_DEPTH): "severity",
        (A_DEPTH, A_REJECT): "depth",
        (A_DEPOT, A_TECHNICIAN): "part",
        (A_TECHNICIAN, A_EXPEDITE): "technician",
        (A_EXPEDITE, A_START): "expedite",
        (A_START, A_VERIFY): "repair",
        (A_VERIFY, A_RETRY): "verification plc_offset",
        (A_RETRY, A_ESCALATE): "repair depth",
        (A_ESCALATE, A_CLOSE): "reopened",
    }
)
_NEEDED: Final = _table(
    {
        (A_SEVERITY, A_DEPTH): "machine mode",
        (A_DEPTH, A_REJECT): "severity mode",
        (A_REJECT, A_DEPOT): "mode",
        (A_DEPOT, A_EXPEDITE): "machine mode depth",
        (A_EXPEDITE, A_START): "depth",
        (A_START, A_VERIFY): "part technician machine mode depth",
        (A_VERIFY, A_RETRY): "repair machine",
        (A_RETRY, A_ESCALATE): "repair part technician depth",
        (A_ESCALATE, A_CLOSE): "machine mode",
        (A_CLOSE, ACTION_COUNT): "repair",
    }
)


@inlined
def _evidence(n: int, machine: int, fixed: Fixed) -> int:
    """Readings of ``machine`` and of its neighbours in the flow of material."""
    feeds = fixed.feeds[fixed.topology[n]]
    tokens = READING << machine
    for other in range(fixed.machines[n]):
        if feeds[machine, other] != 0.0 or feeds[other, machine] != 0.0:
            tokens |= READING << other
    return tokens


@inlined
def _diagnosis(n: int, action: int, fixed: Fixed, plant: Plant) -> int:
    """What an action of the first segment needs."""
    order = plant.order[n]
    tokens = REOPENED if order[ORDER_ESCALATIONS] > 0 else 0
    if action < A_MACHINE:
        return tokens
    if action < A_MODE:
        return tokens | _evidence(n, action - A_MACHINE, fixed)
    machine = order[ORDER_MACHINE]
    if machine >= 0:
        tokens |= MACHINE | _evidence(n, machine, fixed)
    if action == A_MODE + PLC_OVERLOAD:
        tokens |= PLC_OFFSET
    if action == A_MODE + FALSE_ALARM:
        tokens |= (READING << fixed.machines[n]) - READING
    return tokens


@inlined
def needed(n: int, action: int, fixed: Fixed, plant: Plant) -> int:
    """Tokens that ``action`` needs, given the order before it; the clock apart."""
    if action < A_SEVERITY:
        return _diagnosis(n, action, fixed, plant)
    order = plant.order[n]
    tokens = _NEEDED[action]
    if action < A_DEPTH:
        tokens |= READING << order[ORDER_MACHINE]
    elif A_DEPOT <= action < A_EXPEDITE and order[ORDER_EXPEDITED] == 1:
        tokens |= EXPEDITE
    elif action >= A_RETRY and order[ORDER_VERIFIED] != 0:
        tokens |= VERIFICATION
    return tokens


@inlined
def made(n: int, action: int, delivered: bool, waited: bool, plant: Plant) -> int:  # noqa: FBT001 - positional in numba
    """Tokens that ``action`` made; ``delivered``: its exchange was answered, ``waited``: the line stood for it."""
    asks = action < A_MACHINE or action == A_VERIFY
    tokens = 0
    if delivered or not asks:
        tokens |= _MADE[action]
    if delivered and asks:
        tokens |= READING << (action if action < A_MACHINE else plant.order[n, ORDER_MACHINE])
    if waited or not delivered:
        tokens |= CLOCK
    return tokens
