"""From (environment, step, time stamp) to a record: LevelDB while a shard is written, a sorted table once it is sealed.

One entry an episode, that of its first step; any other step is found by looking for the greatest key not above the
wanted one and adding the offset. The keys are big-endian, so their bytes sort as their numbers do.

LevelDB admits one process. It is opened by the writer alone; readers use the episode table.
"""

from __future__ import annotations

import os
import shutil
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CorruptError, DiskFullError, LockHeldError, StoreError
from agentpipe.experience.store.keys import episode_keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPEN_INDEX: Final = "index"
SEALED_INDEX: Final = "index.bin"
STEP_BITS: Final = 16
KEY_BYTES: Final = 20
_KEY: Final = struct.Struct(">IQQ")
_VALUE: Final = struct.Struct("<QQI")
_SIGN: Final = 1 << 63
_COUNT: Final = b"\xff" * (KEY_BYTES + 1)  # behind every key: how many episodes are entered
_BLOCK: Final = 65_536
_COMPACTS = 40_000  # entries, half of what fills the four megabytes at which LevelDB begins to compact
_FULL: Final = tuple(os.strerror(number) for number in (27, 28, 122))  # EFBIG, ENOSPC, EDQUOT

_KEYS: Final = np.dtype([("environment", ">u4"), ("step", ">u8"), ("time", ">u8")])
_VALUES: Final = np.dtype([("row", "<u8"), ("first", "<u8"), ("steps", "<u4")])
SEALED: Final = np.dtype([("key", "<u8"), ("time_ns", "<i8"), ("row", "<u8")])
"""one row of the sealed index: environment × 2³² + episode, time stamp of the first step, row in the episode table"""


class Entry(NamedTuple):
    """What the index says of one episode."""

    environment: int
    episode: int
    time_ns: int
    row: int
    first: int
    steps: int


def step_id(episode: int, step: int) -> int:
    """Episode and step as one number: episode × 2¹⁶ + step."""
    return (episode << STEP_BITS) | step


def encode_key(environment: int, step: int, time_ns: int) -> bytes:
    """The 20 bytes of a key, which sort as its parts do: environment uint32, step id uint64, time stamp int64."""
    return _KEY.pack(environment, step, time_ns + _SIGN)


def decode_key(key: bytes) -> tuple[int, int, int]:
    """Environment, step id and time stamp of a key."""
    environment, step, time = _KEY.unpack(key)
    return environment, step, time - _SIGN


def _decode(key: bytes, value: bytes) -> Entry:
    environment, step, time_ns = decode_key(key)
    return Entry(environment, step >> STEP_BITS, time_ns, *_VALUE.unpack(value))


def _encoded(episodes: npt.NDArray[Any], first_row: int) -> Iterator[tuple[bytes, bytes]]:
    keys, values = np.zeros(len(episodes), _KEYS), np.zeros(len(episodes), _VALUES)
    keys["environment"] = episodes["environment"]
    keys["step"] = episodes["episode"].astype(np.uint64) << np.uint64(STEP_BITS)
    keys["time"] = episodes["time_ns"].view(np.uint64) ^ np.uint64(_SIGN)
    values["row"] = np.arange(first_row, first_row + len(episodes))
    values["first"], values["steps"] = episodes["first"], episodes["steps"]
    # An array of raw bytes becomes a list of bytes objects at once, without a slice of Python for each.
    return zip(keys.view(f"V{KEY_BYTES}").tolist(), values.view(f"V{_VALUES.itemsize}").tolist(), strict=True)


class _Compaction:
    """LevelDB compacts in one thread a process, which it starts once and which a fork does not take along."""

    begun = False
    lost = False

    @classmethod
    def forked(cls) -> None:
        cls.lost = cls.begun


os.register_at_fork(after_in_child=_Compaction.forked)


