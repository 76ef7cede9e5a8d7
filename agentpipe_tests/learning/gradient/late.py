"""Two segments, and only the late one pays: what the first decision is worth is known at the end, and not before."""

from __future__ import annotations

import numpy as np

from agentpipe.learning.aids.options import AidOptions
from agentpipe.learning.options import NetworkOptions, PpoOptions, TrainingOptions
from agentpipe.learning.policy.normalisation import ObservationStatistics

CHOICES, WAIT, ACTIONS = 2, 2, 3
NAMES = ("cue 0", "cue 1")
ACTION_NAMES = ("first", "second", "wait")


class LatePool:
    """One decision between two actions in the first segment, then ``waiting`` steps without a choice in the second.

    The last step pays 1 where the decision equalled the cue that was shown with it, else -1. Unless ``shown``, nothing
    that is seen in the second segment tells of cue or decision: not the observation, nor the last action, nor the time.

    Args:
        size: N.
        seed: of the cues.
        waiting: steps of the second segment.
        shown: whether the decision was right is seen in the second segment.
    """

    def __init__(self, size=64, seed=0, waiting=3, *, shown=False):
        self.size, self.waiting, self.shown = size, waiting, shown
        self.names = tuple(f"late-{index}" for index in range(size))
        self.generator = np.random.Generator(np.random.PCG64(seed))
        self.observation, self.final_observation = (np.zeros((size, CHOICES), np.float32) for _ in range(2))
        self.mask, self.final_mask = (np.zeros((size, ACTIONS), np.bool_) for _ in range(2))
        self.last_action, self.final_last_action = (np.full(size, ACTIONS, np.int64) for _ in range(2))
        self.time, self.final_time, self.reward = (np.zeros(size, np.float32) for _ in range(3))
        self.terminated, self.truncated, self.right = (np.zeros(size, np.bool_) for _ in range(3))
        self.segment, self.stage = np.zeros(size, np.int8), np.zeros(size, np.int64)
        self.cue, self.episode = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.result_success, self.result_reason = np.zeros(size, np.bool_), np.zeros(size, np.int8)
        self.result_return, self.result_decision_seconds = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self.result_steps, self.result_decisions = np.full(size, waiting + 1), np.ones(size, np.int32)
        self.reset()

    def reset(self, episode=0):
        self.episode[:], self.stage[:] = episode, 0
        self.cue[:] = self.generator.integers(0, CHOICES, self.size)
        self._look()

    def _look(self):
        first = self.stage == 0
        self.segment[:] = ~first
        seen = np.where(first, self.cue, self.right)
        self.observation[:] = (np.arange(CHOICES) == seen[:, None]) & (first | self.shown)[:, None]
        self.mask[:] = first[:, None] == (np.arange(ACTIONS) < CHOICES)

    def step(self, actions):
        assert self.mask[np.arange(self.size), actions].all(), "illegal action"
        self.right[:] = np.where(self.stage == 0, actions == self.cue, self.right)
        last = self.stage == self.waiting
        self.reward[:] = np.where(last, np.where(self.right, 1.0, -1.0), 0.0)
        self.terminated[:], self.result_success[:] = last, self.right
        self.result_return[:] = np.where(self.right, 1.0, -1.0)
        self.stage[:] = np.where(last, 0, self.stage + 1)
        self.cue[:] = np.where(last, self.generator.integers(0, CHOICES, self.size), self.cue)
        self.episode += last
        self._look()

    def snapshot(self):
        return {}


def late_options(seed=0, updates=8, waiting=3, hidden=16, **ppo):
    """Options under which the first decision is learned in a few seconds, where credit reaches it."""
    chosen = PpoOptions(
        rollout_steps=3 * (waiting + 1),
        epochs=4,
        minibatch=256,
        learning_rate=1e-2,
        schedule="constant",
        discount=0.99,
        **ppo,
    )
    network = NetworkOptions(hidden=(hidden,), action_embedding=2, time_frequencies=1, activation="tanh")
    budget = 64 * chosen.rollout_steps * updates
    off = AidOptions(curiosity="off", dynamic_lambda="off", layer_rates="off", distillation="off")
    return TrainingOptions(
        network, chosen, None, aids=off, budget_steps=budget, patience=None, checkpoint_every=10**6, seed=seed
    )


def right_share(package, seed=123, size=256):
    """Mean probability of the right first decision."""
    pool = LatePool(size, seed)
    seen = package.act(pool.observation, pool.last_action, pool.time, pool.mask)
    return float(seen.probabilities[np.arange(size), pool.cue].mean())


def no_statistics():
    return ObservationStatistics.empty(NAMES)
