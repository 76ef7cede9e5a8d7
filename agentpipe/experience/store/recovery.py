"""Saving what is whole of a damaged open shard.

Nothing is repaired in place: the whole episodes are written to a new open shard, which takes the place of the damaged
one; that one is moved to a quarantine with every byte it had.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import RecordError
from agentpipe.experience.store import checksum
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.content import word_counts
from agentpipe.experience.store.counter import COUNTER, Counts, newest
from agentpipe.experience.store.header import read_header
from agentpipe.experience.store.intake import Layout
from agentpipe.experience.store.keys import episode_keys
from agentpipe.experience.store.lock import WriterLock
from agentpipe.experience.store.mapped import map_records
from agentpipe.experience.store.seal import move
from agentpipe.experience.store.shard import WORD
from agentpipe.experience.store.writer import ShardWriter
from agentpipe.storage import exchange, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agentpipe.experience.store.header import Header

_BLOCK: Final = 1_024


@dataclass(frozen=True)
class Recovery:
    """What became of an open shard.

    Args:
        kept: Episodes that are whole; they count.
        lost: Episodes that counted and are not whole, or are not there any more.
        quarantine: Where the damaged shard lies now; None where nothing had to be done.
    """

    kept: int
    lost: int
    quarantine: Path | None


@dataclass(frozen=True)
class Parts:
    """The files of an open shard, each as far as it is there."""

    records: npt.NDArray[Any]
    episodes: npt.NDArray[Any]
    finals: npt.NDArray[Any]
    graph: npt.NDArray[np.uint64]


def recover(directory: Path, quarantine: Path | None = None) -> Recovery:
    """Makes an open shard whole again, without the episodes that are not.

    Where neither slot of the counter can be read, every whole episode that is there counts.

    Args:
        directory: The open shard; nobody may be writing it.
        quarantine: The folder that takes the damaged one; None = ``quarantine`` beside it.

    Raises:
        LockHeldError: it is being written.
        CorruptError: its header cannot be read: then nothing says what the bytes mean.
        DiskFullError, HomeError: it cannot be written.
    """
    lock = WriterLock(directory, "a recovery")
    try:
        header = read_header(directory)
        counts = _counts(directory)
        parts = _read(directory, header, counts)
        layout = Layout.of(header.content["observation_size"], header.content["action_count"])
        whole = whole_episodes(parts, layout, len(header.policies))
        counted = len(whole) if counts is None else counts.episodes
        if counts is not None and whole.all() and _complete(parts, counts):
            return Recovery(counted, 0, None)
        fresh = directory.with_name(f".staging-recovery-{directory.name}")
        shutil.rmtree(fresh, ignore_errors=True)
        with ShardWriter.open(fresh, header.manifest(), durability="power", holder="a recovery") as writer:
            for batch in _batches(parts, np.flatnonzero(whole)):
                writer.append(*batch)
        aside = _aside(quarantine or directory.parent / "quarantine", directory.name)
        with typed_os_errors(directory):
            swapped = exchange(fresh, directory)  # at no instant is there no shard
        move(fresh if swapped else directory, aside)
        if not swapped:
            move(fresh, directory)
    finally:
        lock.release()
    return Recovery(int(whole.sum()), counted - int(whole.sum()), aside)


def whole_episodes(parts: Parts, layout: Layout, policies: int) -> npt.NDArray[np.bool_]:
    """True for each episode all of whose bytes are there and fit each other."""
    rows, records = parts.episodes, parts.records
    first, lengths, graph = (rows[name].astype(np.int64) for name in ("first", "steps", "graph"))
    words, final = word_counts(rows["steps"]), rows["final"]
    good: npt.NDArray[np.bool_] = ~checksum.wrong(rows) & (lengths >= 1) & (lengths <= rec.MAX_EPISODE_STEPS)
    good &= (first >= 0) & (first + lengths <= len(records)) & (graph >= 0) & (graph + words <= len(parts.graph))
    good &= (final >= rec.NO_FINAL) & (final < len(parts.finals))
    before = np.concatenate([[0], np.cumsum(checksum.wrong(records))])
    at = np.flatnonzero(good)
    good[at] = before[first[at] + lengths[at]] == before[first[at]]
    at = np.flatnonzero(good)
    good[at] = checksum.range_checksums(parts.graph, graph[at], words[at]) == rows["graph_checksum"][at]
    torn = checksum.wrong(parts.finals)
    seen: set[int] = set()
    for row, key in zip(at.tolist(), episode_keys(rows[at]).tolist(), strict=True):
        good[row] &= key not in seen and _fits(parts, layout, row, policies)
        if final[row] != rec.NO_FINAL:
            number = int(final[row])
            good[row] &= not torn[number] and bool(episode_keys(parts.finals[number : number + 1])[0] == key)
        if good[row]:
            seen.add(key)
    return good


def _fits(parts: Parts, layout: Layout, row: int, policies: int) -> bool:
    episode = parts.episodes[row : row + 1]
    lengths = episode["steps"].astype(np.int64)
    steps = parts.records[int(episode["first"][0]) :][: int(lengths[0])]
    keys = np.stack([episode["environment"], episode["episode"]], axis=1)
    return not checksum.inspect_steps(
        checksum.as_words(steps).view(np.uint32), keys, lengths, *layout.sizes, policies, np.zeros(3, np.int64)
    )


def _counts(directory: Path) -> Counts | None:
    try:
        return newest((directory / COUNTER).read_bytes())
    except OSError:
        return None


def _read(directory: Path, header: Header, counts: Counts | None) -> Parts:
    layout = Layout.of(header.content["observation_size"], header.content["action_count"])
    arrays = [
        _as_far_as_there(directory / name, dtype, count)
        for name, dtype, count in (
            (rec.RECORDS, layout.steps, counts.steps if counts else None),
            (rec.EPISODES, rec.EPISODE, counts.episodes if counts else None),
            (rec.FINALS, layout.finals, counts.finals if counts else None),
            (rec.GRAPH, WORD, counts.words if counts else None),
        )
    ]
    if counts is None:
        empty = np.flatnonzero(arrays[1]["steps"] == 0)
        arrays[1] = arrays[1][: empty[0]] if len(empty) else arrays[1]
    return Parts(*arrays)


def _as_far_as_there(path: Path, dtype: np.dtype[Any], count: int | None) -> npt.NDArray[Any]:
    if not path.is_file():
        return np.zeros(0, dtype)
    there = path.stat().st_size // dtype.itemsize
    return map_records(path, dtype, there if count is None else min(count, there), exact=False).records


def _complete(parts: Parts, counts: Counts) -> bool:
    found = len(parts.records), len(parts.episodes), len(parts.finals), len(parts.graph)
    return found == (counts.steps, counts.episodes, counts.finals, counts.words)


def _batches(parts: Parts, rows: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[Any], ...]]:
    for start in range(0, len(rows), _BLOCK):
        episodes = parts.episodes[rows[start : start + _BLOCK]]
        first, lengths, graph = (episodes[name].astype(np.int64) for name in ("first", "steps", "graph"))
        words = word_counts(episodes["steps"])
        finals = parts.finals[episodes["final"][episodes["final"] != rec.NO_FINAL]]
        steps = np.concatenate([parts.records[a : a + n] for a, n in zip(first, lengths, strict=True)])
        parents = np.concatenate([parts.graph[a : a + n] for a, n in zip(graph, words, strict=True)])
        yield steps, episodes, finals, parents


def _aside(folder: Path, name: str) -> Path:
    with typed_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 10_000):
        path = folder / f"{name}-{number}"
        if not path.exists():
            return path
    raise RecordError("the quarantine is full", file=folder, remedy="look through it and remove what you do not need")
