"""The bandit: which disturbance combination the policy is least sure of, for each group of environments.

*Arms*: a level of sensor, network and load disturbance each, 0 (background) to 5: 216. *Groups* (the context): what the
effect of a disturbance depends on. *Reward*: the mean entropy of the policy's decisions in one environment during one
rollout, counted where it had a choice; one such mean is one sample, since decisions within an episode go together.

Gaussian Thompson sampling that forgets, since the policy changes as it learns: before each decision a cell's samples
are scaled down to ``most`` where there are more (Gupta, Granmo and Agrawala, "Thompson Sampling for Dynamic Multi-armed
Bandits", 2011) and multiplied by the discount (Qi, Wang and Zhu, "Discounted Thompson Sampling for Non-Stationary
Bandit Problems", 2023). Samples of one arm in all groups are pooled in part: with w_ga, s_ga the count and sum that are
left of a cell, and w_a, s_a of its arm,

    m_a  = (s_a + m) / (w_a + 1)                        m: the mean of all samples
    m_ga = (s_ga + K m_a) / (w_ga + K)                  K = :data:`POOLING`
    d_ga = sigma / sqrt(1 + min(w_ga + min(w_a, K), most))

and a move draws from N(m_ga, d_ga^2) for every arm and takes the highest. sigma is the deviation of the samples within
arms. ``most`` keeps beliefs from growing surer than what may change meanwhile: arms that are nearly as good share the
moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.compound import LEVELS

if TYPE_CHECKING:
    from agentpipe.learning.tensors import Arrays

ARMS: Final = LEVELS**3
POOLING: Final = 8.0
"""samples of an arm in other groups that count in a group"""
_LEAST: Final = 1e-6
"""smallest deviation drawn with, in nats: equal arms are chosen alike"""

Float64 = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]


def arm_of(levels: npt.NDArray[np.int8]) -> Codes:
    """i64[...] of levels i8[..., 3]; -1 where a level is not known."""
    known = (levels >= 0).all(axis=-1)
    wide = levels.astype(np.int64)
    return np.where(known, (wide[..., 0] * LEVELS + wide[..., 1]) * LEVELS + wide[..., 2], -1)


def levels_of_arm(arms: Codes) -> npt.NDArray[np.int8]:
    """i8[..., 3] of arms i64[...]: levels of sensor, network and load."""
    parts = arms // LEVELS**2, arms // LEVELS % LEVELS, arms % LEVELS
    return np.stack(parts, axis=-1).astype(np.int8)


class Bandit:
    """What is believed of each arm in each group.

    Args:
        groups: G.
        discount: of all samples at each decision, above 0, at most 1.
        most: samples at which a belief grows no surer, and of a cell that outlast a decision.

    Attributes:
        count, total, squares: f64[G, 216], samples that are left, their sum in nats and the sum of their squares.
    """

    def __init__(self, groups: int, discount: float, most: float) -> None:
        self.discount, self.most = discount, most
        self.count, self.total, self.squares = (np.zeros((groups, ARMS)) for _ in range(3))

    def forget(self) -> None:
        """Before a decision: what was seen counts for less."""
        kept = self.discount * self.most / np.maximum(self.count, self.most)
        self.count *= kept
        self.total *= kept
        self.squares *= kept

    def beliefs(self) -> tuple[Float64, Float64]:
        """f64[G, 216] each: expected entropy in nats, and the deviation that it is drawn with.

        Without any sample the expectation is NaN and every deviation is 1.
        """
        count, total = self.count.sum(axis=0), self.total.sum(axis=0)
        seen = float(count.sum())
        if seen == 0:
            return np.full_like(self.count, np.nan), np.ones_like(self.count)
        of_arm = (total + total.sum() / seen) / (count + 1.0)
        mean = (self.total + POOLING * of_arm) / (self.count + POOLING)
        tried = count > 0
        within = float(self.squares.sum()) - float((total[tried] ** 2 / count[tried]).sum())
        sigma = np.sqrt(max(within, 0.0) / max(seen - np.count_nonzero(tried), 1.0))
        evidence = np.minimum(self.count + np.minimum(count, POOLING), self.most)
        return mean, np.maximum(sigma / np.sqrt(1.0 + evidence), _LEAST)

    def draw(self, groups: Codes, generator: np.random.Generator) -> tuple[Codes, npt.NDArray[np.bool_], Float64]:
        """One move for each of ``groups`` i64[k].

        Returns:
            Arms i64[k]; bool[k], whether it is the one of the highest expectation; the expectations f64[k].
        """
        mean, deviation = self.beliefs()
        centre = np.zeros_like(mean) if np.isnan(mean).any() else mean
        noise = generator.standard_normal((len(groups), ARMS), np.float32)
        arms = (centre[groups] + deviation[groups] * noise).argmax(axis=1)
        best = mean[groups, arms] >= mean.max(axis=1)[groups]  # never where nothing is expected
        return arms, best, mean[groups, arms]

    def state(self) -> Arrays:
        """For a checkpoint."""
        return {"count": self.count, "total": self.total, "squares": self.squares}

    def restore(self, arrays: Arrays) -> None:
        """The inverse of :meth:`state`."""
        for name in ("count", "total", "squares"):
            getattr(self, name)[...] = arrays[name]
