"""Making the long-term memory of an agent from recorded trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import InputError
from agentpipe.experience.store.shard import open_shard
from agentpipe.serving.agent.memory import CASE, FORMAT, MANIFEST, STATISTICS, Embedding
from agentpipe.storage import digest_file, publish_directory, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agentpipe.experience.store.shard import Shard
    from agentpipe.serving.signature import Signature

MOST: Final = 200_000
"""steps that are kept at most: 26 MB of embeddings"""


def memory_folder(home: Path, signature: Signature) -> Path:
    """Where the memory of a line lies in a home."""
    return home / "memory" / signature.observation_digest[:16]


def recorded_shards(home: Path) -> list[Path]:
    """The sealed shards of a home's trajectories."""
    from agentpipe.experience.care.holdings import find_shards

    return [held.path for held in find_shards(home) if held.state == "sealed" and "trajectories" in held.path.parts]


def remember(
    shards: Sequence[Path], folder: Path, signature: Signature, *, most: int = MOST, seed: int = 0
) -> dict[str, Any]:
    """Publishes the memory of what ``shards`` hold as ``folder``, in place of one that is there; returns its manifest.

    Where there are more than ``most`` steps, an even draw of each shard is kept. Equal shards give an equal memory.

    Raises:
        InputError: no shard holds a step of this line.
        CorruptError: a shard is damaged.
        DiskFullError, HomeError: the folder cannot be written.
    """
    parts = [part for part in (_drawn(path, most, len(shards), seed, signature) for path in shards) if len(part[1])]
    if not parts:
        raise InputError("nothing recorded to remember", remedy="materialise trajectories first: agentpipe run")
    observations = np.concatenate([observation for observation, _ in parts])
    cases = np.concatenate([case for _, case in parts])
    wide = observations.astype(np.float64)
    statistics = np.stack([wide.mean(axis=0), wide.std(axis=0)])
    embeddings = Embedding(statistics)(observations)
    with publish_directory(folder) as staging:
        np.save(staging / STATISTICS, statistics)
        partitions = [_partition(staging, segment, embeddings, cases) for segment in np.unique(cases["segment"])]
        manifest = {
            "format": FORMAT,
            "observation_digest": signature.observation_digest,
            "rows": len(cases),
            "statistics": digest_file(staging / STATISTICS),
            "partitions": partitions,
        }
        write_json(staging / MANIFEST, manifest)
    return manifest


def _partition(
    folder: Path, segment: int, embeddings: npt.NDArray[np.float32], cases: npt.NDArray[Any]
) -> dict[str, Any]:
    chosen = cases["segment"] == segment
    paths = {"embeddings": folder / f"embeddings-{segment}.npy", "cases": folder / f"cases-{segment}.npy"}
    np.save(paths["embeddings"], embeddings[chosen])
    np.save(paths["cases"], cases[chosen])
    digests = {name: digest_file(path) for name, path in paths.items()}
    return {"segment": int(segment), "rows": int(chosen.sum()), **digests}


def _drawn(
    path: Path, most: int, shards: int, seed: int, signature: Signature
) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
    shard = open_shard(path)
    records = shard.records
    if len(records) and records["observation"].shape[1] != signature.observation_size:
        return np.zeros((0, signature.observation_size), np.float32), np.zeros(0, CASE)
    share = min(len(records), -(-most // shards))
    rows = np.sort(np.random.default_rng(seed).choice(len(records), size=share, replace=False))
    chosen = records[rows]
    cases = np.zeros(share, CASE)
    for name in ("environment", "episode", "step", "action", "segment", "reward", "time"):
        cases[name] = chosen[name]
    cases["success"] = _success(shard)[rows]
    return np.ascontiguousarray(chosen["observation"], np.float32), cases


def _success(shard: Shard) -> npt.NDArray[np.uint8]:
    """u1[steps]: whether the episode of each step ended well."""
    found = np.zeros(len(shard.records), np.uint8)
    for episode in shard.episodes:
        first = int(episode["first"])
        found[first : first + int(episode["steps"])] = episode["success"]
    return found
