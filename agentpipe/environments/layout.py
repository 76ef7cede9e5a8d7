"""Names and sizes of the built-in line: segments, actions, observation features, outcomes.

One frozen version number covers everything that decides how hard the line is. A change of the kernel, of this layout or
of the default line profile that alters any byte of an episode is a new version, with new figures for every player.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

SIMULATOR_VERSION: Final = "1.0.0"
MAX_STEPS: Final = 64
MACHINES: Final = 8
CHANNELS: Final = 5
PARTS: Final = 4
DEPOTS: Final = 3
TECHNICIANS: Final = 4
SKILLS: Final = 4

SEGMENTS: Final = ("identify", "assess", "dispatch", "execute")
PHYSICAL_MODES: Final = 7
SENSOR_FAILURE: Final = 7
PLC_OVERLOAD: Final = 8
FALSE_ALARM: Final = 9
MODES: Final = (*tuple(f"p{index}" for index in range(PHYSICAL_MODES)), "sensor_failure", "plc_overload", "false_alarm")
SEVERITIES: Final = ("low", "medium", "high")
DEPTHS: Final = ("adjust", "repair", "replace")
TOPOLOGIES: Final = ("serial", "parallel", "fork_join", "re_entrant", "ring", "tree")
SENSOR_TYPES: Final = ("analog_4_20ma", "smart_hart", "mems_wireless", "piezo_iepe", "rtd_fieldbus")
PROTOCOLS: Final = ("modbus_tcp", "profinet", "opc_ua", "ethercat", "io_link")
DISTURBANCE_KINDS: Final = ("sensor", "network", "load")

REASONS: Final = (
    "success",
    "wrong_diagnosis",  # closed, but the wrong machine or mode was repaired
    "wrong_depth",  # closed, right fault, repair too shallow for its severity
    "late",  # deadline passed
    "secondary_failure",  # severity reached its limit before the repair
    "false_rejection",  # a real fault was rejected as a false alarm
    "needless_repair",  # a false alarm was repaired
    "step_limit",  # 64 steps
    "unskilled_technician",  # closed, right fault, but nobody there could repair it
    "repair_failed",  # closed, all right, but the repair itself failed and was not verified
)


class Purpose(IntEnum):
    """What random numbers are drawn for; part of every counter-based key."""

    COLLECT = 0
    TRAIN = 1
    STATISTICS = 2
    VALIDATION = 3
    REPORT = 4
    PROMOTION = 5
    HEALTH = 6


# Actions: (name, segment), in order of their number.
_ACTIONS: Final = (
    *((f"measure_{m}", 0) for m in range(MACHINES)),
    *((f"declare_machine_{m}", 0) for m in range(MACHINES)),
    *((f"declare_{mode}", 0) for mode in MODES),
    *((f"judge_{severity}", 1) for severity in SEVERITIES),
    *((f"depth_{depth}", 1) for depth in DEPTHS),
    ("reject_alarm", 1),
    *((f"reserve_depot_{d}", 2) for d in range(DEPOTS)),
    *((f"technician_{t}", 2) for t in range(TECHNICIANS)),
    ("expedite", 2),
    *((name, 3) for name in ("start", "verify", "retry", "escalate", "close")),
)
ACTION_NAMES: Final = tuple(name for name, _ in _ACTIONS)
ACTION_COUNT: Final = len(ACTION_NAMES)
ACTION_SEGMENT: Final[npt.NDArray[np.int8]] = np.array([segment for _, segment in _ACTIONS], dtype=np.int8)

A_MEASURE: Final = 0
A_MACHINE: Final = A_MEASURE + MACHINES
A_MODE: Final = A_MACHINE + MACHINES
A_SEVERITY: Final = A_MODE + len(MODES)
A_DEPTH: Final = A_SEVERITY + 3
A_REJECT: Final = A_DEPTH + 3
A_DEPOT: Final = A_REJECT + 1
A_TECHNICIAN: Final = A_DEPOT + DEPOTS
A_EXPEDITE: Final = A_TECHNICIAN + TECHNICIANS
A_START: Final = A_EXPEDITE + 1
A_VERIFY: Final = A_START + 1
A_RETRY: Final = A_START + 2
A_ESCALATE: Final = A_START + 3
A_CLOSE: Final = A_START + 4

# What a step can make, and a later step need; bit i of ``pool.produced`` and ``pool.used`` is token i.
TOKENS: Final = (
    *(f"reading_{m}" for m in range(MACHINES)),
    "plc_offset",
    "machine",
    "mode",
    "severity",
    "depth",
    "part",
    "technician",
    "expedite",
    "repair",
    "verification",
    "reopened",
    "clock",
)
# Of these every step that made one counts until the episode ends (means and waiting add up); of the others the newest.
ACCUMULATING: Final = sum(
    1 << bit for bit, token in enumerate(TOKENS) if token.startswith("reading_") or token in ("plc_offset", "clock")
)

# Observation features in order; each block's first index is an O_... constant.
_READINGS = MACHINES * CHANNELS
_BLOCKS: Final = (
    ("reading", [f"{m}.{c}" for m in range(MACHINES) for c in range(CHANNELS)]),  # last received, healthy SDs
    ("mean", [f"{m}.{c}" for m in range(MACHINES) for c in range(CHANNELS)]),  # historian's mean since the alarm
    ("age", [str(m) for m in range(MACHINES)]),  # seconds since the last packet was sent / 10
    ("count", [str(m) for m in range(MACHINES)]),  # log2(1 + packets received)
    ("present", [str(m) for m in range(MACHINES)]),
    ("topology", list(TOPOLOGIES)),
    ("link", ["round_trip", "variation", "loss", "poll"]),  # RFC 6298 estimates (s), loss share, poll cycle (s)
    ("plc", ["offset", "mean_offset"]),  # relative scan-period offset: last reported, mean since the alarm
    ("segment", list(SEGMENTS)),
    ("declared_machine", [str(m) for m in range(MACHINES)]),
    ("declared_mode", list(MODES)),
    ("severity", list(SEVERITIES)),
    ("depth", list(DEPTHS)),
    ("stock", [f"{d}" for d in range(DEPOTS)]),  # of the part the declared mode needs
    ("lead", [f"{d}" for d in range(DEPOTS)]),  # minutes until that depot's part can be at the declared machine
    ("travel", [f"{t}" for t in range(TECHNICIANS)]),  # minutes until that technician can be there
    ("skilled", [f"{t}" for t in range(TECHNICIANS)]),  # has the skill the declared mode needs
    ("depot", [f"{d}" for d in range(DEPOTS)]),  # reserved
    ("technician", [f"{t}" for t in range(TECHNICIANS)]),  # chosen
    ("order", ["expedited", "started", "verified_ok", "verified_bad", "escalations", "retries"]),
    ("tried", [str(m) for m in range(MACHINES)] + list(MODES)),  # diagnoses a verification has refuted
    ("clock", ["elapsed", "remaining", "steps_left"]),  # minutes, minutes, share
)
OBSERVATION_NAMES: Final = tuple(f"{block}.{name}" for block, names in _BLOCKS for name in names)
OBSERVATION_SIZE: Final = len(OBSERVATION_NAMES)


def block_start(block: str) -> int:
    """Index of the first observation feature of ``block``; ``KeyError`` when there is no such block."""
    start = 0
    for name, members in _BLOCKS:
        if name == block:
            return start
        start += len(members)
    raise KeyError(block)
