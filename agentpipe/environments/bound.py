"""How many environments generalisation asks for: covering constant of the disturbance space and the bound (S1)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CatalogError

if TYPE_CHECKING:
    from agentpipe.environments.table import DisturbanceTable

DELTA = 0.01
EPSILON = 0.03
RADIUS = 0.05
_LLOYD_ROUNDS = 50


@dataclass(frozen=True)
class Covering:
    """``constant`` clusters put all ``rows`` within ``radius`` of a centre; ``reached`` is the largest distance."""

    constant: int
    radius: float
    reached: float
    rows: int


@dataclass(frozen=True)
class BoundReport:
    """The bound as computed; ``required`` is its whole part, ``short`` whether ``available`` falls below the bound."""

    constant: int
    delta: float
    epsilon: float
    bound: float
    required: int
    available: int
    short: bool
    text: str

    def to_json(self) -> dict[str, object]:
        """JSON-ready form."""
        return asdict(self)


def generalisation_bound(constant: int, delta: float = DELTA, epsilon: float = EPSILON) -> float:
    """C·ln(1/δ)/ε²: training environments so that with probability 1 − δ the success seen is within ε of the true one.

    C = 42, δ = 0.01, ε = 0.03 gives 214,907.9 (and not the 6,892 that circulates for these figures).

    Raises:
        CatalogError: C below 1, or δ or ε outside (0, 1).
    """
    for name, value, fits in (
        ("constant", constant, constant >= 1),
        ("delta", delta, 0 < delta < 1),
        ("epsilon", epsilon, 0 < epsilon < 1),
    ):
        if not fits:
            raise CatalogError(f"{name} {value:g} is out of range", field=name, remedy="C ≥ 1, 0 < δ < 1, 0 < ε < 1")
    return constant * math.log(1 / delta) / epsilon**2


def disturbance_space(table: DisturbanceTable) -> npt.NDArray[np.float64]:
    """The table's rows as points f64[rows, used]: parameters scaled to [0, 1], those that never vary left out."""
    points = np.array([row.values for row in table.rows], dtype=np.float64)
    low, high = points.min(axis=0), points.max(axis=0)
    used = high > low
    scaled: npt.NDArray[np.float64] = (points[:, used] - low[used]) / (high[used] - low[used])
    return scaled


def covering(table: DisturbanceTable, radius: float = RADIUS) -> Covering:
    """The covering constant of a table's disturbance space, measured by k-means.

    The smallest k for which k-means (Lloyd, started from farthest points, hence deterministic) leaves no row farther
    than ``radius`` from its centre. Distance is the root mean square over parameters, each scaled to [0, 1].

    Raises:
        CatalogError: ``radius`` is not positive.
    """
    if not radius > 0:
        raise CatalogError(f"radius {radius:g} is not positive", field="radius", remedy="use a radius such as 0.05")
    points = disturbance_space(table)
    points = points / math.sqrt(max(points.shape[1], 1))
    distinct = len(np.unique(points, axis=0))
    for k in range(1, distinct + 1):
        reached = _largest_distance(points, k)
        if reached <= radius:
            return Covering(k, radius, reached, len(points))
    return Covering(distinct, radius, 0.0, len(points))


def _largest_distance(points: npt.NDArray[np.float64], k: int) -> float:
    centres = _farthest_points(points, k)
    distances = _distances(points, centres)
    nearest = distances.argmin(axis=1)
    for _ in range(_LLOYD_ROUNDS):
        members = [points[nearest == index] for index in range(k)]
        centres = np.stack([m.mean(axis=0) if len(m) else c for m, c in zip(members, centres, strict=True)])
        distances = _distances(points, centres)
        following = distances.argmin(axis=1)
        if (following == nearest).all():
            break
        nearest = following
    return float(distances.min(axis=1).max())


def _farthest_points(points: npt.NDArray[np.float64], k: int) -> npt.NDArray[np.float64]:
    """``k`` starting centres: the point nearest the mean, then always the one farthest from all chosen."""
    chosen = [int(_distances(points, points.mean(axis=0, keepdims=True)).argmin())]
    gap = _distances(points, points[chosen]).min(axis=1)
    while len(chosen) < k:
        chosen.append(int(gap.argmax()))
        gap = np.minimum(gap, _distances(points, points[chosen[-1:]])[:, 0])
    return points[chosen]


def _distances(points: npt.NDArray[np.float64], centres: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    distances: npt.NDArray[np.float64] = np.sqrt(((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2))
    return distances


def bound_report(
    available: int, table: DisturbanceTable, *, delta: float = DELTA, epsilon: float = EPSILON, radius: float = RADIUS
) -> BoundReport:
    """The bound for a table, held against the ``available`` training environments."""
    constant = covering(table, radius).constant
    bound = generalisation_bound(constant, delta, epsilon)
    short = available < bound
    text = (
        f"N ≥ C·ln(1/δ)/ε² = {constant}·ln(1/{delta:g})/{epsilon:g}² = {int(bound):,}; {available:,} environments train"
    )
    if short:
        reached = math.sqrt(constant * math.log(1 / delta) / max(available, 1))
        text += f": short of the bound; this many give ε = {reached:.3f}"
    return BoundReport(constant, delta, epsilon, bound, int(bound), available, short, text)
