"""Warm-up: an expert plays, the network learns its decisions and answers, and the critic the expert's returns.

The expert's episodes come from the simulator as fast as they are learned, so each sample is seen once and nothing is
stored: a pool of thousands of lines plays a few steps, the network takes one pass over them, and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from agentpipe.environments.demonstrator import QUESTIONS
from agentpipe.learning.cloning.fused import (
    ANSWERED,
    ANSWERED_RIGHT,
    CHOICES,
    CROSS_ENTROPY,
    RIGHT,
    VALUE_ERROR,
    ClonedBatch,
    CloningGradient,
)
from agentpipe.learning.gates import WarmUpFigures
from agentpipe.learning.gradient.advantages import generalised_advantages
from agentpipe.learning.gradient.ppo import clip_gradients
from agentpipe.learning.options import share_at
from agentpipe.learning.samples.rollout import Rollout, collect
from agentpipe.learning.samples.shown import require_answers, require_decisions
from agentpipe.progress import silent

if TYPE_CHECKING:
    from agentpipe.environments.demonstrator import Expert
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.joint.training import JointTraining
    from agentpipe.learning.options import PpoOptions, WarmUpOptions
    from agentpipe.learning.state import TrainingState
    from agentpipe.learning.workers import Workers
    from agentpipe.progress import Progress

LOWEST_RATE = 0.02
"""last learning rate over the first"""
FIGURE_SHARE = 0.1
"""of the warm-up, at its end, over which the figures of gate 2 are means"""


def warm_up(
    pool: LinePool,
    expert: Expert,
    state: TrainingState,
    options: WarmUpOptions,
    ppo: PpoOptions,
    workers: Workers,
    progress: Progress = silent,
    joint: JointTraining | None = None,
) -> WarmUpFigures:
    """Clones ``expert`` from freshly played episodes; returns the figures of gate 2.

    The learning rate falls along a cosine to a fiftieth. Figures are taken before the network has learned from the
    samples that they are measured on.

    Args:
        pool: of N environments; is reset first.
        expert: decides, and answers questions.
        state: its network learns, its reward scaler sees the expert's rewards.
        options: how many episodes, minibatch, learning rate.
        ppo: discount, lambda, value weight, gradient norm, rollout length.
        workers: share the work; the result does not depend on how many there are.
        progress: told after every few steps.
        joint: trains perception and memory on what the expert plays; needed where the network has a memory.

    Raises:
        NonFiniteError: an observation, reward, loss or gradient is not finite.
        ActionError: a decision of the expert is not allowed, or an answer is none; names environment and step.
    """
    network = state.network
    parameters = tuple(parameter for _, parameter in network.policy_parameters())
    optimiser = torch.optim.Adam(parameters, lr=options.learning_rate, eps=1e-5, fused=True)
    gradient = CloningGradient(network, QUESTIONS, options.answer_weight, ppo.value_weight, workers)
    record = None if joint is None else joint.record(ppo.rollout_steps)
    rollout = Rollout(ppo.rollout_steps, pool.size, network.encoded_size, network.action_count, joint=record)
    answers = torch.zeros(ppo.rollout_steps, pool.size, int(QUESTIONS.max()) + 1, dtype=torch.int64)
    norms: list[float] = []
    chunks: list[np.ndarray] = []
    episodes = steps = 0

    def decide(t: int) -> np.ndarray:
        said, decided, now = expert.answers(pool), expert.act(pool).actions, steps + t
        require_answers(said, network.action_count, now, pool.names)
        require_decisions(decided, pool.mask, now, pool.names)
        answers[t] = torch.from_numpy(said)
        return decided

    pool.reset()
    while episodes < options.episodes:
        done = min(episodes / options.episodes, 1.0)
        for group in optimiser.param_groups:
            group["lr"] = options.learning_rate * share_at("cosine", done, LOWEST_RATE)
        played = collect(pool, network, rollout, state.uniforms, workers, step=steps, expert=decide)
        batch = _batch(rollout, answers, state, ppo)
        sums = np.zeros(gradient.sums_size)
        samples = len(batch.action)
        order = torch.randperm(samples, generator=state.generator)
        for rows in order.tensor_split(-(-samples // options.minibatch)):
            part = gradient(batch, rows, 0.0)
            loss = float(part[CROSS_ENTROPY] + part[VALUE_ERROR])
            norm = clip_gradients(parameters, ppo.max_gradient_norm, names=gradient.names, step=len(norms), loss=loss)
            optimiser.step()
            norms.append(float(norm.norm()))
            sums += part
        if joint is not None:
            joint.update(rollout, len(norms))
        chunks.append(np.append(sums, samples))
        episodes += played.episodes
        steps += rollout.steps
        right = sums[ANSWERED_RIGHT] / max(sums[ANSWERED], 1.0)
        note = f"cross-entropy {sums[CROSS_ENTROPY] / samples:.3f}, answers right {right:.1%}"
        progress("warm-up", min(episodes, options.episodes), options.episodes, note)
    return _figures(chunks, norms, episodes, expert.name)


def _batch(rollout: Rollout, answers: torch.Tensor, state: TrainingState, ppo: PpoOptions) -> ClonedBatch:
    _, returns = generalised_advantages(
        state.scaler(rollout.reward, rollout.done),
        rollout.value.numpy(),
        rollout.last_value,
        rollout.terminated,
        rollout.truncated,
        rollout.final_value,
        ppo.discount,
        ppo.gae_lambda,
    )
    empty = torch.zeros(0)
    batch = ClonedBatch(
        encoded=rollout.encoded.flatten(0, 1),
        last_action=rollout.last_action.flatten(),
        mask=rollout.mask.flatten(0, 1),
        action=rollout.action.flatten(),
        log_probability=empty,
        advantage=empty,
        returns=torch.from_numpy(returns.reshape(-1)),
        segment=empty,
        weight=empty,
    )
    batch.answers = answers.flatten(0, 1)
    return batch


def _figures(chunks: list[np.ndarray], norms: list[float], episodes: int, expert: str) -> WarmUpFigures:
    last = np.sum(chunks[-max(1, round(FIGURE_SHARE * len(chunks))) :], axis=0)
    samples = last[-1]
    return WarmUpFigures(
        actor_loss=float(last[CROSS_ENTROPY] / samples),
        critic_mae=float(last[VALUE_ERROR] / samples),
        gradient_norm_median=float(np.median(norms)),
        accuracy=float(last[RIGHT] / max(last[CHOICES], 1.0)),
        samples=int(sum(chunk[-1] for chunk in chunks)),
        episodes=episodes,
        expert=expert,
    )
