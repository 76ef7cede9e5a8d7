"""What the fault of each line truly is, as classes to be learned from; for training alone, never for a player."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments import physics
from agentpipe.environments.layout import FALSE_ALARM, MACHINES, MODES, PHYSICAL_MODES, SEVERITIES

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool

TRUTHS: Final = ("machine", "mode", "severity")
"""what is asked of a fault"""
TRUTH_SIZES: Final = (MACHINES, len(MODES), len(SEVERITIES))
"""classes of each"""


def has_truth(pool: LinePool) -> bool:
    """Whether the environments of ``pool`` can say what is true: the built-in line can, one's own cannot."""
    return hasattr(pool, "hidden") and hasattr(pool, "plant")


def truth(pool: LinePool) -> npt.NDArray[np.int8]:
    """i8[N, 3]: machine, mode and severity level of the fault that each order is about, now; -1 where there is none.

    A false alarm has no machine. A severity is that of a physical fault (it grows with time) that is not repaired yet.
    """
    hidden = pool.hidden()
    severity = hidden.severity + hidden.growth * pool.plant().elapsed
    level = np.searchsorted(physics.SEVERITY_LIMITS, severity, side="right")
    grows = (hidden.mode < PHYSICAL_MODES) & (hidden.repaired == 0)
    machine = np.where(hidden.mode == FALSE_ALARM, -1, hidden.machine)
    return np.stack([machine, hidden.mode, np.where(grows, level, -1)], axis=1).astype(np.int8)
