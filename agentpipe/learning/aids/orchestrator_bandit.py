"""The bandit: under which disturbance combination the policy is least sure, for each kind of environment.

*Arms*: a level of sensor, network and load disturbance each, 0 (background) to 5: 216. *Context*: the environment's
sensor type and protocol, on which the effect of a disturbance depends; its topology and own fault mode, which make it
harder or easier whatever the disturbance. *Reward*: the mean entropy of the policy's decisions in one environment
during one part of a rollout, counted where it had a choice; one such mean is one sample, since decisions within an
episode go together. Its weight is its number of decisions over the mean number of the samples it came with.

Linear Thompson sampling (Agrawal and Goyal, "Thompson Sampling for Contextual Bandits with Linear Payoffs", 2013). A
sample has a one in each of fourteen features and zeros elsewhere: the intercept; the level of each kind; the levels of
each pair of kinds; the arm; sensor type with sensor level, protocol with network level; topology, sensor type, protocol
and mode alone. So what is common to many arms is learned from all of them, and what is special of one from it alone.
With S the weighted sum of x x', b that of x y, q that of y y and w that of the weights,

    A = L + S,    theta = inv(A) b,    sigma^2 = (q - b'theta) / w

L is diagonal: as many samples as a feature's effect is held near zero by (:data:`RIDGE`). A move draws from
N(theta, sigma^2 inv(A)) and takes the arm whose entropy is highest then. :data:`DRAWS` are shared by all moves.

What was seen is forgotten, since the policy changes as it learns: before each decision S, b, q and w are multiplied by
the discount (Russac, Vernade and Cappé, "Weighted Linear Bandits for Non-Stationary Environments", 2019), and scaled
down to ``most`` samples an arm where there are more (Gupta, Granmo and Agrawala, "Thompson Sampling for Dynamic
Multi-armed Bandits", 2011). So beliefs grow no surer than what may have changed meanwhile, and arms that are nearly as
good share the moves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from agentpipe.environments.compound import LEVELS
from agentpipe.environments.jit import entry
from agentpipe.environments.layout import MODES, PROTOCOLS, SENSOR_TYPES, TOPOLOGIES

if TYPE_CHECKING:
    from agentpipe.learning.tensors import Arrays

ARMS: Final = LEVELS**3
DRAWS: Final = 256
"""draws from what is believed, for one decision"""
_SIZES: Final = (
    (1, 0.01),  # intercept
    *((LEVELS, 4.0),) * 3,
    *((LEVELS**2, 64.0),) * 3,
    (ARMS, 256.0),
    (len(SENSOR_TYPES) * LEVELS, 64.0),
    (len(PROTOCOLS) * LEVELS, 64.0),
    *((size, 4.0) for size in (len(TOPOLOGIES), len(SENSOR_TYPES), len(PROTOCOLS), len(MODES))),
)
STARTS: Final = tuple(int(start) for start in np.cumsum([0, *(size for size, _ in _SIZES[:-1])]))
"""the first feature of each of the fourteen blocks"""
RIDGE: Final[npt.NDArray[np.float64]] = np.concatenate([np.full(size, weight) for size, weight in _SIZES])
FEATURES: Final = len(RIDGE)
_SENSOR, _NETWORK, _TOPOLOGY = 8, 9, 10  # blocks from which on a feature depends on the context
_LEAST: Final = 1e-6
"""smallest deviation of a sample, in nats: arms that are equal are chosen alike"""

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


def features_of(arms: Codes, contexts: Codes) -> Codes:
    """i64[k, 14]: the features that are one.

    Args:
        arms: i64[k].
        contexts: i64[k, 4], sensor type, protocol, topology and own fault mode.
    """
    sensor, network, load = levels_of_arm(arms).astype(np.int64).T
    kind, protocol, topology, mode = contexts.T
    places = (
        np.zeros_like(arms),
        *(sensor, network, load),
        *(sensor * LEVELS + network, sensor * LEVELS + load, network * LEVELS + load),
        arms,
        *(kind * LEVELS + sensor, protocol * LEVELS + network),
        *(topology, kind, protocol, mode),
    )
    features: Codes = np.stack(places, axis=1) + np.array(STARTS)
    return features


_LEVELS_OF: Final = levels_of_arm(np.arange(ARMS)).astype(np.int64)
_BASIS: Final[Float64] = np.zeros((ARMS, STARTS[_SENSOR]))
_BASIS[np.arange(ARMS)[:, None], features_of(np.arange(ARMS), np.zeros((ARMS, 4), np.int64))[:, :_SENSOR]] = 1.0


class Bandit:
    """What is believed of each arm in each context.

    Args:
        discount: of all that was seen, at each decision; above 0, at most 1.
        most: samples an arm that outlast a decision.

    Attributes:
        outer: f64[F, F], S; its lower triangle.
        moment: f64[F], b.
        sums: f64[2], w and q.
    """

    def __init__(self, discount: float, most: float) -> None:
        self.discount, self.most = discount, most
        self.outer, self.moment, self.sums = np.zeros((FEATURES, FEATURES)), np.zeros(FEATURES), np.zeros(2)

    def hear(self, arms: Codes, contexts: Codes, entropy: Float64, decisions: Codes) -> None:
        """Takes in samples.

        Args:
            arms: i64[k].
            contexts: i64[k, 4].
            entropy: f64[k], mean in nats over the decisions of each sample.
            decisions: i64[k], at least one each.
        """
        weights = decisions * (len(decisions) / max(int(decisions.sum()), 1))
        _add(features_of(arms, contexts), entropy, weights, self.outer, self.moment, self.sums)

    def forget(self) -> None:
        """Before a decision: what was seen counts for less."""
        kept = self.discount * min(1.0, self.most * ARMS / max(float(self.sums[0]), 1.0))
        for array in (self.outer, self.moment, self.sums):
            np.multiply(array, kept, out=array)

    def draw(self, contexts: Codes, generator: np.random.Generator) -> tuple[Codes, npt.NDArray[np.bool_]]:
        """One move for each of ``contexts`` i64[k, 4].

        Returns:
            Arms i64[k]; bool[k], whether it is the one of the highest expectation.
        """
        if not len(contexts):
            return np.zeros(0, np.int64), np.zeros(0, np.bool_)
        theta, factor, sigma = self._solve()
        noise = torch.from_numpy(generator.standard_normal((FEATURES, DRAWS)))
        drawn = theta[:, None] + sigma * torch.linalg.solve_triangular(factor.T, noise, upper=True)
        chosen = np.arange(len(contexts)) % DRAWS
        arms = _scores(drawn.T.numpy(), chosen, contexts).argmax(axis=1)
        if not self.sums[0]:
            return arms, np.zeros(len(arms), np.bool_)
        kinds, row = np.unique(contexts[:, :2], axis=0, return_inverse=True)
        best = _scores(theta[None].numpy(), np.zeros(len(kinds), np.int64), kinds).argmax(axis=1)
        return arms, arms == best[row.reshape(-1)]

    def expected(self, arms: Codes, contexts: Codes) -> Float64:
        """f64[k]: entropy in nats that is expected of arms i64[k] in contexts i64[k, 4]; NaN before any sample."""
        if not self.sums[0]:
            return np.full(len(arms), np.nan)
        values: Float64 = self._solve()[0].numpy()[features_of(arms, contexts)].sum(axis=1)
        return values

    def _solve(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """The mean theta f64[F], the lower factor of A f64[F, F], and sigma."""
        lower = torch.from_numpy(self.outer + np.diag(RIDGE))
        factor = torch.linalg.cholesky(lower)  # reads the lower triangle alone
        moment = torch.from_numpy(self.moment)
        theta = torch.cholesky_solve(moment[:, None], factor)[:, 0]
        count, squares = self.sums.tolist()
        variance = (squares - float(moment @ theta)) / count if count else 1.0
        return theta, factor, max(math.sqrt(max(variance, 0.0)), _LEAST)

    def state(self) -> Arrays:
        """For a checkpoint."""
        return {"outer": self.outer, "moment": self.moment, "sums": self.sums}

    def restore(self, arrays: Arrays) -> None:
        """The inverse of :meth:`state`."""
        for name in ("outer", "moment", "sums"):
            getattr(self, name)[...] = arrays[name]


def _scores(theta: Float64, chosen: Codes, contexts: Codes) -> Float64:
    """f64[k, 216]: what differs between arms, under row ``chosen`` i64[k] of theta f64[n, F] in contexts i64[k, 2+]."""
    arms = (torch.from_numpy(theta[:, : STARTS[_SENSOR]]) @ torch.from_numpy(_BASIS).T).numpy()
    sensor = theta[:, STARTS[_SENSOR] : STARTS[_NETWORK]].reshape(len(theta), -1, LEVELS)
    network = theta[:, STARTS[_NETWORK] : STARTS[_TOPOLOGY]].reshape(len(theta), -1, LEVELS)
    scores: Float64 = arms[chosen]
    scores += sensor[chosen, contexts[:, 0]][:, _LEVELS_OF[:, 0]]
    scores += network[chosen, contexts[:, 1]][:, _LEVELS_OF[:, 1]]
    return scores


@entry
def _add(features, entropy, weights, outer, moment, sums):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - a kernel
    # The features of a sample rise: what stands at (later, earlier) is the lower triangle.
    for k in range(len(features)):
        y, weight = entropy[k], weights[k]
        sums[0] += weight
        sums[1] += weight * y * y
        for i in range(features.shape[1]):
            moment[features[k, i]] += weight * y
            for j in range(i + 1):
                outer[features[k, i], features[k, j]] += weight
