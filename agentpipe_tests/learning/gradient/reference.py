"""The segment-wise clipped loss by autograd: slow and plain, what the fused gradient is held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentpipe.learning.gradient.advantages import segment_scale
from agentpipe.learning.gradient.fused import LOG_RATIO_LIMIT
from agentpipe.learning.samples.batch import Batch


def normalised(advantages, segment, segments):
    """Advantages under mean and deviation of their segments, as the gradient takes them."""
    centre, scale = segment_scale(advantages, segment, segments)
    return (advantages - centre[segment]) * scale[segment]


def select(batch, rows):
    """The samples ``rows`` of a batch, copied."""
    return Batch(*(getattr(batch, name).index_select(0, rows) for name in Batch.__dataclass_fields__))


@dataclass
class Loss:
    """The loss of one minibatch and its parts."""

    total: Tensor
    parts: Tensor
    """f32[6]: policy loss, value loss, sum of entropies, decisions that had a choice, approx KL, old approx KL"""
    segment_kl: Tensor
    """f32[S], sums over samples"""
    segment_clipped: Tensor
    """f32[S], clipped samples"""
    segment_count: Tensor
    """f32[S]"""


def segmented_loss(
    network: torch.nn.Module, batch: Batch, clip: Tensor, entropy_weight: float, value_weight: float
) -> Loss:
    """The clipped surrogate of Schulman et al. (2017, eq. 7) with a clip range per segment.

        r        = exp(clamp(log pi(a|s) - log pi_old(a|s), ±10))     one ratio a sample, whatever the segment's length
        L_policy = -mean w min(r A, clamp(r, 1 - clip[segment], 1 + clip[segment]) A)
        L        = L_policy - entropy_weight * mean w H(pi(.|s)) + value_weight * mean w (V(s) - G)^2 / 2

    w is the sample's weight.
    KL is estimated as mean((r - 1) - log r), which is never negative (Schulman, 2020).

    Args:
        network: with gradients.
        batch: any number of samples, one included.
        clip: f32[S].
        entropy_weight: of the entropy bonus.
        value_weight: of the value loss.
    """
    logits, value = network.heads(batch.encoded, batch.last_action, batch.mask)
    log_probabilities = logits.log_softmax(dim=-1)
    chosen = log_probabilities.gather(1, batch.action.unsqueeze(1)).squeeze(1)
    log_ratio = (chosen - batch.log_probability).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    limit = clip[batch.segment]
    clipped = torch.minimum(torch.maximum(ratio, 1.0 - limit), 1.0 + limit)
    policy_loss = -(batch.weight * torch.minimum(ratio * batch.advantage, clipped * batch.advantage)).mean()
    # Illegal actions: probability exactly zero times -1e9 is zero.
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1)
    value_loss = 0.5 * (batch.weight * (value - batch.returns).square()).mean()
    total = policy_loss - entropy_weight * (batch.weight * entropy).mean() + value_weight * value_loss
    with torch.no_grad():
        kl = (ratio - 1.0) - log_ratio
        choices = (batch.mask.sum(dim=-1) > 1).sum()
        parts = torch.stack([policy_loss, value_loss, entropy.sum(), choices, kl.mean(), -log_ratio.mean()])
        sums = torch.zeros(3, len(clip), dtype=kl.dtype)
        outside = ((ratio - 1.0).abs() > limit).to(kl.dtype)
        for row, amount in enumerate((kl, outside, torch.ones_like(kl))):
            sums[row].index_add_(0, batch.segment, amount)
    return Loss(total, parts.detach(), *sums)


def anchor_loss(network: torch.nn.Module, batch: Batch, anchor: Tensor) -> Tensor:
    """mean w KL(anchor || policy), with ``anchor`` f[M, A] the probabilities to stay near."""
    log_probabilities = network.heads(batch.encoded, batch.last_action, batch.mask)[0].log_softmax(dim=-1)
    apart = torch.where(anchor > 0, anchor * (anchor.clamp_min(1e-30).log() - log_probabilities), 0.0)
    return (batch.weight * apart.sum(dim=-1)).mean()


def cloning_loss(
    network: torch.nn.Module, batch: Batch, answers: Tensor, questions, answer_weight: float, value_weight: float
) -> Tensor:
    """The mean of -log p(a) - answer_weight sum_q log p_q(a_q) + value_weight (V - G)^2 / 2.

    Args:
        network: with gradients.
        batch: any number of samples.
        answers: i64[M, Q], the right action for each question or -1.
        questions: i8[A], which question each action answers, or -1.
        answer_weight: of the answers.
        value_weight: of the value loss.
    """
    logits, value = network.heads(batch.encoded, batch.last_action, torch.ones_like(batch.mask))
    entropy, illegal = torch.nn.functional.cross_entropy, float("-inf")
    total = entropy(logits.masked_fill(~batch.mask, illegal), batch.action)
    for question in range(answers.shape[1]):
        others = torch.from_numpy(question != questions)
        options = logits.masked_fill(others, illegal)
        asked = answers[:, question] >= 0
        answered = entropy(options[asked], answers[asked, question], reduction="sum")
        total = total + answer_weight * answered / len(answers)
    return total + value_weight * 0.5 * (value - batch.returns).square().mean()
