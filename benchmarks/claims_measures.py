"""What claims measure of one trained policy, beside its success: reach of credit, spread of entropy, shares of draws.

**Reach.** Of sampled rollouts of the policy, every step of ``identify`` has two advantages: by GAE over the whole
episode, and by GAE that is cut at the borders of segments, where a later segment is known by the critic's value alone.
With A either of them, and E the sum of the scaled rewards that ``execute`` pays later in the same episode,

    arrived = cov(A, E) / var(E)

is how much of one unit of what execute pays arrives in the advantage of identify. Episodes that never come to execute
are left out. The claim is the ratio of the two. A second figure is the mean distance of the terms of the sum that GAE
is, in steps: with d_l the temporal differences, sum_l l w_l |d_l| / sum_l w_l |d_l|, w_l = (discount lambda)^l as far
as the sum goes, over all steps.

**Spread of entropy.** The standard deviation, over decisions with a choice, of the entropy of the policy's distribution
over the allowed actions, in nats.

Both are of sampled play on the validation environments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import SEGMENTS

if TYPE_CHECKING:
    from pathlib import Path

    from agentpipe.learning.options import PpoOptions
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.samples.rollout import Rollout
    from benchmarks.buffer_learning import Scene

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

_PIECE = 16_384


def sampled(package: PolicyPackage, scene: Scene, steps: int) -> Rollout:
    """``steps`` sampled decisions in every validation environment of ``scene``."""
    import torch

    from agentpipe.environments.layout import Purpose
    from agentpipe.learning.joint.record import JointRecord
    from agentpipe.learning.samples.rollout import Rollout, collect
    from agentpipe.learning.workers import Workers

    network, pool = package.network, scene.pool(scene.validation, Purpose.VALIDATION)
    joint = JointRecord(network, steps, torch.zeros(pool.size, network.memory_size))
    rollout = Rollout(steps, pool.size, network.encoded_size, network.action_count, joint=joint)
    with Workers(1) as workers:
        collect(pool, network, rollout, np.random.default_rng(scene.seed), workers)
    pool.close()
    return rollout


def entropy_spread(package: PolicyPackage, rollout: Rollout) -> dict[str, float]:
    """Mean and standard deviation of the entropy over the decisions of ``rollout`` that had a choice, in nats."""
    import torch

    batch, found = rollout.batch, []
    with torch.inference_mode():
        for start in range(0, rollout.live, _PIECE):
            at = slice(start, min(start + _PIECE, rollout.live))
            logits, _ = package.network.heads(batch.encoded[at], batch.last_action[at], batch.mask[at])
            log_p = logits.log_softmax(dim=-1)
            entropy = -(log_p.exp() * log_p).sum(dim=-1)  # where the mask is false p is zero and log p finite
            found.append(entropy[batch.mask[at].sum(dim=-1) > 1].numpy())
    every = np.concatenate(found).astype(np.float64)
    return {"entropy_mean": float(every.mean()), "entropy_deviation": float(every.std())}


def reach(rollout: Rollout, reward: Floats, ppo: PpoOptions) -> dict[str, float]:
    """``arrived`` and ``distance`` of both kinds of advantage; see the module.

    Args:
        rollout: T steps of N environments.
        reward: f32[T, N], scaled as the critic learned them.
        ppo: discount and lambda.
    """
    from agentpipe.learning.gradient.advantages import generalised_advantages

    given = (
        reward,
        rollout.value.numpy(),
        rollout.last_value,
        rollout.terminated,
        rollout.truncated,
        rollout.final_value,
        ppo.discount,
        ppo.gae_lambda,
    )
    paid, ended = paid_later(reward, rollout.segment, rollout.done, SEGMENTS.index("execute"))
    came = came_later(rollout.segment, rollout.done, SEGMENTS.index("execute"))
    early = (rollout.segment == SEGMENTS.index("identify")) & ended & came
    differences = np.abs(generalised_advantages(*given[:-1], 0.0)[0])
    decay, whole = ppo.discount * ppo.gae_lambda, rollout.done
    cut = whole | _borders(rollout.segment)
    found = {}
    for name, borders, segment in (("episode", whole, None), ("segment", cut, rollout.segment)):
        advantages, _ = generalised_advantages(*given, segment)
        found[f"arrived_{name}"] = slope(advantages[early], paid[early])
        found[f"distance_{name}"] = mean_distance(differences, borders, decay)
    return found


def paid_later(
    reward: Floats, segment: npt.NDArray[np.int8], done: Flags, which: int
) -> tuple[npt.NDArray[np.float64], Flags]:
    """Sum of the rewards of segment ``which`` from each step to the end of its episode, f64[T, N].

    Returns:
        The sums, and bool[T, N], whether the episode ended within the T steps.
    """
    paid, ended = np.zeros(reward.shape), np.zeros(reward.shape, np.bool_)
    running, known = np.zeros(reward.shape[1]), np.zeros(reward.shape[1], np.bool_)
    for t in range(len(reward) - 1, -1, -1):
        running = np.where(done[t], 0.0, running) + np.where(segment[t] == which, reward[t], 0.0)
        known |= done[t]
        paid[t], ended[t] = running, known
    return paid, ended


def came_later(segment: npt.NDArray[np.int8], done: Flags, which: int) -> Flags:
    """bool[T, N]: the episode of this step comes to segment ``which``, now or later."""
    came = np.zeros(segment.shape, np.bool_)
    running = np.zeros(segment.shape[1], np.bool_)
    for t in range(len(segment) - 1, -1, -1):
        running = np.where(done[t], False, running) | (segment[t] == which)
        came[t] = running
    return came


def mean_distance(differences: Floats, cut_t: Flags, decay: float) -> float:
    """Mean distance in steps of the terms of GAE, over all steps; see the module.

    Args:
        differences: f32[T, N], absolute temporal differences.
        cut_t: bool[T, N], the sum ends behind this step.
        decay: discount times lambda.
    """
    size = differences.shape[1]
    weight, moment, weights, moments = np.zeros(size), np.zeros(size), 0.0, 0.0
    for t in range(len(differences) - 1, -1, -1):
        # One step farther away each term counts decay as much, and is one step farther away.
        moment = np.where(cut_t[t], 0.0, decay * (moment + weight))
        weight = np.where(cut_t[t], 0.0, decay * weight) + differences[t]
        weights, moments = weights + float(weight.sum()), moments + float(moment.sum())
    return moments / max(weights, 1e-12)


def slope(values: npt.NDArray[Any], of: npt.NDArray[Any]) -> float:
    """cov(values, of) / var(of); 0 where ``of`` does not vary or is of fewer than two."""
    if len(of) < 2 or of.var() < 1e-12:
        return 0.0
    return float(np.cov(values.astype(np.float64), of.astype(np.float64), bias=True)[0, 1] / of.var())


def _borders(segment: npt.NDArray[np.int8]) -> Flags:
    cut = np.zeros(segment.shape, np.bool_)
    cut[:-1] = segment[1:] != segment[:-1]
    return cut


def scaled_rewards(rollout: Rollout, checkpoint: Path, clamp: float) -> Floats:
    """The rewards of ``rollout`` under the scale that training ended with."""
    from agentpipe.learning import checkpoint as checkpoints

    count, _, m2 = checkpoints.load(checkpoint).arrays["rewards"]["moments"]
    scaled: Floats = np.clip(rollout.reward / np.float32(np.sqrt(m2 / count)), -clamp, clamp)
    return scaled


def drawn(package: PolicyPackage, scene: Scene, folder: Path) -> dict[str, float]:
    """Shares of draws, causal and uniform, over one sampled episode of every fourth training environment."""
    from agentpipe.environments.layout import Purpose
    from agentpipe.experience.quality import measure_quality
    from agentpipe.experience.record import record_trajectories
    from agentpipe.learning.policy.player import PolicyPlayer

    shard = record_trajectories(
        lambda some: scene.pool(some, Purpose.COLLECT),
        PolicyPlayer(package, greedy=False, seed=scene.seed, name="trained"),
        environments=scene.train[::4],
        table=scene.table,
        episodes_per_env=1,
        out_dir=folder,
        cell="all",
        policy_version=package.digest,
        durability="process",
    )
    quality = measure_quality(shard)
    shares = {"key_fault": quality.key_fault_shares, "idle": quality.idle_shares}
    found = {f"{name}_{sampler}": value for name, share in shares.items() for sampler, value in share.items()}
    return {**{name: float(value or 0.0) for name, value in found.items()}, "coverage": float(quality.coverage or 0.0)}


def steered(folder: Path) -> dict[str, float]:
    """Shares of the orchestrator's moves, its floor included; nothing where a training had none.

    Returns:
        ``coupled``: sensor and network disturbed, load not. ``coupled_or_more``: load disturbed or not.
    """
    from agentpipe.learning.aids.orchestrator_log import FILE, coupling_shares, read_log

    logs = sorted(folder.rglob(FILE))
    if not logs:
        return {}
    shares = coupling_shares(read_log(logs[0]))
    return {"coupled": shares["sensor × network"], "coupled_or_more": shares["sensor × network or more"]}
