"""The gradient of the warm-up's loss: the expert's decision, its answers to open questions, and the critic's error.

For the logits z of one sample, with p the softmax over the legal actions and p_q the softmax over the actions that
answer question q (whatever the mask says: a question may be asked before it may be answered),

    L = -log p(a) - answer_weight * sum_q log p_q(a_q) + value_weight * (V(s) - G)^2 / 2

averaged over the samples. The answers make every step of an episode teach what only one step of it decides.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentpipe.environments.jit import entry
from agentpipe.learning.batch import Batch
from agentpipe.learning.fused import Block, SegmentedGradient

if TYPE_CHECKING:
    from agentpipe.learning.network import PolicyNetwork
    from agentpipe.learning.workers import Workers

CROSS_ENTROPY, VALUE_ERROR, RIGHT, CHOICES, ANSWERS, ANSWERED_RIGHT, ANSWERED = range(7)
"""positions in the sums of :class:`CloningGradient`"""


class ClonedBatch(Batch):
    """A batch of expert decisions with ``answers`` i64[M, Q], the right action for each question or -1."""

    answers: Tensor


class CloningGradient(SegmentedGradient):
    """Gradients of the warm-up's loss; see :class:`SegmentedGradient` for how they are computed.

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
        self.questions = questions
        self.answer_weight = answer_weight
        super().__init__(network, (0.0,), value_weight, workers)

    def _new_block(self) -> Block:
        return _CloningBlock(self.network, self.questions, self.answer_weight)


class _CloningBlock(Block):
    def __init__(self, network: PolicyNetwork, questions: npt.NDArray[np.int8], answer_weight: float) -> None:
        super().__init__(network)
        self.questions, self.answer_weight = questions, answer_weight
        self.answers = torch.empty(len(self.action), int(questions.max()) + 1, dtype=torch.int64)

    def load(self, batch: Batch, rows: Tensor) -> None:
        assert isinstance(batch, ClonedBatch)
        torch.index_select(batch.encoded, 0, rows, out=self.encoded)
        torch.index_select(batch.last_action, 0, rows, out=self.last_action)
        torch.index_select(batch.mask, 0, rows, out=self.mask)
        torch.index_select(batch.action, 0, rows, out=self.action)
        torch.index_select(batch.returns, 0, rows, out=self.returns)
        torch.index_select(batch.answers, 0, rows, out=self.answers)

    def loss(
        self,
        clip: npt.NDArray[np.float32],
        entropy_weight: float,
        value_weight: float,
        samples: int,
        sums: npt.NDArray[np.float64],
    ) -> None:
        del clip, entropy_weight
        inputs = (self.mask, self.action, self.answers, self.returns)
        weights = (np.float32(self.answer_weight), np.float32(value_weight), np.float32(1.0 / samples))
        arrays = (tensor.numpy() for tensor in (self.logits, self.value, *inputs))
        _clone_head(*arrays, self.questions, *weights, sums, np.zeros(self.logits.shape[1], np.float32))


@entry
def _clone_head(  # type: ignore[no-untyped-def]  # noqa: ANN202, C901, PLR0912, PLR0913, PLR0917 - a kernel
    logits,  # noqa: ANN001
    value,  # noqa: ANN001
    mask,  # noqa: ANN001
    action,  # noqa: ANN001
    answers,  # noqa: ANN001
    returns,  # noqa: ANN001
    questions,  # noqa: ANN001
    answer_weight,  # noqa: ANN001
    value_weight,  # noqa: ANN001
    share,  # noqa: ANN001
    sums,  # noqa: ANN001
    gradient,  # noqa: ANN001
):
    rows, actions = logits.shape
    for i in range(rows):
        for j in range(actions):
            gradient[j] = np.float32(0.0)
        top, best, legal = np.float32(-3.0e38), 0, 0
        for j in range(actions):
            if mask[i, j]:
                legal += 1
                if logits[i, j] > top:
                    top, best = logits[i, j], j
        total = np.float32(0.0)
        for j in range(actions):
            if mask[i, j]:
                total += np.float32(math.exp(logits[i, j] - top))
        log_total = np.float32(math.log(total)) + top
        for j in range(actions):
            if mask[i, j]:
                gradient[j] += share * np.float32(math.exp(logits[i, j] - log_total))
        gradient[action[i]] -= share
        sums[0] -= logits[i, action[i]] - log_total
        sums[2] += legal > 1 and best == action[i]
        sums[3] += legal > 1
        for q in range(answers.shape[1]):
            target = answers[i, q]
            if target < 0:
                continue
            top, best = np.float32(-3.0e38), 0
            for j in range(actions):
                if questions[j] == q and logits[i, j] > top:
                    top, best = logits[i, j], j
            total = np.float32(0.0)
            for j in range(actions):
                if questions[j] == q:
                    total += np.float32(math.exp(logits[i, j] - top))
            log_total = np.float32(math.log(total)) + top
            for j in range(actions):
                if questions[j] == q:
                    gradient[j] += answer_weight * share * np.float32(math.exp(logits[i, j] - log_total))
            gradient[target] -= answer_weight * share
            sums[4] -= logits[i, target] - log_total
            sums[5] += best == target
            sums[6] += 1
        for j in range(actions):
            logits[i, j] = gradient[j]
        error = value[i] - returns[i]
        sums[1] += abs(error)
        value[i] = value_weight * share * error
