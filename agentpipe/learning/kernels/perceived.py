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
OWN: Final = 2 * CHANNELS + 5
_COMMON: Final = OWN + 2 * CHANNELS
_ZERO, _ONE, _LEAST = np.float32(0.0), np.float32(1.0), np.float32(1e-4)
_NEVER, _FAR = np.float32(-30.0), np.float32(-3.0e38)


class Weights(NamedTuple):
    """Parameters of the network of width w, and how presence and topology are read from normalised input."""

    alone: Any
    """f32[INPUTS, w], A turned"""
    alone_bias: Any
    """f32[w]"""
    own: Any
    """f32[w, w], the part of B that reads the machine itself, turned"""
    fed: Any
    """f32[w, w], the part that reads those it feeds"""
    feeding: Any
    """f32[w, w], the part that reads those that feed it"""
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
    alone: Any
    """f32[BLOCK * 8, w]"""
    fed: Any
    """f32[BLOCK * 8, w]"""
    feeding: Any
    """f32[BLOCK * 8, w]"""
    together: Any
    """f32[BLOCK * 8, w]"""
    answers: Any
    """f32[13, BLOCK * 8], answers first"""
    top: Any
    """f32[BLOCK * 8]"""

    @classmethod
    def allocate(cls, width: int) -> Self:
        """Room for one thread."""
        rows = BLOCK * MACHINES
        sizes = (
            (BLOCK, MACHINES),
            (BLOCK, MACHINES, MACHINES),
            (rows, INPUTS),
            *[(rows, width)] * 4,
            (ANSWERS, rows),
            (rows,),
        )
        return cls(Call.allocate(), *(np.zeros(size, np.float32) for size in sizes))


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
def _coupled(feeds: Any, values: Any, fed: Any, feeding: Any) -> None:
    """Adds, for each machine, the values of those it feeds to ``fed``, of those that feed it to ``feeding``."""
    for m in range(MACHINES):
        for n in range(MACHINES):
            coupling = feeds[m, n]
            if abs(coupling) > _LEAST:
                for j in range(values.shape[1]):
                    fed[m, j] += coupling * values[n, j]
                    feeding[n, j] += coupling * values[m, j]


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


@compiled
def _mix(samples: int, weights: Weights, work: Work) -> None:
    """The second layer: every machine with those beside it; one that is not there is nothing to the others."""
    width, rows = work.alone.shape[1], samples * MACHINES
    for i in range(samples):
        own = slice(i * MACHINES, (i + 1) * MACHINES)
        alone, fed, feeding = work.alone[own], work.fed[own], work.feeding[own]
        for m in range(MACHINES):
            here = work.present[i, m]
            for j in range(width):
                alone[m, j] *= here
                fed[m, j] = _ZERO
                feeding[m, j] = _ZERO
        _coupled(work.feeds[i], alone, fed, feeding)
    multiply(work.call, rows, width, width, work.alone, False, weights.own, False, work.together, False)
    multiply(work.call, rows, width, width, work.fed, False, weights.fed, False, work.together, True)
    multiply(work.call, rows, width, width, work.feeding, False, weights.feeding, False, work.together, True)
    _activate(work.together[:rows], weights.together_bias, weights.tanh)


@compiled
def _exponents(samples: int, weights: Weights, work: Work) -> None:
    """Turns the logits of the modes, f32[10, samples * 8], into what is proportional to their probabilities.

    Of each sample the largest becomes one. All logits, those of the severities too, get their bias first.
    """
    rows, top = samples * MACHINES, work.top
    for k in range(ANSWERS):
        logit, bias = work.answers[k], weights.answers_bias[k]
        for r in range(rows):
            logit[r] += bias
    for r in range(rows):
        top[r] = _FAR
    for k in range(MODE_COUNT):
        logit = work.answers[k]
        for r in range(rows):
            top[r] = logit[r] if logit[r] > top[r] else top[r]
    for i in range(samples):
        best = _FAR
        for m in range(MACHINES):
            best = max(best, top[i * MACHINES + m] + (_ONE - work.present[i, m]) * _NEVER)
        for m in range(MACHINES):
            top[i * MACHINES + m] = best - (_ONE - work.present[i, m]) * _NEVER
    for k in range(MODE_COUNT):
        p = work.answers[k]
        for r in range(rows):
            p[r] = exp(p[r] - top[r])


@inlined
def _marginals(answers: Any, first: int, belief: Any) -> None:
    """Sums over the joint of machine and mode, of one sample: of each machine without the false alarm, of each mode."""
    for k in range(MACHINES):
        belief[k] = _ZERO
    for k in range(MODE_COUNT):
        total = _ZERO
        for m in range(MACHINES):
            p = answers[k, first + m]
            total += p
            belief[m] += p if k != FALSE_ALARM else _ZERO
        belief[MACHINES + k] = total


@inlined
def _normalise(belief: Any, first: int, count: int) -> None:
    total = _ZERO
    for k in range(first, first + count):
        total += belief[k]
    share = _ONE / total
    for k in range(first, first + count):
        belief[k] *= share


@inlined
def _severity(answers: Any, first: int, belief: Any) -> None:
    """Softmax of the machines' mean logits, each as probable as it is the faulty one."""
    at, top = MACHINES + MODE_COUNT, _FAR
    for level in range(LEVELS):
        logit = _ZERO
        for m in range(MACHINES):
            logit += belief[m] * answers[MODE_COUNT + level, first + m]
        belief[at + level] = logit
        top = max(top, logit)
    for level in range(LEVELS):
        belief[at + level] = exp(belief[at + level] - top)
    _normalise(belief, at, LEVELS)


@entry
def believe(weights: Weights, work: Work, base: Any, belief: Any) -> None:
    """Fills ``belief`` f32[N, 21] from the base encoding f32[N, E or more]."""
    width = work.alone.shape[1]
    for low in range(0, len(base), BLOCK):
        samples = min(BLOCK, len(base) - low)
        rows = samples * MACHINES
        for i in range(samples):
            about = work.about[i * MACHINES : (i + 1) * MACHINES]
            _public(weights, base[low + i], work.present[i], work.feeds[i])
            _own(base[low + i], work.present[i], about)
            means = about[:, CHANNELS : 2 * CHANNELS]
            fed, feeding = about[:, OWN : OWN + CHANNELS], about[:, OWN + CHANNELS : OWN + 2 * CHANNELS]
            _coupled(work.feeds[i], means, fed, feeding)
            _common(base[low + i], work.present[i], about)
        multiply(work.call, rows, width, INPUTS, work.about, False, weights.alone, False, work.alone, False)
        _activate(work.alone[:rows], weights.alone_bias, weights.tanh)
        _mix(samples, weights, work)
        multiply(work.call, ANSWERS, rows, width, weights.answers, False, work.together, True, work.answers, False)
        _exponents(samples, weights, work)
        for i in range(samples):
            _marginals(work.answers, i * MACHINES, belief[low + i])
            _normalise(belief[low + i], 0, MACHINES)
            _normalise(belief[low + i], MACHINES, MODE_COUNT)
            _severity(work.answers, i * MACHINES, belief[low + i])
