"""Cloning a fixed set of episodes: several passes, and a tenth of the episodes that only judges.

Each epoch goes over the steps of the episodes to learn from once, in random order, with masked cross-entropy for the
decisions and a squared error for the values, as in :mod:`~agentpipe.learning.cloning.fused`; then the held-out episodes
are judged. The weights of the epoch with the lowest held-out cross-entropy are kept; after ``patience`` epochs without
a lower one cloning stops. An episode is held out as a whole, and one that is there twice is there once
(:func:`~agentpipe.learning.cloning.demonstrations.read_demonstrations`): no step is judged that was learned.

The critic learns discounted returns of scaled rewards, from episodes whose rewards are known and which ended by
themselves; a decision of a person has none, and teaches the actor alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agentpipe.errors import LearningError
from agentpipe.learning.cloning.fused import (
    CHOICES,
    CROSS_ENTROPY,
    RIGHT,
    VALUE_ERROR,
    ClonedBatch,
    CloningGradient,
)
from agentpipe.learning.cloning.imitation import LOWEST_RATE
from agentpipe.learning.gates import WarmUpFigures
from agentpipe.learning.gradient.ppo import clip_gradients
from agentpipe.learning.gradient.rewards import accumulated
from agentpipe.learning.options import share_at
from agentpipe.progress import silent

if TYPE_CHECKING:
    import numpy.typing as npt

    from agentpipe.learning.aids.options import DemonstrationOptions
    from agentpipe.learning.cloning.demonstrations import Demonstrations
    from agentpipe.learning.options import PpoOptions
    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.state import TrainingState
    from agentpipe.learning.workers import Workers
    from agentpipe.progress import Progress


@dataclass(frozen=True)
class _Judged:
    """Means over the steps of some episodes."""

    cross_entropy: float
    value_mae: float | None
    accuracy: float


def clone_demonstrations(
    demonstrations: Demonstrations,
    state: TrainingState,
    options: DemonstrationOptions,
    ppo: PpoOptions,
    workers: Workers,
    progress: Progress = silent,
) -> WarmUpFigures:
    """Clones recorded episodes; returns the figures of gate 2, of the held-out episodes.

    Perception and memory, where the network has them, stay as they are: they learn once the policy gradient begins.

    Args:
        demonstrations: at least two episodes, of the network's sizes.
        state: its network learns, its reward scaler sees the rewards, its generator shuffles.
        options: epochs, patience, held-out share, minibatch, learning rate.
        ppo: discount, value weight, gradient norm.
        workers: share the work; the result does not depend on how many there are.
        progress: told after every epoch.

    Raises:
        LearningError: fewer than two episodes.
        NonFiniteError: a loss or a gradient is not finite.
    """
    if len(demonstrations) < 2:
        raise LearningError("one episode cannot be learned from and judged by", field="demonstrations")
    network, generator = state.network, state.generator
    learned, held = _split(demonstrations, options.held_out, generator)
    batch, paid = _batch(demonstrations, state, ppo.discount)
    loss = _Loss(network, ppo.value_weight, paid, workers)
    parameters = [parameter for _, parameter in network.policy_parameters()]
    optimiser = torch.optim.Adam(parameters, lr=options.learning_rate, eps=1e-5, fused=True)
    norms: list[float] = []
    best, kept, waited, epoch = loss.judge(batch, held), state.weights(), 0, 0
    while epoch < options.epochs and waited < options.patience:
        for group in optimiser.param_groups:
            group["lr"] = options.learning_rate * share_at("cosine", epoch / options.epochs, LOWEST_RATE)
        order = learned[torch.randperm(len(learned), generator=generator)]
        for rows in order.tensor_split(-(-len(order) // options.minibatch)):
            total = loss(batch, rows)
            norm = clip_gradients(
                tuple(parameters), ppo.max_gradient_norm, names=loss.names, step=len(norms), loss=total
            )
            optimiser.step()
            norms.append(float(norm.norm()))
        epoch, waited, seen = epoch + 1, waited + 1, loss.judge(batch, held)
        if seen.cross_entropy < best.cross_entropy:
            best, kept, waited = seen, state.weights(), 0
        note = f"held-out cross-entropy {seen.cross_entropy:.3f}, decisions right {seen.accuracy:.1%}"
        progress("cloning", epoch, options.epochs, note)
    network.load_state_dict(kept)
    return WarmUpFigures(
        actor_loss=best.cross_entropy,
        critic_mae=best.value_mae,
        gradient_norm_median=float(np.median(norms)),
        accuracy=best.accuracy,
        samples=len(learned) * epoch,
        episodes=len(demonstrations),
        expert=f"demonstrations {demonstrations.digest[:12]}",
    )


def _split(demonstrations: Demonstrations, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Steps to learn from, and steps of whole episodes that are held out."""
    count = len(demonstrations)
    held = min(count - 1, max(1, round(share * count)))
    chosen = np.zeros(count, np.bool_)
    chosen[torch.randperm(count, generator=generator)[:held].numpy()] = True
    of_step = np.repeat(chosen, demonstrations.length)
    return torch.from_numpy(np.flatnonzero(~of_step)), torch.from_numpy(np.flatnonzero(of_step))


