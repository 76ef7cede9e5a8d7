"""Perception and memory learn from the rollout that the policy has just learned from.

An update takes some minibatches of whole environments, one after the other (each holds every so many-th of them, so
that none is of one cell alone), with one step of the optimiser for each; the next update takes the next ones. A
minibatch is cut into a fixed number of pieces whose gradients are added in order: the result does not depend on the
number of threads.

What is learned here reaches perception's and memory's own parameters and nothing else; that is what the tests of S12
hold, path by path.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentpipe.environments.truth import TRUTHS, has_truth
from agentpipe.errors import CheckpointError, LearningError
from agentpipe.learning.gradient.ppo import clip_gradients
from agentpipe.learning.joint.perception import perception_loss
from agentpipe.learning.joint.record import JointRecord
from agentpipe.learning.tensors import adam_slots, required

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.samples.rollout import Rollout
    from agentpipe.learning.tensors import Arrays
    from agentpipe.learning.workers import Workers

PIECES: Final = 8
"""parts of a minibatch with gradients of their own"""
LEARNING_RATE: Final = 2e-3
"""of perception and memory"""
MINIBATCH: Final = 8_192
"""steps of one gradient step, at most; at least those of one environment"""
SHARE: Final = 0.25
"""of a rollout's minibatches that are learned from, at least one; the next update takes the next ones. There are far
more samples than perception and memory need, and they cost as much as the policy's"""
GRADIENT_NORM: Final = 1.0
"""gradients of each part are scaled down to this norm"""


class _Part(NamedTuple):
    """Perception or memory, with its own optimiser."""

    name: str
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    optimiser: torch.optim.Adam
    loss: Callable[[Rollout, JointRecord, Tensor, Tensor], tuple[Tensor, Tensor]]
    """of a rollout, its record, the environments of a piece and of its minibatch: a share of the loss, and sums"""
    sums: int
    """how many"""


