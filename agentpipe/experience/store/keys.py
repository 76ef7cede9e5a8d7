"""Which episodes an open shard holds: a hash table from (environment, episode) to row, in two flat arrays.

Open addressing with linear probing. It lives in memory only and is built again from the episode table, some millions
of entries a second; LevelDB answers the same question a hundred times slower, too slow to ask of each new episode.
"""

# What numba compiles returns what the caller's types say; the annotations are for readers.
# mypy: warn_return_any=False
from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry, inlined

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_32: Final = np.uint64(32)
_EMPTY: Final = -1
_SMALLEST: Final = 1024


@inlined
def _slot(keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64], key: np.uint64) -> np.int64:
    """Where ``key`` stands, or the empty slot where it would."""
    mask = keys.size - 1
    at = np.int64((key * _GOLDEN) >> _32) & mask
    while rows[at] != _EMPTY and keys[at] != key:
        at = (at + 1) & mask
    return at


@entry
def _insert(keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64], new: npt.NDArray[np.uint64], first: int) -> int:
    """Adds all, or none and returns which of ``new`` is there already."""
    for i in range(new.size):
        at = _slot(keys, rows, new[i])
        if rows[at] != _EMPTY:
            _remove(keys, rows, new, i)
            return i
        keys[at] = new[i]
        rows[at] = first + i
    return -1


@inlined
def _remove(keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64], new: npt.NDArray[np.uint64], count: int) -> None:
    # Backwards, the last that came first: then each slot is simply empty again, and no chain is cut.
    for i in range(count - 1, -1, -1):
        rows[_slot(keys, rows, new[i])] = _EMPTY


@entry
def _undo(keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64], new: npt.NDArray[np.uint64]) -> None:
    _remove(keys, rows, new, new.size)


@entry
def _find(keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64], key: np.uint64) -> int:
    return rows[_slot(keys, rows, key)]


def episode_keys(episodes: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Environment and episode of each row as one number: environment × 2³² + episode."""
    return (episodes["environment"].astype(np.uint64) << _32) | episodes["episode"]


class EpisodeKeys:
    """The table; grows by doubling, at most half full."""

    def __init__(self) -> None:
        self._clear(_SMALLEST)
        self._count = 0

    def _clear(self, slots: int) -> None:
        self._keys = np.zeros(slots, np.uint64)
        self._rows = np.full(slots, _EMPTY, np.int64)

    def add(self, new: npt.NDArray[np.uint64], first: int) -> int | None:
        """Gives ``new`` the rows from ``first`` on; or adds nothing and returns which of them is a second one."""
        if 2 * (self._count + len(new)) > len(self._keys):
            used = self._rows != _EMPTY
            keys, rows = self._keys[used], self._rows[used]
            self._clear(1 << int(4 * (self._count + len(new))).bit_length())
            order = np.argsort(rows)
            assert np.array_equal(rows[order], np.arange(len(rows)))
            _insert(self._keys, self._rows, keys[order], 0)
        twice = int(_insert(self._keys, self._rows, new, first))
        if twice >= 0:
            return twice
        self._count += len(new)
        return None

    def undo(self, new: npt.NDArray[np.uint64]) -> None:
        """Takes back the latest :meth:`add`."""
        _undo(self._keys, self._rows, new)
        self._count -= len(new)

    def find(self, environment: int, episode: int) -> int | None:
        """The row of an episode."""
        if not (0 <= environment < 1 << 32 and 0 <= episode < 1 << 32):
            return None
        row = int(_find(self._keys, self._rows, np.uint64((environment << 32) | episode)))
        return row if row >= 0 else None
