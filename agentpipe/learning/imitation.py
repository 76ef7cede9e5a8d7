"""Warm-up: behaviour cloning of an expert by masked cross-entropy, and the critic on the expert's returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentpipe.environments.layout import MAX_STEPS
from agentpipe.errors import LearningError
from agentpipe.learning.advantages import discounted_returns
from agentpipe.learning.gates import WarmUpFigures
from agentpipe.learning.ppo import clip_gradients
from agentpipe.learning.rollout import require_choice, require_finite
from agentpipe.progress import silent

if TYPE_CHECKING:
    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.network import PolicyNetwork
    from agentpipe.learning.options import WarmUpOptions
    from agentpipe.learning.rewards import RewardScaler
    from agentpipe.progress import Progress


@dataclass
class Demonstrations:
    """Decisions of an expert in whole episodes."""

    encoded: Tensor
    """f32[M, E]"""
    last_action: Tensor
    """i64[M]"""
    mask: Tensor
    """bool[M, A]"""
    action: Tensor
    """i64[M]"""
    returns: Tensor
    """f32[M], discounted scaled rewards to the end of the episode"""
    weight: Tensor
    """f32[M], 0 where the episode's end was not seen or was a truncation, so that its return is not known"""
    episodes: int


def demonstrate(
    pool: LinePool,
    expert: Player,
    network: PolicyNetwork,
    scaler: RewardScaler,
    options: WarmUpOptions,
    progress: Progress = silent,
) -> Demonstrations:
    """Plays the expert; keeps the first episodes of each environment, whole ones, so that short ones are not preferred.

    Args:
        pool: is reset first, and again by whoever uses it next.
        expert: decides.
        network: encodes the observations.
        scaler: learns the scale of rewards.
        options: how many episodes.
        progress: told at each step.
    """
    size = pool.size
    quota = -(-options.episodes // size)
    recorded = np.linspace(0, size, min(size, options.episodes), endpoint=False).astype(np.int64)
    finished = np.full(size, quota)
    finished[recorded] = 0
    columns: list[tuple[Tensor, ...]] = []
    rows: list[npt.NDArray[np.int64]] = []
    rewards, ended, cut = [], [], []
    pool.reset()
    limit = min(options.max_steps, MAX_STEPS) * quota
    for step in range(limit):
        active = np.flatnonzero(finished < quota)
        if len(active) == 0:
            break
        require_finite(pool.observation, "observation", step, pool.names)
        require_choice(pool.mask, step, pool.names)
        actions = expert.act(pool).actions
        columns.append(_sample(pool, network, active, actions))
        rows.append(step * size + active)
        pool.step(actions)
        rewards.append(pool.reward.copy())
        cut.append(pool.truncated & ~pool.terminated)
        ended.append(pool.terminated | pool.truncated)
        finished += ended[-1]
        progress(
            "expert episodes", int(np.minimum(finished, quota)[recorded].sum()), quota * len(recorded), expert.name
        )
    done = np.stack(ended)
    returns = discounted_returns(scaler(np.stack(rewards), done), done, scaler.discount)
    position = np.concatenate(rows)
    known = _known(done, np.stack(cut)).reshape(-1)[position]
    encoded, last_action, mask, action = (torch.cat(parts) for parts in zip(*columns, strict=True))
    return Demonstrations(
        encoded,
        last_action,
        mask,
        action,
        torch.from_numpy(returns.reshape(-1)[position]),
        torch.from_numpy(known.astype(np.float32)),
        int(np.minimum(finished, quota)[recorded].sum()),
    )


def _sample(
    pool: LinePool, network: PolicyNetwork, rows: npt.NDArray[np.int64], actions: npt.NDArray[np.int64]
) -> tuple[Tensor, ...]:
    with torch.no_grad():
        encoded = network.encode(torch.from_numpy(pool.observation[rows]), torch.from_numpy(pool.time[rows]))
    return (encoded, *(torch.from_numpy(array[rows]) for array in (pool.last_action, pool.mask, actions)))


def _known(done: npt.NDArray[np.bool_], cut: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Where the episode that a step belongs to was seen to terminate: bool[T, N]."""
    known = np.empty_like(done)
    ahead = np.zeros(done.shape[1], dtype=np.bool_)
    for t in range(len(done) - 1, -1, -1):
        ahead = np.where(done[t], ~cut[t], ahead)
        known[t] = ahead
    return known


def clone(
    network: PolicyNetwork,
    demonstrations: Demonstrations,
    options: WarmUpOptions,
    generator: torch.Generator,
    *,
    value_weight: float,
    max_gradient_norm: float,
    expert: str = "",
    progress: Progress = silent,
) -> WarmUpFigures:
    """Fits the actor by masked cross-entropy and the critic by squared error; returns the figures of gate 2.

    Raises:
        NonFiniteError: a loss or gradient is not finite.
        LearningError: there is nothing to learn from.
    """
    samples = len(demonstrations.action)
    if samples == 0:
        raise LearningError(
            "the expert decided nothing", remedy="ask for at least one expert episode", field="episodes"
        )
    optimiser = torch.optim.Adam(network.parameters(), lr=options.learning_rate, eps=1e-5, fused=True)
    names, parameters = zip(*network.named_parameters(), strict=True)
    norms: list[float] = []
    sums = torch.zeros(5)
    for epoch in range(options.epochs):
        sums.zero_()
        for rows in torch.randperm(samples, generator=generator).tensor_split(-(-samples // options.minibatch)):
            loss, figures = _clone_loss(network, demonstrations, rows, value_weight)
            optimiser.zero_grad(set_to_none=False)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = clip_gradients(parameters, max_gradient_norm, names=names, step=len(norms), loss=loss.item()).norm()
            optimiser.step()
            norms.append(float(norm))
            sums += figures
        progress("behaviour cloning", epoch + 1, options.epochs, f"cross-entropy {float(sums[0]) / samples:.3f}")
    cross_entropy, error, known, right, choices = (float(value) for value in sums)
    return WarmUpFigures(
        actor_loss=cross_entropy / samples,
        critic_mae=error / max(known, 1.0),
        gradient_norm_median=float(np.median(norms)),
        accuracy=right / max(choices, 1.0),
        samples=samples,
        episodes=demonstrations.episodes,
        expert=expert,
    )


def _clone_loss(
    network: PolicyNetwork, demonstrations: Demonstrations, rows: Tensor, value_weight: float
) -> tuple[Tensor, Tensor]:
    d = demonstrations
    encoded, last_action, mask, action, returns, weight = (
        part.index_select(0, rows) for part in (d.encoded, d.last_action, d.mask, d.action, d.returns, d.weight)
    )
    logits, value = network.heads(encoded, last_action, mask)
    cross_entropy = torch.nn.functional.cross_entropy(logits, action, reduction="none")
    error = value - returns
    loss = cross_entropy.mean() + value_weight * 0.5 * (weight * error.square()).sum() / weight.sum().clamp(min=1.0)
    with torch.no_grad():
        choice = mask.sum(dim=-1) > 1
        right = (logits.argmax(dim=-1) == action) & choice
        figures = [cross_entropy.sum(), (weight * error.abs()).sum(), weight.sum(), right.sum(), choice.sum()]
        return loss, torch.stack([figure.float() for figure in figures])
