"""Forward and backward pass of a block of samples through the policy network.

What :class:`~agentpipe.learning.policy.network.PolicyNetwork` computes, with its parameters in one row of numbers
(:class:`~agentpipe.learning.kernels.packed.PackedNetwork` puts them there) and its input encoded. With x the encoded
input of a sample, l its last action and f the activation, each trunk is

    h_1 = f(W_1 x + table[l]),   h_k = f(W_k h_(k-1) + b_k),   z = H h_K + c

where ``table`` holds the projected embedding of every last action with the first bias added to it. The rows of H are
the actor's and, behind them, the critic's; with two trunks each has its own. z is kept with actions first, so that what
follows goes over many samples at once.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from agentpipe.learning.kernels.blas import Call, multiply
from agentpipe.learning.kernels.elementary import tanh
from agentpipe.learning.kernels.jit import compiled

BLOCK: Final = 192
"""samples that go through the network together: their activations stay in the cache"""
INPUTS, OUTPUTS, WEIGHT, BIAS, TURNED, VALUES = range(6)
"""columns of :attr:`Net.layers`"""
FIRST_ROW, ROWS = range(2)
"""columns of :attr:`Net.heads`"""
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


class Net(NamedTuple):
    """A network of T trunks with K layers each, A actions; of one trunk for actor and critic, or one for each."""

    layers: Any
    """i64[T K, 6], trunk after trunk: inputs, outputs, where its weight [outputs, inputs] and its bias (none in a first
    layer) are in ``weights``, its weight turned [inputs, outputs] in ``turned``, its values in ``Work.values``"""
    heads: Any
    """i64[T, 2]: of the rows of H, the first that reads this trunk, and how many do"""
    head: Any
    """i64[3]: where H [A + 1, width], c [A + 1] and the table [A + 1, T width] are in ``weights``"""
    weights: Any
    """f32[P]"""
    turned: Any
    """f32[Q]"""
    tanh: bool
    """the activation, else the positive part"""


class Work(NamedTuple):
    """Room for one block of samples; each thread has its own."""

    call: Call
    encoded: Any
    """f32[BLOCK, E]"""
    last_action: Any
    """i64[BLOCK]"""
    mask: Any
    """bool[A, BLOCK]"""
    values: Any
    """f32[...], of all layers"""
    gradients: Any
    """f32[2, BLOCK * widest], of two neighbouring layers"""
    z: Any
    """f32[A + 1, BLOCK], logits and below them the values, then their gradients"""
    probability: Any
    """f32[A, BLOCK]"""
    lanes: Any
    """f32[10, BLOCK], of the samples"""


@compiled
def gather(encoded: Any, last_action: Any, mask: Any, chosen: Any, work: Work) -> None:
    """Copies the inputs of the samples ``chosen`` i64[rows], at most a block, out of arrays of M samples."""
    for i in range(len(chosen)):
        sample = chosen[i]
        source, target = encoded[sample], work.encoded[i]
        for j in range(len(source)):
            target[j] = source[j]
        work.last_action[i] = last_action[sample]
        for j in range(mask.shape[1]):
            work.mask[j, i] = mask[sample, j]


@compiled
def _activate(rows: int, values: Any, bias: Any, is_tanh: bool) -> None:
    for i in range(rows):
        row = values[i]
        if is_tanh:
            for j in range(values.shape[1]):
                row[j] = tanh(row[j] + bias[j])
        else:
            for j in range(values.shape[1]):
                row[j] += bias[j]
                row[j] = _ZERO if row[j] <= _ZERO else row[j]


@compiled
def _activate_first(rows: int, values: Any, table: Any, last_action: Any, column: int, is_tanh: bool) -> None:
    width = values.shape[1]
    for i in range(rows):
        row, bias = values[i], table[last_action[i], column : column + width]
        if is_tanh:
            for j in range(width):
                row[j] = tanh(row[j] + bias[j])
        else:
            for j in range(width):
                row[j] += bias[j]
                row[j] = _ZERO if row[j] <= _ZERO else row[j]


@compiled
def _deactivate(rows: int, gradient: Any, values: Any, bias: Any, is_tanh: bool) -> None:
    """Gradient before the activation, in place; its sum over the samples is added to that of the bias."""
    for i in range(rows):
        row, value = gradient[i], values[i]
        if is_tanh:
            for j in range(values.shape[1]):
                row[j] *= _ONE - value[j] * value[j]
                bias[j] += row[j]
        else:
            for j in range(values.shape[1]):
                row[j] = row[j] if value[j] > _ZERO else _ZERO
                bias[j] += row[j]


@compiled
def _deactivate_first(
    rows: int, gradient: Any, values: Any, table: Any, last_action: Any, column: int, is_tanh: bool
) -> None:
    """As :func:`_deactivate`, added to the table's row of each sample's last action."""
    width = values.shape[1]
    for i in range(rows):
        row, value, bias = gradient[i], values[i], table[last_action[i], column : column + width]
        if is_tanh:
            for j in range(width):
                row[j] *= _ONE - value[j] * value[j]
                bias[j] += row[j]
        else:
            for j in range(width):
                row[j] = row[j] if value[j] > _ZERO else _ZERO
                bias[j] += row[j]


@compiled
def forward(net: Net, encoded: Any, last_action: Any, rows: int, work: Work) -> None:
    """Logits (unmasked) and values of ``rows`` samples, at most a block, to ``work.z``.

    Args:
        net: the network.
        encoded: f32[rows, E].
        last_action: i64[rows].
        rows: samples.
        work: keeps the values of all layers for :func:`backward`.
    """
    trunks, count = len(net.heads), len(work.z)
    depth = len(net.layers) // trunks
    width = net.layers[-1, OUTPUTS]
    first_width = net.layers[0, OUTPUTS]
    at = net.head[2]
    table = net.weights[at : at + count * trunks * first_width].reshape(count, trunks * first_width)
    head = net.weights[net.head[0] : net.head[0] + count * width].reshape(count, width)
    for trunk in range(trunks):
        below = encoded
        for depth_here in range(depth):
            layer = net.layers[trunk * depth + depth_here]
            inputs, outputs, at = layer[INPUTS], layer[OUTPUTS], layer[TURNED]
            turned = net.turned[at : at + inputs * outputs].reshape(inputs, outputs)
            at = layer[VALUES]
            values = work.values[at : at + BLOCK * outputs].reshape(BLOCK, outputs)
            multiply(work.call, rows, outputs, inputs, below, False, turned, False, values, False)
            if depth_here == 0:
                _activate_first(rows, values, table, last_action, trunk * outputs, net.tanh)
            else:
                _activate(rows, values, net.weights[layer[BIAS] : layer[BIAS] + outputs], net.tanh)
            below = values
        first, some = net.heads[trunk, FIRST_ROW], net.heads[trunk, ROWS]
        multiply(work.call, some, rows, width, head[first:], False, below, True, work.z[first:], False)
    for j in range(count):
        z, bias = work.z[j], net.weights[net.head[1] + j]
        for i in range(rows):
            z[i] += bias


@compiled
def backward(net: Net, encoded: Any, last_action: Any, rows: int, work: Work, gradient: Any) -> None:
    """Adds the gradients of all weights to ``gradient`` f32[P], which is laid out as ``net.weights``.

    Args:
        net: the network.
        encoded: f32[rows, E], as it was given to :func:`forward`.
        last_action: i64[rows], likewise.
        rows: samples.
        work: as :func:`forward` left it, but with the gradient of logits and values in ``work.z``.
        gradient: is added to.
    """
    trunks, count = len(net.heads), len(work.z)
    depth = len(net.layers) // trunks
    width = net.layers[-1, OUTPUTS]
    first_width = net.layers[0, OUTPUTS]
    at = net.head[2]
    table = gradient[at : at + count * trunks * first_width].reshape(count, trunks * first_width)
    at = net.head[0]
    head = net.weights[at : at + count * width].reshape(count, width)
    head_gradient = gradient[at : at + count * width].reshape(count, width)
    for j in range(count):
        z, total = work.z[j], _ZERO
        for i in range(rows):
            total += z[i]
        gradient[net.head[1] + j] += total
    for trunk in range(trunks):
        first, some = net.heads[trunk, FIRST_ROW], net.heads[trunk, ROWS]
        z = work.z[first:]
        at = net.layers[trunk * depth + depth - 1, VALUES]
        values = work.values[at : at + BLOCK * width].reshape(BLOCK, width)
        here = work.gradients[0, : BLOCK * width].reshape(BLOCK, width)
        multiply(work.call, some, width, rows, z, False, values, False, head_gradient[first:], True)
        multiply(work.call, rows, width, some, z, True, head[first:], False, here, False)
        for above in range(depth):
            depth_here = depth - 1 - above
            layer = net.layers[trunk * depth + depth_here]
            inputs, outputs, at = layer[INPUTS], layer[OUTPUTS], layer[VALUES]
            values = work.values[at : at + BLOCK * outputs].reshape(BLOCK, outputs)
            at = layer[WEIGHT]
            weight_gradient = gradient[at : at + inputs * outputs].reshape(outputs, inputs)
            if depth_here == 0:
                _deactivate_first(rows, here, values, table, last_action, trunk * outputs, net.tanh)
                multiply(work.call, outputs, inputs, rows, here, True, encoded, False, weight_gradient, True)
                continue
            _deactivate(rows, here, values, gradient[layer[BIAS] : layer[BIAS] + outputs], net.tanh)
            weight = net.weights[at : at + inputs * outputs].reshape(outputs, inputs)
            at = net.layers[trunk * depth + depth_here - 1, VALUES]
            below = work.values[at : at + BLOCK * inputs].reshape(BLOCK, inputs)
            there = work.gradients[(above + 1) % 2, : BLOCK * inputs].reshape(BLOCK, inputs)
            multiply(work.call, outputs, inputs, rows, here, True, below, False, weight_gradient, True)
            multiply(work.call, rows, inputs, outputs, here, False, weight, False, there, False)
            here = there
