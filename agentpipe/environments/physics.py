"""Constants of the built-in plant. Times in seconds, readings in healthy standard deviations.

Together with ``data/line_profile.json`` these numbers decide how hard the line is; they are frozen under
``layout.SIMULATOR_VERSION``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import PROTOCOLS, SENSOR_TYPES

Float32 = npt.NDArray[np.float32]

# Protocols: poll cycle, and the bits one machine's packet takes on the wire.
POLL_SECONDS: Final[Float32] = np.array([3.0, 1.5, 2.5, 1.0, 2.0], np.float32)
PACKET_BITS: Final[Float32] = np.array([2_400.0, 1_600.0, 6_400.0, 1_200.0, 1_800.0], np.float32)
assert len(POLL_SECONDS) == len(PACKET_BITS) == len(PROTOCOLS)

POLL_SHARE: Final = 4  # machines polled in one cycle at most: the line in two halves

# Sensor suites: own noise and first-order lag of each channel.
TYPE_NOISE: Final[Float32] = np.array(
    [
        [0.20, 0.30, 0.25, 0.20, 0.25],
        [0.12, 0.25, 0.20, 0.15, 0.20],
        [0.25, 0.18, 0.30, 0.30, 0.25],
        [0.30, 0.10, 0.20, 0.25, 0.20],
        [0.08, 0.30, 0.25, 0.20, 0.25],
    ],
    np.float32,
)
TYPE_LAG: Final[Float32] = np.array(
    [
        [12.0, 1.0, 0.5, 2.0, 1.0],
        [8.0, 1.0, 0.5, 1.5, 1.0],
        [15.0, 0.5, 1.0, 3.0, 1.0],
        [20.0, 0.2, 0.5, 2.0, 0.5],
        [5.0, 1.0, 0.5, 2.0, 1.0],
    ],
    np.float32,
)
assert len(TYPE_NOISE) == len(TYPE_LAG) == len(SENSOR_TYPES)

FULL_SCALE: Final[Float32] = np.full(5, 10.0, np.float32)  # nominal over SD, what a ratio disturbance acts on
LOAD_RESPONSE: Final[Float32] = np.array([1.0, 2.5, 4.0, 1.5, 3.0], np.float32)  # SDs per unit of scan-period offset
CURRENT: Final = 2  # the channel whose jumps couple into impulses

OPERATING_SCATTER: Final = 0.3  # of a healthy machine's operating point, drawn once an episode
PROCESS_NOISE: Final = 0.55  # of a machine's state between two packets
AMPLITUDE_LOW: Final = 0.55  # share of a mode's full signature at severity 0
AMPLITUDE_RISE: Final = 0.65
TRANSIENT_SECONDS: Final = 6.0  # decay of what raised a false alarm
OVERLOAD_OFFSET: Final = 0.18  # added to the scan-period offset by a PLC overload
OVERLOAD_GAIN: Final = 0.8
BURST_SAMPLES: Final = 4.0  # samples averaged by a fresh measurement

OWN_MODE_PROBABILITY: Final = 0.7
MISHAP_PROBABILITY: Final = 0.015  # of a correct repair that fails all the same

ACTION_SECONDS: Final = 0.6
BURST_CYCLE_SHARE: Final = 0.5  # of a poll cycle that a fresh measurement takes
PICK_SECONDS: Final = 10.0
SUPPLIER_SECONDS: Final = 150.0  # lead time of a part no depot shelf holds
EXPEDITE_FACTOR: Final = 0.6
REPAIR_SECONDS: Final[Float32] = np.array([40.0, 80.0, 140.0], np.float32)
SEVERITY_LIMITS: Final = (0.35, 0.65)
MIN_RTO: Final = 0.2
MAX_RTO: Final = 3.0

# Part kind and skill that each mode slot needs (p0 … p6, sensor failure, PLC overload, false alarm).
PART_OF_MODE: Final[npt.NDArray[np.int8]] = np.array([0, 0, 1, 1, 2, 2, 0, 3, 3, 3], np.int8)
SKILL_OF_MODE: Final[npt.NDArray[np.int8]] = np.array([0, 0, 0, 1, 2, 0, 2, 3, 3, 3], np.int8)


# How far a mode reaches along the line: its signature times a channel coupling, scaled by slot. Above 1 the neighbour
# shows more than the faulty machine itself.
DOWN_REACH: Final[Float32] = np.array([1.25, 1.4, 1.3, 1.3, 1.3, 1.3, 1.3], np.float32)
UP_REACH: Final[Float32] = np.array([0.5, 1.0, 0.9, 0.4, 0.6, 0.4, 1.0], np.float32)
DOWN_COUPLING: Final[Float32] = np.array(
    [
        [0.75, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.8, 0.2, 0.0, 0.0],
        [0.0, 0.0, 0.75, 0.0, -0.3],
        [0.0, 0.0, 0.2, 1.0, 0.0],
        [0.0, 0.0, 0.3, 0.0, 1.0],
    ],
    np.float32,
)
UP_COUPLING: Final[Float32] = np.array(
    [
        [0.2, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.6, 0.0, 0.0, 0.0],
        [0.1, 0.0, 0.8, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.5, 0.0],
        [0.0, 0.0, -0.5, 0.0, 0.5],
    ],
    np.float32,
)


def packets_a_cycle(bandwidth_khz: Float32, snr_db: Float32, protocol: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """How many machines' packets fit one poll cycle: Shannon and Hartley's capacity B·log2(1 + S/N), 1 to 8.

    Args:
        bandwidth_khz: ``[N]`` bandwidth in kilohertz.
        snr_db: ``[N]`` signal-to-noise ratio in decibels.
        protocol: ``[N]`` index into :data:`layout.PROTOCOLS`.
    """
    capacity = bandwidth_khz.astype(np.float64) * 1e3 * np.log2(1.0 + 10.0 ** (snr_db.astype(np.float64) / 10.0))
    packets = np.floor(capacity * POLL_SECONDS[protocol] / PACKET_BITS[protocol])
    return np.clip(packets, 1, 8).astype(np.int8)
