"""What holds a retraining near the policy that it starts from: KL(champion || policy) over the samples of each update.

With q the champion's probabilities over the legal actions of a sample, p = softmax(z) the policy's and w its weight,

    L_anchor    = kl_weight * mean w sum_j q_j (log q_j - log p_j)
    dL/dz_j     = kl_weight * w (p_j - q_j)                           (divided by the number of samples)

which is added to the gradient of :mod:`~agentpipe.learning.gradient.fused`. The direction is the one that drift is
measured in turned round: it weighs each action by what the champion gives it, so that nothing the champion does is
forgotten. For policies that are close the two directions agree to second order. The tests hold the gradient
against autograd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentpipe.errors import LearningError
from agentpipe.learning.gradient.fused import SegmentedGradient
from agentpipe.learning.policy.compiled import CompiledPolicy
from agentpipe.learning.samples.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.learning.kernels.segmented import Goal, Samples
    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.workers import Workers


BLOCK = 1_024
"""samples that the champion is asked about together"""


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
        self.policy = CompiledPolicy(theirs, workers.threads)
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

        def block(worker: int, piece: int) -> None:
            at = slice(piece * BLOCK, min((piece + 1) * BLOCK, samples))
            self.policy.distribution(worker, (batch.encoded[at], batch.last_action[at], batch.mask[at]), target[at])

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

    anchors = 1

    def __init__(
        self, network: PolicyNetwork, clip: Sequence[float], value_weight: float, workers: Workers, kl_weight: float
    ) -> None:
        super().__init__(network, clip, value_weight, workers)
        self.kl_weight = kl_weight

    def _samples(self, batch: Batch) -> Samples:
        assert isinstance(batch, AnchoredBatch)
        return super()._samples(batch)._replace(anchor=batch.anchor.numpy())

    def _goal(self, entropy_weight: float) -> Goal:
        return super()._goal(entropy_weight)._replace(kl_weight=np.float32(self.kl_weight))
