"""Segment-wise clipped policy gradient (S9): GAE over the whole episode, normalisation and clip range per segment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentpipe.environments.layout import SEGMENTS
from agentpipe.errors import NonFiniteError
from agentpipe.learning.advantages import explained_variance, generalised_advantages, normalise_by_segment

if TYPE_CHECKING:
    from agentpipe.learning.network import PolicyNetwork
    from agentpipe.learning.options import PpoOptions
    from agentpipe.learning.rewards import RewardScaler
    from agentpipe.learning.rollout import Rollout

LOG_RATIO_LIMIT = 10.0
"""the logarithm of a probability ratio is clamped to plus and minus this before the exponential"""


@dataclass
class Batch:
    """M samples, flattened over time and environments; one row each."""

    encoded: Tensor
    """f32[M, E]"""
    last_action: Tensor
    """i64[M]"""
    mask: Tensor
    """bool[M, A]"""
    action: Tensor
    """i64[M]"""
    log_probability: Tensor
    """f32[M], when the action was chosen"""
    advantage: Tensor
    """f32[M], normalised per segment"""
    returns: Tensor
    """f32[M]"""
    segment: Tensor
    """i64[M]"""

    def select(self, rows: Tensor) -> Batch:
        """The samples ``rows``, copied."""
        return Batch(*(getattr(self, name).index_select(0, rows) for name in self.__dataclass_fields__))


@dataclass
class UpdateFigures:
    """What one update did; names as in CleanRL, so that everyone finds them."""

    losses: dict[str, float]
    gradient_norms: dict[str, float] = field(default_factory=dict)
    """mean over the update's gradient steps, before clipping, one per parameter tensor"""


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


def prepare(rollout: Rollout, scaler: RewardScaler, options: PpoOptions) -> tuple[Batch, dict[str, float]]:
    """Advantages and returns of a rollout, flattened (views where possible), and figures about them."""
    reward = scaler(rollout.reward, rollout.done)
    value = rollout.value.numpy()
    advantages, returns = generalised_advantages(
        reward,
        value,
        rollout.last_value,
        rollout.terminated,
        rollout.truncated,
        rollout.final_value,
        options.discount,
        options.gae_lambda,
    )
    segment = rollout.segment.reshape(-1)
    normalised = normalise_by_segment(advantages.reshape(-1), segment, len(SEGMENTS))
    batch = Batch(
        rollout.encoded.flatten(0, 1),
        rollout.last_action.flatten(),
        rollout.mask.flatten(0, 1),
        rollout.action.flatten(),
        rollout.log_probability.flatten(),
        torch.from_numpy(normalised),
        torch.from_numpy(returns.reshape(-1)),
        torch.from_numpy(segment.astype(np.int64)),
    )
    positive, negative = int((rollout.reward > 0).sum()), int((rollout.reward < 0).sum())
    deviation = float(advantages.std(dtype=np.float64))
    return batch, {
        "losses/explained_variance": explained_variance(value, returns),
        "losses/advantage_mean": float(advantages.mean(dtype=np.float64)) / max(deviation, 1e-8),
        "losses/advantage_std": deviation,
        "losses/value_mae": float(np.abs(returns - value).mean(dtype=np.float64)),
        "rewards/positive_to_negative": positive / max(1, negative),
        "rewards/clamped_share": scaler.clamped_share,
        "rewards/deviation": scaler.deviation,
    }


