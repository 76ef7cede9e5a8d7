"""Running scale of rewards (S11): divided by the deviation of the discounted return, clamped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Floats = npt.NDArray[np.float32]


def accumulated(
    values: npt.NDArray[np.float64], length: npt.NDArray[np.int64], discount: float
) -> npt.NDArray[np.float64]:
    """y_t = x_t + discount * y_(t-1) within each episode, f64[M]; of reversed rewards these are discounted returns.

    Args:
        values: f64[M], one episode after the other.
        length: i64[E], steps of each; M together.
        discount: gamma.
    """
    sums = np.empty_like(values)
    first = np.cumsum(length) - length
    running = np.zeros(len(length))
    for step in range(int(length.max(initial=0))):
        rows = length > step
        at = first[rows] + step
        running[rows] = values[at] + discount * running[rows]
        sums[at] = running[rows]
    return sums


class RewardScaler:
    """Scales rewards by the running standard deviation of each environment's discounted return.

    The mean is not taken off: that would change which behaviour is best when episodes differ in length. Moments are
    merged in float64 as in Chan, Golub and LeVeque (1979).

    Args:
        size: environments N.
        discount: gamma.
        clamp: scaled rewards lie within plus and minus this.
    """

    def __init__(self, size: int, discount: float, clamp: float = 5.0) -> None:
        self.discount = discount
        self.clamp = clamp
        self.running: npt.NDArray[np.float64] = np.zeros(size)
        self.count = 0.0
        self.mean = 0.0
        self.m2 = 0.0
        self.clamped_share = 0.0

    @property
    def deviation(self) -> float:
        """Of the discounted returns seen so far; 1 before any, or when they never moved."""
        deviation = float(np.sqrt(self.m2 / self.count)) if self.count > 0 else 0.0
        return deviation if deviation > 1e-8 else 1.0

    def __call__(self, r_t: Floats, done_t: npt.NDArray[np.bool_]) -> Floats:
        """Learns from rewards f32[T, N] and returns them scaled; ``done_t`` bool[T, N] ends an episode's return."""
        seen = np.empty(r_t.shape)
        for t in range(len(r_t)):
            self.running = self.running * self.discount + r_t[t]
            seen[t] = self.running
            self.running = np.where(done_t[t], 0.0, self.running)
        self.observe(seen)
        scaled = r_t / np.float32(self.deviation)
        self.clamped_share = float((np.abs(scaled) > self.clamp).mean())
        clamped: Floats = np.clip(scaled, -self.clamp, self.clamp)
        return clamped

    def scale(self, reward: Floats) -> Floats:
        """Rewards f32 of any shape under the present scale and clamp; nothing is learned from them."""
        scaled: Floats = np.clip(reward / np.float32(self.deviation), -self.clamp, self.clamp)
        return scaled

    def observe(self, returns: npt.NDArray[np.float64]) -> None:
        """Learns the scale from discounted returns f64 of any shape, one or more."""
        self._merge(float(returns.size), float(returns.mean()), float(np.square(returns - returns.mean()).sum()))

    def _merge(self, count: float, mean: float, m2: float) -> None:
        total = self.count + count
        difference = mean - self.mean
        self.mean += difference * count / total
        self.m2 += m2 + difference * difference * self.count * count / total
        self.count = total

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that the next call depends on."""
        return {"running": self.running, "moments": np.array([self.count, self.mean, self.m2])}

    def restore(self, state: Mapping[str, npt.NDArray[Any]], file: Path) -> None:
        """The inverse of :meth:`state`.

        Raises:
            CheckpointError: the state is of another pool size, or not finite.
        """
        running, moments = state.get("running"), state.get("moments")
        if running is None or moments is None or running.shape != self.running.shape or moments.shape != (3,):
            raise CheckpointError("reward statistics do not fit the pool", file=file, field="running")
        if not (np.isfinite(running).all() and np.isfinite(moments).all()):
            raise CheckpointError("reward statistics are not finite", file=file, field="moments")
        self.running = running.astype(np.float64)
        self.count, self.mean, self.m2 = (float(value) for value in moments)
