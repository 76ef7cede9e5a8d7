"""Uniform sampling: every step is equally likely."""

from __future__ import annotations

from typing import Final

from agentpipe.experience.sampling.static import StaticSampler

UNIFORM: Final = "uniform"


class UniformSampler(StaticSampler):
    """All weights are 1.

    Args:
        size: steps to draw from.
        seed: from 0 to 2**63 - 1.
        stratified: every step once an epoch, in random order; else independent draws, which in one epoch miss
            1/e of the steps.

    Raises:
        SamplingError: an empty set.
    """

    def __init__(self, size: int, *, seed: int, stratified: bool = True) -> None:
        super().__init__(UNIFORM, size, None, None, seed=seed, stratified=stratified)
