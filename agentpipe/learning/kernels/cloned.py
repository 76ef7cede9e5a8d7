"""The warm-up's loss of a part of a minibatch, from the weights to the gradients.

Formulas stand in :mod:`~agentpipe.learning.cloning.fused`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agentpipe.learning.kernels.elementary import exp, log
from agentpipe.learning.kernels.jit import compiled, entry
from agentpipe.learning.kernels.layers import BLOCK, backward, forward, gather
from agentpipe.learning.kernels.softmax import LEGAL, LOG_TOTAL, masked_softmax

if TYPE_CHECKING:
    from agentpipe.learning.kernels.layers import Net, Work

CROSS_ENTROPY, VALUE_ERROR, RIGHT, CHOICES, ANSWERS, ANSWERED_RIGHT, ANSWERED = range(7)
"""positions in the figures"""
_ZERO, _ONE, _LOWEST = np.float32(0.0), np.float32(1.0), np.float32(-3.0e38)


class Decisions(NamedTuple):
    """The arrays of a :class:`ClonedBatch` that are looked at, and what is wanted of them."""

    encoded: Any
    last_action: Any
    mask: Any
    action: Any
    returns: Any
    answers: Any
    questions: Any
    """i8[A]"""
    answer_weight: Any
    value_weight: Any


@entry
def cloned(
    samples: Decisions,
    net: Net,
    work: Work,
    chosen: Any,
    first: int,
    last: int,
    gradients: Any,
    sums: Any,
) -> None:
    """Shards ``first`` to before ``last`` of a minibatch.

    Args:
        samples: arrays of M samples.
        net: the network.
        work: room for one block.
        chosen: i64[count], the minibatch's samples.
        first: shard.
        last: shard behind the last.
        gradients: f32[shards, P], a row for each shard of the minibatch; those done here are overwritten.
        sums: f64[shards, figures], likewise.
    """
    count, shards = len(chosen), len(gradients)
    for shard in range(first, last):
        gradient, figures = gradients[shard], sums[shard]
        gradient[:] = _ZERO
        figures[:] = 0.0
        start, end = shard * count // shards, (shard + 1) * count // shards
        for low in range(start, end, BLOCK):
            here = chosen[low : min(low + BLOCK, end)]
            rows = len(here)
            gather(samples.encoded, samples.last_action, samples.mask, here, work)
            forward(net, work.encoded, work.last_action, rows, work)
            masked_softmax(rows, work)
            _loss(samples, here, _ONE / np.float32(count), work, figures)
            backward(net, work.encoded, work.last_action, rows, work, gradient)


@compiled
def _loss(samples: Decisions, chosen: Any, share: Any, work: Work, figures: Any) -> None:
    """Turns logits and values into their gradients and adds to the figures; ``share`` is one over the samples."""
    rows, actions = len(chosen), len(work.mask)
    log_total, legal, value = work.lanes[LOG_TOTAL], work.lanes[LEGAL], work.z[actions]
    for i in range(rows):
        sample = chosen[i]
        action = samples.action[sample]
        top, best = _LOWEST, 0
        for j in range(actions):
            if work.mask[j, i] and work.z[j, i] > top:
                top, best = work.z[j, i], j
        figures[CROSS_ENTROPY] -= work.z[action, i] - log_total[i]
        figures[RIGHT] += legal[i] > _ONE and best == action
        figures[CHOICES] += legal[i] > _ONE
        error = value[i] - samples.returns[sample]
        figures[VALUE_ERROR] += abs(error)
        value[i] = samples.value_weight * share * error
        work.probability[action, i] -= _ONE
        _answer(samples, sample, i, work, figures)
    for j in range(actions):
        z, p = work.z[j], work.probability[j]
        for i in range(rows):
            z[i] = share * p[i]


@compiled
def _answer(samples: Decisions, sample: int, i: int, work: Work, figures: Any) -> None:
    """Adds the gradient of the open questions of one sample to its row of probabilities."""
    actions, weight = len(work.mask), samples.answer_weight
    for q in range(samples.answers.shape[1]):
        target = samples.answers[sample, q]
        if target < 0:
            continue
        top, best = _LOWEST, 0
        for j in range(actions):
            if samples.questions[j] == q and work.z[j, i] > top:
                top, best = work.z[j, i], j
        total = _ZERO
        for j in range(actions):
            if samples.questions[j] == q:
                total += exp(work.z[j, i] - top)
        for j in range(actions):
            if samples.questions[j] == q:
                work.probability[j, i] += weight * exp(work.z[j, i] - top) / total
        work.probability[target, i] -= weight
        figures[ANSWERS] -= work.z[target, i] - top - log(total)
        figures[ANSWERED_RIGHT] += best == target
        figures[ANSWERED] += 1.0
