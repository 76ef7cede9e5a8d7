"""The gradient of the segment-wise clipped policy loss, written out: no autograd graph, blocks that fit the cache.

With one ratio a sample, r = exp(clamp(log pi(a|s) - log pi_old(a|s), ±10)), whatever the length of its segment, the
clip range c of the sample's segment (Schulman et al., 2017, eq. 7; S9), and the sample's weight w:

    L_policy = -mean w min(r A, clamp(r, 1 - c, 1 + c) A)
    L        = L_policy - entropy_weight * mean w H(pi(.|s)) + value_weight * mean w (V(s) - G)^2 / 2

and therefore, for the logits z of the legal actions, with p = softmax(z) and H = -sum p log p,

    dL/dz_j = w g (1[j = a] - p_j) + w entropy_weight p_j (log p_j + H)
    g       = -r A where the minimum is r A and the clamp of the log ratio does not bind, else 0
    dL/dV   = w value_weight (V - G)

each divided by the number of samples, not by the sum of their weights. A live sample has w = 1; a replayed one has the
importance weight of its sampler, which says how much rarer than uniform it should have been drawn: it therefore
multiplies everything that the sample adds to the loss, the entropy bonus included.

KL is estimated as mean((r - 1) - log r), which is never negative (Schulman, 2020). A minibatch is cut into a fixed
number of shards whose gradients are added in order: the result does not depend on the number of threads. The tests hold
it against autograd through the network.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from agentpipe.environments.jit import entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.learning.batch import Batch
    from agentpipe.learning.network import PolicyNetwork
    from agentpipe.learning.workers import Workers

LOG_RATIO_LIMIT = 10.0
"""the logarithm of a probability ratio is clamped to plus and minus this before the exponential"""
SHARDS = 8
"""parts of a minibatch with gradient sums of their own"""
BLOCK = 512
"""samples that go through the network together: their activations stay in the cache"""
POLICY, VALUE, ENTROPY, CHOICES, KL, OLD_KL = range(6)
"""positions in what a :class:`SegmentedGradient` returns"""
SEGMENTED = 6
"""where KL, clipped samples and samples of each segment begin in it"""

Floats = npt.NDArray[np.float32]


class SegmentedGradient:
    """Computes gradients of one network, again and again; the network's parameters get their ``.grad`` from here.

    Args:
        network: its weights are read at every call.
        clip: clip range of each segment.
        value_weight: of the value loss.
        workers: share the shards.
    """

    def __init__(self, network: PolicyNetwork, clip: Sequence[float], value_weight: float, workers: Workers) -> None:
        self.network = network
        self.clip = np.asarray(clip, dtype=np.float32)
        self.value_weight = value_weight
        self.workers = workers
        self.names = tuple(name for name, _ in network.named_parameters())
        self._sizes = [parameter.numel() for parameter in network.parameters()]
        self._shards = torch.zeros(SHARDS, sum(self._sizes))
        self._views = [self._split(shard) for shard in self._shards]
        self.gradient = torch.zeros(sum(self._sizes))
        self._gradient_views = self._split(self.gradient)
        width = network.first.out_features
        self._table = torch.zeros(network.action_count + 1, width)
        self._table_gradients = torch.zeros(SHARDS, network.action_count + 1, width)
        self._blocks = [self._new_block() for _ in range(workers.threads)]
        self._shard_sums = np.zeros((SHARDS, 6 + 3 * len(clip)))

    @property
    def sums_size(self) -> int:
        """Length of what a call returns."""
        return int(self._shard_sums.shape[1])

    def _new_block(self) -> Block:
        return Block(self.network)

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, self._sizes)
        shapes = (parameter.shape for parameter in self.network.parameters())
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, shapes, strict=True)}

    @torch.no_grad()
    def __call__(self, batch: Batch, rows: Tensor, entropy_weight: float) -> npt.NDArray[np.float64]:
        """Sets the gradients of the mean loss over the samples ``rows`` of ``batch``, one or more.

        Returns:
            f64[6 + 3 S], sums over the samples: policy loss and value loss (weighted), entropy, decisions that had a
            choice, KL, old KL, then for each segment KL, clipped samples and samples (each sample once).
        """
        network, samples = self.network, len(rows)
        torch.mm(network.embedding.weight, network.projection.weight.t(), out=self._table)

        @torch.no_grad()  # holds for one thread only
        def shard(worker: int, piece: int) -> None:
            views, table, sums = self._views[piece], self._table_gradients[piece], self._shard_sums[piece]
            self._shards[piece].zero_()
            table.zero_()
            sums[:] = 0.0
            for low in range(piece * samples // SHARDS, (piece + 1) * samples // SHARDS, BLOCK):
                chosen = rows[low : min(low + BLOCK, (piece + 1) * samples // SHARDS)]
                block = self._blocks[worker].cut(len(chosen))
                block.load(batch, chosen)
                block.forward(network, self._table)
                block.loss(self.clip, entropy_weight, self.value_weight, samples, sums)
                block.backward(network, views, table)

        self.workers.run(shard, SHARDS)
        torch.sum(self._shards, dim=0, out=self.gradient)
        table_gradient = self._table_gradients.sum(dim=0)
        views = self._gradient_views
        for name, parameter in network.named_parameters():
            parameter.grad = views[name]  # at every call: two gradients of one network may take turns
        torch.mm(table_gradient, network.projection.weight, out=views["embedding.weight"])
        torch.mm(table_gradient.t(), network.embedding.weight, out=views["projection.weight"])
        sums: npt.NDArray[np.float64] = self._shard_sums.sum(axis=0)
        return sums


class Block:
    """Inputs, activations and their gradients of up to :data:`BLOCK` samples."""

    def __init__(self, network: PolicyNetwork, rows: int = BLOCK) -> None:
        hidden, first, actions = network.options.hidden, network.first.out_features, network.action_count
        self.tanh = network.options.activation == "tanh"
        self.width = hidden[0]
        self.encoded = torch.empty(rows, network.encoded_size)
        self.last_action = torch.empty(rows, dtype=torch.int64)
        self.mask = torch.empty(rows, actions, dtype=torch.bool)
        self.action, self.segment = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
        self.old, self.advantage, self.returns, self.weight = (torch.empty(rows) for _ in range(4))
        self.first, self.first_gradient = torch.empty(rows, first), torch.empty(rows, first)
        self.looked_up = torch.empty(rows, first)
        trunks = 1 if network.options.shared_trunk else 2
        self.layers = [[torch.empty(rows, width) for width in hidden[1:]] for _ in range(trunks)]
        self.gradients = [[torch.empty(rows, width) for width in hidden[1:]] for _ in range(trunks)]
        self.logits, self.value, self.ones = torch.empty(rows, actions), torch.empty(rows), torch.ones(rows)
        self._cuts: dict[int, Block] = {rows: self}

    def cut(self, rows: int) -> Block:
        """The same memory for fewer rows."""
        if rows not in self._cuts:
            shorter = object.__new__(type(self))
            for name, value in vars(self).items():
                setattr(shorter, name, _shorten(value, rows))
            self._cuts[rows] = shorter
        return self._cuts[rows]

    def load(self, batch: Batch, rows: Tensor) -> None:
        """Copies the samples ``rows`` of ``batch`` here."""
        torch.index_select(batch.encoded, 0, rows, out=self.encoded)
        torch.index_select(batch.last_action, 0, rows, out=self.last_action)
        torch.index_select(batch.mask, 0, rows, out=self.mask)
        torch.index_select(batch.action, 0, rows, out=self.action)
        torch.index_select(batch.segment, 0, rows, out=self.segment)
        torch.index_select(batch.log_probability, 0, rows, out=self.old)
        torch.index_select(batch.advantage, 0, rows, out=self.advantage)
        torch.index_select(batch.returns, 0, rows, out=self.returns)
        torch.index_select(batch.weight, 0, rows, out=self.weight)

    def _stacks(self, network: PolicyNetwork) -> list[tuple[str, list[nn.Linear], Tensor, Tensor]]:
        """Of each trunk: its name, its layers, its first activations and their gradient."""
        width = self.width
        actor_stack, critic_stack = (
            [layer for layer in stack if isinstance(layer, nn.Linear)]
            for stack in (network.actor_hidden, network.critic_hidden)
        )
        if network.options.shared_trunk:
            return [("actor_hidden", actor_stack, self.first, self.first_gradient)]
        actor, critic = (self.first[:, :width], self.first[:, width:])
        gradients = (self.first_gradient[:, :width], self.first_gradient[:, width:])
        return [
            ("actor_hidden", actor_stack, actor, gradients[0]),
            ("critic_hidden", critic_stack, critic, gradients[1]),
        ]

    def forward(self, network: PolicyNetwork, table: Tensor) -> None:
        """Computes logits (unmasked) and values; ``table`` f32[A + 1, first width] is the projected embedding."""
        torch.addmm(network.first.bias, self.encoded, network.first.weight.t(), out=self.first)
        torch.index_select(table, 0, self.last_action, out=self.looked_up)
        self._activate(self.first.add_(self.looked_up))
        tops = []
        for trunk, (_, stack, values, _) in enumerate(self._stacks(network)):
            below = values
            for layer, out in zip(stack, self.layers[trunk], strict=True):
                torch.addmm(layer.bias, below, layer.weight.t(), out=out)
                self._activate(out)
                below = out
            tops.append(below)
        torch.addmm(network.actor_head.bias, tops[0], network.actor_head.weight.t(), out=self.logits)
        torch.addmv(network.critic_head.bias, tops[-1], network.critic_head.weight[0], out=self.value)

    def loss(
        self,
        clip: Floats,
        entropy_weight: float,
        value_weight: float,
        samples: int,
        sums: npt.NDArray[np.float64],
    ) -> None:
        """Turns logits and values into their gradients, in place, and adds to ``sums``."""
        inputs = (self.mask, self.action, self.segment, self.old, self.advantage, self.returns, self.weight)
        weights = (np.float32(entropy_weight), np.float32(value_weight), np.float32(1.0 / samples))
        _head(self.logits.numpy(), self.value.numpy(), *(tensor.numpy() for tensor in inputs), clip, *weights, sums)

    def backward(self, network: PolicyNetwork, views: dict[str, Tensor], table_gradient: Tensor) -> None:
        """Adds the gradients of all parameters to ``views``, those of the table to ``table_gradient``."""
        stacks = self._stacks(network)
        tops, top_gradients = [], []
        for trunk, (_, _, values, gradient) in enumerate(stacks):
            deep = bool(self.layers[trunk])
            tops.append(self.layers[trunk][-1] if deep else values)
            top_gradients.append(self.gradients[trunk][-1] if deep else gradient)
        views["actor_head.weight"].addmm_(self.logits.t(), tops[0])
        views["actor_head.bias"].addmv_(self.logits.t(), self.ones)
        views["critic_head.weight"][0].addmv_(tops[-1].t(), self.value)
        views["critic_head.bias"].add_(self.value.sum())
        torch.mm(self.logits, network.actor_head.weight, out=top_gradients[0])
        if len(stacks) == 1:
            top_gradients[0].addr_(self.value, network.critic_head.weight[0])
        else:
            torch.outer(self.value, network.critic_head.weight[0], out=top_gradients[1])
        for trunk, (name, stack, values, gradient) in enumerate(stacks):
            for index in range(len(stack) - 1, -1, -1):
                below, below_gradient = values, gradient
                if index:
                    below, below_gradient = self.layers[trunk][index - 1], self.gradients[trunk][index - 1]
                here = self._deactivate(self.gradients[trunk][index], self.layers[trunk][index])
                views[f"{name}.{index}.weight"].addmm_(here.t(), below)
                views[f"{name}.{index}.bias"].addmv_(here.t(), self.ones)
                torch.mm(here, stack[index].weight, out=below_gradient)
        here = self._deactivate(self.first_gradient, self.first)
        views["first.weight"].addmm_(here.t(), self.encoded)
        views["first.bias"].addmv_(here.t(), self.ones)
        _scatter(here.numpy(), self.last_action.numpy(), table_gradient.numpy())

    def _activate(self, values: Tensor) -> None:
        if self.tanh:
            values.tanh_()
        else:
            values.relu_()

    def _deactivate(self, gradient: Tensor, values: Tensor) -> Tensor:
        """Gradient before the activation, in place."""
        if self.tanh:
            torch.ops.aten.tanh_backward.grad_input(gradient, values, grad_input=gradient)
        else:
            torch.ops.aten.threshold_backward.grad_input(gradient, values, 0.0, grad_input=gradient)
        return gradient


def _shorten(value: Any, rows: int) -> Any:  # noqa: ANN401 - an attribute of a block
    if isinstance(value, Tensor):
        return value[:rows]
    if isinstance(value, list):
        return [_shorten(part, rows) for part in value]
    return value


@entry
def _head(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917 - a kernel
    logits,  # noqa: ANN001
    value,  # noqa: ANN001
    mask,  # noqa: ANN001
    action,  # noqa: ANN001
    segment,  # noqa: ANN001
    old,  # noqa: ANN001
    advantage,  # noqa: ANN001
    returns,  # noqa: ANN001
    weight,  # noqa: ANN001
    clip,  # noqa: ANN001
    entropy_weight,  # noqa: ANN001
    value_weight,  # noqa: ANN001
    share,  # noqa: ANN001
    sums,  # noqa: ANN001
):
    rows, actions = logits.shape
    segments = len(clip)
    one, zero, limit = np.float32(1.0), np.float32(0.0), np.float32(LOG_RATIO_LIMIT)
    for i in range(rows):
        top = np.float32(-3.0e38)
        legal = 0
        for j in range(actions):
            if mask[i, j]:
                legal += 1
                top = max(top, logits[i, j])
        total = zero
        for j in range(actions):
            if mask[i, j]:
                total += np.float32(math.exp(logits[i, j] - top))
        log_total = np.float32(math.log(total)) + top
        entropy = zero
        for j in range(actions):
            if mask[i, j]:
                log_p = logits[i, j] - log_total
                entropy -= np.float32(math.exp(log_p)) * log_p
        raw = logits[i, action[i]] - log_total - old[i]
        log_ratio = min(max(raw, -limit), limit)
        ratio = np.float32(math.exp(log_ratio))
        c, a, w = clip[segment[i]], advantage[i], weight[i]
        free, bound = ratio * a, min(max(ratio, one - c), one + c) * a
        inside = raw >= -limit and raw <= limit
        g = -free * share * w if free <= bound and inside else zero
        for j in range(actions):
            if mask[i, j]:
                log_p = logits[i, j] - log_total
                p = np.float32(math.exp(log_p))
                logits[i, j] = -g * p + entropy_weight * share * w * p * (log_p + entropy)
            else:
                logits[i, j] = zero
        logits[i, action[i]] += g
        error = value[i] - returns[i]
        value[i] = value_weight * share * w * error
        kl = ratio - one - log_ratio
        sums[0] -= w * min(free, bound)
        sums[1] += w * np.float32(0.5) * error * error
        sums[2] += entropy
        sums[3] += legal > 1
        sums[4] += kl
        sums[5] -= log_ratio
        sums[6 + segment[i]] += kl
        sums[6 + segments + segment[i]] += abs(ratio - one) > c
        sums[6 + 2 * segments + segment[i]] += 1


@entry
def _scatter(gradient, index, table):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - a kernel
    rows, width = gradient.shape
    for i in range(rows):
        k = index[i]
        for j in range(width):
            table[k, j] += gradient[i, j]
