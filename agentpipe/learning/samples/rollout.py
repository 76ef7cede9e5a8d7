"""Collecting rollouts: arrays allocated once, shared between the simulator (numpy) and the network (torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentpipe.environments.layout import OBSERVATION_NAMES, REASONS, SEGMENTS
from agentpipe.errors import EmptyMaskError, LearningError, NonFiniteError, SimulationError
from agentpipe.learning.policy.compiled import CompiledPolicy
from agentpipe.learning.samples.batch import Batch
from agentpipe.learning.samples.shown import ENDED, NOW, TAKEN, Shown, within
from agentpipe.learning.samples.space import declared_space

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.joint.record import JointRecord
    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.samples.stream import Stream
    from agentpipe.learning.workers import Workers

BLOCK = 1_024
"""environments that go through the network together: their activations stay in the cache"""


class Rollout:
    """T steps of N environments; tensors and numpy views of the same memory, time first.

    Args:
        steps: T.
        size: N.
        encoded_size: width of the encoded input.
        action_count: A.
        spare: rows behind the T x N live ones in :attr:`batch`, for replayed samples.
        joint: what perception and memory learn from; needed to collect with a network that has a memory.
    """

    def __init__(
        self,
        steps: int,
        size: int,
        encoded_size: int,
        action_count: int,
        spare: int = 0,
        joint: JointRecord | None = None,
    ) -> None:
        self.steps, self.size, self.live = steps, size, steps * size
        self.batch = Batch.allocate(self.live + spare, encoded_size, action_count)
        live = self.batch.first(self.live)
        self.encoded = live.encoded.view(steps, size, encoded_size)
        self.mask = live.mask.view(steps, size, action_count)
        self.last_action = live.last_action.view(steps, size)
        self.action = live.action.view(steps, size)
        self.log_probability = live.log_probability.view(steps, size)
        self.value = torch.zeros(steps, size)
        self.entropy = torch.zeros(steps, size)
        """of the distribution that each action was drawn from; 0 where an expert decided"""
        self.segment = np.zeros((steps, size), dtype=np.int8)
        self.reward = np.zeros((steps, size), dtype=np.float32)
        self.terminated = np.zeros((steps, size), dtype=np.bool_)
        self.truncated = np.zeros((steps, size), dtype=np.bool_)
        self.final_value = np.zeros((steps, size), dtype=np.float32)
        self.last_value = np.zeros(size, dtype=np.float32)
        self.success = np.zeros((steps, size), dtype=np.bool_)
        """of the episode that ended in this step; as :attr:`total` of no meaning where none did"""
        self.total = np.zeros((steps, size), dtype=np.float32)
        """its return"""
        self.joint = joint
        self.memory = torch.zeros(size, 0) if joint is None else joint.memory

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """bool[T, N]."""
        return self.terminated | self.truncated


@dataclass
class EpisodeFigures:
    """Sums over the episodes that ended during a rollout."""

    episodes: int = 0
    successes: int = 0
    returns: float = 0.0
    steps: int = 0
    decisions: int = 0
    decision_seconds: float = 0.0
    reasons: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(REASONS), dtype=np.int64))

    def add(self, pool: LinePool, rows: npt.NDArray[np.int64]) -> None:
        """Adds the episodes that just ended in ``rows``."""
        self.episodes += len(rows)
        self.successes += int(pool.result_success[rows].sum())
        self.returns += float(pool.result_return[rows].sum())
        self.steps += int(pool.result_steps[rows].sum())
        self.decisions += int(pool.result_decisions[rows].sum())
        self.decision_seconds += float(pool.result_decision_seconds[rows].sum())
        self.reasons += np.bincount(pool.result_reason[rows], minlength=len(REASONS))

    def figures(self) -> dict[str, float]:
        """Means, under the names that the field greps for; empty when no episode ended."""
        if self.episodes == 0:
            return {}
        return {
            "charts/success_rate": self.successes / self.episodes,
            "charts/episodic_return": self.returns / self.episodes,
            "charts/episodic_length": self.steps / self.episodes,
            "charts/decision_seconds": self.decision_seconds / max(1, self.decisions),
            **{
                f"episodes/{name}": int(count) / self.episodes
                for name, count in zip(REASONS, self.reasons, strict=True)
            },
        }


def collect(
    pool: LinePool,
    network: PolicyNetwork,
    rollout: Rollout,
    generator: np.random.Generator,
    workers: Workers,
    *,
    step: int = 0,
    expert: Callable[[int], npt.NDArray[np.int64]] | None = None,
    stream: Stream | None = None,
) -> EpisodeFigures:
    """Fills ``rollout`` with sampled decisions of ``network``; the pool goes on from where it stands.

    Args:
        pool: of N environments; its arrays are copied at every step, since the next one overwrites them.
        network: decides.
        rollout: is overwritten.
        generator: one uniform number an environment and step is drawn from it.
        workers: share the environments; the result does not depend on how many there are.
        step: pool steps before this rollout, for error messages.
        expert: decides instead, given the step of this rollout; log-probabilities are not filled then, and the entropy
            is zero.
        stream: records every step.

    Raises:
        NonFiniteError: at the first non-finite observation, time, value or reward, naming environment, field and step.
        SimulationError: an observation leaves the space that the pool declares, a segment or a last action is unknown,
            or an array of the pool has another dtype or shape than it should.
        EmptyMaskError: an environment allows no action.
        LearningError: the network has a memory, and the rollout does not keep it.
    """
    figures, policy = EpisodeFigures(), CompiledPolicy(network, workers.threads)
    shown = Shown(rollout.size, network.observation_size, network.action_count)
    shown.require(pool, NOW, step)
    with torch.inference_mode():
        joint = _begin(pool, network, rollout)
        for t in range(rollout.steps):
            if expert is not None:
                rollout.action[t] = torch.from_numpy(expert(t))
            _decide(pool, policy, rollout, t, None if expert else generator.random(pool.size), workers, step + t)
            rollout.segment[t] = pool.segment
            if joint is not None:
                joint.before(t, pool)
            if stream is not None:
                stream.before()
            pool.step(rollout.action[t].numpy())
            shown.require(pool, NOW | TAKEN, step + t)
            rollout.reward[t] = pool.reward
            rollout.terminated[t] = pool.terminated
            rollout.truncated[t] = pool.truncated
            require_finite(rollout.reward[t], "reward", step + t, pool.names)
            if stream is not None:
                decided = (rollout.action[t], rollout.log_probability[t], rollout.value[t])
                stream.after(*(tensor.numpy() for tensor in decided))
            ended = np.flatnonzero(pool.terminated | pool.truncated)
            if len(ended):
                shown.require(pool, ENDED, step + t)
                shown.require_results(pool, ended, step + t)
                figures.add(pool, ended)
                rollout.success[t], rollout.total[t] = pool.result_success, pool.result_return
                _bootstrap(pool, policy, rollout, t, step + t)
        if joint is not None:
            joint.end(pool)
        _require_segments(rollout.segment, step, pool.names)
        now = (pool.observation, pool.last_action, pool.time, pool.mask)
        rollout.last_value[:] = _values(policy, *now, rollout.memory, pool.names, step + rollout.steps)
    return figures


def _decide(
    pool: LinePool,
    policy: CompiledPolicy,
    rollout: Rollout,
    t: int,
    uniforms: npt.NDArray[np.float64] | None,
    workers: Workers,
    step: int,
) -> None:
    space = declared_space(pool)
    arrays = (pool.observation, pool.time, pool.mask, pool.last_action)
    observation, time, mask, last_action = (torch.from_numpy(array) for array in arrays)

    @torch.inference_mode()  # holds for one thread only
    def block(worker: int, piece: int) -> None:
        at = slice(piece * BLOCK, min((piece + 1) * BLOCK, pool.size))
        names = pool.names[at]
        within(pool.last_action[at], 0, policy.network.action_count, "last_action", step, names)
        if space is None:
            require_finite(pool.observation[at], "observation", step, names)
        else:
            space.check(pool.observation[at], step, names)
        require_finite(pool.time[at], "time", step, names)
        inputs = (observation[at], last_action[at], time[at], rollout.memory[at])
        rollout.memory[at] = policy.encode(worker, *inputs, rollout.encoded[t, at])
        rollout.mask[t, at] = mask[at]
        rollout.last_action[t, at] = last_action[at]
        seen = (rollout.encoded[t, at], rollout.last_action[t, at], rollout.mask[t, at])
        into = (rollout.action, rollout.log_probability, rollout.value, rollout.entropy)
        numbers = None if uniforms is None else uniforms[at]
        stuck = policy.decide(worker, seen, numbers, tuple(tensor[t, at] for tensor in into))
        if stuck >= 0:
            raise EmptyMaskError("no action is allowed", environment=names[stuck], field="mask", step=step)
        require_finite(rollout.value[t, at].numpy(), "value", step, names)

    workers.run(block, -(-pool.size // BLOCK))


def _begin(pool: LinePool, network: PolicyNetwork, rollout: Rollout) -> JointRecord | None:
    if rollout.memory.shape != (pool.size, network.memory_size):
        raise LearningError("the rollout does not keep the policy's memory", field="memory", remedy="give it a record")
    if rollout.joint is not None:
        rollout.joint.begin()
    return rollout.joint


def _bootstrap(pool: LinePool, policy: CompiledPolicy, rollout: Rollout, t: int, step: int) -> None:
    """Values of the final observations of what was truncated; a memory learns to foresee those of all that ended."""
    rows = np.flatnonzero(pool.truncated & ~pool.terminated)
    looked_at = rows if rollout.memory.shape[1] == 0 else np.flatnonzero(pool.truncated | pool.terminated)
    if len(looked_at):
        _check_final(pool, looked_at, step)
    if rollout.joint is not None:
        rollout.joint.ended(t, pool)
    if len(rows):
        names = [pool.names[row] for row in rows]
        rollout.final_value[t, rows] = _values(
            policy,
            pool.final_observation[rows],
            pool.final_last_action[rows],
            pool.final_time[rows],
            pool.final_mask[rows],
            rollout.memory[torch.from_numpy(rows)],
            names,
            step,
        )


def _check_final(pool: LinePool, rows: npt.NDArray[np.int64], step: int) -> None:
    names, space = [pool.names[row] for row in rows], declared_space(pool)
    if space is not None:
        space.check(pool.final_observation[rows], step, names)
    else:
        require_finite(pool.final_observation[rows], "observation", step, names)
    within(pool.final_last_action[rows], 0, pool.mask.shape[1], "final_last_action", step, names)


def _values(
    policy: CompiledPolicy,
    observation: npt.NDArray[np.float32],
    last_action: npt.NDArray[np.int64],
    time: npt.NDArray[np.float32],
    mask: npt.NDArray[np.bool_],
    memory: Tensor,
    names: Sequence[str],
    step: int,
) -> npt.NDArray[np.float32]:
    require_finite(observation, "observation", step, names)
    require_finite(time, "time", step, names)
    within(last_action, 0, policy.network.action_count, "last_action", step, names)
    last = torch.from_numpy(last_action)
    encoded = torch.empty(len(last), policy.network.encoded_size)
    policy.encode(0, torch.from_numpy(observation), last, torch.from_numpy(time), memory, encoded)
    values = policy.values(0, (encoded, last, torch.from_numpy(mask)))
    require_finite(values, "value", step, names)
    return values


def _require_segments(segment: npt.NDArray[np.int8], step: int, names: Sequence[str]) -> None:
    if segment.min() >= 0 and segment.max() < len(SEGMENTS):
        return
    t, row = np.argwhere((segment < 0) | (segment >= len(SEGMENTS)))[0]
    where: Any = {"environment": names[row], "field": "segment", "step": step + int(t)}
    remedy = f"number segments from 0 to {len(SEGMENTS) - 1}; the last checkpoint is good"
    raise SimulationError(f"unknown segment {segment[t, row]}", **where, remedy=remedy)


def require_finite(array: npt.NDArray[np.float32], name: str, step: int, names: Sequence[str]) -> None:
    """Checks f32[N] or f32[N, D] at the price of one sum.

    Raises:
        NonFiniteError: names the first environment and, for observations, the feature.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        total = float(torch.from_numpy(array).sum(dtype=torch.float32))
    if np.isfinite(total):
        return
    where: Any = np.argwhere(~np.isfinite(array))
    if len(where) == 0:
        return  # finite values whose float32 sum overflows
    environment = names[where[0][0]]
    known = array.ndim == 2 and array.shape[1] == len(OBSERVATION_NAMES)
    place = f"{name} {OBSERVATION_NAMES[where[0][1]]}" if known else name
    remedy = "training stopped at the first such value; the last checkpoint is good"
    raise NonFiniteError("not finite", environment=environment, field=place, step=step, remedy=remedy)
