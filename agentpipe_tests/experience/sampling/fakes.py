"""Shards made of arrays alone: every field of every record can be told apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from agentpipe.experience.graph import parents_from_pairs
from agentpipe.experience.store import records as rec

ACTIONS = 11


def make_shard(lengths, *, features=3, actions=ACTIONS, seed=0, pairs=(), ordinals=(0,), **columns):
    """Random records; ``columns`` replaces fields of the steps, or of the episodes where the name says so."""
    random = np.random.default_rng(seed)
    lengths = np.asarray(lengths, np.int64)
    records = np.zeros(lengths.sum(), rec.step_dtype(features, actions))
    records.view(np.uint8)[:] = random.integers(0, 255, records.nbytes, np.uint8)
    records["mask"] = rec.pack_masks(random.random((len(records), actions)) < 0.5)
    records["observation"] = random.normal(size=(len(records), features))
    records["reward"] = random.normal(size=len(records))
    records["policy"] = random.integers(0, len(ordinals), len(records))
    records["earned"] = random.integers(0, 2, len(records))
    episodes = np.zeros(len(lengths), rec.EPISODE)
    episodes["steps"] = lengths
    episodes["first"] = np.cumsum(lengths) - lengths
    for name, values in columns.items():
        target = episodes if name in rec.EPISODE.names and len(values) == len(lengths) else records
        target[name] = values
    return SimpleNamespace(
        path=Path(f"shard-{seed}"),
        manifest={"observation_size": features, "action_count": actions},
        records=records,
        episodes=episodes,
        finals=np.zeros(0, rec.final_dtype(features, actions)),
        graph=parents_from_pairs(lengths, np.array(pairs, np.int64).reshape(-1, 3)),
        index=np.zeros(len(lengths), [("key", "<u8"), ("time_ns", "<i8"), ("row", "<u8")]),
        policies=[{"player": "p", "version": str(ordinal), "ordinal": ordinal} for ordinal in ordinals],
        still_whole=lambda: None,
    )
