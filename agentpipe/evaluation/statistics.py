"""Estimates with 95 % confidence intervals when episodes of one environment are not independent.

Notation: cluster g (an environment) of G has the sums A_g of a numerator and B_g of a denominator; the estimate is the
ratio R = sum A_g / sum B_g. With residuals e_g = A_g - R B_g its linearised, cluster-robust variance is

    var(R) = G / (G - 1) * sum e_g**2 / (sum B_g)**2

(Cochran, Sampling Techniques, 3rd ed. 1977, section 6.3 and 10.3), and intervals use Student's t with G - 1 degrees of
freedom. A share gets a Wilson interval at the effective sample size R (1 - R) / var(R), so that it stays inside [0, 1]
and keeps its coverage near 0 and 1 (Franco, Little, Louis and Slud 2019, J. Survey Statistics and Methodology 7(3)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.errors import EvaluationError

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

NORMAL_QUANTILE = 1.959963984540054
DIGITS = 6


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """An estimate, its 95 % confidence interval and what it rests on."""

    value: float
    low: float
    high: float
    observations: int
    """Rows: episodes, decisions, ..."""
    clusters: int
    """Environments; equals ``observations`` where none were given."""
    method: str
    """``wilson``, ``clustered_wilson`` or ``clustered_t``."""

    def ci95(self) -> list[float]:
        """``[low, high]``, rounded to six digits."""
        return [round(self.low, DIGITS), round(self.high, DIGITS)]


def student_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t with ``degrees`` >= 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


def wilson(successes: float, n: float, quantile: float = NORMAL_QUANTILE) -> Interval:
    """Wilson's score interval (1927) for a share of ``successes`` in ``n`` independent trials.

    Both may be fractional (an effective sample size).

    Raises:
        EvaluationError: ``n`` is not positive, or ``successes`` is outside [0, n].
    """
    if not (n > 0 and 0 <= successes <= n):
        raise EvaluationError(f"no interval for {successes} successes in {n} trials")
    share, square = successes / n, quantile * quantile
    centre = (share + square / (2 * n)) / (1 + square / n)
    half = quantile * np.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    return Interval(max(0.0, float(centre - half)), min(1.0, float(centre + half)))


def _checked(name: str, values: npt.ArrayLike, size: int | None = None) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise EvaluationError(f"{name} must be a vector with at least one value", shape=array.shape)
    if size is not None and array.size != size:
        raise EvaluationError(f"{name} has {array.size} values, expected {size}")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise EvaluationError(f"{name} is not finite", row=int(bad[0]))
    return array


def _cluster_sums(numerator: Floats, denominator: Floats, cluster: npt.ArrayLike) -> tuple[Floats, Floats]:
    labels = np.asarray(cluster)
    if labels.shape != numerator.shape:
        raise EvaluationError(f"cluster has shape {labels.shape}, expected {numerator.shape}")
    _, index = np.unique(labels, return_inverse=True)
    sums = np.bincount(index, weights=numerator).astype(np.float64)
    return sums, np.bincount(index, weights=denominator).astype(np.float64)


def _variance(sums: Floats, sizes: Floats, ratio: float) -> float:
    groups = sums.size
    return float(groups / (groups - 1) * np.sum((sums - ratio * sizes) ** 2) / np.sum(sizes) ** 2)


def ratio_interval(numerator: npt.ArrayLike, denominator: npt.ArrayLike, cluster: npt.ArrayLike) -> Estimate:
    """Ratio of two sums, clustered: f64[n] numerator and denominator (sum > 0), labels [n].

    With a single cluster its spread cannot be known: the interval is infinite.

    Raises:
        EvaluationError: empty, not finite, of different lengths, or a denominator that sums to zero.
    """
    top = _checked("numerator", numerator)
    bottom = _checked("denominator", denominator, top.size)
    if not np.sum(bottom) > 0:
        raise EvaluationError("the denominator must sum to more than zero")
    sums, sizes = _cluster_sums(top, bottom, cluster)
    ratio = float(np.sum(sums) / np.sum(sizes))
    if sums.size < 2:
        return Estimate(ratio, -np.inf, np.inf, top.size, sums.size, "clustered_t")
    half = student_quantile(sums.size - 1) * np.sqrt(_variance(sums, sizes, ratio))
    return Estimate(ratio, float(ratio - half), float(ratio + half), top.size, sums.size, "clustered_t")


def mean_interval(values: npt.ArrayLike, cluster: npt.ArrayLike) -> Estimate:
    """Mean of f64[n] values with labels [n]; see :func:`ratio_interval`."""
    array = _checked("values", values)
    return ratio_interval(array, np.ones_like(array), cluster)


def success_interval(success: npt.ArrayLike, cluster: npt.ArrayLike | None = None) -> Estimate:
    """Success share of bool[n] episodes, with labels [n] of their environments, or independent where there are none.

    The effective sample size is never more than n. Where it cannot be estimated (one cluster, or all episodes with the
    same outcome) each cluster counts as one observation, which is the least that clustering can leave.

    Raises:
        EvaluationError: empty, not finite, or of different lengths.
    """
    outcome = _checked("success", success)
    share = float(np.mean(outcome))
    if cluster is None:
        interval = wilson(float(np.sum(outcome)), outcome.size)
        return Estimate(share, interval.low, interval.high, outcome.size, outcome.size, "wilson")
    sums, sizes = _cluster_sums(outcome, np.ones_like(outcome), cluster)
    groups = sums.size
    if groups < 2 or share in (0.0, 1.0):
        effective, quantile = float(groups), NORMAL_QUANTILE
    else:
        variance = _variance(sums, sizes, share)
        effective = min(float(outcome.size), share * (1 - share) / variance) if variance > 0 else float(outcome.size)
        quantile = student_quantile(groups - 1)
    interval = wilson(share * effective, effective, quantile)
    return Estimate(share, interval.low, interval.high, outcome.size, groups, "clustered_wilson")


def paired_difference(first: npt.ArrayLike, second: npt.ArrayLike, cluster: npt.ArrayLike) -> Estimate:
    """Mean of ``first - second``, episode by episode, with labels [n] of their environments.

    Both players met the same episodes in the same order, so what an episode's difficulty adds to both cancels.
    """
    a = _checked("first", first)
    return mean_interval(a - _checked("second", second, a.size), cluster)


def group_by(labels: npt.ArrayLike) -> dict[str, npt.NDArray[np.int64]]:
    """Row numbers i64 of each label, labels in sorted order."""
    array = np.asarray(labels)
    names, index = np.unique(array, return_inverse=True)
    order = np.argsort(index, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(index))[:-1]) if names.size else []
    return {str(name): part for name, part in zip(names, parts, strict=True)}


def rounded(value: object) -> Any:  # noqa: ANN401 - JSON of the same shape as the input
    """``value`` with every float inside rounded to six digits and non-finite ones replaced by ``None`` (JSON-ready)."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float | np.floating):
        return round(float(value), DIGITS) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
