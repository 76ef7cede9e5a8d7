"""Causal priority sampling: steps on which much depends come more often."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from agentpipe.experience.sampling.draw import SamplingError, check_priorities, check_size
from agentpipe.experience.sampling.masses import UNIT, Masses, integer_masses
from agentpipe.experience.sampling.static import StaticSampler

CAUSAL: Final = "causal"
FLOOR: Final = 0.1
ALPHA: Final = 0.6
BETA: Final = 1.0
LEAST_FLOOR: Final = 1e-6
"""below, a floor would be lost in the rounding of the masses"""


class CausalSampler(StaticSampler):
    """Draws step i with probability p_i = (1 - floor) influence_i^alpha / sum(influence^alpha) + floor / n.

    The exponent is that of prioritised replay: at 1 a few steps whose dependents vary most take most draws, and an
    epoch misses many of the ten most influential steps of calmer episodes; at 0 all influential steps are alike.

    The floor is the share of draws that is spread evenly, so that no step starves: each comes ``floor`` times or more
    an epoch on average. No influence anywhere: every step is equally likely.

    Importance weights are w_i = (n p_i)**-beta, divided by their mean over draws, sum(p_i w_i). With beta = 1 that mean
    is 1: a weighted mean over draws estimates the plain mean over all steps without bias. The usual division by the
    largest possible weight (Schaul et al., "Prioritized experience replay", ICLR 2016) would shrink it by up to
    1 / floor, and with it the part of the batch that these draws are; it guards against unbounded weights, and here
    none exceeds floor**-beta (before the division).

    Args:
        influence: [n], finite, not negative; of :attr:`~agentpipe.experience.sampling.sets.SampleSet.influence`.
        seed: from 0 to 2**63 - 1.
        floor: from :data:`LEAST_FLOOR` to 1.
        alpha: from 0 to 1.
        beta: 0 = no correction, 1 = full correction.
        stratified: see :class:`~agentpipe.experience.sampling.static.StaticSampler`.

    Raises:
        SamplingError: an empty set; an influence that is negative or not finite; floor or beta out of range.
    """

    def __init__(
        self,
        influence: npt.ArrayLike,
        *,
        seed: int,
        floor: float = FLOOR,
        alpha: float = ALPHA,
        beta: float = BETA,
        stratified: bool = True,
    ) -> None:
        if not 0 <= beta <= 1:
            raise SamplingError(f"beta {beta}", field="beta", remedy="a value from 0 to 1")
        masses = causal_masses(influence, floor, alpha)
        expected = masses.astype(np.float64) / UNIT
        weights = expected**-beta
        weights /= np.mean(expected * weights)
        super().__init__(CAUSAL, len(masses), masses, weights.astype(np.float32), seed=seed, stratified=stratified)
        self.floor, self.alpha, self.beta = floor, alpha, beta


def causal_masses(influence: npt.ArrayLike, floor: float = FLOOR, alpha: float = ALPHA) -> Masses:
    """Masses of causal sampling, u64[n] (:mod:`~agentpipe.experience.sampling.masses`)."""
    if not LEAST_FLOOR <= floor <= 1:
        raise SamplingError(f"floor {floor}", field="floor", remedy=f"a value from {LEAST_FLOOR:g} to 1")
    if not 0 <= alpha <= 1:
        raise SamplingError(f"alpha {alpha}", field="alpha", remedy="a value from 0 to 1")
    checked = check_priorities(influence, "influence")
    check_size(len(checked))
    largest = float(checked.max())
    if not largest > 0:
        return integer_masses(np.ones(len(checked)))
    scaled = np.where(checked > 0, (checked / largest) ** alpha, 0.0)  # at alpha 0, too, no influence is none
    return integer_masses((1 - floor) * (scaled / scaled.mean()) + floor)