def segmented_loss(
    network: PolicyNetwork, batch: Batch, clip: Tensor, entropy_weight: float, value_weight: float
) -> Loss:
    """The clipped surrogate of Schulman et al. (2017, eq. 7) with a clip range per segment.

        r        = exp(clamp(log pi(a|s) - log pi_old(a|s), ±10))     one ratio a sample, whatever the segment's length
        L_policy = -mean min(r A, clamp(r, 1 - clip[segment], 1 + clip[segment]) A)
        L        = L_policy - entropy_weight * mean H(pi(.|s)) + value_weight * mean (V(s) - G)^2 / 2

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
    policy_loss = -torch.minimum(ratio * batch.advantage, clipped * batch.advantage).mean()
    # Illegal actions: probability exactly zero times -1e9 is zero.
    entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1)
    value_loss = 0.5 * (value - batch.returns).square().mean()
    total = policy_loss - entropy_weight * entropy.mean() + value_weight * value_loss
    with torch.no_grad():
        kl = (ratio - 1.0) - log_ratio
        choices = (batch.mask.sum(dim=-1) > 1).sum()
        parts = torch.stack([policy_loss, value_loss, entropy.sum(), choices, kl.mean(), -log_ratio.mean()])
        sums = torch.zeros(3, len(clip))
        outside = ((ratio - 1.0).abs() > limit).float()
        for row, amount in enumerate((kl, outside, torch.ones_like(kl))):
            sums[row].index_add_(0, batch.segment, amount)
    return Loss(total, parts.detach(), *sums)


def update(
    network: PolicyNetwork,
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    options: PpoOptions,
    generator: torch.Generator,
    *,
    entropy_weight: float,
    number: int = 0,
) -> UpdateFigures:
    """One update: several epochs over the samples in random order, minibatches of nearly equal size.

    Args:
        network: is changed.
        optimiser: over the network's parameters; its learning rate is set by the caller.
        batch: M samples.
        options: epochs, minibatch, clip ranges, weights.
        generator: of the order.
        entropy_weight: of this update.
        number: of this update, for error messages.

    Raises:
        NonFiniteError: a loss or gradient is not finite; raised before the step is taken.
    """
    samples = len(batch.action)
    pieces = -(-samples // options.minibatch)
    clip = torch.tensor(options.clip)
    names, parameters = zip(*network.named_parameters(), strict=True)
    norms, total_norm = torch.zeros(len(parameters)), 0.0
    parts, sums, taken = torch.zeros(6), torch.zeros(3, len(clip)), 0
    for _ in range(options.epochs):
        first = taken
        epoch_kl = 0.0
        for rows in torch.randperm(samples, generator=generator).tensor_split(pieces):
            loss = segmented_loss(network, batch.select(rows), clip, entropy_weight, options.value_weight)
            optimiser.zero_grad(set_to_none=False)
            loss.total.backward()  # type: ignore[no-untyped-call]
            step_norms = clip_gradients(
                parameters, options.max_gradient_norm, names=names, step=number, loss=loss.total
            )
            optimiser.step()
            norms += step_norms
            total_norm += float(step_norms.norm())
            parts += loss.parts
            sums += torch.stack([loss.segment_kl, loss.segment_clipped, loss.segment_count])
            epoch_kl += float(loss.parts[4])
            taken += 1
        if options.target_kl is not None and epoch_kl / (taken - first) > options.target_kl:
            break
    losses = _figures(parts, sums, taken)
    losses["losses/gradient_norm"] = total_norm / taken
    losses["losses/gradient_steps"] = taken
    return UpdateFigures(losses, {name: float(norm) / taken for name, norm in zip(names, norms, strict=True)})


def clip_gradients(
    parameters: tuple[Tensor, ...], limit: float, *, names: tuple[str, ...], step: int, loss: Tensor
) -> Tensor:
    """Scales all gradients so that their joint norm is at most ``limit``; returns the norms before, f32[parameters].

    Raises:
        NonFiniteError: the loss or a gradient is not finite; names the parameter.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack([gradient.norm() for gradient in gradients])
    total = float(norms.norm())
    if not np.isfinite(total) or not np.isfinite(float(loss.detach())):
        bad = [name for name, norm in zip(names, norms, strict=True) if not np.isfinite(float(norm))]
        remedy = "training stopped before the step was taken; the last checkpoint is good"
        place = f"gradient of {bad[0]}" if bad else "loss"
        raise NonFiniteError("not finite", environment="all (a minibatch)", field=place, step=step, remedy=remedy)
    if total > limit:
        for gradient in gradients:
            gradient.mul_(limit / total)
    return norms


def _figures(parts: Tensor, sums: Tensor, steps: int) -> dict[str, float]:
    policy, value, entropy, choices, kl, old_kl = (float(part) for part in parts)
    count = sums[2].clamp(min=1.0)
    per_segment = {
        f"losses/{name}/{segment}": float(figure)
        for name, row in (("approx_kl", 0), ("clipfrac", 1))
        for segment, figure in zip(SEGMENTS, sums[row] / count, strict=True)
    }
    return {
        "losses/policy_loss": policy / steps,
        "losses/value_loss": value / steps,
        "losses/entropy": entropy / max(1.0, choices),
        "losses/approx_kl": kl / steps,
        "losses/old_approx_kl": old_kl / steps,
        "losses/clipfrac": float(sums[1].sum() / sums[2].sum().clamp(min=1.0)),
        **per_segment,
    }