class JointTraining:
    """Trains perception and memory of a network, and keeps the memory of each environment.

    Args:
        network: with perception, memory, both or neither; without both nothing is ever done.
        pool: of N environments.
        workers: share the pieces.
        learning_rate: of both, constant.
        minibatch: steps of one gradient step.
        frozen: nothing is learned, the memory of each environment is kept all the same: for a policy that is held near
            another one, which reads what this one reads only while both are as they were.

    Raises:
        LearningError: the network has perception and the environments do not say what is true.
    """

    def __init__(
        self,
        network: PolicyNetwork,
        pool: LinePool,
        workers: Workers,
        *,
        learning_rate: float = LEARNING_RATE,
        minibatch: int = MINIBATCH,
        frozen: bool = False,
    ) -> None:
        if network.perception is not None and not frozen and not has_truth(pool):
            remedy = "train without perception (width 0): environments of your own tell no true fault to learn from"
            raise LearningError("perception has nothing to learn from here", field="network.perception", remedy=remedy)
        self.network, self.workers, self.minibatch = network, workers, minibatch
        self.memory = network.fresh_memory(pool.size)
        """f32[N, M], the memory of each environment now"""
        self._parts: list[_Part] = []
        if frozen:
            return
        if network.perception is not None:
            self._add("perception", network.perception, self._perception_loss, learning_rate, 1 + len(TRUTHS))
        if network.memory is not None:
            self._add("memory", network.memory, self._memory_loss, learning_rate, 2)

    def _add(self, name: str, module: nn.Module, loss: Any, rate: float, sums: int) -> None:  # noqa: ANN401
        names, parameters = zip(*module.named_parameters(), strict=True)
        optimiser = torch.optim.Adam(parameters, lr=rate, eps=1e-5, fused=True)
        self._parts.append(_Part(name, tuple(f"{name}.{part}" for part in names), parameters, optimiser, loss, sums))

    def record(self, steps: int) -> JointRecord | None:
        """What a :class:`~agentpipe.learning.samples.rollout.Rollout` of ``steps`` keeps for this; none for nothing."""
        learning = bool(self._parts)
        needed = learning or self.network.memory is not None
        return JointRecord(self.network, steps, self.memory, learning=learning) if needed else None

    # -- learning ----------------------------------------------------------------------------------------------

    def update(self, rollout: Rollout, number: int = 0) -> dict[str, float]:
        """Some minibatches of ``rollout``.

        Args:
            rollout: collected with a record of this; is not changed.
            number: of the update; says which minibatches are next.

        Returns:
            Figures for the log, taken before each step of the optimiser; empty without perception and memory.

        Raises:
            NonFiniteError: a loss or gradient is not finite; names the parameter. The step is not taken.
            LearningError: the rollout was collected without a record.
        """
        if not self._parts:
            return {}
        if rollout.joint is None:
            raise LearningError("the rollout keeps nothing to learn from", field="rollout", remedy="give it a record")
        figures: dict[str, float] = {}
        for part in self._parts:
            figures |= self._pass(part, rollout, rollout.joint, number)
        return figures

    def _pass(self, part: _Part, rollout: Rollout, record: JointRecord, number: int) -> dict[str, float]:
        minibatches = min(rollout.size, -(-rollout.live // self.minibatch))
        taken = math.ceil(SHARE * minibatches)
        sums, norm = torch.zeros(part.sums, dtype=torch.float64), 0.0
        known = np.zeros(len(TRUTHS), np.int64)
        for index in range(taken):
            rows = torch.arange((number * taken + index) % minibatches, rollout.size, minibatches)
            sums += self._gradient(part, rollout, record, rows)
            known += (record.truth[:, rows.numpy()] >= 0).sum(axis=(0, 1))
            norms = clip_gradients(
                part.parameters, GRADIENT_NORM, names=part.names, step=number, loss=float(sums.sum())
            )
            part.optimiser.step()
            norm += float(norms.norm())
        figures = {"gradient_norm": norm / taken}
        if part.name == "perception":
            figures["loss"] = float(sums[0]) / taken
            for question, right, count in zip(TRUTHS, sums[1:].tolist(), known.tolist(), strict=True):
                figures[f"{question}_right"] = right / max(1, count)
        else:
            figures["loss"], figures["loss_if_unchanged"] = (sums / taken).tolist()
        return {f"{part.name}/{name}": value for name, value in figures.items()}

    def _gradient(self, part: _Part, rollout: Rollout, record: JointRecord, rows: Tensor) -> Tensor:
        """Sets the gradients of the mean loss over the environments ``rows``; returns the sums."""
        found: list[tuple[Tensor, ...]] = [()] * PIECES
        sums = torch.zeros(PIECES, part.sums, dtype=torch.float64)
        pieces = rows.tensor_split(PIECES)

        @torch.enable_grad()  # holds for one thread only
        def piece(_: int, index: int) -> None:
            if len(pieces[index]):
                loss, counted = part.loss(rollout, record, pieces[index], rows)
                sums[index] = counted
                found[index] = torch.autograd.grad(loss, part.parameters)

        self.workers.run(piece, PIECES)
        whole = [gradients for gradients in found if gradients]
        for place, parameter in enumerate(part.parameters):
            total = whole[0][place].clone()
            for gradients in whole[1:]:
                total += gradients[place]
            parameter.grad = total
        return sums.sum(dim=0)

    def _perception_loss(
        self, rollout: Rollout, record: JointRecord, rows: Tensor, whole: Tensor
    ) -> tuple[Tensor, Tensor]:
        perception = self.network.perception
        assert perception is not None
        truth = torch.from_numpy(record.truth)
        known = (truth[:, whole] >= 0).sum(dim=(0, 1)).float()
        base = rollout.encoded[:, rows, : self.network.base_size].flatten(0, 1)
        loss, right = perception_loss(perception(base), truth[:, rows].flatten(0, 1).long(), known)
        return loss, torch.cat([loss.detach().double().unsqueeze(0), right.double()])

    def _memory_loss(self, rollout: Rollout, record: JointRecord, rows: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        memory, width = self.network.memory, self.network.base_size + self.network.belief_size
        assert memory is not None
        inputs = rollout.encoded[:, rows, :width]
        states = memory.unroll(inputs, rollout.last_action[:, rows], record.memory_start[rows])
        now = inputs[..., : self.network.observation_size]
        target = torch.cat([now[1:], record.after[rows].unsqueeze(0)])
        final = record.final_at[:, rows]
        ended = final >= 0
        target[ended] = record.finals[final[ended]]
        share = 1.0 / (rollout.steps * len(whole) * target.shape[-1])
        loss = (memory.predict(states, now) - target).square().sum() * share
        unchanged = (now - target).square().sum() * share
        return loss, torch.stack([loss.detach(), unchanged]).double()

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> Arrays:
        """All that the next update depends on, beside the weights: the memory, the slots of both optimisers."""
        arrays: Arrays = {"state": self.memory.numpy().copy()}
        for part in self._parts:
            for name, parameter in zip(part.names, part.parameters, strict=True):
                for slot, value in part.optimiser.state.get(parameter, {}).items():
                    arrays[f"{name}/{slot}"] = value.detach().numpy().copy()
        return arrays

    def restore(self, arrays: Mapping[str, Any], file: Path) -> None:
        """The inverse of :meth:`state`.

        Raises:
            CheckpointError: an array is missing or of another shape; names it. Nothing has changed then.
        """
        kept = required(arrays, "state", file)
        if kept.shape != tuple(self.memory.shape) or kept.dtype != np.float32:
            text = f"a memory of {kept.shape} {kept.dtype}, this run has {tuple(self.memory.shape)}"
            raise CheckpointError(text, file=file, field="state", remedy="resume with the options of the checkpoint")
        slots = [self._slots(part, arrays, file) for part in self._parts]
        self.memory.copy_(torch.from_numpy(np.array(kept)))
        for part, state in zip(self._parts, slots, strict=True):
            part.optimiser.load_state_dict({**part.optimiser.state_dict(), "state": state})

    @staticmethod
    def _slots(part: _Part, arrays: Mapping[str, Any], file: Path) -> dict[int, dict[str, Tensor]]:
        shapes = {name: tuple(one.shape) for name, one in zip(part.names, part.parameters, strict=True)}
        slots = adam_slots(shapes, dict(arrays), file)
        return {index: {slot: torch.from_numpy(a.copy()) for slot, a in own.items()} for index, own in slots.items()}
