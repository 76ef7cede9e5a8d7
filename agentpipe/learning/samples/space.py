"""The space that a pool declares for its observations, and whether they keep to it.

A pool that knows the bounds of what it shows has an ``observation_space`` with ``low`` and ``high``, as Gymnasium's
``Box`` does (one environment's). An observation beyond them is trouble in the simulator or in its declaration: whatever
is learned from it, no other environment of the same kind will show. Training stops at the first such value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry
from agentpipe.environments.layout import OBSERVATION_NAMES
from agentpipe.errors import NonFiniteError, SimulationError

if TYPE_CHECKING:
    from collections.abc import Sequence

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Space:
    """Bounds of D observation features, all of them finite."""

    low: Floats
    """f32[D]"""
    high: Floats
    """f32[D]"""

    def check(self, observation: Floats, step: int, names: Sequence[str]) -> None:
        """Looks at observations f32[N, D] of the environments ``names``; equal to a bound is inside.

        Raises:
            NonFiniteError: the first value outside is a NaN or an infinity; names environment, field and step.
            SimulationError: it is finite; names the bound, too.
        """
        place = int(_first_outside(observation, self.low, self.high))
        if place < 0:
            return
        row, column = divmod(place, observation.shape[1])
        value = float(observation[row, column])
        name = OBSERVATION_NAMES[column] if len(self.low) == len(OBSERVATION_NAMES) else str(column)
        where: dict[str, Any] = {"environment": names[row], "field": f"observation {name}"}
        if not np.isfinite(value):
            remedy = "training stopped at the first such value; the last checkpoint is good"
            raise NonFiniteError("not finite", **where, step=step, remedy=remedy)
        above = value > self.high[column]
        bound = float((self.high if above else self.low)[column])
        remedy = "correct the environment, or the observation space that it declares; the last checkpoint is good"
        text = f"{value:g} is {'above' if above else 'below'} {bound:g}, the bound of the declared space"
        raise SimulationError(text, **where, step=step, remedy=remedy)


def declared_space(pool: object) -> Space | None:
    """The space of one environment of ``pool``; ``None`` where it declares none. An infinite bound is the largest f32.

    Raises:
        SimulationError: it has no bounds, a bound is no number, or it is of another size than the observations.
    """
    declared: Any = getattr(pool, "observation_space", None)
    if declared is None:
        return None
    most, where = np.finfo(np.float32).max, "observation_space"
    try:
        low, high = (np.clip(np.asarray(side, np.float32), -most, most) for side in (declared.low, declared.high))
    except (AttributeError, TypeError, ValueError) as error:
        remedy = "declare one with low and high, as Gymnasium's Box has, or none"
        raise SimulationError(f"the declared space has no bounds: {error}", field=where, remedy=remedy) from error
    size: int = pool.observation.shape[1]  # type: ignore[attr-defined]
    if low.shape != (size,) or high.shape != (size,):
        text = f"a space of {low.shape} is declared for observations of {size} features"
        raise SimulationError(text, field=where, remedy="declare the space of one environment")
    if np.isnan(low).any() or np.isnan(high).any():
        raise SimulationError("a bound of the declared space is NaN", field=where, remedy="declare numbers, or none")
    return Space(low, high)


@entry
def _first_outside(observation, low, high):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - a kernel
    rows, columns = observation.shape
    for row in range(rows):
        inside = True
        for column in range(columns):
            inside &= (low[column] <= observation[row, column]) & (observation[row, column] <= high[column])
        if inside:
            continue
        for column in range(columns):
            if not (low[column] <= observation[row, column] <= high[column]):
                return row * columns + column
    return -1
