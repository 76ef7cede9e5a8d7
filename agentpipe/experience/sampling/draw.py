"""What every sampler does: draws ids and weights, seeded, and says where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from agentpipe.environments.rng import fold, stable_hash
from agentpipe.errors import AgentpipeError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SIZE: Final = (1 << 31) - 1
"""largest number of steps of one set: ids are kept in 32 bits"""


class SamplingError(AgentpipeError):
    """Raised when nothing can be drawn: an empty set, priorities that are none, a state of something else."""


@dataclass(frozen=True)
class Draw:
    """Steps that were drawn.

    Args:
        ids: i64[n], each from 0 to the sampler's size - 1.
        weights: f32[n], importance weights; 1 where all steps are equally likely.
    """

    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


class Sampler(Protocol):
    """Draws steps of a set of fixed size. What it draws depends on its seed, its name and what it has drawn before."""

    @property
    def name(self) -> str:
        """Which sampler this is, as the training log calls it."""
        ...

    @property
    def size(self) -> int:
        """Steps that it draws from."""
        ...

    def draw(self, count: int) -> Draw:
        """The next ``count`` steps.

        Raises:
            SamplingError: a count below one.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Where it stands: numbers and arrays, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a :meth:`state` of a sampler of the same kind and seed over the same set.

        Raises:
            SamplingError: the state is of another sampler, seed or size.
        """
        ...


def sampler_key(seed: int, name: str) -> np.uint64:
    """Key of all draws of the sampler ``name`` under ``seed`` (0 <= seed < 2**63)."""
    if not 0 <= seed < 1 << 63:
        raise SamplingError(f"seed {seed} is out of range", remedy="a seed is from 0 to 2**63 - 1")
    return np.uint64(fold(np.uint64(seed), stable_hash(f"agentpipe.experience.sampling.{name}")))


def check_size(size: int) -> int:
    """``size``, if that many steps can be drawn from."""
    if not 0 < size <= MAX_SIZE:
        text = "nothing to draw from: the set has no steps" if size <= 0 else f"{size} steps are too many"
        raise SamplingError(text, remedy="record trajectories, widen the freshness window, or use fewer shards")
    return size


def check_count(count: int) -> int:
    """``count``, if so many steps can be asked for."""
    if count < 1:
        raise SamplingError(f"a draw of {count} steps", remedy="draw at least one")
    return count


def check_state(state: Mapping[str, Any], **expected: object) -> None:
    """Compares what a state says of its sampler with what the sampler is."""
    for field, value in expected.items():
        if state.get(field) != value:
            text = f"the state is of a sampler with {field} {state.get(field)!r}, not {value!r}"
            raise SamplingError(text, field=field, remedy="build the sampler over the same set and seed")


def check_priorities(values: npt.ArrayLike, what: str) -> npt.NDArray[np.float64]:
    """``values`` as f64[n], if each is finite and not negative."""
    checked = np.ascontiguousarray(values, np.float64)
    bad = ~(checked >= 0) | ~np.isfinite(checked)
    if bad.any():
        at = int(bad.argmax())
        remedy = "priorities are finite and not negative"
        raise SamplingError(f"{what} {checked[at]} cannot be a priority", position=at, remedy=remedy)
    return checked
