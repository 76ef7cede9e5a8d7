"""The segment-wise clipped policy loss of a part of a minibatch, from the weights to the gradients.

Formulas stand in :mod:`~agentpipe.learning.gradient.fused`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from agentpipe.learning.kernels.elementary import exp
from agentpipe.learning.kernels.jit import compiled, entry
from agentpipe.learning.kernels.layers import BLOCK, backward, forward, gather
from agentpipe.learning.kernels.softmax import CHOSEN, LEGAL, LOG_TOTAL, SHARE, TOP, masked_softmax
from agentpipe.learning.kernels.softmax import ENTROPY as ENTROPIES

if TYPE_CHECKING:
    from agentpipe.learning.kernels.layers import Net, Work

LOG_RATIO_LIMIT: Final = 10.0
"""the logarithm of a probability ratio is clamped to plus and minus this before the exponential"""
POLICY, VALUE, ENTROPY, CHOICES, KL, OLD_KL = range(6)
"""positions in the figures"""
SEGMENTED: Final = 6
"""where KL, clipped samples and samples of each segment begin in them"""
_ZERO, _ONE, _HALF, _LIMIT = np.float32(0.0), np.float32(1.0), np.float32(0.5), np.float32(LOG_RATIO_LIMIT)


class Samples(NamedTuple):
    """The arrays of a :class:`~agentpipe.learning.samples.batch.Batch`, in its order, and of an anchor."""

    encoded: Any
    last_action: Any
    mask: Any
    action: Any
    log_probability: Any
    advantage: Any
    returns: Any
    segment: Any
    weight: Any
    anchor: Any
    """f32[M, A], probabilities to stay near; of no rows where there are none"""


class Goal(NamedTuple):
    """What is wanted of a loss."""

    clip: Any
    """f32[S]"""
    entropy_weight: Any
    value_weight: Any
    kl_weight: Any
    """of the anchor"""


@entry
def segmented(
    samples: Samples,
    goal: Goal,
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
        goal: weights and clip ranges.
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
            if len(samples.anchor) > 0:
                _anchor_sums(samples, here, work, figures)
            _loss(samples, goal, here, _ONE / np.float32(count), work, figures)
            backward(net, work.encoded, work.last_action, rows, work, gradient)


@compiled
def _anchor_sums(samples: Samples, chosen: Any, work: Work, figures: Any) -> None:
    """The sum of w KL(anchor || policy)."""
    log_total = work.lanes[LOG_TOTAL]
    for i in range(len(chosen)):
        kl = _ZERO
        for j in range(len(work.mask)):
            q = samples.anchor[chosen[i], j]
            if work.mask[j, i] and q > _ZERO:
                kl += q * (np.float32(math.log(q)) - (work.z[j, i] - log_total[i]))
        figures[-1] += samples.weight[chosen[i]] * kl


@compiled
def _loss(samples: Samples, goal: Goal, chosen: Any, share: Any, work: Work, figures: Any) -> None:
    """Turns logits and values into their gradients and adds to the figures; ``share`` is one over the samples."""
    rows, actions, segments = len(chosen), len(work.mask), len(goal.clip)
    value, log_total, entropy, legal = work.z[actions], work.lanes[LOG_TOTAL], work.lanes[ENTROPIES], work.lanes[LEGAL]
    pull, spread, hold = work.lanes[TOP], work.lanes[SHARE], work.lanes[CHOSEN]
    for i in range(rows):
        sample = chosen[i]
        action, segment, advantage = samples.action[sample], samples.segment[sample], samples.advantage[sample]
        w, clip = samples.weight[sample], goal.clip[segment]
        raw = work.z[action, i] - log_total[i] - samples.log_probability[sample]
        log_ratio = min(max(raw, -_LIMIT), _LIMIT)
        ratio = exp(log_ratio)
        free, bound = ratio * advantage, min(max(ratio, _ONE - clip), _ONE + clip) * advantage
        inside = -_LIMIT <= raw <= _LIMIT
        pull[i] = -free * share * w if free <= bound and inside else _ZERO
        spread[i], hold[i] = goal.entropy_weight * share * w, goal.kl_weight * share * w
        error = value[i] - samples.returns[sample]
        value[i] = goal.value_weight * share * w * error
        kl = ratio - _ONE - log_ratio
        figures[POLICY] -= w * min(free, bound)
        figures[VALUE] += w * _HALF * error * error
        figures[ENTROPY] += entropy[i]
        figures[CHOICES] += legal[i] > _ONE
        figures[KL] += kl
        figures[OLD_KL] -= log_ratio
        figures[SEGMENTED + segment] += kl
        figures[SEGMENTED + segments + segment] += abs(ratio - _ONE) > clip
        figures[SEGMENTED + 2 * segments + segment] += 1.0
    for j in range(actions):
        z, p = work.z[j], work.probability[j]
        for i in range(rows):
            z[i] = p[i] * (spread[i] * (z[i] - log_total[i] + entropy[i]) - pull[i]) if p[i] != _ZERO else _ZERO
    for i in range(rows):
        work.z[samples.action[chosen[i]], i] += pull[i]
    if len(samples.anchor) > 0:
        for i in range(rows):
            for j in range(actions):
                q = samples.anchor[chosen[i], j] if work.mask[j, i] else _ZERO
                work.z[j, i] += hold[i] * (work.probability[j, i] - q)
