"""What follows from the logits of a block of samples: probabilities of the legal actions, entropy, a draw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.learning.kernels.elementary import exp, log
from agentpipe.learning.kernels.jit import compiled

if TYPE_CHECKING:
    from agentpipe.learning.kernels.layers import Work

TOP, SHARE, LOG_TOTAL, ENTROPY, LEGAL, CHOSEN = range(6)
"""rows of ``Work.lanes`` that :func:`masked_softmax` and :func:`chosen` fill; the others are free"""
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-3.0e38)


@compiled
def masked_softmax(rows: int, work: Work) -> None:
    """Probabilities of the legal actions (others zero), logarithm of their normaliser, entropy, number legal.

    log p of action j of sample i is ``work.z[j, i] - work.lanes[LOG_TOTAL, i]``. Without a legal action all is zero.
    """
    actions = len(work.mask)
    top, total, log_total = work.lanes[TOP], work.lanes[SHARE], work.lanes[LOG_TOTAL]
    entropy, legal = work.lanes[ENTROPY], work.lanes[LEGAL]
    for i in range(rows):
        top[i], total[i], entropy[i], legal[i] = _LOWEST, _ZERO, _ZERO, _ZERO
    for j in range(actions):
        z, mask = work.z[j], work.mask[j]
        for i in range(rows):
            here = z[i] if mask[i] else _LOWEST
            top[i] = here if here > top[i] else top[i]
            legal[i] += _ONE if mask[i] else _ZERO
    for j in range(actions):
        z, mask, p = work.z[j], work.mask[j], work.probability[j]
        for i in range(rows):
            p[i] = exp(z[i] - top[i]) if mask[i] else _ZERO
            total[i] += p[i]
    for i in range(rows):
        log_total[i] = log(total[i]) + top[i]
        total[i] = _ONE / total[i] if legal[i] > _ZERO else _ZERO
    for j in range(actions):
        z, p = work.z[j], work.probability[j]
        for i in range(rows):
            p[i] *= total[i]
            entropy[i] -= p[i] * (z[i] - log_total[i]) if p[i] != _ZERO else _ZERO


@compiled
def chosen(rows: int, work: Work, action: Any) -> None:
    """Puts log p of ``action`` i64[rows] into ``work.lanes[CHOSEN]``, after :func:`masked_softmax`."""
    log_p, log_total = work.lanes[CHOSEN], work.lanes[LOG_TOTAL]
    for i in range(rows):
        log_p[i] = work.z[action[i], i] - log_total[i]


@compiled
def draw(rows: int, work: Work, uniform: Any, action: Any) -> None:
    """Draws an action for each sample, after :func:`masked_softmax`, by the inverse of the cumulative distribution.

    It is the first one whose cumulated probability exceeds the uniform number; where rounding lets none exceed it, the
    last possible one.

    Args:
        rows: samples.
        work: holds the probabilities.
        uniform: f64[rows] in [0, 1).
        action: i64[rows], is filled; -1 where nothing is legal.
    """
    cumulated, below = work.lanes[TOP], work.lanes[CHOSEN]
    for i in range(rows):
        cumulated[i], below[i], action[i] = _ZERO, np.float32(uniform[i]), -1
    for j in range(len(work.mask)):
        p = work.probability[j]
        for i in range(rows):
            open_ = cumulated[i] <= below[i] and p[i] > _ZERO
            cumulated[i] += p[i]
            action[i] = j if open_ else action[i]