class OpenIndex:
    """LevelDB behind a class that raises typed errors and can be made to agree with the episode table.

    Args:
        path: Its folder.
        make: Where it is missing it is made.

    Raises:
        CorruptError: LevelDB cannot read what is there.
        DiskFullError: no room.
    """

    def __init__(self, path: Path, *, make: bool = True) -> None:
        self.path = path
        self._make = make
        self._database: Any = None
        self._put = 0
        self._open()

    def _open(self) -> None:
        import plyvel

        if _Compaction.lost:
            remedy = "start processes that write shards by spawn or forkserver"
            message = "this process was forked from one that had written a shard, where LevelDB would wait for ever"
            raise StoreError(message, file=self.path, remedy=remedy)
        try:
            self._database = plyvel.DB(
                str(self.path), create_if_missing=self._make, paranoid_checks=True, compression=None
            )
        except plyvel.Error as error:
            raise self._typed(error) from error

    def _typed(self, error: Exception) -> StoreError:
        if any(text in str(error) for text in _FULL):
            return DiskFullError("the disk is full", file=self.path, remedy="free space and run again")
        if "already held" in str(error) or "temporarily unavailable" in str(error):
            return LockHeldError("LevelDB is open elsewhere", file=self.path, remedy="close that writer first")
        return CorruptError(f"LevelDB: {error}", file=self.path, remedy="remove this folder: it is made again")

    def put(self, episodes: npt.NDArray[Any], first_row: int, *, sync: bool) -> None:
        """Enters ``episodes``, rows from ``first_row`` on, all or none; on disk when this returns, if ``sync``.

        Raises:
            DiskFullError, CorruptError: LevelDB failed; nothing more can be entered until this is opened again.
        """
        import plyvel

        try:
            with self._database.write_batch(transaction=True, sync=sync) as batch:
                for key, value in _encoded(episodes, first_row):
                    batch.put(key, value)
                batch.put(_COUNT, (first_row + len(episodes)).to_bytes(8, "little"))
        except plyvel.Error as error:
            raise self._typed(error) from error
        self._put += len(episodes)
        _Compaction.begun = _Compaction.begun or self._put >= _COMPACTS

    def count(self) -> int:
        """How many episodes are entered, as of the last batch."""
        import plyvel

        try:
            return int.from_bytes(self._database.get(_COUNT, b"", verify_checksums=True), "little")
        except plyvel.Error as error:
            raise self._typed(error) from error

    def entries(self) -> Iterator[Entry]:
        """Every entry, in the order of the keys."""
        import plyvel

        try:
            for key, value in self._database.iterator(stop=_COUNT, verify_checksums=True):
                yield _decode(key, value)
        except (plyvel.Error, struct.error) as error:
            raise self._typed(error) from error

    def find(self, environment: int, step: int, time_ns: int) -> Entry | None:
        """The entry of the greatest key that is not above the wanted one, where it is of the same episode.

        Raises:
            CorruptError: LevelDB cannot read it.
        """
        if not (0 <= environment < 1 << 32 and 0 <= step < 1 << 48 and -_SIGN <= time_ns < _SIGN):
            return None
        stop = encode_key(environment, step, time_ns)
        import plyvel

        backwards = self._database.iterator(stop=stop, include_stop=True, reverse=True, verify_checksums=True)
        try:
            with backwards as found:
                for key, value in found:
                    entry = _decode(key, value)
                    same = entry.environment == environment and entry.episode == step >> STEP_BITS
                    return entry if same else None
        except (plyvel.Error, struct.error) as error:
            raise self._typed(error) from error
        return None

    def disagreements(self, episodes: npt.NDArray[Any]) -> Iterator[tuple[int, str]]:
        """Rows of the episode table whose entry is missing or says something else, and what is wrong with it."""
        seen = np.zeros(len(episodes), np.bool_)
        for entry in self.entries():
            if entry.row >= len(episodes):
                yield entry.row, "entry of an episode that does not count"
                continue
            row = episodes[entry.row]
            seen[entry.row] = True
            for name in Entry._fields:
                if name != "row" and getattr(entry, name) != int(row[name]):
                    yield entry.row, name
                    break
        yield from ((int(row), "entry is missing") for row in np.flatnonzero(~seen))

    def agree(self, episodes: npt.NDArray[Any]) -> int:
        """Makes the entries those of ``episodes`` (all that count); returns how many were added or removed.

        Where the count of entries fits nothing else is looked at: batches are whole or not there.
        """
        import plyvel

        if self.count() == len(episodes):
            return 0
        try:
            with self._database.write_batch(transaction=True, sync=True) as batch:
                beyond = [entry for entry in self.entries() if entry.row >= len(episodes)]
                for entry in beyond:
                    batch.delete(encode_key(entry.environment, step_id(entry.episode, 0), entry.time_ns))
                batch.put(_COUNT, min(self.count(), len(episodes)).to_bytes(8, "little"))
        except plyvel.Error as error:
            raise self._typed(error) from error
        start = self.count()
        for row in range(start, len(episodes), _BLOCK):
            self.put(episodes[row : row + _BLOCK], row, sync=True)
        return len(beyond) + len(episodes) - start

    def close(self) -> None:
        """Gives the database back."""
        if self._database is not None:
            self._database.close()
            self._database = None


def open_index(path: Path, episodes: npt.NDArray[Any]) -> OpenIndex:
    """The index of an open shard, made to agree with its counted ``episodes``; built again where it is damaged.

    Raises:
        DiskFullError: no room.
        CorruptError: it cannot be built again either.
    """
    index = None
    try:
        index = OpenIndex(path)
        index.agree(episodes)
    except CorruptError:
        if index is not None:
            index.close()
        shutil.rmtree(path, ignore_errors=True)
        index = OpenIndex(path)
        index.agree(episodes)
    return index


def sealed_rows(episodes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The sealed index of ``episodes``: ``SEALED`` rows in the order of their keys."""
    rows = np.zeros(len(episodes), SEALED)
    rows["key"] = episode_keys(episodes)
    rows["time_ns"] = episodes["time_ns"]
    rows["row"] = np.arange(len(episodes))
    return rows[np.argsort(rows["key"], kind="stable")]


def find_row(index: npt.NDArray[Any], environment: int, episode: int) -> int | None:
    """The row of an episode in the episode table, by binary search in a sealed index."""
    if not (0 <= environment < 1 << 32 and 0 <= episode < 1 << 32):
        return None
    keys, key = index["key"], (environment << 32) | episode
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if int(keys[middle]) < key:
            low = middle + 1
        else:
            high = middle
    return int(index["row"][low]) if low < len(keys) and int(keys[low]) == key else None
