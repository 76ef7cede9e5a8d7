"""A sum tree with sixteen children a node: which step covers a point of the cumulated priorities.

All levels stand in one array, the steps first, each padded to whole nodes with zeros; sixteen float64 are two lines of
the cache, and a million steps take five levels. A parent is never adjusted by a difference: it is added up anew from
its children whenever one of them changed, so that no error builds up, however many changes there are.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry, inlined
from agentpipe.environments.rng import bits, uniform

WIDTH: Final = 16
_SHIFT: Final = 4

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def level_offsets(size: int) -> Ints:
    """First place of each level, the steps' first, and behind the last the length of the whole: i64[levels + 1]."""
    offsets, nodes = [0], size
    while True:
        nodes = -(-nodes // WIDTH)
        offsets.append(offsets[-1] + nodes * WIDTH)
        if nodes == 1:
            return np.array(offsets, np.int64)


class SumTree:
    """Priorities of ``size`` steps, all zero at first.

    Args:
        size: number of steps, at least one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.offsets = level_offsets(size)
        self.sums = np.zeros(self.offsets[-1])
        self.stored = self.sums[:size]
        """the priorities, f64[size]; read it, write through :meth:`fill` and :meth:`update`"""

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self.sums[-WIDTH:].sum())

    def fill(self, priorities: npt.ArrayLike) -> None:
        """Sets all priorities, f64[size]."""
        self.stored[:] = priorities
        _add_all(self.sums, self.offsets)

    def update(self, ids: Ints, priorities: Floats) -> None:
        """Sets the priorities of ``ids``; of equal ids the last one counts."""
        update_tree(self.sums, self.offsets, ids, priorities)

    def find(self, points: Floats) -> Ints:
        """The step that covers each point of the cumulated priorities (0 <= point < total), i64."""
        ids = np.empty(len(points), np.int64)
        find_steps(self.sums, self.offsets, points.copy(), ids)
        return ids


@entry
def _add_node(sums: Floats, offsets: Ints, level: int, node: int) -> None:
    """Adds up the children of one place of ``level``, which is at least 1."""
    begin = offsets[level - 1] + node * 16
    low = high = 0.0
    for child in range(begin, begin + 8):
        low += sums[child]
        high += sums[child + 8]
    sums[offsets[level] + node] = low + high


@entry
def _add_all(sums: Floats, offsets: Ints) -> None:
    for level in range(1, len(offsets) - 1):
        for node in range((offsets[level] - offsets[level - 1]) >> _SHIFT):
            _add_node(sums, offsets, level, node)


@entry
def update_tree(sums: Floats, offsets: Ints, ids: Ints, priorities: Floats) -> None:
    """Sets leaves and adds up what stands above them.

    A level with no more nodes than changes is added up whole; elsewhere neighbours in ``ids`` share a parent's sum.
    """
    for place in range(len(ids)):
        sums[ids[place]] = priorities[place]
    for level in range(1, len(offsets) - 1):
        nodes = (offsets[level] - offsets[level - 1]) >> _SHIFT
        if nodes <= len(ids):
            for node in range(nodes):
                _add_node(sums, offsets, level, node)
            continue
        last = -1
        for place in range(len(ids)):
            node = ids[place] >> (_SHIFT * level)
            if node != last:
                _add_node(sums, offsets, level, node)
                last = node


@inlined
def _last_positive(sums: Floats, begin: int) -> int:
    last = 0
    for child in range(16):
        if sums[begin + child] > 0.0:
            last = child
    return last


@entry
def find_steps(sums: Floats, offsets: Ints, points: Floats, ids: Ints) -> None:
    """The step that covers each of ``points``, which are used up.

    All go down one level together, and without a branch that a processor would have to guess: the misses of the cache
    and the additions of neighbours overlap. A point that rounding puts behind the last child falls to the last one
    above zero.
    """
    for place in range(len(ids)):
        ids[place] = 0
    for level in range(len(offsets) - 2, -1, -1):
        for place in range(len(ids)):
            begin = offsets[level] + ids[place] * 16
            point, cumulated, before, chosen = points[place], 0.0, 0.0, 0
            for child in range(16):
                cumulated += sums[begin + child]
                if cumulated <= point:
                    chosen = child + 1
                    before = cumulated
            if chosen == 16:
                chosen = _last_positive(sums, begin)
                before = 0.0
            ids[place] = ids[place] * 16 + chosen
            points[place] = point - before


@entry
def draw_tree(sums: Floats, offsets: Ints, key: np.uint64, call: int, ids: Ints, priorities: Floats) -> None:
    """One point in each of ``len(ids)`` equal parts of the cumulated priorities: ids ascend."""
    total = 0.0
    for place in range(len(sums) - 16, len(sums)):
        total += sums[place]
    part = total / len(ids)
    drawing = bits(key, call, 0)
    for place in range(len(ids)):
        priorities[place] = (place + uniform(bits(drawing, place, 0))) * part
    find_steps(sums, offsets, priorities, ids)
    for place in range(len(ids)):
        priorities[place] = sums[ids[place]]