def _batch(demonstrations: Demonstrations, state: TrainingState, discount: float) -> tuple[ClonedBatch, Tensor]:
    """All steps, and bool[M]: there is a return to learn."""
    length, reward = demonstrations.length, demonstrations.reward
    paid = np.repeat(demonstrations.paid, length)
    if paid.any():
        state.scaler.observe(accumulated(reward.astype(np.float64), length, discount)[paid])
    scaled = state.scaler.scale(reward).astype(np.float64)
    backwards = accumulated(scaled[::-1], length[::-1], discount)[::-1]
    empty = torch.zeros(0)
    batch = ClonedBatch(
        encoded=_encoded(demonstrations, state.network),
        last_action=torch.from_numpy(demonstrations.last_action),
        mask=torch.from_numpy(demonstrations.mask),
        action=torch.from_numpy(demonstrations.action),
        log_probability=empty,
        advantage=empty,
        returns=torch.from_numpy(np.where(paid, backwards, 0.0).astype(np.float32)),
        segment=empty,
        weight=empty,
    )
    batch.answers = torch.zeros(len(reward), 0, dtype=torch.int64)
    return batch, torch.from_numpy(paid)


@torch.no_grad()
def _encoded(demonstrations: Demonstrations, network: PolicyNetwork) -> Tensor:
    """What the network reads at every step, f32[M, E]; it watches all episodes side by side from their first step."""
    length = demonstrations.length
    encoded = torch.zeros(int(length.sum()), network.encoded_size)
    first = np.cumsum(length) - length
    memory = network.fresh_memory(len(length))
    for step in range(int(length.max())):
        rows = torch.from_numpy(np.flatnonzero(length > step))
        at = torch.from_numpy(first)[rows] + step
        place = at.numpy()
        observation, time = (torch.from_numpy(getattr(demonstrations, name)[place]) for name in ("observation", "time"))
        last_action = torch.from_numpy(demonstrations.last_action[place])
        encoded[at], memory[rows] = network.encode(observation, last_action, time, memory[rows])
    return encoded


class _Loss:
    """Cross-entropy of all steps, and the value loss of those that have a return, as one mean over the steps."""

    def __init__(self, network: PolicyNetwork, value_weight: float, paid: Tensor, workers: Workers) -> None:
        questions = np.full(network.action_count, -1, np.int8)
        self.parameters = [parameter for _, parameter in network.policy_parameters()]
        self.paid = paid
        self.both = CloningGradient(network, questions, 0.0, value_weight, workers)
        self.actor = CloningGradient(network, questions, 0.0, 0.0, workers)
        self.names = self.both.names

    def __call__(self, batch: ClonedBatch, rows: Tensor) -> float:
        """Sets the gradients; returns the loss's figures in one sum, to be checked for being finite."""
        sums = self._sums(batch, rows)
        return float(sums[CROSS_ENTROPY] + sums[VALUE_ERROR])

    def judge(self, batch: ClonedBatch, rows: Tensor) -> _Judged:
        """Means over the steps ``rows``; the gradients that come with them are of no use."""
        sums, valued = self._sums(batch, rows), int(self.paid[rows].sum())
        return _Judged(
            cross_entropy=float(sums[CROSS_ENTROPY] / len(rows)),
            value_mae=float(sums[VALUE_ERROR] / valued) if valued else None,
            accuracy=float(sums[RIGHT] / max(sums[CHOICES], 1.0)),
        )

    def _sums(self, batch: ClonedBatch, rows: Tensor) -> npt.NDArray[np.float64]:
        valued, others = rows[self.paid[rows]], rows[~self.paid[rows]]
        if len(others) == 0:
            return self.both(batch, rows, 0.0)
        if len(valued) == 0:
            return _without_values(self.actor(batch, rows, 0.0))
        sums = self.both(batch, valued, 0.0)
        gradients = [_gradient(parameter).clone() for parameter in self.parameters]
        sums = sums + _without_values(self.actor(batch, others, 0.0))
        share = len(valued) / len(rows)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            _gradient(parameter).mul_(1.0 - share).add_(gradient, alpha=share)
        return sums


def _gradient(parameter: Any) -> Tensor:  # noqa: ANN401 - torch types a gradient as optional
    gradient: Tensor = parameter.grad
    return gradient


def _without_values(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    rest = sums.copy()
    rest[VALUE_ERROR] = 0.0
    return rest
