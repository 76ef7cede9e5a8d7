"""The parameters of a policy network as compiled code reads them, and its gradients on their way back."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from agentpipe.learning.kernels.blas import Call
from agentpipe.learning.kernels.layers import BLOCK, Net, Work
from agentpipe.learning.policy.network import UnitHead

if TYPE_CHECKING:
    from agentpipe.learning.policy.network import PolicyNetwork

_LANES = 10
_LINE = 16
"""numbers of a line of the cache, at whose borders matrices begin: products take a tenth longer elsewhere"""


class _Views:
    """Names for the parts of one row of numbers: first weights, other layers, H, c, table; all together ``size``."""

    def __init__(self, network: PolicyNetwork, flat: Tensor | None = None) -> None:
        widths, trunks = network.options.hidden, 1 if network.options.shared_trunk else 2
        rows, self.size = network.action_count + 1, 0
        self.first = self._take(flat, trunks * widths[0], network.encoded_size)
        self.hidden = [
            [(self._take(flat, after, before), self._take(flat, after)) for before, after in pairwise(widths)]
            for _ in range(trunks)
        ]
        self.head = self._take(flat, rows, widths[-1])
        self.head_bias = self._take(flat, rows)
        self.table = self._take(flat, rows, trunks * widths[0])

    def _take(self, flat: Tensor | None, *shape: int) -> Tensor:
        start, end = self.size, self.size + math.prod(shape)
        self.size = -(-end // _LINE) * _LINE
        return torch.empty(0) if flat is None else flat[start:end].view(shape)


class PackedNetwork:
    """A copy of a network's weights for compiled code; :meth:`load` it anew whenever the network has changed.

    Args:
        network: its policy; perception and memory are no part of it.
    """

    def __init__(self, network: PolicyNetwork) -> None:
        self.network = network
        self.names = tuple(name for name, _ in network.policy_parameters())
        self.size = _Views(network).size
        """P, numbers of :attr:`Net.weights` and of a gradient"""
        self._weights = torch.zeros(self.size)
        self._views = _Views(network, self._weights)
        stacks = (network.actor_hidden, network.critic_hidden)[: len(self._views.hidden)]
        self._stacks = [[cast("nn.Linear", layer) for layer in stack] for stack in stacks]
        self._turned: list[tuple[Tensor, Tensor]] = []
        self.net = self._describe()
        self.load()

    def _describe(self) -> Net:
        network, views = self.network, self._views
        first, rows, weights, values, turned = network.options.hidden[0], [], [], 0, 0
        for trunk, stack in enumerate(views.hidden):
            layers = [(views.first[trunk * first : (trunk + 1) * first], -1)]
            layers += [(weight, int(bias.storage_offset())) for weight, bias in stack]
            for weight, bias_at in layers:
                outputs, inputs = weight.shape
                rows.append((inputs, outputs, weight.storage_offset(), bias_at, turned, values))
                weights.append(weight)
                turned += -(-weight.numel() // _LINE) * _LINE
                values += BLOCK * outputs
        flat, actions = torch.zeros(turned), network.action_count
        for weight, row in zip(weights, rows, strict=True):
            self._turned.append((weight, flat[row[4] : row[4] + weight.numel()].view(row[0], row[1])))
        self._values = values
        parts = (views.head, views.head_bias, views.table)
        return Net(
            layers=np.array(rows, np.int64),
            heads=np.array([(0, actions + 1)] if len(views.hidden) == 1 else [(0, actions), (actions, 1)], np.int64),
            head=np.array([part.storage_offset() for part in parts], np.int64),
            weights=self._weights.numpy(),
            turned=flat.numpy(),
            tanh=network.options.activation == "tanh",
        )

    def work(self) -> Work:
        """Room for the blocks of one thread."""
        actions = self.network.action_count
        return Work(
            call=Call.allocate(),
            encoded=_zeros(BLOCK, self.network.encoded_size),
            last_action=np.zeros(BLOCK, np.int64),
            mask=np.zeros((actions, BLOCK), np.bool_),
            values=_zeros(self._values),
            gradients=_zeros(2, BLOCK * max(self.network.options.hidden)),
            z=_zeros(actions + 1, BLOCK),
            probability=_zeros(actions, BLOCK),
            lanes=_zeros(_LANES, BLOCK),
        )

    @torch.no_grad()
    def load(self) -> None:
        """Copies the network's weights."""
        network, views = self.network, self._views
        views.first.copy_(network.first.weight)
        for stack, layers in zip(views.hidden, self._stacks, strict=True):
            for (weight, bias), layer in zip(stack, layers, strict=True):
                weight.copy_(layer.weight)
                bias.copy_(layer.bias)
        for weight, turned in self._turned:
            turned.copy_(weight.t())
        views.head[:-1].copy_(network.actor_weight())
        views.head[-1:].copy_(network.critic_head.weight)
        views.head_bias[:-1].copy_(network.actor_head.bias)
        views.head_bias[-1:].copy_(network.critic_head.bias)
        if network.fuses:
            torch.addmm(network.first.bias, network.embedding.weight, network.projection.weight.t(), out=views.table)
        else:
            views.table.copy_(network.first.bias)

    @torch.no_grad()
    def unpack(self, gradient: Tensor) -> None:
        """Gives the network's parameters their ``.grad``, views of ``gradient`` f32[P] where they are its numbers."""
        network, found = self.network, _Views(self.network, gradient)
        network.first.weight.grad = found.first
        network.first.bias.grad = found.table.sum(dim=0)
        for stack, layers in zip(found.hidden, self._stacks, strict=True):
            for (weight, bias), layer in zip(stack, layers, strict=True):
                layer.weight.grad, layer.bias.grad = weight, bias
        network.critic_head.weight.grad, network.critic_head.bias.grad = found.head[-1:], found.head_bias[-1:]
        network.actor_head.bias.grad = found.head_bias[:-1]
        if isinstance(network.actor_head, UnitHead):
            self._through_unit_head(network.actor_head, found.head[:-1])
        else:
            network.actor_head.weight.grad = found.head[:-1]
        if network.fuses:
            network.embedding.weight.grad = found.table @ network.projection.weight
            network.projection.weight.grad = found.table.t() @ network.embedding.weight

    def _through_unit_head(self, head: UnitHead, gradient: Tensor) -> None:
        """From the gradient at the effective weight to those of V and the temperature; formulas stand with the head."""
        raw = head.weight_raw
        positive = nn.functional.softplus(raw)
        norm = positive.norm(dim=1, keepdim=True)
        unit, temperature = positive / norm, head.log_temperature.exp()
        along = (unit * gradient).sum(dim=1, keepdim=True)
        head.weight_raw.grad = temperature / norm * (gradient - unit * along) * raw.sigmoid()
        head.log_temperature.grad = temperature * along.sum()


def _zeros(*shape: int) -> npt.NDArray[np.float32]:
    """Begins at the border of a line of the cache, unlike numpy's own."""
    made: npt.NDArray[np.float32] = torch.zeros(shape).numpy()
    return made
