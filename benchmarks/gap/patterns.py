"""The hypotheses: which machine has which fault, how severe, and what each machine of the line would then look like."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments import physics
from agentpipe.environments.geometry import downstream_matrices
from agentpipe.environments.layout import (
    CHANNELS,
    FALSE_ALARM,
    MACHINES,
    MODES,
    PHYSICAL_MODES,
    PLC_OVERLOAD,
    SENSOR_FAILURE,
)
from benchmarks.gap.filter import CONSTANT, FADING, GROWING

SEVERITIES: Final = 6
"""equal parts of the range of severities at the alarm"""
SIZES: Final = (2.5, 3.5, 4.5)
"""shifts of a failed sensor, each with the spread of a third of their range"""
CASES: Final = max(SEVERITIES, 2 * CHANNELS * len(SIZES), PHYSICAL_MODES)
PAIRS: Final = MACHINES * len(MODES)
SIZE_VARIANCE, GAIN_VARIANCE = 1.0 / 12.0, 0.3**2 / 12.0
"""of a uniform number of width 1, and of a machine's own gain (0.85 to 1.15)"""


class Patterns(NamedTuple):
    """P patterns, those of one machine together, its healthy one first."""

    start: npt.NDArray[np.int64]
    """i64[machines + 1]: those of machine j are ``start[j]`` to ``start[j + 1]``"""
    machine: npt.NDArray[np.int64]
    """i64[P] whose readings"""
    hypothesis: npt.NDArray[np.int64]
    """i64[P]: ``(faulty machine * modes + mode) * CASES + case``, or -1 where it is healthy"""
    kind: npt.NDArray[np.int64]
    """i64[P] constant, growing or fading"""
    effect: npt.NDArray[np.float64]
    """f64[P, 5] shift at full strength, of a machine of gain 1"""
    severity: npt.NDArray[np.float64]
    """f64[P] at the alarm"""
    mode: npt.NDArray[np.int64]
    """i64[P] whose covariance the operating point has, -1: the healthy one"""
    geared: npt.NDArray[np.bool_]
    """bool[P]: the machine's own gain acts on the shift"""
    extra: npt.NDArray[np.float64]
    """f64[P, 5] variance of the operating point besides"""


def severity_of(case: int) -> float:
    """Middle of the part ``case`` of the range 0.1 to 0.8 of severities at the alarm."""
    return 0.1 + 0.7 * (case + 0.5) / SEVERITIES


def log_priors(modes: npt.NDArray[np.float64], machines: int) -> npt.NDArray[np.float64]:
    """f64[machines * modes, CASES]: log of each case's probability before anything is received, -inf where unused.

    Args:
        modes: f64[modes] how often each occurs.
        machines: of the line, all alike.
    """
    cases = np.ones(len(MODES), np.int64)
    cases[:PHYSICAL_MODES] = SEVERITIES
    cases[SENSOR_FAILURE], cases[FALSE_ALARM] = 2 * CHANNELS * len(SIZES), PHYSICAL_MODES
    used = np.arange(CASES) < cases[:, None]
    with np.errstate(divide="ignore"):
        one = np.where(used, np.log(modes / (machines * cases))[:, None], -np.inf)
    return np.tile(one, (machines, 1))


def line_patterns(
    topology: int, machines: int, physical: int, signatures: tuple[npt.NDArray[np.float32], ...]
) -> Patterns:
    """The patterns of a line.

    Args:
        topology: index into ``layout.TOPOLOGIES``.
        machines: of the line.
        physical: fault modes of the profile.
        signatures: shift of the faulty machine, of those it feeds, of those that feed it, each f32[modes, 5].
    """
    feeds = downstream_matrices()[topology].astype(np.float64)
    shift, down, up = (part.astype(np.float64) for part in signatures)
    found: list[_Row] = []
    for j in range(machines):
        found.append(_Row(j, -1, CONSTANT, np.zeros(CHANNELS)))
        for m in range(machines):
            if m != j and feeds[m, j] == 0.0 and feeds[j, m] == 0.0:
                continue
            effects = shift * (m == j) + feeds[m, j] * down + feeds[j, m] * up
            for mode in range(physical):
                own = mode if m == j else -1
                for case in range(SEVERITIES):
                    at = _hypothesis(m, mode, case)
                    found.append(_Row(j, at, GROWING, effects[mode], severity_of(case), own, geared=True))
        found += _structural(j)
        alarms = (
            _Row(j, _hypothesis(j, FALSE_ALARM, like), FADING, shift[like], geared=True) for like in range(physical)
        )
        found += alarms
    columns = [np.array(column) for column in zip(*found, strict=True)]
    return Patterns(np.searchsorted(columns[0], np.arange(machines + 1)), *columns)


class _Row(NamedTuple):
    """One pattern; see :class:`Patterns`."""

    machine: int
    hypothesis: int
    kind: int
    effect: npt.NDArray[np.float64]
    severity: float = 0.0
    mode: int = -1
    geared: bool = False
    extra: npt.NDArray[np.float64] = np.zeros(CHANNELS)


def _hypothesis(machine: int, mode: int, case: int) -> int:
    return (machine * len(MODES) + mode) * CASES + case


def _structural(machine: int) -> list[_Row]:
    """A failed sensor of each channel, sign and size; an overload."""
    rows = []
    for case in range(2 * CHANNELS * len(SIZES)):
        channel, rest = divmod(case, 2 * len(SIZES))
        effect, extra = np.zeros(CHANNELS), np.zeros(CHANNELS)
        effect[channel], extra[channel] = SIZES[rest // 2] * (1.0 if rest % 2 else -1.0), SIZE_VARIANCE
        rows.append(_Row(machine, _hypothesis(machine, SENSOR_FAILURE, case), CONSTANT, effect, extra=extra))
    effect = physics.OVERLOAD_GAIN * physics.LOAD_RESPONSE.astype(np.float64)
    rows.append(_Row(machine, _hypothesis(machine, PLC_OVERLOAD, 0), CONSTANT, effect))
    return rows
