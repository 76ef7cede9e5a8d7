"""What holds a retraining near the policy that it starts from: KL(champion || policy) over the samples of each update.

With q the champion's probabilities over the legal actions of a sample, p = softmax(z) the policy's and w its weight,

    L_anchor    = kl_weight * mean w sum_j q_j (log q_j - log p_j)
    dL/dz_j     = kl_weight * w (p_j - q_j)                           (divided by the number of samples)

which is added to the gradient of :mod:`~agentpipe.learning.fused`. The direction is the one that drift is measured in
turned round: it weighs each action by what the champion gives it, so that nothing the champion does is forgotten. For
policies that are close the two directions agree to second order. The tests hold the gradient against autograd.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentpipe.environments.jit import entry
from agentpipe.errors import LearningError
from agentpipe.learning.batch import Batch
from agentpipe.learning.fused import BLOCK, SHARDS, Block, SegmentedGradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.learning.network import PolicyNetwork
    from agentpipe.learning.package import PolicyPackage
    from agentpipe.learning.workers import Workers


class AnchoredBatch(Batch):
    """A batch with ``anchor`` f32[M, A], the champion's probabilities, zero where the mask is false."""

    anchor: Tensor


class Anchor:
    """The champion, asked about the samples of each update.

    It reads what the samples hold: beliefs and memory of the network that learns. Perception and memory therefore have
    to be the champion's, and to stay so: near a champion the policy alone learns.

    Args:
        champion: the policy to stay near.
        network: the one that learns; of the same inputs and actions.
        workers: share the work; the result does not depend on how many there are.
        rows: samples of the largest batch.

    Raises:
        LearningError: observation statistics or actions are not the champion's, so that the two would not see the same.
    """

    def __init__(self, champion: PolicyPackage, network: PolicyNetwork, workers: Workers, rows: int) -> None:
        theirs, mine = champion.network, network
        sizes = [(one.action_count, one.base_size, one.belief_size, one.memory_size) for one in (theirs, mine)]
        same = sizes[0] == sizes[1]
        if not same or not (torch.equal(theirs.mean, mine.mean) and torch.equal(theirs.scale, mine.scale)):
            text = "another normalisation or other actions than the policy to stay near"
            raise LearningError(
                text, field="statistics", remedy="retrain with the statistics of the champion's package"
            )
        self.network, self.workers = theirs, workers
        self.learner, self.probabilities = mine, torch.zeros(rows, mine.action_count)

    def fill(self, batch: Batch) -> AnchoredBatch:
        """``batch`` with the champion's probabilities, in memory that the next call overwrites.

        Raises:
            LearningError: perception or memory are not the champion's.
        """
        self._same_reading()
        samples = len(batch.action)
        if samples > len(self.probabilities):
            self.probabilities = torch.zeros(samples, self.network.action_count)
        anchored = AnchoredBatch(*(getattr(batch, name) for name in Batch.__dataclass_fields__))
        target = self.probabilities[:samples]
        anchored.anchor = target

        @torch.inference_mode()  # holds for one thread only
        def block(_: int, piece: int) -> None:
            at = slice(piece * BLOCK, min((piece + 1) * BLOCK, samples))
            logits = self.network.heads(batch.encoded[at], batch.last_action[at], batch.mask[at])[0]
            torch.mul(logits.softmax(dim=-1), batch.mask[at], out=target[at])

        self.workers.run(block, -(-samples // BLOCK))
        return anchored

    def _same_reading(self) -> None:
        theirs, mine = (
            {
                name: tensor
                for name, tensor in network.state_dict().items()
                if name.startswith(("perception.", "memory."))
            }
            for network in (self.network, self.learner)
        )
        for name, tensor in mine.items():
            if not torch.equal(tensor, theirs[name]):
                remedy = "train the policy alone near a champion: perception and memory stay as they are"
                raise LearningError("what the policies read is not the same", field=name, remedy=remedy)


class AnchoredGradient(SegmentedGradient):
    """The segment-wise clipped gradient with an anchor; its batches are :class:`AnchoredBatch`.

    What a call returns has one figure more, the last: the sum of w KL(champion || policy) over the samples.

    Args:
        network: its weights are read at every call.
        clip: clip range of each segment.
        value_weight: of the value loss.
        workers: share the shards.
        kl_weight: of the anchor.
    """

    def __init__(
        self, network: PolicyNetwork, clip: Sequence[float], value_weight: float, workers: Workers, kl_weight: float
    ) -> None:
        self.kl_weight = kl_weight
        super().__init__(network, clip, value_weight, workers)
        self._shard_sums = np.zeros((SHARDS, self.sums_size + 1))

    def _new_block(self) -> Block:
        return _AnchoredBlock(self.network, self.kl_weight)


class _AnchoredBlock(Block):
    def __init__(self, network: PolicyNetwork, kl_weight: float) -> None:
        super().__init__(network)
        self.kl_weight = kl_weight
        self.anchor = torch.empty(BLOCK, network.action_count)
        self.pull = torch.empty(BLOCK, network.action_count)

    def load(self, batch: Batch, rows: Tensor) -> None:
        super().load(batch, rows)
        assert isinstance(batch, AnchoredBatch)
        torch.index_select(batch.anchor, 0, rows, out=self.anchor)

    def loss(
        self,
        clip: npt.NDArray[np.float32],
        entropy_weight: float,
        value_weight: float,
        samples: int,
        sums: npt.NDArray[np.float64],
    ) -> None:
        inputs = (tensor.numpy() for tensor in (self.logits, self.mask, self.weight, self.anchor, self.pull))
        _pull(*inputs, np.float32(self.kl_weight), np.float32(1.0 / samples), sums[-1:])
        super().loss(clip, entropy_weight, value_weight, samples, sums[:-1])
        self.logits.add_(self.pull)


@entry
def _pull(  # type: ignore[no-untyped-def]  # noqa: ANN202 - a kernel
    logits,  # noqa: ANN001
    mask,  # noqa: ANN001
    weight,  # noqa: ANN001
    anchor,  # noqa: ANN001
    pull,  # noqa: ANN001
    kl_weight,  # noqa: ANN001
    share,  # noqa: ANN001
    sums,  # noqa: ANN001
):
    rows, actions = logits.shape
    zero = np.float32(0.0)
    for i in range(rows):
        top = np.float32(-3.0e38)
        for j in range(actions):
            if mask[i, j]:
                top = max(top, logits[i, j])
        total = zero
        for j in range(actions):
            if mask[i, j]:
                total += np.float32(math.exp(logits[i, j] - top))
        log_total = np.float32(math.log(total)) + top
        kl = zero
        for j in range(actions):
            if mask[i, j]:
                log_p, q = logits[i, j] - log_total, anchor[i, j]
                pull[i, j] = kl_weight * share * weight[i] * (np.float32(math.exp(log_p)) - q)
                if q > zero:
                    kl += q * (np.float32(math.log(q)) - log_p)
            else:
                pull[i, j] = zero
        sums[0] += weight[i] * kl
