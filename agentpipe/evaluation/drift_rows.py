"""KL divergence of each row of two policies' probabilities, in blocks: a million rows need no more memory than a few.

For a row with m legal actions both distributions are mixed with the uniform one over the legal actions,

    p' = (1 - s) p + s / m,      q' = (1 - s) q + s / m,      s fixed beforehand,

and its figure is KL(p' || q') = sum_a p'(a) ln(p'(a) / q'(a)) in nats (Kullback and Leibler 1951), p the candidate's
and q the champion's. The smoothing depends on nothing but the masks. All sums are float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.errors import EvaluationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

BLOCK = 8_192
"""Rows computed at once: with 32 actions a block of float64 is 2 MB, about what a core's cache holds."""
SUM_TOLERANCE = 1e-3


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, rows, BLOCK))


def check_probabilities(probabilities: npt.NDArray[Any], mask: npt.NDArray[np.bool_], who: str) -> None:
    """Refuses what is no distribution over the legal actions: [n, A] probabilities, mask bool[n, A].

    Raises:
        EvaluationError: another shape; a probability that is negative, not finite or not allowed; a row that does not
            sum to one within 0.001. The message names ``who``, row and action.
    """
    if probabilities.shape != mask.shape or mask.ndim != 2:
        raise EvaluationError(f"the {who} gives probabilities of shape {probabilities.shape}", expected=mask.shape)
    for block in _blocks(mask.shape[0]):
        part, legal = probabilities[block], mask[block]
        bad = ~(part >= 0) | ~np.isfinite(part) | ((part > 0) & ~legal)
        if bad.any():
            row, action = (int(index[0]) for index in np.nonzero(bad))
            message = f"the {who}'s probability is negative, not finite or not allowed"
            raise EvaluationError(message, row=block.start + row, action=action)
        off = ~(np.abs(part.sum(axis=1, dtype=np.float64) - 1) <= SUM_TOLERANCE)
        if off.any():
            row = block.start + int(np.flatnonzero(off)[0])
            raise EvaluationError(f"the {who}'s probabilities do not sum to one", row=row)


def smoothed_kl(
    candidate: npt.ArrayLike, champion: npt.ArrayLike, mask: npt.NDArray[np.bool_], smoothing: float = 1e-6
) -> Floats:
    """KL(candidate || champion) of each row: f64[n] from [n, A] probabilities and a mask bool[n, A]; see the module.

    Raises:
        EvaluationError: ``smoothing`` is not in (0, 1), shapes differ, or a row allows no action.
    """
    if not 0 < smoothing < 1:
        raise EvaluationError(f"smoothing must be in (0, 1), got {smoothing}")
    p_all, q_all = np.asarray(candidate), np.asarray(champion)
    if not p_all.shape == q_all.shape == mask.shape or mask.ndim != 2:
        raise EvaluationError("probabilities differ in shape", candidate=p_all.shape, champion=q_all.shape)
    result = np.empty(mask.shape[0])
    for block in _blocks(mask.shape[0]):
        legal = mask[block]
        count = np.count_nonzero(legal, axis=1)
        if not count.all():
            raise EvaluationError("no action is allowed", row=block.start + int(np.flatnonzero(count == 0)[0]))
        floor = (smoothing / count)[:, None]
        p, q = (array[block].astype(np.float64) * (1 - smoothing) + floor for array in (p_all, q_all))
        ratio = np.log(p / q)
        ratio *= legal
        result[block] = np.einsum("ij,ij->i", p, ratio)
    return np.maximum(result, 0.0, out=result)
