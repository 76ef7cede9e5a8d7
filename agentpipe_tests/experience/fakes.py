"""A pool whose every number can be predicted, and small random episodes for stores, samplers and whoever reads them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.environments.players import Decision
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.writer import ShardWriter


class CountingPool:
    """Environment i ends each episode after i + 1 steps.

    observation = 1000 * environment + 10 * episode + step in every feature; reward = step - 1; odd rows truncate.

    It does not say what its steps made and used. ``rows``: how many environments, or which.
    """

    def __init__(self, rows):
        self.rows = np.arange(rows) if isinstance(rows, int) else np.array(rows)
        self.size = size = len(self.rows)
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
            setattr(self, f"result_{name}", self.rows.astype(np.int8))
        for name in ("return", "elapsed_seconds", "decision_seconds"):
            setattr(self, f"result_{name}", np.zeros(size, dtype=np.float32))
        self.final_observation, self.final_mask = self.observation.copy(), self.mask.copy()
        self.final_last_action, self.final_time = self.last_action.copy(), self.time.copy()
        self._show()

    def _show(self):
        self.observation[:] = (1000 * self.rows + 10 * self.episode + self.at)[:, None]
        self.time[:] = self.at

    def step(self, actions):
        rows = self.rows
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


def header(observation_size=4, action_count=6, **changes):
    """The header of a small shard: two policies."""
    return {
        "cell": "sensor-1",
        "observation_size": observation_size,
        "action_count": action_count,
        "simulator_version": "1.0.0",
        "table_version": "t1",
        "policies": [
            {"player": "first", "version": "1", "ordinal": 0},
            {"player": "second", "version": "2", "ordinal": 3},
        ],
        "accumulating": 0,
        **changes,
    }


def make_episodes(
    rng,
    count,
    observation_size=4,
    action_count=6,
    max_steps=9,
    cut_share=0.1,
    environments=5,
    first_episode=0,
):
    """Random valid episodes, in random order: ``(steps, episodes, finals, parents)``, as a writer takes them.

    They are the episodes from ``first_episode`` on of the environments 100 to 100 + ``environments``, in turn; a share
    ``cut_share`` of them is cut and has a final record. Any step may be a parent of any later one.
    """
    order = rng.permutation(count)
    lengths = rng.integers(1, max_steps + 1, count)
    total, ends = int(lengths.sum()), np.cumsum(lengths)
    episodes = np.zeros(count, rec.EPISODE)
    episodes["environment"], episodes["episode"] = 100 + order % environments, first_episode + order // environments
    episodes["steps"], episodes["cut"] = lengths, rng.random(count) < cut_share
    episodes["success"] = np.where(episodes["cut"], 0, rng.random(count) < 0.5)
    episodes["reason"] = np.where(episodes["cut"], -1, 1 - episodes["success"])
    episodes["mode"], episodes["machine"] = rng.integers(0, 8, (2, count))
    steps = np.zeros(total, rec.step_dtype(observation_size, action_count))
    for name in ("environment", "episode"):
        steps[name] = np.repeat(episodes[name], lengths)
    steps["step"] = np.arange(total) - np.repeat(ends - lengths, lengths)
    steps["time_ns"] = 1_700_000_000_000_000_000 + np.arange(total) * 1_000
    steps["time"] = steps["step"]
    steps["policy"] = rng.integers(0, 2, total)
    steps["fingerprint"] = steps["environment"] * 7
    steps["log_probability"] = -rng.random(total)
    steps["value"], steps["reward"] = rng.normal(size=(2, total))
    steps["earned"] = rng.random(total) < 0.4
    mask = rng.random((total, action_count)) < 0.6
    steps["action"] = rng.integers(0, action_count, total)
    mask[np.arange(total), steps["action"]] = True
    steps["mask"] = rec.pack_masks(mask)
    steps["last_action"] = np.where(steps["step"] > 0, np.roll(steps["action"], 1), action_count)
    steps["observation"] = rng.normal(size=(total, observation_size))
    steps["truncated"][ends - 1] = episodes["cut"]
    steps["terminated"][ends - 1] = 1 - episodes["cut"]
    episodes["return"] = np.add.reduceat(steps["reward"], ends - lengths) if count else 0
    return steps, episodes, _finals(rng, episodes, observation_size, action_count), _parents(rng, lengths)


def _finals(rng, episodes, observation_size, action_count):
    cut = episodes[episodes["cut"] == 1]
    finals = np.zeros(len(cut), rec.final_dtype(observation_size, action_count))
    for name in ("environment", "episode"):
        finals[name] = cut[name]
    finals["time_ns"] = 1_800_000_000_000_000_000
    finals["time"] = cut["steps"]
    finals["mask"] = rec.pack_masks(np.ones((len(cut), action_count), dtype=np.bool_))
    finals["observation"] = rng.normal(size=(len(cut), observation_size))
    return finals


def _parents(rng, lengths):
    words = []
    for length in lengths:
        used = np.tril(rng.random((length, length)) < 0.3, -1)
        padded = np.pad(used, [(0, 0), (0, -length % 64)])
        words.append(np.packbits(padded, axis=1, bitorder="little").view("<u8").reshape(-1))
    return np.concatenate([np.zeros(0, "<u8"), *words])


def names(environments=5):
    """Ids of the environments that :func:`make_episodes` uses."""
    return {100 + number: f"t{number:04d}.sensor-1" for number in range(environments)}


def write_shard(path, *batches, quality=None, changes=None, **sizes):
    """A sealed shard at ``path`` of ``batches`` (what :func:`make_episodes` gives), or of 20 episodes of seed 0."""
    batches = batches or (make_episodes(np.random.default_rng(0), 20, **sizes),)
    widths = batches[0][0]["observation"].shape[1], sizes.get("action_count", 6)
    known = {int(index): f"t{index:04d}.sensor-1" for batch in batches for index in np.unique(batch[1]["environment"])}
    with ShardWriter.open(
        path.with_name(f"{path.name}.open"), header(*widths, **(changes or {})), capacity=64
    ) as writer:
        for batch in batches:
            writer.append(*batch)
        return writer.seal(path, names=known, reasons=["success", "failure"], quality=quality)
