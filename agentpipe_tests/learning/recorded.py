"""Recorded episodes in memory, with the few attributes that replay looks at; and the tiny pool, recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agentpipe.experience.store import records as rec
from agentpipe_tests.learning.tiny import ACTIONS, CHOICES, SEGMENTS, WIDTH, TinyPool, TinyRandom


class MemoryShard:
    """Episodes given as lists of records; a final record for each that was cut.

    Args:
        episodes: structured arrays, one an episode, in order.
        finals: episode → final record.
    """

    def __init__(self, episodes, finals=None, digest="memory"):
        finals = finals or {}
        self.path, self.digest = Path("memory"), digest
        self.records = np.concatenate(episodes)
        self.episodes = np.zeros(len(episodes), rec.EPISODE)
        self.episodes["steps"] = [len(episode) for episode in episodes]
        self.episodes["first"] = np.cumsum(self.episodes["steps"]) - self.episodes["steps"]
        self.episodes["final"] = rec.NO_FINAL
        self.finals = np.zeros(len(finals), rec.final_dtype(WIDTH, ACTIONS))
        for place, (row, final) in enumerate(finals.items()):
            self.episodes["final"][row], self.finals[place] = place, final
        self.manifest = {"observation_size": WIDTH, "action_count": ACTIONS}

    def unpack_masks(self, packed):
        return rec.unpack_masks(packed, ACTIONS)


class MemorySet:
    """All steps of some shards, in order."""

    def __init__(self, shards):
        self.shards = tuple(shards)
        self.edges = np.cumsum([0, *(len(shard.records) for shard in self.shards)])
        self.size = int(self.edges[-1])

    def still_whole(self):
        pass

    def locate(self, ids):
        source = np.searchsorted(self.edges, ids, side="right") - 1
        return source.astype(np.uint16), ids - self.edges[source]

    def episodes(self, ids):
        source, record = self.locate(ids)
        row = [
            np.searchsorted(self.shards[s].episodes["first"], r, side="right") - 1
            for s, r in zip(source, record, strict=True)
        ]
        return source, np.array(row, np.int64)


def steps_of(pool, decided):
    """Records of what every environment of ``pool`` sees and does, before the step is taken."""
    records = np.zeros(pool.size, rec.step_dtype(WIDTH, ACTIONS))
    for name in ("observation", "time", "segment", "last_action", "episode"):
        records[name] = getattr(pool, name)
    records["environment"] = np.arange(pool.size)
    records["mask"] = rec.pack_masks(pool.mask)
    records["action"], records["log_probability"] = decided.actions, np.log(decided.probabilities)
    return records


def tiny_shard(rounds=2, size=128, seed=0, *, player=None, shuffled=False, digest="memory"):
    """``rounds`` episodes of each environment of a tiny pool, played by ``player`` (default: uniformly)."""
    pool, player = TinyPool(size, seed, shuffled=shuffled), player or TinyRandom(seed)
    episodes = []
    for _ in range(rounds):
        steps = []
        for number in range(SEGMENTS):
            steps.append(steps_of(pool, player.act(pool)))
            pool.step(steps[-1]["action"].astype(np.int64))
            steps[-1]["reward"], steps[-1]["terminated"], steps[-1]["step"] = pool.reward, pool.terminated, number
        episodes.extend(np.stack(steps, axis=1))
    return MemoryShard(episodes, digest=digest)


def right_actions(shard):
    """The action that the recorded observation shows most clearly (noise included)."""
    return shard.records["observation"][:, :CHOICES].argmax(axis=1) + CHOICES * shard.records["segment"]
