"""Bootstrap intervals of a mean when rows of one environment are not independent.

Whole environments are drawn with replacement (the cluster bootstrap; Davison and Hinkley, Bootstrap Methods and their
Application, 1997, section 3.8): with sums A_g and row counts B_g of environment g, each of R resamples of all G
environments gives sum A_g / sum B_g, and the interval runs from the 2.5 % to the 97.5 % percentile of these. KL is not
negative and skewed to the right, which a percentile interval follows and a symmetric one does not.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.errors import EvaluationError

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

DRAWS = 1_000
"""Resamples; that many are enough for a 95 % interval (Davison and Hinkley, section 5.2)."""
MOST_CLUSTERS = 10_000
"""More environments are put together, at random, into so many bundles, which are as independent as their members."""
_AT_ONCE = 1 << 21  # numbers drawn at once: 16 MB


def keyed_generator(seed: int, key: str) -> np.random.Generator:
    """A generator of its own for each ``key``: adding a cell changes no other cell's interval."""
    word = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return np.random.default_rng(np.random.SeedSequence([seed, word]))


def bootstrap_mean(
    values: npt.ArrayLike, cluster: npt.ArrayLike, *, seed: int, key: str = "", draws: int = DRAWS
) -> list[float | None]:
    """95 % percentile interval of the mean of f64[n] values with labels [n] of their environments.

    Returns:
        ``[low, high]``; ``[None, None]`` with a single environment, whose spread cannot be known.

    Raises:
        EvaluationError: no value, one that is not finite, labels of another length, or fewer than 100 ``draws``.
    """
    array, labels = np.asarray(values, dtype=np.float64), np.asarray(cluster)
    if array.ndim != 1 or not array.size or labels.shape != array.shape:
        raise EvaluationError("values and clusters must be vectors of one length", values=array.shape)
    if not np.isfinite(array).all():
        raise EvaluationError("a value is not finite", row=int(np.flatnonzero(~np.isfinite(array))[0]))
    if draws < 100:
        raise EvaluationError(f"{draws} resamples make no 95 % interval", remedy="use at least 100")
    index = _numbered(labels)
    sizes = np.bincount(index)
    present = np.flatnonzero(sizes)
    if present.size < 2:
        return [None, None]
    sums: Floats = np.bincount(index, weights=array)[present].astype(np.float64)
    counts: Floats = sizes[present].astype(np.float64)
    generator = keyed_generator(seed, key)
    if present.size > MOST_CLUSTERS:
        bundle = generator.permutation(present.size) % MOST_CLUSTERS
        sums = np.bincount(bundle, weights=sums).astype(np.float64)
        counts = np.bincount(bundle, weights=counts).astype(np.float64)
    means = _resampled(sums, counts, generator, draws)
    low, high = np.quantile(means, [0.025, 0.975])
    return [float(low), float(high)]


def _numbered(labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """``labels`` as numbers from 0 in the same order; indices of a catalogue are such numbers already."""
    if np.issubdtype(labels.dtype, np.integer) and labels.min() >= 0 and labels.max() <= 4 * MOST_CLUSTERS:
        return labels.astype(np.int64, copy=False)
    index: npt.NDArray[np.int64] = np.unique(labels, return_inverse=True)[1]
    return index


def _resampled(sums: Floats, sizes: Floats, generator: np.random.Generator, draws: int) -> Floats:
    """f64[draws], the mean of each resample of clusters."""
    clusters, means = sums.size, np.empty(draws)
    at_once = max(1, _AT_ONCE // clusters)
    for start in range(0, draws, at_once):
        part = means[start : start + at_once]
        chosen = generator.integers(0, clusters, size=(part.size, clusters))
        part[:] = sums[chosen].sum(axis=1) / sizes[chosen].sum(axis=1)
    return means
