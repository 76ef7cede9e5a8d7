"""The belief of :class:`~agentpipe.learning.joint.line_perception.LinePerception`, compiled: for rollouts and replay.

The formula is there. Samples go through in blocks whose machines, eight a sample, stay in the cache; couplings of zero,
nearly all of them, cost nothing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Self

import numpy as np

from agentpipe.environments.layout import CHANNELS, FALSE_ALARM, MACHINES, MODES, SEVERITIES, TOPOLOGIES, block_start
from agentpipe.learning.kernels.blas import Call, multiply
from agentpipe.learning.kernels.elementary import exp, tanh
from agentpipe.learning.kernels.jit import compiled, entry, inlined

BLOCK: Final = 32
"""samples that go through the network together"""
READING, MEAN, AGE, COUNT, PRESENT, DECLARED, TRIED, TOPOLOGY, LINK, PLC = (
    block_start(name)
    for name in ("reading", "mean", "age", "count", "present", "declared_machine", "tried", "topology", "link", "plc")
)
LINE: Final = PLC + 2 - LINK
MODE_COUNT, LEVELS, KINDS = len(MODES), len(SEVERITIES), len(TOPOLOGIES)
INPUTS: Final = 2 * CHANNELS + 5 + 4 * CHANNELS + LINE + MODE_COUNT + MACHINES
ANSWERS: Final = MODE_COUNT + LEVELS
_COMMON: Final = 4 * CHANNELS + 5
_ZERO, _ONE, _LEAST = np.float32(0.0), np.float32(1.0), np.float32(1e-4)
_NEVER, _FAR = np.float32(-30.0), np.float32(-3.0e38)


class Weights(NamedTuple):
    """Parameters of the network of width w, and how presence and topology are read from normalised input."""

    alone: Any
    """f32[w, INPUTS]"""
    alone_bias: Any
    """f32[w]"""
    together: Any
    """f32[w, 3 w]"""
    together_bias: Any
    """f32[w]"""
    answers: Any
    """f32[13, w]"""
    answers_bias: Any
    """f32[13]"""
    couplings: Any
    """f32[6, 8, 8]"""
    shift: Any
    """f32[14]"""
    unit: Any
    """f32[14]"""
    tanh: bool
    """the activation, else the positive part"""


class Work(NamedTuple):
    """Room for one block of samples; each thread has its own."""

    call: Call
    present: Any
    """f32[BLOCK, 8]"""
    feeds: Any
    """f32[BLOCK, 8, 8]"""
    about: Any
    """f32[BLOCK * 8, INPUTS]"""
    hidden: Any
    """f32[BLOCK * 8, w]"""
    around: Any
    """f32[BLOCK * 8, 3 w]"""
    answers: Any
    """f32[BLOCK * 8, 13]"""

    @classmethod
    def allocate(cls, width: int) -> Self:
        """Room for one thread."""
        rows = BLOCK * MACHINES
        sizes = ((BLOCK, MACHINES), (BLOCK, MACHINES, MACHINES), (rows, INPUTS), (rows, width), (rows, 3 * width))
        return cls(Call.allocate(), *(np.zeros(size, np.float32) for size in (*sizes, (rows, ANSWERS))))


@inlined
def _public(weights: Weights, base: Any, present: Any, feeds: Any) -> None:
    """Presence f32[8] and couplings f32[8, 8] of one sample."""
    for m in range(MACHINES):
        present[m] = base[PRESENT + m] * weights.unit[m] + weights.shift[m]
        for n in range(MACHINES):
            feeds[m, n] = _ZERO
    for kind in range(KINDS):
        share = base[TOPOLOGY + kind] * weights.unit[MACHINES + kind] + weights.shift[MACHINES + kind]
        if abs(share) > _LEAST:
            for m in range(MACHINES):
                for n in range(MACHINES):
                    feeds[m, n] += share * weights.couplings[kind, m, n]


@inlined
def _own(base: Any, present: Any, about: Any) -> None:
    """What is known of each machine alone; the rest of its row is cleared, but for its place."""
    at = 2 * CHANNELS
    for m in range(MACHINES):
        row = about[m]
        for c in range(CHANNELS):
            row[c] = base[READING + m * CHANNELS + c]
            row[CHANNELS + c] = base[MEAN + m * CHANNELS + c] * present[m]
        row[at], row[at + 1], row[at + 2] = base[AGE + m], base[COUNT + m], base[PRESENT + m]
        row[at + 3], row[at + 4] = base[DECLARED + m], base[TRIED + m]
        for index in range(at + 5, INPUTS):
            row[index] = _ZERO
        row[INPUTS - MACHINES + m] = _ONE


@inlined
def _coupled(feeds: Any, values: Any, width: int, out: Any, first: int) -> None:
    """Adds, for each machine, the values of those it feeds at ``first`` of its row, of those that feed it behind."""
    for m in range(MACHINES):
        for n in range(MACHINES):
            coupling = feeds[m, n]
            if abs(coupling) > _LEAST:
                for j in range(width):
                    out[m, first + j] += coupling * values[n, j]
                    out[n, first + width + j] += coupling * values[m, j]


@inlined
def _common(base: Any, present: Any, about: Any) -> None:
    """What every machine of the line is told alike."""
    middle, largest, line, end = _COMMON, _COMMON + CHANNELS, _COMMON + 2 * CHANNELS, INPUTS - MACHINES
    machines, common = _ZERO, about[0]
    for m in range(MACHINES):
        machines += present[m]
        for c in range(CHANNELS):
            mean = about[m, CHANNELS + c]
            common[middle + c] += mean
            common[largest + c] = max(common[largest + c], abs(mean))
    for c in range(CHANNELS):
        common[middle + c] /= machines
    for index in range(LINE):
        common[line + index] = base[LINK + index]
    for mode in range(MODE_COUNT):
        common[line + LINE + mode] = base[TRIED + MACHINES + mode]
    for m in range(1, MACHINES):
        for index in range(middle, end):
            about[m, index] = common[index]


@compiled
def _activate(values: Any, bias: Any, is_tanh: bool) -> None:
    for i in range(len(values)):
        row = values[i]
        for j in range(values.shape[1]):
            x = row[j] + bias[j]
            row[j] = tanh(x) if is_tanh else (_ZERO if x <= _ZERO else x)


@inlined
def _masked(present: Any, hidden: Any, around: Any) -> None:
    """[z_m | 0 | 0] of the machines of one sample, f32[8, 3 w]; of one that is not there zeros."""
    width = hidden.shape[1]
    for m in range(MACHINES):
        here = present[m]
        for j in range(width):
            around[m, j] = hidden[m, j] * here
        for j in range(width, 3 * width):
            around[m, j] = _ZERO


@inlined
def _joint(present: Any, answers: Any, bias: Any, belief: Any) -> None:
    """Sums over the joint of machine and mode, of one sample: of each machine without the false alarm, of each mode."""
    top = answers[0, 0] + bias[0]
    for m in range(MACHINES):
        for k in range(MODE_COUNT):
            answers[m, k] += bias[k] + (_ONE - present[m]) * _NEVER
            top = max(top, answers[m, k])
    for k in range(MACHINES + MODE_COUNT):
        belief[k] = _ZERO
    for m in range(MACHINES):
        for k in range(MODE_COUNT):
            p = exp(answers[m, k] - top)
            belief[MACHINES + k] += p
            belief[m] += p if k != FALSE_ALARM else _ZERO


@inlined
def _normalise(belief: Any, first: int, count: int) -> None:
    total = _ZERO
    for k in range(first, first + count):
        total += belief[k]
    for k in range(first, first + count):
        belief[k] /= total


@inlined
def _severity(answers: Any, bias: Any, belief: Any) -> None:
    """Softmax of the machines' mean logits, each as probable as it is the faulty one."""
    first = MACHINES + MODE_COUNT
    top = _FAR
    for level in range(LEVELS):
        logit = bias[MODE_COUNT + level]
        for m in range(MACHINES):
            logit += belief[m] * answers[m, MODE_COUNT + level]
        belief[first + level] = logit
        top = max(top, logit)
    for level in range(LEVELS):
        belief[first + level] = exp(belief[first + level] - top)
    _normalise(belief, first, LEVELS)


