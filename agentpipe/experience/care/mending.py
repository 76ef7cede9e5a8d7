"""Bringing damaged bytes back where a checksum proves that they are back: nothing here is guessed.

A changed byte is found by trying; a graph follows from the tokens of its steps; an episode of the built-in simulator
follows from its actions. What does not fit its checksum afterwards is lost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import AgentpipeError
from agentpipe.experience.care.shrink import play
from agentpipe.experience.graph import derive_parents, words_of
from agentpipe.experience.regenerate import compact_of
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import find_flip, range_checksums, wrong, xxh64
from agentpipe.experience.store.header import header_checksum
from agentpipe.experience.store.manifest import _outside_checksum, manifest_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from agentpipe.experience.origin import PoolFor

SEARCHES: Final = 64
"""records of a file in which a changed byte is looked for"""
_SMALL_FILE: Final = 4_096
_LONGEST: Final = 1 << 16
"""bytes of JSON in which a flipped bit is looked for: more would take minutes"""
_BITS: Final = tuple(1 << bit for bit in range(8))
_WORDS_SEARCHED: Final = 512
Array = npt.NDArray[Any]


@dataclass
class Parts:
    """Writable copies of a shard's arrays, and what became of them."""

    records: Array
    episodes: Array
    finals: Array
    words: npt.NDArray[np.uint64]
    mended: list[str] = field(default_factory=list)
    """what was brought back, one sentence each"""
    lost: dict[int, str] = field(default_factory=dict)
    """episode rows that cannot be brought back → why"""

    def files(self) -> dict[str, Array]:
        """The arrays by the names of their files."""
        return {
            rec.RECORDS: self.records,
            rec.EPISODES: self.episodes,
            rec.FINALS: self.finals,
            rec.GRAPH: self.words,
        }

    def lose(self, row: int, why: str) -> None:
        """Gives an episode up; the first reason stands."""
        self.lost.setdefault(row, why)


def read_array(path: Path, dtype: np.dtype[Any], count: int) -> Array:
    """The first ``count`` records of a file; what is missing is zeros, which fit no checksum."""
    out = np.zeros(count, dtype)
    if path.is_file():
        found = np.frombuffer(path.read_bytes()[: count * dtype.itemsize], np.uint8)
        out.view(np.uint8).reshape(-1)[: len(found)] = found
    return out


def read_parts(path: Path, said: Mapping[str, Any], counts: Mapping[str, int]) -> Parts:
    """What the files of a shard hold.

    Args:
        path: The shard.
        said: Its manifest or header.
        counts: Records of each file: ``steps``, ``episodes``, ``finals``, ``graph_words``.
    """
    shape = said["observation_size"], said["action_count"]
    return Parts(
        records=read_array(path / rec.RECORDS, rec.step_dtype(*shape), counts["steps"]),
        episodes=read_array(path / rec.EPISODES, rec.EPISODE, counts["episodes"]),
        finals=read_array(path / rec.FINALS, rec.final_dtype(*shape), counts["finals"]),
        words=read_array(path / rec.GRAPH, np.dtype("<u8"), counts["graph_words"]),
    )


def mend(parts: Parts, said: Mapping[str, Any], names: Mapping[int, str], pool_for: PoolFor | None) -> None:
    """Brings back what can be brought back; the rest is in ``parts.lost``."""
    for name, array in ((rec.EPISODES, parts.episodes), (rec.RECORDS, parts.records), (rec.FINALS, parts.finals)):
        count = mend_records(array)
        if count:
            parts.mended.append(f"{count} record(s) of {name}: one changed byte each")
    _rows(parts)
    _graphs(parts, int(said.get("accumulating") or 0))
    bad_records, bad_finals = wrong(parts.records), wrong(parts.finals)
    damaged = {row: why for row, why in _damaged(parts, bad_records, bad_finals) if row not in parts.lost}
    for row, why in damaged.items():
        if pool_for is None or not _play_again(parts, row, said, names, pool_for):
            parts.lose(row, why)


def mend_records(records: Array) -> int:
    """Undoes single changed bytes in place; returns in how many records."""
    mended = 0
    for place in np.flatnonzero(wrong(records))[:SEARCHES].tolist():
        raw = bytearray(records[place : place + 1].tobytes())
        flip = find_flip(bytes(raw))
        if flip is not None:
            raw[flip[0]] = flip[1]
            records[place : place + 1] = np.frombuffer(bytes(raw), records.dtype)
            mended += 1
    return mended


def _rows(parts: Parts) -> None:
    """Rows that cannot be trusted, or that lead out of the files."""
    episodes = parts.episodes
    steps = episodes["steps"].astype(np.int64)
    for row in np.flatnonzero(wrong(episodes)).tolist():
        parts.lose(row, "its row does not fit its checksum")
    for name, sizes, total in (("first", steps, len(parts.records)), ("graph", words_of(steps), len(parts.words))):
        begin = episodes[name].astype(np.int64)
        for row in np.flatnonzero((begin < 0) | (steps < 1) | (begin + sizes > total)).tolist():
            parts.lose(row, f"{name} leads out of the file")
    outside = (episodes["final"] < rec.NO_FINAL) | (episodes["final"] >= len(parts.finals))
    for row in np.flatnonzero(outside).tolist():
        parts.lose(row, "final leads out of the file")


