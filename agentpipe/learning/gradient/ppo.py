"""Segment-wise clipped policy gradient (S9): GAE over the whole episode, normalisation and clip range per segment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentpipe.environments.layout import SEGMENTS
from agentpipe.errors import NonFiniteError
from agentpipe.learning.gradient.advantages import explained_variance, generalised_advantages, segment_scale
from agentpipe.learning.gradient.fused import CHOICES, ENTROPY, KL, OLD_KL, POLICY, SEGMENTED, VALUE

if TYPE_CHECKING:
    from agentpipe.learning.gradient.fused import SegmentedGradient
    from agentpipe.learning.gradient.rewards import RewardScaler
    from agentpipe.learning.options import PpoOptions
    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.samples.batch import Batch
    from agentpipe.learning.samples.rollout import Rollout


@dataclass
class UpdateFigures:
    """What one update did; names as in CleanRL, so that everyone finds them."""

    losses: dict[str, float]
    gradient_norms: dict[str, float] = field(default_factory=dict)
    """mean over the update's gradient steps, before clipping, one per parameter tensor"""


class Prepared(NamedTuple):
    """A rollout that is ready to be learned from."""

    batch: Batch
    """the live samples first; rows behind them are for replayed ones"""
    figures: dict[str, float]
    """about rewards, advantages and values"""
    centre: npt.NDArray[np.float64]
    """f64[S], mean live advantage of each segment, in scaled returns"""
    scale: npt.NDArray[np.float64]
    """f64[S], one over the deviation of the live advantages of each segment"""


def prepare(
    rollout: Rollout,
    scaler: RewardScaler,
    options: PpoOptions,
    *,
    gae_lambda: float | None = None,
    bonus: npt.NDArray[np.float32] | None = None,
) -> Prepared:
    """Advantages and returns of a rollout, in its own memory; the scaler learns from its rewards.

    Args:
        rollout: T steps of N environments.
        scaler: of rewards.
        options: discount, lambda, how advantages are normalised.
        gae_lambda: of this update; none = that of the options.
        bonus: f32[T, N], added to the scaled rewards.
    """
    reward = scaler(rollout.reward, rollout.done)
    if bonus is not None:
        reward = reward + bonus
    value = rollout.value.numpy()
    advantages, returns = generalised_advantages(
        reward,
        value,
        rollout.last_value,
        rollout.terminated,
        rollout.truncated,
        rollout.final_value,
        options.discount,
        options.gae_lambda if gae_lambda is None else gae_lambda,
        rollout.segment if options.credit == "segment" else None,
    )
    batch, live, segment = rollout.batch, rollout.live, rollout.segment.reshape(-1)
    kind = segment if options.normalise == "segment" else np.zeros_like(segment)
    centre, scale = segment_scale(advantages.reshape(-1), kind, len(SEGMENTS))
    if options.normalise == "batch":
        centre[:], scale[:] = centre[0], scale[0]
    batch.advantage[:live] = torch.from_numpy((advantages.reshape(-1) - centre[segment]) * scale[segment])
    batch.returns[:live] = torch.from_numpy(returns.reshape(-1))
    batch.segment[:live] = torch.from_numpy(segment)
    positive, negative = int((rollout.reward > 0).sum()), int((rollout.reward < 0).sum())
    deviation = float(advantages.std(dtype=np.float64))
    figures = {
        "losses/explained_variance": explained_variance(value, returns),
        "losses/advantage_mean": float(advantages.mean(dtype=np.float64)) / max(deviation, 1e-8),
        "losses/advantage_std": deviation,
        "losses/value_mae": float(np.abs(returns - value).mean(dtype=np.float64)),
        "rewards/positive_to_negative": positive / max(1, negative),
        "rewards/clamped_share": scaler.clamped_share,
        "rewards/deviation": scaler.deviation,
    }
    return Prepared(batch, figures, centre, scale)