@entry
def believe(weights: Weights, work: Work, base: Any, belief: Any) -> None:
    """Fills ``belief`` f32[N, 21] from the base encoding f32[N, E or more]."""
    width = len(weights.alone)
    for low in range(0, len(base), BLOCK):
        samples = min(BLOCK, len(base) - low)
        rows = samples * MACHINES
        for i in range(samples):
            own = slice(i * MACHINES, (i + 1) * MACHINES)
            _public(weights, base[low + i], work.present[i], work.feeds[i])
            _own(base[low + i], work.present[i], work.about[own])
            _coupled(work.feeds[i], work.about[own, CHANNELS:], CHANNELS, work.about[own], 2 * CHANNELS + 5)
            _common(base[low + i], work.present[i], work.about[own])
        multiply(work.call, rows, width, INPUTS, work.about, False, weights.alone, True, work.hidden, False)
        _activate(work.hidden[:rows], weights.alone_bias, weights.tanh)
        for i in range(samples):
            own = slice(i * MACHINES, (i + 1) * MACHINES)
            _masked(work.present[i], work.hidden[own], work.around[own])
            _coupled(work.feeds[i], work.around[own], width, work.around[own], width)
        multiply(work.call, rows, width, 3 * width, work.around, False, weights.together, True, work.hidden, False)
        _activate(work.hidden[:rows], weights.together_bias, weights.tanh)
        multiply(work.call, rows, ANSWERS, width, work.hidden, False, weights.answers, True, work.answers, False)
        for i in range(samples):
            own = slice(i * MACHINES, (i + 1) * MACHINES)
            _joint(work.present[i], work.answers[own], weights.answers_bias, belief[low + i])
            _normalise(belief[low + i], 0, MACHINES)
            _normalise(belief[low + i], MACHINES, MODE_COUNT)
            _severity(work.answers[own], weights.answers_bias, belief[low + i])
