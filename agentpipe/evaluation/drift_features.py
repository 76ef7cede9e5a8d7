"""How far each feature of one sample moved away from another: population stability index and Kolmogorov-Smirnov.

*PSI*. K bins come from the reference alone: its deciles, ties merged, and one bin beyond its least and one beyond its
largest value. With shares p (reference) and q (production), both mixed with the uniform distribution,

    p' = (1 - s) p + s / K,   q' = (1 - s) q + s / K,   PSI = sum_k (q'_k - p'_k) ln(q'_k / p'_k)

(Siddiqi, Credit Risk Scorecards, 2006, where s = 0). s is fixed, so an empty bin is finite and means the same in every
comparison. Two equal distributions give about (K - 1)(1/n + 1/m) by chance.

*KS*. The largest distance D of the two distribution functions and its asymptotic p-value, from
:func:`scipy.stats.ks_2samp`; p-values are then adjusted over all features by Benjamini and Hochberg (1995).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentpipe.evaluation.statistics import rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

BINS = 10
SMOOTHING = 1e-3
KS_ROWS = 20_000
"""Most rows of each side that the Kolmogorov-Smirnov distance is taken from, drawn by seed."""


@dataclass(frozen=True)
class FeatureDrift:
    """One feature, production against reference; figures rounded to six digits."""

    name: str
    status: str
    """``OK``, or ``REVIEW`` where PSI, or D together with its p-value, is above its limit."""
    psi: float
    ks: float
    p_value: float
    """Of ``ks``, adjusted over all features."""
    reference_mean: float
    production_mean: float
    outside: float
    """Share of production below the reference's least or above its largest value."""
    edges: list[float]
    """Upper edges of the bins but the last, which has none; a value equal to an edge lies below it."""
    reference_shares: list[float]
    production_shares: list[float]


def bin_edges(ordered: npt.NDArray[np.floating]) -> Floats:
    """Upper edges f64[K - 1] of K bins for an ascending sample of at least one finite value; see the module.

    A constant c has three bins: below c, c, above c.
    """
    picks = ordered[(ordered.size * np.arange(1, BINS) - 1) // BINS].astype(np.float64)
    below = np.nextafter(ordered[0], ordered.dtype.type(-np.inf)).astype(np.float64)
    return np.unique(np.concatenate([[below], picks, [np.float64(ordered[-1])]]))


def bin_shares(ordered: npt.NDArray[np.floating], edges: Floats) -> Floats:
    """Shares f64[K] of an ascending sample in the bins that ``edges`` separate."""
    at = np.searchsorted(ordered, edges.astype(ordered.dtype), side="right")
    counts = np.diff(np.concatenate([[0], at, [ordered.size]]))
    return counts / ordered.size


def stability_index(reference: Floats, production: Floats, smoothing: float = SMOOTHING) -> float:
    """PSI in nats of two vectors of K shares."""
    p, q = ((1 - smoothing) * shares + smoothing / shares.size for shares in (reference, production))
    return float(np.sum((q - p) * np.log(q / p)))


def adjusted(p_values: npt.ArrayLike) -> Floats:
    """Benjamini-Hochberg adjusted p-values, in the order given."""
    from scipy.stats import false_discovery_control

    return np.asarray(false_discovery_control(p_values, method="bh"), dtype=np.float64)


def distances(reference: npt.NDArray[np.float32], production: npt.NDArray[np.float32]) -> tuple[Floats, Floats]:
    """D f64[F] and adjusted p-values f64[F] of [n, F] and [m, F] samples."""
    from scipy.stats import ks_2samp

    found = [
        ks_2samp(reference[:, column], production[:, column], method="asymp") for column in range(reference.shape[1])
    ]
    return np.array([one.statistic for one in found]), adjusted([min(1.0, one.pvalue) for one in found])


def compare_feature(
    reference: npt.NDArray[np.float32], production: npt.NDArray[np.float32]
) -> tuple[float, float, Floats, Floats, Floats]:
    """PSI, share outside, edges, shares of both, for one feature f32[n] and f32[m]."""
    first, second = np.sort(reference), np.sort(production)
    edges = bin_edges(first)
    p, q = bin_shares(first, edges), bin_shares(second, edges)
    return stability_index(p, q), float(q[0] + q[-1]), edges, p, q


def compare_features(
    reference: npt.NDArray[np.float32],
    production: npt.NDArray[np.float32],
    names: Sequence[str],
    ks: tuple[Floats, Floats],
    *,
    psi_limit: float,
    ks_limit: float,
    alpha: float,
) -> list[FeatureDrift]:
    """Every feature of f32[n, F] and f32[m, F], with ``ks`` from :func:`distances` and the limits of a review."""
    result = []
    for column, name in enumerate(names):
        psi, outside, edges, p, q = compare_feature(reference[:, column], production[:, column])
        distance, p_value = float(ks[0][column]), float(ks[1][column])
        moved = psi > psi_limit or (distance > ks_limit and p_value <= alpha)
        figures = {
            "name": name,
            "status": "REVIEW" if moved else "OK",
            "psi": psi,
            "ks": distance,
            "p_value": p_value,
            "reference_mean": float(np.mean(reference[:, column], dtype=np.float64)),
            "production_mean": float(np.mean(production[:, column], dtype=np.float64)),
            "outside": outside,
            "edges": edges.tolist(),
            "reference_shares": p.tolist(),
            "production_shares": q.tolist(),
        }
        result.append(FeatureDrift(**rounded(figures)))
    return result
