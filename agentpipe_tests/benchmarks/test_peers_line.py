"""The line that peers get is the one that agentpipe trains in, and the PPO in one file learns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE, Purpose
from benchmarks.peers_line import Ground
from benchmarks.peers_recorder import Recorder
from benchmarks.peers_settings import SMOKE, Setting

SETTING = Setting(24, 4, 32, 1, 1e-3, last_action=True)


@pytest.fixture(scope="module")
def ground():
    return Ground(0, SMOKE, 1)


def test_peers_get_the_episodes_of_the_pool_normalised_as_agentpipe_normalises(ground):
    line = ground.line(SETTING)
    pool = ground.scene.pool(ground.environments(SETTING), Purpose.TRAIN)
    mean, scale = ground.statistics.mean, ground.statistics.scale
    seen, _ = line.reset(seed=0)
    ends = 0
    for _ in range(70):
        expected = np.clip((pool.observation - mean) * scale, -8, 8)
        np.testing.assert_allclose(seen[:, :OBSERVATION_SIZE], expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(seen[:, OBSERVATION_SIZE:].argmax(axis=1), pool.last_action)
        np.testing.assert_array_equal(line.mask, pool.mask)
        actions = pool.mask.argmax(axis=1)
        seen, reward, terminated, truncated, infos = line.step(actions)
        pool.step(actions)
        np.testing.assert_array_equal(terminated | truncated, pool.terminated | pool.truncated)
        assert (np.sign(reward) == np.sign(pool.reward)).all()
        for row in np.flatnonzero(truncated):
            last = np.clip((pool.final_observation[row] - mean) * scale, -8, 8)
            np.testing.assert_allclose(infos["final_prepared"][row, :OBSERVATION_SIZE], last, rtol=1e-4, atol=1e-4)
            ends += 1
    assert ends >= len(line.mask)  # who takes the lowest action only measures, until the steps are over
    line.close()


class Paying:
    """Eight lines of one step: action 4 pays 1, all others of the allowed first six nothing."""

    num_envs = 8
    preparation = type("Three", (), {"size": 3})()
    mask = np.zeros((8, ACTION_COUNT), np.bool_)
    mask[:, :6] = True

    def reset(self, *, seed):
        del seed
        return np.ones((8, 3), np.float32), {}

    def step(self, actions):
        assert (actions < 6).all()  # never a forbidden one
        ended, never = np.ones(8, np.bool_), np.zeros(8, np.bool_)
        return np.ones((8, 3), np.float32), (actions == 4).astype(np.float32), ended, never, {}


def test_the_ppo_in_one_file_learns_the_action_that_pays():
    from benchmarks.peers_one_file import logits_of, train

    recorder = Recorder([2_048], [], "steps", 60.0)
    agent = train(Paying(), dataclasses.replace(SETTING, rollout_steps=16, epochs=4), 0, recorder)
    probabilities = torch.from_numpy(logits_of(agent, np.ones((1, 3), np.float32))[:, :6]).softmax(dim=1)
    assert probabilities[0, 4] > 0.8
    assert recorder.snapshots[0].steps == 2_048
