"""What a plant has received: every packet and every reported scan offset, told from the outside of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentpipe.environments.layout import CHANNELS, MACHINES, MAX_STEPS, block_start
from agentpipe.environments.physics import BURST_SAMPLES, POLL_SHARE

if TYPE_CHECKING:
    import numpy.typing as npt

    from agentpipe.environments.pool import LinePool

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

O_READING, O_MEAN, O_PLC = block_start("reading"), block_start("mean"), block_start("plc")
MOST = (MAX_STEPS + 1) * (POLL_SHARE + 1) + MACHINES
"""packets of an episode"""
SAME = 2e-4
"""two readings closer than this are one that was repeated"""


class ReceivedLog:
    """The packets of the running episode of each of ``size`` environments.

    A step brings at most one burst and one poll of a machine, at the same instant. Of two that come together the
    historian keeps the last reading and the mean of both, so both are known.

    Attributes:
        count: i64[N] packets; machine i8[N, MOST], time, samples, offset f64[N, MOST], values f64[N, MOST, 5] readings,
            stuck bool[N, MOST, 5] that only repeat the one before.
        steps: i64[N] of the episode; heard bool[N, 65], offsets f64[N, 65], reported f64[N, 65] seconds: what the PLC
            said in each.
    """

    def __init__(self, size: int) -> None:
        self.count, self.steps = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.machine = np.zeros((size, MOST), np.int8)
        self.time, self.samples, self.offset = (np.zeros((size, MOST)) for _ in range(3))
        self.values, self.stuck = np.zeros((size, MOST, CHANNELS)), np.zeros((size, MOST, CHANNELS), np.bool_)
        self.heard = np.zeros((size, MAX_STEPS + 1), np.bool_)
        self.offsets, self.reported = np.zeros((size, MAX_STEPS + 1)), np.zeros((size, MAX_STEPS + 1))
        self._weight = np.zeros((size, MACHINES))
        self._reading, self._mean = (np.zeros((size, MACHINES, CHANNELS)) for _ in range(2))
        self._reports = np.zeros(size, np.int64)

    def follow(self, pool: LinePool) -> None:
        """Takes in what the step just taken brought; call it once after each step and after a reset."""
        plant = pool.plant()
        fresh = plant.step == 0
        self.count[fresh], self._weight[fresh], self._mean[fresh], self._reports[fresh] = 0, 0.0, 0.0, 0
        seen = pool.observation.astype(np.float64)
        reading, mean = (
            seen[:, at : at + MACHINES * CHANNELS].reshape(-1, MACHINES, CHANNELS) for at in (O_READING, O_MEAN)
        )
        weight = plant.weight.astype(np.float64)
        gained = weight - self._weight
        burst, poll = gained >= BURST_SAMPLES, gained % BURST_SAMPLES == 1.0
        both = (burst & poll)[..., None]
        first = (mean * weight[..., None] - self._mean * self._weight[..., None] - reading) / BURST_SAMPLES
        first = np.where(both, first, reading)
        known = (self._weight > 0)[..., None]
        self._append(pool, burst, BURST_SAMPLES, first, known & (np.abs(first - self._reading) < SAME))
        before = np.where(both, first, self._reading)
        self._append(pool, poll, 1.0, reading, (known | both) & (np.abs(reading - before) < SAME))
        rows = np.arange(pool.size)
        self.steps[:] = plant.step
        self.heard[rows, plant.step] = plant.offset_count > self._reports
        self.offsets[rows, plant.step] = seen[:, O_PLC]
        self.reported[rows, plant.step] = plant.elapsed
        self._weight, self._reading, self._mean = weight, reading.copy(), mean.copy()
        self._reports = plant.offset_count.astype(np.int64)

    def _append(self, pool: LinePool, came: Bools, samples: float, values: Floats, stuck: Bools) -> None:
        elapsed, offset = pool.plant().elapsed, pool.observation[:, O_PLC]
        for machine in range(MACHINES):
            rows = np.flatnonzero(came[:, machine])
            at = self.count[rows]
            self.machine[rows, at], self.samples[rows, at] = machine, samples
            self.time[rows, at], self.offset[rows, at] = elapsed[rows], offset[rows]
            self.values[rows, at], self.stuck[rows, at] = values[rows, machine], stuck[rows, machine]
            self.count[rows] += 1
