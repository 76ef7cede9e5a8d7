"""A pool small enough to know the right answer of: a guessing game under three disturbances.

An episode of environment i shows one of four actions as right and lasts 1 + (episode + i) % 3 steps; all steps must be
answered right. Each active disturbance (drawn by counter, so it can be switched off alone) spoils the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from agentpipe.environments.catalog import EnvironmentSpec, Template
from agentpipe.environments.layout import MODES, REASONS, Purpose
from agentpipe.environments.table import Fingerprint
from agentpipe.errors import ActionError

ACTIONS = 4
KINDS = ("sensor", "network", "load")


def make_environments(count=30, split="holdout"):
    """``count`` environments, 15 cells a template, templates T0, T1, …"""
    specs = []
    for index in range(count):
        topology = ("serial", "ring")[index // 15 % 2]
        template = Template(f"{split}-T{index // 15}", "L0", topology, "smart_hart", "opc_ua", "p0", 8)
        kind, intensity = KINDS[index % 15 // 5], index % 5 + 1
        name = f"{template.template_id}.{kind}-{intensity}"
        specs.append(EnvironmentSpec(name, index, template, kind, intensity, split))
    return specs


@dataclass(frozen=True)
class FakeTable:
    version: str = "table-1"

    def fingerprint(self, environment_id):
        return Fingerprint(f"sha-{environment_id.split('.')[1]}", f"{len(environment_id):08x}")


PROFILE = SimpleNamespace(digest="profile-1")


def draw(seed, purpose, index, episode, stream):
    """A uniform number that depends on nothing else."""
    return np.random.default_rng([seed, int(purpose), index, episode, stream]).random()


@dataclass
class FakePool:
    environments: list
    seed: int
    purpose: Purpose
    off: frozenset = frozenset()
    rate: float = 0.3
    broken: str = ""
    closed: bool = False
    steps: int = 0
    size: int = field(init=False)

    def __post_init__(self):
        self.size = n = len(self.environments)
        self.terminated, self.truncated = np.zeros(n, bool), np.zeros(n, bool)
        self.observation, self.mask = np.zeros((n, 3), np.float32), np.zeros((n, ACTIONS), bool)
        self.segment, self.last_action = np.zeros(n, np.int8), np.zeros(n, np.int64)
        self.time = np.zeros(n, np.float32)
        self.episode, self.result_episode = np.zeros(n, np.int64), np.zeros(n, np.int64)
        kinds = {
            "success": bool, "reason": np.int8, "segment": np.int8, "decisions": np.int32,
            "decision_seconds": np.float32, "elapsed_seconds": np.float32, "mode": np.int8, "machine": np.int8,
            "return": np.float32, "steps": np.int32,
        }  # fmt: skip
        for name, kind in kinds.items():
            setattr(self, f"result_{name}", np.zeros(n, kind))
        self.step_index, self.right = np.zeros(n, int), np.zeros(n, int)
        self.correct = np.zeros(n, bool)
        self.reset()

    def _begin(self, row):
        spec, episode = self.environments[row], int(self.episode[row])
        self.step_index[row], self.correct[row] = 0, True
        self.right[row] = int(draw(self.seed, self.purpose, spec.index, episode, 0) * ACTIONS)
        self.observation[row] = (self.right[row], spec.index, episode)
        self.mask[row] = True
        self.mask[row, (self.right[row] + 1) % ACTIONS] = False
        self.last_action[row], self.time[row] = ACTIONS, 0.0

    def active(self, row):
        """The disturbances of the current episode, switched off or not."""
        spec, episode = self.environments[row], int(self.episode[row])
        return {
            kind
            for stream, kind in enumerate(KINDS, start=1)
            if draw(self.seed, self.purpose, spec.index, episode, stream) < self.rate
        }

    def reset(self, episode=0):
        self.episode[:] = episode
        for row in range(self.size):
            self._begin(row)

    def step(self, actions):
        assert not self.closed
        if not self.mask[np.arange(self.size), actions].all():
            raise ActionError("not allowed")
        self.steps += 1
        self.terminated[:] = False
        for row, action in enumerate(actions):
            self.correct[row] &= bool(action == self.right[row])
            self.step_index[row] += 1
            self.last_action[row], self.time[row] = action, self.step_index[row] / 10
            if (
                self.broken != "endless"
                and self.step_index[row] > (self.episode[row] + self.environments[row].index) % 3
            ):
                self._end(row)

    def _end(self, row):
        spoiled = self.active(row) - self.off
        success = bool(self.correct[row]) and not spoiled
        reason = "success" if success else "late" if spoiled else "wrong_diagnosis"
        segment = 3 if spoiled else 0
        index = self.environments[row].index
        length = int(self.step_index[row])
        results = (
            success,
            REASONS.index(reason),
            segment,
            length,
            2.0 * length,
            60.0,
            self._mode(row),
            index % 8,
            1.0,
            length,
        )
        names = ("success", "reason", "segment", "decisions", "decision_seconds", "elapsed_seconds", "mode", "machine",
                 "return", "steps")  # fmt: skip
        for name, value in zip(names, results, strict=True):
            getattr(self, f"result_{name}")[row] = value
        if self.broken == "nan" and index == 3:
            self.result_return[row] = np.nan
        self.result_episode[row] = self.episode[row] + (self.broken == "order")
        self.terminated[row] = True
        self.episode[row] += 1
        self._begin(row)

    def _mode(self, row):
        return int(self.right[row] + 4 * (self.environments[row].index % 2)) % len(MODES)

    def close(self):
        self.closed = True


class Builder:
    """Builds fake pools and remembers them."""

    def __init__(self, **options):
        self.options, self.built = options, []

    def __call__(self, environments, table, profile, *, seed, purpose, threads=1, off=frozenset(), first_episode=0):
        pool = FakePool(list(environments), seed, purpose, off=off, **self.options)
        pool.reset(first_episode)
        self.built.append(pool)
        return pool


@dataclass
class Knowing:
    """Always answers right: fails only where a disturbance spoils the episode."""

    name: str = "policy"
    digest: str = "weights-1"

    def act(self, pool):
        return SimpleNamespace(actions=pool.right.astype(np.int64), probabilities=np.ones(pool.size, np.float32))


class Guessing:
    """Chooses among the allowed actions; starts its stream again at ``reset``."""

    name = "random"

    def __init__(self, seed=0):
        self.seed = seed
        self.reset()

    def reset(self):
        self.generator = np.random.default_rng(self.seed)

    def act(self, pool):
        scores = np.where(pool.mask, self.generator.random(pool.mask.shape), -1.0)
        return SimpleNamespace(actions=scores.argmax(axis=1), probabilities=1 / pool.mask.sum(axis=1))


def expected_causes(pool_rate, environments, seed, purpose, episodes):
    """Naive truth for the knowing player: {(environment_id, episode): the disturbances that were active}."""
    truth = {}
    for spec in environments:
        for episode in range(episodes):
            truth[spec.environment_id, episode] = {
                kind
                for stream, kind in enumerate(KINDS, 1)
                if draw(seed, purpose, spec.index, episode, stream) < pool_rate
            }
    return truth
