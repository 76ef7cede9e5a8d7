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

KL is estimated as mean((r - 1) - log r), which is never negative (Schulman, 2020). A minibatch is cut into shards, as
many as its size asks for, whose gradients are added in order: the result does not depend on the number of threads. From
the weights to the gradients all is compiled (:mod:`~agentpipe.learning.kernels`); the tests hold it against autograd
through the network.
"""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from agentpipe.learning.kernels.packed import PackedNetwork
from agentpipe.learning.kernels.segmented import (
    CHOICES,
    ENTROPY,
    KL,
    LOG_RATIO_LIMIT,
    OLD_KL,
    POLICY,
    SEGMENTED,
    VALUE,
    Goal,
    Samples,
    segmented,
)
from agentpipe.learning.samples.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.workers import Workers

__all__ = [
    "CHOICES",
    "ENTROPY",
    "KL",
    "LOG_RATIO_LIMIT",
    "OLD_KL",
    "POLICY",
    "SEGMENTED",
    "VALUE",
    "FusedGradient",
    "SegmentedGradient",
]

SHARDS: Final = 8
"""most parts of a minibatch with gradient sums of their own"""
SHARD_SAMPLES: Final = 256
"""fewest samples of a part, where there is more than one"""
Doubles = npt.NDArray[np.float64]


class FusedGradient(abc.ABC):
    """Gradients of one network's loss, again and again; the network's parameters get their ``.grad`` from here.

    Args:
        network: its policy; its weights are read at every call.
        workers: share the work.
        sums: how many figures of the loss are summed over the samples.
    """

    def __init__(self, network: PolicyNetwork, workers: Workers, sums: int) -> None:
        self.network, self.workers, self.sums_size = network, workers, sums
        self.packed = PackedNetwork(network)
        self.names = self.packed.names
        """of the parameters that get a gradient"""
        self._gradients = torch.zeros(SHARDS, self.packed.size)
        self._total = torch.zeros(self.packed.size)
        self._sums = np.zeros((SHARDS, sums))
        self._work = [self.packed.work() for _ in range(workers.threads)]

    def __call__(self, batch: Batch, rows: Tensor, entropy_weight: float) -> Doubles:
        """Sets the gradients of the mean loss over the samples ``rows`` of ``batch``, one or more.

        Returns:
            f64[sums], figures of the loss summed over the samples.
        """
        self.packed.load()
        shards, kernel, chosen = shards_of(len(rows)), self._kernel(batch, entropy_weight), rows.numpy()
        gradients, sums = self._gradients.numpy()[:shards], self._sums[:shards]

        def share(worker: int, low: int, high: int) -> None:
            kernel(self.packed.net, self._work[worker], chosen, low, high, gradients, sums)

        self.workers.share(share, shards)
        torch.sum(self._gradients[:shards], dim=0, out=self._total)
        self.packed.unpack(self._total)
        total: Doubles = sums.sum(axis=0)
        return total

    @abc.abstractmethod
    def _kernel(self, batch: Batch, entropy_weight: float) -> Callable[..., None]:
        """Compiled code that does some shards; takes network, room, rows, first shard, last, gradients, sums."""


class SegmentedGradient(FusedGradient):
    """The segment-wise clipped policy loss.

    A call returns f64[6 + 3 S], sums over the samples: policy loss and value loss (weighted), entropy, decisions that
    had a choice, KL, old KL, then for each segment KL, clipped samples and samples (each sample once).

    Args:
        network: its weights are read at every call.
        clip: clip range of each segment.
        value_weight: of the value loss.
        workers: share the shards.
    """

    anchors = 0
    """figures behind those"""

    def __init__(self, network: PolicyNetwork, clip: Sequence[float], value_weight: float, workers: Workers) -> None:
        super().__init__(network, workers, SEGMENTED + 3 * len(clip) + self.anchors)
        self.clip = np.asarray(clip, dtype=np.float32)
        self.value_weight = value_weight

    def _kernel(self, batch: Batch, entropy_weight: float) -> Callable[..., None]:
        return functools.partial(segmented, self._samples(batch), self._goal(entropy_weight))

    def _samples(self, batch: Batch) -> Samples:
        columns = {name: getattr(batch, name).numpy() for name in Batch.__dataclass_fields__}
        return Samples(**columns, anchor=np.zeros((0, 0), np.float32))

    def _goal(self, entropy_weight: float) -> Goal:
        return Goal(self.clip, np.float32(entropy_weight), np.float32(self.value_weight), np.float32(0.0))


def shards_of(samples: int) -> int:
    """How many parts a minibatch is cut into: a power of two, so that two threads or four get equal shares."""
    most = min(SHARDS, max(1, samples // SHARD_SAMPLES))
    return 1 << (most.bit_length() - 1)
