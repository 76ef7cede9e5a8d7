"""The gradient of the warm-up's loss: the expert's decision, its answers to open questions, and the critic's error.

For the logits z of one sample, with p the softmax over the legal actions and p_q the softmax over the actions that
answer question q (whatever the mask says: a question may be asked before it may be answered),

    L = -log p(a) - answer_weight * sum_q log p_q(a_q) + value_weight * (V(s) - G)^2 / 2

averaged over the samples. The answers make every step of an episode teach what only one step of it decides.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentpipe.learning.gradient.fused import FusedGradient
from agentpipe.learning.kernels.cloned import (
    ANSWERED,
    ANSWERED_RIGHT,
    ANSWERS,
    CHOICES,
    CROSS_ENTROPY,
    RIGHT,
    VALUE_ERROR,
    Decisions,
    cloned,
)
from agentpipe.learning.samples.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.workers import Workers

__all__ = [
    "ANSWERED",
    "ANSWERED_RIGHT",
    "ANSWERS",
    "CHOICES",
    "CROSS_ENTROPY",
    "RIGHT",
    "VALUE_ERROR",
    "ClonedBatch",
    "CloningGradient",
]


class ClonedBatch(Batch):
    """A batch of expert decisions with ``answers`` i64[M, Q], the right action for each question or -1."""

    answers: Tensor


class CloningGradient(FusedGradient):
    """The warm-up's loss; a call returns f64[7], sums over the samples.

    Args:
        network: its weights are read at every call.
        questions: i8[A], which question each action answers, or -1.
        answer_weight: of the answers' cross-entropy.
        value_weight: of the value loss.
        workers: share the shards.
    """

    def __init__(
        self,
        network: PolicyNetwork,
        questions: npt.NDArray[np.int8],
        answer_weight: float,
        value_weight: float,
        workers: Workers,
    ) -> None:
        super().__init__(network, workers, ANSWERED + 1)
        self.questions, self.answer_weight, self.value_weight = questions, answer_weight, value_weight

    def _kernel(self, batch: Batch, entropy_weight: float) -> Callable[..., None]:
        del entropy_weight
        assert isinstance(batch, ClonedBatch)
        samples = Decisions(
            encoded=batch.encoded.numpy(),
            last_action=batch.last_action.numpy(),
            mask=batch.mask.numpy(),
            action=batch.action.numpy(),
            returns=batch.returns.numpy(),
            answers=batch.answers.numpy(),
            questions=self.questions,
            answer_weight=np.float32(self.answer_weight),
            value_weight=np.float32(self.value_weight),
        )
        return functools.partial(cloned, samples)
