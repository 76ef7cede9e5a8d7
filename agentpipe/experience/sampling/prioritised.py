"""Prioritised experience replay: steps whose value was most wrong come more often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry
from agentpipe.experience.sampling.draw import (
    Draw,
    SamplingError,
    check_count,
    check_priorities,
    check_size,
    check_state,
    sampler_key,
)
from agentpipe.experience.sampling.tree import Floats, Ints, SumTree, draw_tree

if TYPE_CHECKING:
    from collections.abc import Mapping

PRIORITISED: Final = "prioritised"
ALPHA: Final = 0.6
BETA: Final = 0.4
LEAST_ERROR: Final = 1e-6
"""added to every error, so that a step learned perfectly can still come"""


class PrioritisedSampler:
    """The proportional variant of Schaul et al., "Prioritized experience replay", ICLR 2016, with their symbols.

    p_i = (|delta_i| + :data:`LEAST_ERROR`)**alpha; P(i) = p_i / sum p. A draw of k steps takes one from each of k equal
    parts of the cumulated priorities. w_i = (n P(i))**-beta, divided by the largest of the draw, so that weights only
    scale down. A step that was never updated has the largest priority there ever was (1 at first). Call number k draws
    what depends on seed, set, k and the priorities alone.

    Args:
        size: steps to draw from.
        seed: from 0 to 2**63 - 1.
        alpha: 0 = uniform, 1 = in proportion to the error.
        beta: 0 = no correction, 1 = full correction; an attribute, set it to anneal.

    Raises:
        SamplingError: an empty set; alpha or beta out of range.
    """

    def __init__(self, size: int, *, seed: int, alpha: float = ALPHA, beta: float = BETA) -> None:
        if not 0 <= alpha <= 1:
            raise SamplingError(f"alpha {alpha}", field="alpha", remedy="a value from 0 to 1")
        self.name = PRIORITISED
        self.size = check_size(size)
        self.seed = seed
        self.alpha = alpha
        self.beta = beta
        self.calls = 0
        self.largest = 1.0
        self._key = sampler_key(seed, PRIORITISED)
        self._tree = SumTree(size)
        self._tree.fill(1.0)

    @property
    def beta(self) -> float:
        """How much of the bias the weights take back."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        if not 0 <= beta <= 1:
            raise SamplingError(f"beta {beta}", field="beta", remedy="a value from 0 to 1")
        self._beta = beta

    def draw(self, count: int) -> Draw:
        """The next ``count`` steps, ids ascending (neighbours in a shard are gathered faster)."""
        ids, weights = np.empty(check_count(count), np.int64), np.empty(count, np.float32)
        tree, priorities = self._tree, np.empty(count)
        draw_tree(tree.sums, tree.offsets, self._key, self.calls, ids, priorities)
        _weigh(priorities, self._beta, weights)
        self.calls += 1
        return Draw(ids, weights)

    def update(self, ids: Ints, errors: npt.ArrayLike) -> None:
        """New priorities from TD errors, f[n] (their sign does not count); of equal ids the last one counts.

        Raises:
            SamplingError: an id out of range, an error that is not finite; nothing is changed then.
        """
        given = np.ascontiguousarray(ids, np.int64)
        priorities = np.abs(np.asarray(errors, np.float64))
        if given.shape != priorities.shape or given.ndim != 1:
            text = f"{given.shape} ids and {priorities.shape} errors"
            raise SamplingError(text, remedy="give one error for each id")
        wrong = _to_priorities(given, self.size, self.alpha, priorities)
        if wrong >= 0:
            text = f"id {given[wrong]} with error {np.asarray(errors).flat[wrong]}"
            raise SamplingError(text, position=int(wrong), remedy=f"ids from 0 to {self.size - 1}, finite errors")
        if len(given):
            self.largest = max(self.largest, float(priorities.max()))
            self._tree.update(given, priorities)

    def grow(self, size: int) -> None:
        """Takes in steps that came behind the present ones, at the largest priority.

        Raises:
            SamplingError: ``size`` is below the present one.
        """
        if size < self.size:
            raise SamplingError(f"{size} steps, {self.size} before", remedy="build a new sampler for a smaller set")
        known = self._tree.stored
        self._tree = SumTree(check_size(size))
        self._tree.fill(np.concatenate([known, np.full(size - self.size, self.largest)]))
        self.size = size

    def priorities(self) -> Floats:
        """The priority p_i of each step, f64[size]."""
        return self._tree.stored.copy()

    def probabilities(self) -> Floats:
        """P(i) of each step, f64[size]."""
        return self._tree.stored / self._tree.total

    def state(self) -> dict[str, Any]:
        """Name, seed, size, alpha, beta, calls and all priorities."""
        return {
            "name": self.name,
            "seed": self.seed,
            "size": self.size,
            "alpha": self.alpha,
            "beta": self._beta,
            "calls": self.calls,
            "largest": self.largest,
            "priorities": self.priorities(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where ``state`` was taken."""
        check_state(state, name=self.name, seed=self.seed, size=self.size, alpha=self.alpha)
        priorities = check_priorities(state["priorities"], "priority")
        calls, largest = int(state["calls"]), float(state["largest"])
        if len(priorities) != self.size or not (priorities > 0).all() or calls < 0 or not largest > 0:
            raise SamplingError("the state is incomplete", remedy="use what state() returned")
        self.beta, self.calls, self.largest = float(state["beta"]), calls, largest
        self._tree.fill(priorities)


@entry
def _to_priorities(ids: Ints, size: int, alpha: float, errors: Floats) -> int:
    """Turns absolute errors into priorities in place; the first place with something wrong, or -1."""
    for place in range(len(ids)):
        if ids[place] < 0 or ids[place] >= size or not errors[place] < np.inf:
            return place
        errors[place] = (errors[place] + LEAST_ERROR) ** alpha
    return -1


@entry
def _weigh(priorities: Floats, beta: float, weights: npt.NDArray[np.float32]) -> None:
    """(n P)**-beta over the largest of them: (p / p_min)**-beta, whatever the total."""
    least = priorities[0]
    for place in range(1, len(priorities)):
        least = min(least, priorities[place])
    for place in range(len(priorities)):
        weights[place] = (least / priorities[place]) ** beta
