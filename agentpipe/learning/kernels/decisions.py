"""What a policy decides, and what it says of decisions that were taken, for any number of samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agentpipe.learning.kernels.jit import compiled, entry
from agentpipe.learning.kernels.layers import BLOCK, forward
from agentpipe.learning.kernels.softmax import CHOSEN, ENTROPY, LEGAL, chosen, draw, masked_softmax

if TYPE_CHECKING:
    from agentpipe.learning.kernels.layers import Net, Work

_ZERO = np.float32(0.0)


class Seen(NamedTuple):
    """Inputs of N samples."""

    encoded: Any
    """f32[N, E]"""
    last_action: Any
    """i64[N]"""
    mask: Any
    """bool[N, A]"""


class Decided(NamedTuple):
    """What is said of N samples."""

    action: Any
    """i64[N]"""
    log_probability: Any
    """f32[N], of the action"""
    value: Any
    """f32[N]"""
    entropy: Any
    """f32[N], of the distribution"""


@compiled
def _look(net: Net, work: Work, seen: Seen, low: int, high: int, value: Any) -> None:
    """Probabilities and values of the samples ``low`` to before ``high``, at most a block."""
    rows, actions = high - low, len(work.mask)
    for i in range(rows):
        for j in range(actions):
            work.mask[j, i] = seen.mask[low + i, j]
    forward(net, seen.encoded[low:high], seen.last_action[low:high], rows, work)
    masked_softmax(rows, work)
    for i in range(rows):
        value[low + i] = work.z[actions, i]


@entry
def decide(net: Net, work: Work, seen: Seen, uniform: Any, decided: Decided) -> int:
    """Draws an action for each sample by its number in ``uniform`` f64[N], and says what led to it.

    Without numbers (``uniform`` is empty) only the value is looked for, and the entropy is zero: another one decides.

    Returns:
        The first sample without a legal action (its action is -1), or -1.
    """
    count, drawn, stuck = len(seen.encoded), len(uniform) > 0, -1
    for low in range(0, count, BLOCK):
        high = min(low + BLOCK, count)
        rows = high - low
        _look(net, work, seen, low, high, decided.value)
        for i in range(rows):
            if work.lanes[LEGAL, i] <= _ZERO and stuck < 0:
                stuck = low + i
            decided.entropy[low + i] = work.lanes[ENTROPY, i] if drawn else _ZERO
        if drawn:
            action = decided.action[low:high]
            draw(rows, work, uniform[low:high], action)
            chosen(rows, work, action)
            for i in range(rows):
                decided.log_probability[low + i] = work.lanes[CHOSEN, i]
    return stuck


@entry
def judge(net: Net, work: Work, seen: Seen, action: Any, log_probability: Any, value: Any) -> None:
    """Logarithms of the probabilities of ``action`` i64[N], and values, both f32[N]."""
    count = len(seen.encoded)
    for low in range(0, count, BLOCK):
        high = min(low + BLOCK, count)
        _look(net, work, seen, low, high, value)
        chosen(high - low, work, action[low:high])
        for i in range(high - low):
            log_probability[low + i] = work.lanes[CHOSEN, i]


@entry
def distribution(net: Net, work: Work, seen: Seen, probability: Any, value: Any) -> None:
    """Probabilities f32[N, A], zero where the mask is false, and values f32[N]."""
    count = len(seen.encoded)
    for low in range(0, count, BLOCK):
        high = min(low + BLOCK, count)
        _look(net, work, seen, low, high, value)
        for i in range(high - low):
            for j in range(len(work.mask)):
                probability[low + i, j] = work.probability[j, i]
