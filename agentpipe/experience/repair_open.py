"""Repairing an open shard that nobody writes to: what counted and is whole goes on counting."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.experience import records as rec
from agentpipe.experience.checksum import wrong
from agentpipe.experience.counter import COUNTER, SLOT_BYTES, Counts, encode, newest
from agentpipe.experience.graph import words_of
from agentpipe.experience.header import read_header
from agentpipe.experience.holdings import holder_of
from agentpipe.experience.index import OPEN_INDEX, sealed_rows
from agentpipe.experience.mending import Parts, mend, read_array, read_parts
from agentpipe.experience.origin import is_built_in
from agentpipe.experience.seal import move
from agentpipe.experience.shard import Shard
from agentpipe.experience.writer import ShardWriter
from agentpipe.storage import write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agentpipe.experience.repair import Workshop

_HOLDER = "agentpipe buffer check --fix"


def fix_open(path: Path, workshop: Workshop) -> list[str]:
    """Repairs an open shard; one that is being written stays as it is.

    Raises:
        CorruptError: its header cannot be read.
        VersionError: of another format.
    """
    if holder_of(path) is not None:
        return []
    said = read_header(path).manifest()
    counts, done = _counts(path, said)
    sizes = {"steps": counts.steps, "episodes": counts.episodes, "finals": counts.finals, "graph_words": counts.words}
    parts = read_parts(path, said, sizes)
    names = _names(said, parts)
    mend(parts, said, names, workshop.pool_for if is_built_in(said) else None)
    done += parts.mended
    if parts.lost:
        return done + _write_without(path, said, parts, workshop)
    arrays = {
        rec.RECORDS: parts.records,
        rec.EPISODES: parts.episodes,
        rec.FINALS: parts.finals,
        rec.GRAPH: parts.words,
    }
    for name, array in arrays.items():
        data = array.tobytes()
        if not (path / name).is_file() or (path / name).read_bytes()[: len(data)] != data:
            write_bytes(path / name, data)
    shutil.rmtree(path / OPEN_INDEX, ignore_errors=True)
    ShardWriter.open(path, said, holder=_HOLDER).close()  # looks at it again and enters every episode
    return [*done, "LevelDB, from the episodes"]


def _counts(path: Path, said: Mapping[str, Any]) -> tuple[Counts, list[str]]:
    """What counts; where the counter is lost, every whole episode from the first on."""
    data = (path / COUNTER).read_bytes() if (path / COUNTER).is_file() else b""
    counts = newest(data)
    if counts is not None:
        return counts, []
    counts = _whole(path, said)
    slots = bytearray(2 * SLOT_BYTES)
    place = counts.sequence % 2 * SLOT_BYTES
    slots[place : place + SLOT_BYTES] = encode(counts)
    write_bytes(path / COUNTER, bytes(slots))
    return counts, [f"the counter, from {counts.episodes} whole episodes"]


def _whole(path: Path, said: Mapping[str, Any]) -> Counts:
    """Counts of the longest run of rows that fit their checksum, follow each other, and whose records are whole."""
    room = (path / rec.EPISODES).stat().st_size // rec.EPISODE.itemsize if (path / rec.EPISODES).is_file() else 0
    rows = read_array(path / rec.EPISODES, rec.EPISODE, room)
    steps = rows["steps"].astype(np.int64)
    good = ~wrong(rows)
    for name, sizes in (("first", steps), ("graph", words_of(steps))):
        good &= rows[name].astype(np.int64) == np.cumsum(sizes) - sizes
    count = len(good) if good.all() else int(good.argmin())
    dtype = rec.step_dtype(said["observation_size"], said["action_count"])
    total = int(steps[:count].sum())
    bad = np.flatnonzero(wrong(read_array(path / rec.RECORDS, dtype, total)))
    if len(bad):
        count = int(np.searchsorted(rows["first"][:count], bad[0], side="right")) - 1
    finals = int((rows["final"][:count] != rec.NO_FINAL).sum())
    return Counts(1, int(steps[:count].sum()), count, finals, int(words_of(steps[:count]).sum()))


def _names(said: Mapping[str, Any], parts: Parts) -> dict[int, str]:
    from agentpipe.environments.catalog import load_catalog

    if not is_built_in(said):
        return {}
    inside = set(parts.episodes["environment"].tolist())
    return {spec.index: spec.environment_id for spec in load_catalog().environments() if spec.index in inside}


def _write_without(path: Path, said: Mapping[str, Any], parts: Parts, workshop: Workshop) -> list[str]:
    from agentpipe.experience.compaction import append_rows
    from agentpipe.experience.repair import set_aside_episodes, staging_beside

    arrays = parts.records, parts.episodes, parts.finals, parts.words
    shard = Shard(path, said, *arrays, sealed_rows(parts.episodes), {}, None, {})
    place = set_aside_episodes(shard, parts.lost, workshop)
    kept = np.array([row for row in range(len(parts.episodes)) if row not in parts.lost], np.int64)
    staging = staging_beside(path)
    with ShardWriter.open(staging, said, holder=_HOLDER) as writer:
        append_rows(writer, shard, kept)
    move(staging, path)
    return [f"{len(parts.lost)} episodes are lost and set aside in {place}"]
