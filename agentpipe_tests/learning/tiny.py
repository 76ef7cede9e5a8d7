"""A tiny pool with the attributes of the simulator's, in plain numpy, whose best policy is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentpipe.environments.demonstrator import QUESTION_COUNT
from agentpipe.learning.options import NetworkOptions, PpoOptions, TrainingOptions, WarmUpOptions
from agentpipe.learning.policy.normalisation import ObservationStatistics

CHOICES, SEGMENTS = 3, 4
ACTIONS = CHOICES * SEGMENTS
WIDTH = CHOICES + SEGMENTS + 1
NAMES = tuple(f"o{index}" for index in range(WIDTH))
ACTION_NAMES = tuple(f"a{index}" for index in range(ACTIONS))


class TinyPool:
    """Four decisions an episode, one a segment; each is right when it equals the target that is shown (with noise).

    Args:
        size: N.
        seed: of targets and noise.
        truncating: the fourth decision truncates instead of terminating, and every step is worth 1.
        shuffled: rewards are dealt to the wrong environments, so that there is nothing to learn.
    """

    def __init__(self, size=64, seed=0, *, truncating=False, shuffled=False):
        self.size, self.truncating, self.shuffled = size, truncating, shuffled
        self.names = tuple(f"tiny-{index}" for index in range(size))
        self.generator = np.random.Generator(np.random.PCG64(seed))
        self.observation = np.zeros((size, WIDTH), np.float32)
        self.mask = np.zeros((size, ACTIONS), np.bool_)
        self.segment = np.zeros(size, np.int8)
        self.last_action = np.full(size, ACTIONS, np.int64)
        self.time = np.zeros(size, np.float32)
        self.reward = np.zeros(size, np.float32)
        self.terminated, self.truncated = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        self.final_observation, self.final_mask = self.observation.copy(), self.mask.copy()
        self.final_last_action, self.final_time = self.last_action.copy(), self.time.copy()
        self.target, self.total, self.episode = (
            np.zeros(size, np.int64),
            np.zeros(size, np.float32),
            np.zeros(size, np.int64),
        )
        self.result_success, self.result_reason = np.zeros(size, np.bool_), np.zeros(size, np.int8)
        self.result_return, self.result_steps = np.zeros(size, np.float32), np.zeros(size, np.int32)
        self.result_decisions, self.result_decision_seconds = np.zeros(size, np.int32), np.zeros(size, np.float32)
        self.reset()

    def reset(self, episode=0):
        self.episode[:] = episode
        self._begin(np.ones(self.size, np.bool_))
        self._look()

    def _begin(self, rows):
        self.target[rows] = self.generator.integers(0, CHOICES, self.size)[rows]
        self.segment[rows], self.last_action[rows], self.time[rows], self.total[rows] = 0, ACTIONS, 0.0, 0.0

    def _look(self):
        noise = self.generator.normal(0, 0.3, (self.size, WIDTH)).astype(np.float32)
        rows = np.arange(self.size)
        self.observation[:] = noise
        self.observation[rows, self.target] += 1.0
        self.observation[rows, CHOICES + self.segment] += 1.0
        self.mask[:] = (np.arange(ACTIONS) // CHOICES)[None, :] == self.segment[:, None]

    def uniforms(self, channel=0):
        """Numbers in [0, 1) that depend on environment, episode, step and channel alone."""
        place = np.arange(self.size) + 1e3 * self.episode + 1e6 * np.rint(10 * self.time) + 1e8 * channel
        return (np.sin(place) * 43_758.5453) % 1.0

    def step(self, actions):
        assert self.mask[np.arange(self.size), actions].all(), "illegal action"
        right = actions % CHOICES == self.target
        self.reward[:] = 1.0 if self.truncating else np.where(right, 1.0, -1.0)
        if self.shuffled:
            self.reward[:] = self.generator.permutation(self.reward)
        self.total += self.reward
        self.last_action[:] = actions
        self.time += 0.1
        last = self.segment == SEGMENTS - 1
        self.terminated[:], self.truncated[:] = last & (not self.truncating), last & self.truncating
        self.segment[:] = np.where(last, self.segment, self.segment + 1)
        self._look()
        self.final_observation[last], self.final_mask[last] = self.observation[last], self.mask[last]
        self.final_last_action[last], self.final_time[last] = self.last_action[last], self.time[last]
        self.result_return[:], self.result_steps[:] = self.total, SEGMENTS
        self.result_success[:] = self.total == SEGMENTS
        self.episode += last
        self._begin(last)
        self._look()

    def _arrays(self):
        names = ("observation", "mask", "segment", "last_action", "time", "target", "total", "episode")
        return {name: getattr(self, name) for name in names}

    def snapshot(self):
        state = self.generator.bit_generator.state["state"]
        parts = [state[key] >> shift & (2**64 - 1) for key in ("state", "inc") for shift in (0, 64)]
        return {**{name: array.copy() for name, array in self._arrays().items()}, "random": np.array(parts, np.uint64)}

    def restore(self, snapshot):
        for name, array in self._arrays().items():
            array[...] = snapshot[name]
        low, high, inc_low, inc_high = (int(part) for part in snapshot["random"])
        state = {"state": low | high << 64, "inc": inc_low | inc_high << 64}
        self.generator.bit_generator.state = {"bit_generator": "PCG64", "state": state, "has_uint32": 0, "uinteger": 0}


@dataclass
class Decided:
    actions: np.ndarray
    probabilities: np.ndarray


class TinyExpert:
    name = "tiny expert"

    def act(self, pool):
        return Decided(pool.target + CHOICES * pool.segment.astype(np.int64), np.ones(pool.size, np.float32))

    def answers(self, pool):
        return np.full((pool.size, QUESTION_COUNT), -1)


class TinyRandom:
    name = "tiny random"

    def __init__(self, seed=0):
        self.generator = np.random.default_rng(seed)

    def act(self, pool):
        draws = self.generator.random(pool.mask.shape)
        return Decided(np.where(pool.mask, draws, -1).argmax(1), np.full(pool.size, 1 / CHOICES, np.float32))


def tiny_statistics(steps=20):
    statistics, pool, player = ObservationStatistics.empty(NAMES), TinyPool(seed=99), TinyRandom()
    for _ in range(steps):
        statistics.update(pool.observation)
        pool.step(player.act(pool).actions)
    return statistics


def tiny_options(**changes):
    ppo = PpoOptions(
        rollout_steps=8, epochs=2, minibatch=256, learning_rate=3e-3, discount=0.9, **changes.pop("ppo", {})
    )
    settings = {"budget_steps": 10_000, "validate_every": 2, "checkpoint_every": 1_000, "patience": None, "seed": 1}
    warm_up = changes.pop("warm_up", None)
    network = changes.pop(
        "network", NetworkOptions(hidden=(16, 16), action_embedding=4, time_frequencies=2, activation="tanh")
    )
    return TrainingOptions(network=network, ppo=ppo, warm_up=warm_up, **{**settings, **changes})


def tiny_warm_up(**changes):
    return WarmUpOptions(**{"episodes": 256, "minibatch": 64, "answer_weight": 0.0, "learning_rate": 3e-3, **changes})


def tiny_score(package, seed=7, steps=8, size=128):
    """Share of right decisions of the greedy policy."""
    pool, right = TinyPool(size=size, seed=seed), []
    for _ in range(steps):
        action = package.act(pool.observation, pool.last_action, pool.time, pool.mask).action
        right.append(action % CHOICES == pool.target)
        pool.step(action)
    return float(np.mean(right))
