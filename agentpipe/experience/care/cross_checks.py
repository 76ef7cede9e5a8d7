"""What must hold between the parts of a shard beyond checksums.

Actions that the mask allows, episodes that end once, final observations where they are needed, graphs that say what
their steps made and needed. For shards whose checksums fit; these are for :mod:`~agentpipe.experience.store.audit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.experience.graph import derive_parents, words_of
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.audit import Damage, field_at
from agentpipe.experience.store.checksum import find_flip, wrong

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentpipe.experience.store.shard import Shard

COMPACT: Final = "compact.bin"
LISTED: Final = 20
"""damages of one kind that are listed one by one"""
BLOCK: Final = 4_096
"""episodes looked at together"""

Rows = npt.NDArray[np.int64]


def cross_check(shard: Shard) -> Iterator[Damage]:
    """Everything, block by block."""
    left: dict[str, int] = {}
    for first in range(0, len(shard.episodes), BLOCK):
        shard.still_whole()
        rows = np.arange(first, min(first + BLOCK, len(shard.episodes)))
        for check in (_steps, _finals, _graphs):
            for damage in check(shard, rows):
                kind = f"{damage.file} {damage.field}"
                left[kind] = left.get(kind, LISTED) - 1
                if left[kind] >= 0:
                    yield damage


def _steps(shard: Shard, rows: Rows) -> Iterator[Damage]:
    episodes = shard.episodes[rows]
    begin, lengths = (episodes[name].astype(np.int64) for name in ("first", "steps"))
    records = shard.records[begin[0] : begin[-1] + lengths[-1]]
    allowed = _allowed(records["mask"], records["action"].astype(np.int64))
    ends = (records["terminated"] | records["truncated"]) == 1
    last = np.zeros(len(records), np.bool_)
    last[begin + lengths - 1 - begin[0]] = True
    for field, odd, text in (
        ("action", ~allowed, "the mask does not allow the action"),
        ("terminated", ends != last, "an episode ends at its last step, and nowhere else"),
    ):
        for place in np.flatnonzero(odd).tolist():
            yield Damage(rec.RECORDS, text, int(begin[0]) + place, field)


def _allowed(masks: npt.NDArray[np.uint8], actions: Rows) -> npt.NDArray[np.bool_]:
    """Whether the bit of each action is set in its packed mask."""
    bits = masks[np.arange(len(masks)), actions >> 3] >> (actions & 7).astype(np.uint8)
    return np.asarray(bits & 1, np.bool_)


def _finals(shard: Shard, rows: Rows) -> Iterator[Damage]:
    """Every truncated episode has what it would have gone on from, and no other; a cut one is truncated."""
    episodes = shard.episodes[rows]
    last = shard.records[(episodes["first"] + episodes["steps"] - 1).astype(np.int64)]
    wanted = (last["truncated"] == 1) & (last["terminated"] == 0)
    for field, odd, text in (
        ("final", wanted & (episodes["final"] == rec.NO_FINAL), "truncated, but without a final observation"),
        ("final", ~wanted & (episodes["final"] != rec.NO_FINAL), "a final observation of an episode that terminated"),
        ("cut", ~wanted & (episodes["cut"] == 1), "cut, but its last step is not truncated"),
    ):
        for place in np.flatnonzero(odd).tolist():
            yield Damage(rec.EPISODES, text, int(rows[place]), field)


def _graphs(shard: Shard, rows: Rows) -> Iterator[Damage]:
    """Edges go forward in time; where graphs follow from tokens, they are what the tokens give."""
    accumulating = shard.manifest.get("accumulating")
    first, last = (int(shard.episodes["first"][row]) for row in (rows[0], rows[-1]))
    if not accumulating or not shard.records["produced"][first : last + 1].any():  # the graph was given
        for row in rows.tolist():
            step = first_backward(shard.parents(row))
            if step is not None:
                yield Damage(rec.GRAPH, f"step {step} depends on itself or a later one", row, f"parents of step {step}")
        return
    expected = graphs_from_tokens(shard, rows, int(accumulating))
    begin = int(shard.episodes["graph"][rows[0]])
    differs = expected != shard.graph[begin : begin + len(expected)]
    if differs.any():
        sizes = words_of(shard.episodes["steps"][rows])
        odd = np.add.reduceat(differs, np.cumsum(sizes) - sizes) > 0
        for place in np.flatnonzero(odd).tolist():
            yield Damage(rec.GRAPH, "not what its steps made and needed", int(rows[place]), "parents")


def first_backward(parents: npt.NDArray[np.uint64]) -> int | None:
    """The first step of one episode that has itself or a later step as a parent, or ``None``; u64 ``[n, W]``."""
    bits = np.unpackbits(np.ascontiguousarray(parents, "<u8").view(np.uint8), axis=1, bitorder="little")
    backward = np.triu(bits, 0)[:, : bits.shape[1]].any(axis=1)
    return int(backward.argmax()) if backward.any() else None


def graphs_from_tokens(shard: Shard, rows: Rows, accumulating: int) -> npt.NDArray[np.uint64]:
    """The graphs of consecutive episodes as their tokens give them, one behind the other."""
    episodes = shard.episodes[rows]
    lengths, begin = episodes["steps"].astype(np.int64), int(episodes["first"][0])
    records = shard.records[begin : begin + int(lengths.sum())]
    return derive_parents(records["produced"], records["used"], lengths, accumulating)


def check_compact(
    compact: npt.NDArray[Any], episodes: npt.NDArray[Any], action_count: int, policies: int
) -> Iterator[Damage]:
    """What is left of a shrunk shard: checksums, episodes one behind the other, actions and policies that exist.

    Args:
        compact: ``records.COMPACT``.
        episodes: ``records.EPISODE``.
        action_count: how many actions there are.
        policies: how many policies the manifest lists.
    """
    for file, records in ((rec.EPISODES, episodes), (COMPACT, compact)):
        for record in np.flatnonzero(wrong(records))[:LISTED].tolist():
            flip = find_flip(records[record : record + 1].tobytes())
            field = "content" if flip is None else field_at(records.dtype, flip[0])
            yield Damage(file, "checksum does not fit", record, field)
    if wrong(episodes).any() or wrong(compact).any():
        return
    steps = episodes["steps"].astype(np.int64)
    gaps = episodes["first"].astype(np.int64) != np.cumsum(steps) - steps
    if gaps.any() or steps.sum() != len(compact):
        yield Damage(rec.EPISODES, "episodes and compact records do not fit each other", int(gaps.argmax()), "first")
    faults = {
        "action": (compact["action"] < 0) | (compact["action"] >= action_count),
        "policy": compact["policy"] >= policies,
        "log_probability": ~np.isfinite(compact["log_probability"]),
        "value": ~np.isfinite(compact["value"]),
    }
    for field, odd in faults.items():
        for record in np.flatnonzero(odd)[:LISTED].tolist():
            yield Damage(COMPACT, f"{field} {compact[field][record]} is out of range", record, field)
