"""What a player that remembers could know of each channel in a few numbers, robust where the mean is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agentpipe.environments.layout import CHANNELS, MACHINES
from benchmarks.gap.filter import LOAD_RESPONSE, compiled

if TYPE_CHECKING:
    import numpy.typing as npt

    from benchmarks.gap.log import ReceivedLog

NUMBERS: Final = 4 * CHANNELS + 1
"""of each machine"""
NEAR: Final = 1.5
"""SDs from the median within which a reading counts in the robust mean"""


@compiled
def _summarise(count: Any, machine: Any, samples: Any, offset: Any, values: Any, out: Any) -> None:  # noqa: ANN401
    for n in range(len(count)):
        for j in range(MACHINES):
            rows = np.flatnonzero(machine[n, : count[n]] == j)
            if len(rows) == 0:
                continue
            weight, offsets = samples[n][rows], offset[n][rows]
            middle = (weight * offsets).sum() / weight.sum()
            out[n, j, 4 * CHANNELS] = middle
            for c in range(CHANNELS):
                value = values[n][rows, c] - LOAD_RESPONSE[c] * (offsets - middle)
                mean = (weight * value).sum() / weight.sum()
                near = np.abs(value - np.median(value)) < NEAR
                total = (weight * near).sum()
                out[n, j, c] = (weight * near * value).sum() / total if total > 0.0 else np.median(value)
                out[n, j, CHANNELS + c] = np.sqrt((weight * (value - mean) ** 2).sum() / len(rows))
                out[n, j, 2 * CHANNELS + c] = value[0]
                out[n, j, 3 * CHANNELS + c] = value[len(rows) // 2 :].mean()


def remembered(log: ReceivedLog, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """What was received by the environments ``rows``, f32[rows, 8, NUMBERS].

    Of each channel the mean of the readings near their median, the spread of a sample, the first reading and the mean
    of the later half, all without the load's swings; and the machine's mean scan-period offset.
    """
    out = np.zeros((len(rows), MACHINES, NUMBERS), np.float32)
    _summarise(log.count[rows], log.machine[rows], log.samples[rows], log.offset[rows], log.values[rows], out)
    return out