def _usable(parts: Parts) -> npt.NDArray[np.int64]:
    return np.array([row for row in range(len(parts.episodes)) if row not in parts.lost], np.int64)


def _graphs(parts: Parts, accumulating: int) -> None:
    rows = _usable(parts)
    begin, size = parts.episodes["graph"][rows].astype(np.int64), words_of(parts.episodes["steps"][rows])
    wanted = parts.episodes["graph_checksum"][rows]
    bad = np.flatnonzero(range_checksums(parts.words, begin, size) != wanted)
    for place in bad.tolist():
        row, first, last = int(rows[place]), int(begin[place]), int(begin[place] + size[place])
        for candidate in _graph_candidates(parts, row, parts.words[first:last], accumulating):
            if xxh64(candidate) == int(wanted[place]):
                parts.words[first:last] = candidate
                parts.mended.append(f"graph of episode row {row}")
                break
        else:
            parts.lose(row, "its graph does not fit its checksum")


def _graph_candidates(
    parts: Parts, row: int, words: npt.NDArray[np.uint64], accumulating: int
) -> Iterator[npt.NDArray[np.uint64]]:
    episode = parts.episodes[row]
    if accumulating:
        steps = parts.records[int(episode["first"]) : int(episode["first"]) + int(episode["steps"])]
        yield derive_parents(steps["produced"], steps["used"], np.array([len(steps)]), accumulating)
    if len(words) <= _WORDS_SEARCHED:
        raw = bytearray(words.tobytes())
        flip = find_flip(bytes(raw), int(episode["graph_checksum"]))
        if flip is not None and flip[0] >= 0:
            raw[flip[0]] = flip[1]
            yield np.frombuffer(bytes(raw), np.uint64)


def _damaged(
    parts: Parts, bad_records: npt.NDArray[np.bool_], bad_finals: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, str]]:
    """Rows whose records or final record do not fit their checksums."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(bad_records)])
    for row in _usable(parts).tolist():
        episode = parts.episodes[row]
        first, final = int(episode["first"]), int(episode["final"])
        count = int(before[first + int(episode["steps"])] - before[first])
        if count:
            yield row, f"{count} of its records do not fit their checksum"
        elif final != rec.NO_FINAL and bad_finals[final]:
            yield row, "its final record does not fit its checksum"


def _play_again(parts: Parts, row: int, said: Mapping[str, Any], names: Mapping[int, str], pool_for: PoolFor) -> bool:
    """Plays one episode again and puts it in place, if the stored checksums of its steps say that it is the same."""
    episode = parts.episodes[row : row + 1]
    first, final = int(episode["first"][0]), int(episode["final"][0])
    place = slice(first, first + int(episode["steps"][0]))
    own = {index: name for index, name in names.items() if index == int(episode["environment"][0])}
    try:
        records, finals, _ = play(said, own, episode, compact_of(parts.records[place]), pool_for)
    except AgentpipeError:  # it plays otherwise, or cannot be played here: it is lost
        return False
    if (records[rec.CHECKSUM] != parts.records[rec.CHECKSUM][place]).any():
        return False  # the final record follows from the steps: it needs no proof of its own
    parts.records[place] = records
    if final != rec.NO_FINAL:
        parts.finals[final] = finals[0]
    parts.mended.append(f"episode row {row}: played again from its actions")
    return True


# --------------------------------------------------------------------------------------------- small files


def mend_file(data: bytes, facts: Mapping[str, Any]) -> bytes | None:
    """A small file with one changed byte undone, or with what was appended cut off, or ``None``.

    Args:
        data: The file.
        facts: Its size and checksum as they were.
    """
    wanted, size = int(str(facts["xxh64"]), 16), int(facts["bytes"])
    if xxh64(data[:size]) == wanted:
        return data[:size]
    if len(data) != size or size > _SMALL_FILE:
        return None
    return next((tried for tried in _changes(data, range(1, 256)) if xxh64(tried) == wanted), None)


def mend_manifest(data: bytes) -> bytes | None:
    """A manifest with one flipped bit undone, or ``None``."""
    if len(data) > _LONGEST:
        return None
    return next((tried for tried in _changes(data, _BITS) if _is_manifest(tried)), None)


def mend_header(data: bytes) -> bytes | None:
    """The header of an open shard with one flipped bit undone, or ``None``."""
    if len(data) > _LONGEST:
        return None
    return next((tried for tried in _changes(data, _BITS) if _is_header(tried)), None)


def _changes(data: bytes, changes: Sequence[int]) -> Iterator[bytes]:
    """``data`` with every single byte changed in each of these ways (what is XORed to it)."""
    raw = bytearray(data)
    for place in range(len(raw)):
        for change in changes:
            raw[place] ^= change
            yield bytes(raw)
            raw[place] ^= change


def _is_header(data: bytes) -> bool:
    try:
        header = json.loads(data)
        return bool(header["checksum"] == header_checksum(header))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _is_manifest(data: bytes) -> bool:
    try:
        manifest = json.loads(data)
        checks: tuple[Callable[[], bool], ...] = (
            lambda: manifest["digest"] == manifest_digest(manifest),
            lambda: manifest["sealed"]["checksum"] == _outside_checksum(manifest),
        )
        return all(check() for check in checks)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False
