"""A policy network that decides, and judges decisions, in compiled code: for rollouts, replay and anchors.

What it says differs from :class:`~agentpipe.learning.policy.network.PolicyNetwork` in the last bits only; the tests
hold the two against each other. Compiled code reads a copy of the weights: make another one when they have changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from agentpipe.environments.layout import MACHINES
from agentpipe.learning.joint.line_perception import LinePerception
from agentpipe.learning.kernels import perceived
from agentpipe.learning.kernels.decisions import Decided, Seen, decide, distribution, judge
from agentpipe.learning.kernels.packed import PackedNetwork
from agentpipe.learning.policy.network import OBSERVATION_CLIP

if TYPE_CHECKING:
    from torch import Tensor

    from agentpipe.learning.joint.perception import Perception
    from agentpipe.learning.policy.network import PolicyNetwork

    Inputs = tuple[Tensor, Tensor, Tensor]
    """encoded input f32[N, E], last actions i64[N], masks bool[N, A]"""

Floats = npt.NDArray[np.float32]
_NO_NUMBERS = np.zeros(0)


class CompiledPolicy:
    """The weights that ``network`` has now.

    Its methods take encoded input f32[N, E] (:meth:`PolicyNetwork.encode`), last actions i64[N] and masks bool[N, A],
    and ``worker``: threads that call at the same time have different numbers.

    Args:
        network: is copied.
        threads: how many may call at the same time.
    """

    def __init__(self, network: PolicyNetwork, threads: int = 1) -> None:
        self.network = network
        packed = PackedNetwork(network)
        self._net = packed.net
        self._work = [packed.work() for _ in range(threads)]
        self._perception = _compiled(network.perception)
        self._room = [perceived.Work.allocate(network.options.perception) for _ in range(threads)]

    def encode(
        self, worker: int, observation: Tensor, last_action: Tensor, time: Tensor, memory: Tensor, into: Tensor
    ) -> Tensor:
        """Fills ``into`` f32[N, E] with what :meth:`PolicyNetwork.encode` returns; returns the memory's new state."""
        network = self.network
        if network.memory is not None or (network.perception is not None and self._perception is None):
            encoded, state = network.encode(observation, last_action, time, memory)
            into.copy_(encoded)
            return state
        # The same in place: whole arrays in between, made anew for every block, cost more than the arithmetic.
        seen, octaves = network.observation_size, network.options.time_frequencies
        torch.sub(observation, network.mean, out=into[:, :seen]).mul_(network.scale)
        into[:, :seen].clamp_(-OBSERVATION_CLIP, OBSERVATION_CLIP)
        if network.fuses:
            angle = time.unsqueeze(-1) * network.frequencies
            torch.sin(angle, out=into[:, seen : seen + octaves])
            torch.cos(angle, out=into[:, seen + octaves : network.base_size])
        if self._perception is not None:
            row = into.numpy()
            perceived.believe(self._perception, self._room[worker], row, row[:, network.base_size :])
        return memory

    def decide(
        self,
        worker: int,
        seen: Inputs,
        uniforms: npt.NDArray[np.float64] | None,
        into: tuple[Tensor, ...],
    ) -> int:
        """Draws actions by inverting the cumulative distribution.

        Args:
            worker: number of the calling thread.
            seen: encoded input, last actions, masks.
            uniforms: f64[N] in [0, 1), one for each sample; none = another one decides, and only values are filled.
            into: actions i64[N] (-1 where the mask allows none), logarithms of their probabilities, values and
                entropies (zero where another one decides) f32[N].

        Returns:
            The first sample whose mask allows no action, or -1.
        """
        numbers = _NO_NUMBERS if uniforms is None else uniforms
        decided = Decided(*(tensor.numpy() for tensor in into))
        return int(decide(self._net, self._work[worker], _seen(seen), numbers, decided))

    def judge(self, worker: int, seen: Inputs, action: Tensor) -> tuple[Floats, Floats]:
        """Logarithms of the probabilities of ``action`` i64[N], and values, f32[N] each."""
        log_probability, value = np.empty((2, len(action)), np.float32)
        judge(self._net, self._work[worker], _seen(seen), action.numpy(), log_probability, value)
        return log_probability, value

    def distribution(self, worker: int, seen: Inputs, into: Tensor) -> Floats:
        """Fills ``into`` f32[N, A] with probabilities, zero where the mask is false; returns the values f32[N]."""
        value = np.empty(len(into), np.float32)
        distribution(self._net, self._work[worker], _seen(seen), into.numpy(), value)
        return value

    def values(self, worker: int, seen: Inputs) -> Floats:
        """Values f32[N]."""
        nothing: Any = np.empty(0, np.int64)
        value, entropy = np.empty((2, len(seen[0])), np.float32)
        decide(self._net, self._work[worker], _seen(seen), _NO_NUMBERS, Decided(nothing, value[:0], value, entropy))
        return value


def _compiled(perception: Perception | None) -> perceived.Weights | None:
    """A copy of the weights; ``None`` where they are not those of the built-in line."""
    if not isinstance(perception, LinePerception):
        return None
    alone, together, answers = perception.alone, perception.together, perception.answers
    couplings = perception.couplings.view(-1, MACHINES, MACHINES)
    own, fed, feeding = together.weight.chunk(3, dim=1)
    return perceived.Weights(
        alone=_copy(alone.weight.t()),
        alone_bias=_copy(alone.bias),
        own=_copy(own.t()),
        fed=_copy(fed.t()),
        feeding=_copy(feeding.t()),
        together_bias=_copy(together.bias),
        answers=_copy(answers.weight),
        answers_bias=_copy(answers.bias),
        couplings=_copy(couplings),
        shift=_copy(perception.shift),
        unit=_copy(perception.unit),
        tanh=perception.activation == "tanh",
    )


def _copy(tensor: Tensor) -> Floats:
    copied: Floats = tensor.detach().contiguous().numpy().copy()
    return copied


def _seen(tensors: Inputs) -> Seen:
    return Seen(*(tensor.numpy() for tensor in tensors))
