"""How hard each training environment is, as the policy meets it: success and return by exponential mean.

With x_k the outcome of the k-th episode of an environment and a = :data:`RATE`,

    m_k = (1 - a) m_(k-1) + a x_k,    estimate = m_k / (1 - (1 - a)^k)

whose weights sum to one from the first episode on (as in Kingma and Ba, 2015). It looks back over about 2 / a episodes:
a policy that learns makes what was hard a while ago easy. Episodes that the orchestrator gave another disturbance do
not count: they tell of that disturbance, not of the environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import LearningError
from agentpipe.learning.aids.base import Aid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.aids.base import Knobs
    from agentpipe.learning.samples.rollout import Rollout
    from agentpipe.learning.tensors import Arrays

RATE: Final = 0.05
"""weight of the newest episode"""
NAME: Final = "difficulty"

Floats = npt.NDArray[np.float64]


class Difficulty(Aid):
    """Keeps book; turns nothing."""

    name: ClassVar[str] = NAME

    def __init__(self) -> None:
        super().__init__()
        self.met = Met.of(0)
        self._steered: npt.NDArray[np.bool_] | None = None

    def before(self, knobs: Knobs, pool: LinePool) -> None:
        """Sees which environments are in an episode that was steered."""
        del knobs
        self._steered = _steered(pool)

    def collected(self, rollout: Rollout, pool: LinePool) -> None:
        """Adds the episodes that ended in the rollout, but of environments that were steered at its start or end."""
        if len(self.met.episodes) != rollout.size:
            self.met = Met.of(rollout.size)
        done, now = rollout.done, _steered(pool)
        if self._steered is not None and now is not None:
            done &= ~(self._steered | now)
        for t in range(rollout.steps):
            self.met.add(np.flatnonzero(done[t]), rollout.success[t], rollout.total[t])

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """The means, which are not corrected yet, and how many episodes they are of."""
        return {}, {"success": self.met.success, "total": self.met.total, "episodes": self.met.episodes}

    def restore(self, content: Mapping[str, Any], arrays: Arrays) -> None:
        """The inverse of :meth:`state`."""
        del content
        self.met = Met.restored(arrays)


def _steered(pool: LinePool) -> npt.NDArray[np.bool_] | None:
    """bool[N], the running episode has another disturbance than its environment; none = such a pool has none."""
    compound = getattr(pool, "compound", None)
    return None if compound is None else compound.any(axis=1)


class Met:
    """What became of the episodes of N environments.

    Args:
        success: f64[N], exponential means, not corrected.
        total: f64[N], those of the return.
        episodes: i64[N].
    """

    def __init__(self, success: Floats, total: Floats, episodes: npt.NDArray[np.int64]) -> None:
        self.success, self.total, self.episodes = success, total, episodes

    @classmethod
    def of(cls, size: int) -> Met:
        """Of ``size`` environments that nobody has met."""
        return cls(np.zeros(size), np.zeros(size), np.zeros(size, np.int64))

    @classmethod
    def restored(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Met:
        """From the arrays of :meth:`Difficulty.state`.

        Raises:
            ValueError: they are not of equally many environments.
        """
        success, total = (arrays[name].astype(np.float64) for name in ("success", "total"))
        episodes = arrays["episodes"].astype(np.int64)
        if not success.shape == total.shape == episodes.shape:
            raise ValueError(f"means of {success.shape}, {total.shape} and {episodes.shape} environments")
        return cls(success, total, episodes)

    def add(self, rows: npt.NDArray[np.int64], success: npt.NDArray[np.bool_], total: npt.NDArray[np.float32]) -> None:
        """Adds one episode of each environment in ``rows``; ``success`` and ``total`` are [N]."""
        self.success[rows] += RATE * (success[rows] - self.success[rows])
        self.total[rows] += RATE * (total[rows] - self.total[rows])
        self.episodes[rows] += 1

    def _correction(self) -> Floats:
        weight: Floats = 1.0 - (1.0 - RATE) ** np.maximum(self.episodes, 1)
        return weight

    @property
    def success_rate(self) -> Floats:
        """f64[N]; 0 where nothing was met."""
        return self.success / self._correction()

    @property
    def mean_return(self) -> Floats:
        """f64[N]; 0 where nothing was met."""
        return self.total / self._correction()


def hardest(
    met: Met, names: Sequence[str], count: int, *, least: int, oracle: Floats | None = None
) -> npt.NDArray[np.int64]:
    """The environments on which most is to be gained, hardest first.

    Hard is a high regret, the oracle's return minus the policy's, where the oracle's is known, else a low success.
    Environments of equal difficulty come in the order of their names.

    Args:
        met: what became of the episodes of N environments.
        names: of the environments.
        count: how many are wanted; fewer come where fewer were met often enough.
        least: episodes below which an environment is left out.
        oracle: f64[N], the oracle's mean return; NaN where it is not known, and the environment is left out.

    Returns:
        i64[n], rows, n <= ``count``.

    Raises:
        LearningError: sizes do not fit, or no environment was met often enough.
    """
    size = len(met.episodes)
    if len(names) != size or (oracle is not None and oracle.shape != (size,)):
        raise LearningError(f"{size} environments were met, {len(names)} are named", field="names")
    difficulty = 1.0 - met.success_rate if oracle is None else oracle - met.mean_return
    known = np.flatnonzero((met.episodes >= least) & np.isfinite(difficulty))
    if not len(known):
        remedy = "train for longer, or ask for fewer episodes (least_episodes)"
        raise LearningError(f"no environment was met {least} times", field="episodes", remedy=remedy)
    order = sorted(known.tolist(), key=lambda row: (-difficulty[row], names[row]))
    return np.array(order[:count], np.int64)
