"""What a rollout keeps beside its samples for perception and memory to learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentpipe.environments.truth import TRUTHS, truth

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.policy.network import PolicyNetwork


class JointRecord:
    """Truths, states and observations of T steps of N environments.

    Args:
        network: whose perception and memory learn.
        steps: T.
        memory: f32[N, M], the memory of each environment now; collecting moves it on, and it is shared with whoever
            made it.
        learning: keep truths and observations; else the memory alone is moved on.
    """

    def __init__(self, network: PolicyNetwork, steps: int, memory: Tensor, *, learning: bool = True) -> None:
        self.network, self.memory, self.learning = network, memory, learning
        size = len(memory)
        self.memory_start = torch.zeros_like(memory)
        """f32[N, M], the state before the first step"""
        self.truth = np.full((steps, size, len(TRUTHS)), -1, np.int8)
        """i8[T, N, 3], see :func:`~agentpipe.environments.truth.truth`"""
        self.after = torch.zeros(size, network.observation_size)
        """f32[N, D], the normalised observation behind the last step"""
        self.final_at = torch.zeros(steps, size, dtype=torch.int64)
        """i64[T, N], row in :attr:`finals` of an episode that ended in this step; -1 where none did"""
        self.finals = torch.zeros(0, network.observation_size)
        """f32[F, D], normalised final observations"""
        self._found: list[Tensor] = []

    def begin(self) -> None:
        """Before the first step."""
        self.memory_start.copy_(self.memory)
        self.final_at.fill_(-1)
        self._found = []

    def before(self, t: int, pool: LinePool) -> None:
        """Before the pool takes step ``t``."""
        if self.network.perception is not None and self.learning:
            self.truth[t] = truth(pool)

    def ended(self, t: int, pool: LinePool) -> None:
        """After step ``t``, where it ended episodes."""
        if self.network.memory is not None and self.learning:
            rows = np.flatnonzero(pool.terminated | pool.truncated)
            first = sum(len(part) for part in self._found)
            self.final_at[t, torch.from_numpy(rows)] = torch.arange(first, first + len(rows))
            self._found.append(self.network.normalise(torch.from_numpy(pool.final_observation[rows])))

    def end(self, pool: LinePool) -> None:
        """After the last step."""
        if self.network.memory is not None and self.learning:
            self.after.copy_(self.network.normalise(torch.from_numpy(pool.observation)))
            if self._found:
                self.finals = torch.cat(self._found).clone()
