"""Sampling by probabilities that do not change: stratified epochs or independent draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.experience.sampling.draw import (
    Draw,
    SamplingError,
    check_count,
    check_size,
    check_state,
    sampler_key,
)
from agentpipe.experience.sampling.masses import UNIT, Masses, alias_table, draw_alias, draw_uniform, fill_epoch

if TYPE_CHECKING:
    from collections.abc import Mapping


class StaticSampler:
    """Draw number i depends on seed, name, set and i alone, however the draws are divided into calls.

    Args:
        name: of the sampler.
        size: steps to draw from.
        masses: u64[size], see :mod:`~agentpipe.experience.sampling.masses`; None = equally likely.
        weights: f32[size], importance weight of each step; None = 1.
        seed: from 0 to 2**63 - 1.
        stratified: epochs of ``size`` draws in which every step comes floor or ceiling of its expected times; else
            independent draws.

    Raises:
        SamplingError: an empty set.
    """

    def __init__(
        self,
        name: str,
        size: int,
        masses: Masses | None,
        weights: npt.NDArray[np.float32] | None,
        *,
        seed: int,
        stratified: bool,
    ) -> None:
        self.name = name
        self.size = check_size(size)
        self.seed = seed
        self.stratified = stratified
        self._masses = np.empty(0, np.uint64) if masses is None else masses
        self.drawn = 0
        self._weights = weights
        self._key = sampler_key(seed, name)
        self._table = None if masses is None or stratified else alias_table(masses)
        self._order = np.empty(size if stratified else 0, np.uint32)
        self._epoch = -1

    def draw(self, count: int) -> Draw:
        """The next ``count`` steps, in random order."""
        ids = np.empty(check_count(count), np.int64)
        if self.stratified:
            self._draw_stratified(ids)
        elif self._table is None:
            draw_uniform(self.size, self._key, self.drawn, ids)
        else:
            draw_alias(self._table, self._key, self.drawn, ids)
        self.drawn += count
        weights = np.ones(count, np.float32) if self._weights is None else self._weights[ids]
        return Draw(ids, weights)

    def _draw_stratified(self, ids: npt.NDArray[np.int64]) -> None:
        done = 0
        while done < len(ids):
            epoch, place = divmod(self.drawn + done, self.size)
            if epoch != self._epoch:
                fill_epoch(self._masses, self._key, epoch, self._order)
                self._epoch = epoch
            part = self._order[place : place + len(ids) - done]
            ids[done : done + len(part)] = part
            done += len(part)

    def probabilities(self) -> npt.NDArray[np.float64]:
        """The exact probability of each step, f64[size]."""
        if not len(self._masses):
            return np.full(self.size, 1 / self.size)
        return self._masses / (float(UNIT) * self.size)

    def state(self) -> dict[str, Any]:
        """Name, seed, size, kind of draws and how many there were."""
        return {
            "name": self.name,
            "seed": self.seed,
            "size": self.size,
            "stratified": self.stratified,
            "drawn": self.drawn,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on after the draws that ``state`` tells of."""
        check_state(state, name=self.name, seed=self.seed, size=self.size, stratified=self.stratified)
        drawn = state.get("drawn")
        if not isinstance(drawn, int) or drawn < 0:
            raise SamplingError(f"{drawn!r} draws", field="drawn", remedy="use what state() returned")
        self.drawn = drawn
