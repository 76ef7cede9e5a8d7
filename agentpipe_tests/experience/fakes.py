"""A pool whose every number can be predicted: environment i ends each episode after i + 1 steps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.environments.players import Decision


class CountingPool:
    """observation = 1000 * environment + 10 * episode + step in every feature; reward = step - 1; odd rows truncate.

    It does not say what its steps made and used.
    """

    def __init__(self, size):
        self.size = size
        self.mask = np.zeros((size, ACTION_COUNT), dtype=np.bool_)
        self.mask[:, :3] = True
        self.segment = np.zeros(size, dtype=np.int8)
        self.last_action = np.full(size, ACTION_COUNT, dtype=np.int64)
        self.episode = np.zeros(size, dtype=np.int64)
        self.at = np.zeros(size, dtype=np.int64)
        self.observation = np.zeros((size, OBSERVATION_SIZE), dtype=np.float32)
        self.time = np.zeros(size, dtype=np.float32)
        self.reward = np.zeros(size, dtype=np.float32)
        self.terminated = np.zeros(size, dtype=np.bool_)
        self.truncated = np.zeros(size, dtype=np.bool_)
        self.result_success = np.zeros(size, dtype=np.bool_)
        self.result_reason = np.zeros(size, dtype=np.int8)
        for name in ("mode", "machine"):
            setattr(self, f"result_{name}", np.arange(size, dtype=np.int8))
        for name in ("return", "elapsed_seconds", "decision_seconds"):
            setattr(self, f"result_{name}", np.zeros(size, dtype=np.float32))
        self.final_observation, self.final_mask = self.observation.copy(), self.mask.copy()
        self.final_last_action, self.final_time = self.last_action.copy(), self.time.copy()
        self._show()

    def _show(self):
        self.observation[:] = (1000 * np.arange(self.size) + 10 * self.episode + self.at)[:, None]
        self.time[:] = self.at

    def step(self, actions):
        rows = np.arange(self.size)
        self.reward[:] = self.at - 1.0
        done = self.at == rows
        self.terminated[:], self.truncated[:] = done & (rows % 2 == 0), done & (rows % 2 == 1)
        self.result_success[:] = self.terminated
        self.result_reason[:] = np.where(self.terminated, 0, 7)
        self.final_observation[done] = self.observation[done] + 1
        self.final_mask[done], self.final_time[done] = self.mask[done], self.time[done] + 1
        self.final_last_action[done] = actions[done]
        self.last_action[:] = np.where(done, ACTION_COUNT, actions)
        self.episode[done] += 1
        self.at[:] = np.where(done, 0, self.at + 1)
        self._show()

    def uniforms(self, channel=0):
        return np.random.default_rng([channel, int(self.at.sum()), int(self.episode.sum())]).random(self.size)


class SecondAction:
    """Always takes action 1, and says that it was half as likely."""

    name = "second"

    def act(self, pool):
        return Decision(np.ones(pool.size, dtype=np.int64), np.full(pool.size, 0.5, dtype=np.float32))


def environments(size):
    return [SimpleNamespace(index=100 + row, environment_id=f"line-{row}") for row in range(size)]


def table():
    return SimpleNamespace(
        version="t1", fingerprint=lambda identifier: SimpleNamespace(crc32=f"{int(identifier[5:]):08x}")
    )
