"""Finite bounds of everything a player can observe, derived from the limits of what goes in.

Noise is bounded because the inverse normal table is (|z| <= 3.67), disturbances because the table's parameters are,
time because every order has a deadline. So the Gymnasium box is neither infinite nor invented.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments import physics
from agentpipe.environments.layout import CHANNELS, MACHINES, MAX_STEPS, OBSERVATION_NAMES
from agentpipe.environments.orders import MAX_ESCALATIONS
from agentpipe.environments.parameters import PARAMETERS
from agentpipe.environments.rng import NORMAL_TABLE

if TYPE_CHECKING:
    from agentpipe.environments.state import Fixed

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

LONGEST_SECONDS: Final = 1_800.0
"""No episode runs longer: a deadline is at most 990 s (route 170 s, pick 10 s, supplier 150 s, longest repair 140 s and
25 s, all doubled); the last action may begin just before it, waits at most 240 s for its answer, 330 s for the part and
140 s for the repair."""

_MOST: Final = {parameter.name: parameter.high for parameter in PARAMETERS}
_Z: Final = float(np.abs(NORMAL_TABLE).max())
_ROUNDING: Final = 1.001  # float32 arithmetic in the kernel

# The AR(2) state |x| <= 0.7 |x1| + 0.2 |x2| + σz stays below 10 σz, where it also starts.
_OFFSET: Final = (
    10.0 * _MOST["load_sigma"] * _Z
    + _MOST["load_cycle_amplitude"]
    + _MOST["load_spike_offset"]
    + physics.OVERLOAD_OFFSET
)
_TRIP: Final = (_MOST["network_rtt_ms"] + _MOST["network_jitter_ms"] * math.log(2.0**32)) * 1e-3
_MINUTES: Final = LONGEST_SECONDS / 60.0
_SAMPLES: Final = 1.0 + MAX_STEPS * (1.0 + physics.BURST_SAMPLES)

_LIMITS: Final[dict[str, tuple[float, float]]] = {
    "age": (0.0, 60.0),
    "count": (0.0, math.log2(1.0 + _SAMPLES)),
    "link.round_trip": (0.0, _TRIP),
    "link.variation": (0.0, _TRIP),
    "link.poll": (0.0, float(physics.POLL_SECONDS.max())),
    "plc": (-_OFFSET, _OFFSET),
    "stock": (0.0, 2.0),
    "lead": (0.0, _MINUTES),
    "travel": (0.0, _MINUTES),
    "order.escalations": (0.0, MAX_ESCALATIONS),
    "order.retries": (0.0, 2.0 * (MAX_ESCALATIONS + 1)),
    "clock.elapsed": (0.0, _MINUTES),
    "clock.remaining": (-_MINUTES, _MINUTES),
}
"""By feature, else by block; what is not named lies in 0 … 1."""


class Bounds(NamedTuple):
    """Lowest and highest value of every feature, f32[D] each, in the order of ``layout.OBSERVATION_NAMES``."""

    low: Float32
    high: Float32


def observation_bounds(fixed: Fixed) -> Bounds:
    """Lowest and highest value of every observation feature.

    Args:
        fixed: see :func:`agentpipe.environments.fixed.build_fixed`. Only what comes from the line profile is looked at,
            so the bounds are the same for all environments of one profile.
    """
    limits = [_LIMITS.get(name, _LIMITS.get(name.partition(".")[0], (0.0, 1.0))) for name in OBSERVATION_NAMES]
    low, high = (np.array(side) for side in zip(*limits, strict=True))
    readings = np.tile(_reading_limits(fixed), MACHINES) * _ROUNDING
    for block in ("reading", "mean"):
        rows = [index for index, name in enumerate(OBSERVATION_NAMES) if name.startswith(f"{block}.")]
        low[rows], high[rows] = -readings, readings
    return Bounds(low.astype(np.float32), high.astype(np.float32))


def _reading_limits(fixed: Fixed) -> Float64:
    """f64[CHANNELS]: largest size of a reading, term by term as in :func:`sense.packet`."""
    factors = np.abs(np.concatenate([fixed.healthy_factor[None], fixed.mode_factor])).sum(axis=2).max(axis=0)
    shift = np.maximum(np.abs(fixed.shift), np.abs(fixed.down) + np.abs(fixed.up)).max(axis=0)
    largest_gain, failed_sensor = 1.15, 5.0
    effect = np.maximum(largest_gain * shift, np.maximum(failed_sensor, physics.OVERLOAD_GAIN * physics.LOAD_RESPONSE))
    strength = physics.AMPLITUDE_LOW + physics.AMPLITUDE_RISE
    clean = _Z * (physics.OPERATING_SCATTER + physics.PROCESS_NOISE) * factors + strength * effect
    clean = clean + physics.LOAD_RESPONSE * _OFFSET
    ripple = (clean + physics.FULL_SCALE) * (_MOST["sensor_cycle_amplitude"] + _MOST["sensor_step_amplitude"])
    noise = _Z * (physics.TYPE_NOISE.max(axis=0) + _MOST["sensor_sigma"])
    drift = _Z * _MOST["sensor_drift_sigma_per_min"] * math.sqrt(_MINUTES)
    limits = np.asarray(clean + ripple + noise + drift + _MOST["sensor_impulse_sigma"], np.float64)
    assert limits.shape == (CHANNELS,)
    return limits