def update(
    network: PolicyNetwork,
    optimiser: torch.optim.Optimizer,
    gradient: SegmentedGradient,
    batch: Batch,
    options: PpoOptions,
    generator: torch.Generator,
    *,
    entropy_weight: float,
    number: int = 0,
) -> UpdateFigures:
    """One update: several epochs over the samples in random order, minibatches of nearly equal size.

    Losses and figures are over all samples, replayed ones included.

    Args:
        network: is changed.
        optimiser: over the network's parameters; its learning rate is set by the caller.
        gradient: of ``network``.
        batch: M samples.
        options: epochs, minibatch, gradient norm.
        generator: of the order.
        entropy_weight: of this update.
        number: of this update, for error messages.

    Raises:
        NonFiniteError: a loss or gradient is not finite; raised before the step is taken.
    """
    samples = len(batch.action)
    pieces = -(-samples // options.minibatch)
    parameters = tuple(parameter for _, parameter in network.policy_parameters())
    norms, total_norm, steps = torch.zeros(len(parameters)), 0.0, 0
    sums = np.zeros(0)
    for _ in range(options.epochs):
        epoch_kl = 0.0
        for rows in torch.randperm(samples, generator=generator).tensor_split(pieces):
            step_sums = gradient(batch, rows, entropy_weight)
            step_norms = clip_gradients(
                parameters, options.max_gradient_norm, names=gradient.names, step=number, loss=float(step_sums.sum())
            )
            optimiser.step()
            norms += step_norms
            total_norm += float(step_norms.norm())
            sums = step_sums if steps == 0 else sums + step_sums
            epoch_kl += float(step_sums[KL])
            steps += 1
        if options.target_kl is not None and epoch_kl / samples > options.target_kl:
            break
    losses = _figures(sums)
    losses["losses/gradient_norm"] = total_norm / steps
    losses["losses/gradient_steps"] = steps
    means = {name: float(norm) / steps for name, norm in zip(gradient.names, norms, strict=True)}
    return UpdateFigures(losses, means)


def clip_gradients(
    parameters: tuple[Tensor, ...], limit: float, *, names: tuple[str, ...], step: int, loss: float
) -> Tensor:
    """Scales all gradients so that their joint norm is at most ``limit``; returns the norms before, f32[parameters].

    Raises:
        NonFiniteError: the loss or a gradient is not finite; names the parameter.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack([gradient.norm() for gradient in gradients])
    total = float(norms.norm())
    if not np.isfinite(total) or not np.isfinite(loss):
        bad = [name for name, norm in zip(names, norms, strict=True) if not np.isfinite(float(norm))]
        remedy = "training stopped before the step was taken; the last checkpoint is good"
        place = f"gradient of {bad[0]}" if bad else "loss"
        raise NonFiniteError("not finite", environment="all (a minibatch)", field=place, step=step, remedy=remedy)
    if total > limit:
        for gradient in gradients:
            gradient.mul_(limit / total)
    return norms


def _figures(sums: npt.NDArray[np.float64]) -> dict[str, float]:
    kl, clipped, count = sums[SEGMENTED : SEGMENTED + 3 * len(SEGMENTS)].reshape(3, len(SEGMENTS))
    samples, safe = count.sum(), np.maximum(count, 1)
    anchored = sums[SEGMENTED + 3 * len(SEGMENTS) :]
    return {
        "losses/policy_loss": float(sums[POLICY] / samples),
        "losses/value_loss": float(sums[VALUE] / samples),
        "losses/entropy": float(sums[ENTROPY] / max(1.0, sums[CHOICES])),
        "losses/approx_kl": float(sums[KL] / samples),
        "losses/old_approx_kl": float(sums[OLD_KL] / samples),
        "losses/clipfrac": float(clipped.sum() / samples),
        **({"losses/anchor_kl": float(anchored[0] / samples)} if len(anchored) else {}),
        **{f"losses/approx_kl/{name}": float(figure) for name, figure in zip(SEGMENTS, kl / safe, strict=True)},
        **{f"losses/clipfrac/{name}": float(figure) for name, figure in zip(SEGMENTS, clipped / safe, strict=True)},
    }
