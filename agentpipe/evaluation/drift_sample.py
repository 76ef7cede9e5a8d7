"""The two samples of an input drift: what the policy was trained on, and what it met in production.

The reference is recorded trajectories, not what :func:`~agentpipe.evaluation.reference.collect_reference` collects:
which situations arise depends on who plays, and those are the rule-based player's. Trajectories are played by the
champion, in every cell, and are what training draws from.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agentpipe.errors import CorruptError, EvaluationError
from agentpipe.experience.store import checksum

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from agentpipe.experience.store.shard import Shard


@dataclass(frozen=True)
class Observations:
    """n observations of D features, and where each is from."""

    values: npt.NDArray[np.float32]
    """f32[n, D], raw."""
    groups: npt.NDArray[Any]
    """Line [n]; rows of one are not independent."""


def recorded_observations(
    shards: Sequence[Shard], lines: Mapping[int, str], *, rows: int = 100_000, seed: int
) -> Observations:
    """At most ``rows`` observations of sealed shards, all together drawn by ``seed`` with equal probability.

    Only the drawn records are read, and their checksums verified.

    Args:
        shards: Of every cell.
        lines: The line of each environment by its index in the catalogue
            (``{spec.index: spec.template.line_id for spec in ...}``); they become the groups.
        rows: Most rows.
        seed: Of the draw.

    Raises:
        EvaluationError: no shard, no record, fewer than one row asked for, or an environment without a line.
        CorruptError: the checksum of a drawn record does not fit.
    """
    sizes = np.array([len(shard.records) for shard in shards], dtype=np.int64)
    total = int(sizes.sum())
    if rows < 1 or not total:
        raise EvaluationError(f"cannot draw {rows} observations from {total} recorded steps")
    keep = np.sort(np.random.default_rng(seed).choice(total, min(rows, total), replace=False))
    values, groups, start = [], [], 0
    for shard, size in zip(shards, sizes.tolist(), strict=True):
        chosen = np.ascontiguousarray(shard.records[keep[(keep >= start) & (keep < start + size)] - start])
        if checksum.wrong(chosen).any():
            raise CorruptError(
                "a record's checksum does not fit", file=shard.path, remedy="agentpipe buffer check --fix"
            )
        values.append(chosen["observation"])
        indices, places = np.unique(chosen["environment"], return_inverse=True)
        unknown = [index for index in indices.tolist() if index not in lines]
        if unknown:
            remedy = "use the catalogue that the shard was recorded with"
            raise EvaluationError("a recorded environment has no line", environment=unknown[0], remedy=remedy)
        groups.append(np.array([lines[index] for index in indices.tolist()], dtype=np.str_)[places])
        start += size
    return Observations(np.concatenate(values), np.concatenate(groups))


def decided_observations(decisions: Iterable[pa.Table], size: int, *, rows: int = 100_000, seed: int) -> Observations:
    """At most ``rows`` observations f32[n, size] of decisions, and their lines, in an order that is no one's.

    Each decision has a number, the hash of its id and ``seed``; the least are kept. So the same decisions give the same
    sample in whatever tables and order they come, and not much more than twice the sample is held.

    Args:
        decisions: Tables with columns ``decision_id``, ``line_id`` and ``observation``, as
            :func:`~agentpipe.feedback.store.decisions_of` gives them.
        size: Features of an observation.
        rows: Most rows.
        seed: Of the sample.

    Raises:
        EvaluationError: fewer than one row asked for, or an observation of another size.
    """
    if rows < 1:
        raise EvaluationError(f"cannot draw {rows} observations")
    key = seed.to_bytes(16, "little", signed=True)
    kept = [_Drawn(np.empty(0, np.uint64), np.empty((0, size), np.float32), np.empty(0, object))]
    for table in decisions:
        numbers = np.array([_hash(name, key) for name in table.column("decision_id").to_pylist()], dtype=np.uint64)
        first = kept[0].numbers
        keep = np.flatnonzero(numbers < first[-1]) if first.size == rows else np.arange(numbers.size)
        chosen = table.take(keep)
        values = _matrix(chosen.column("observation"), size)
        kept.append(_Drawn(numbers[keep], values, chosen.column("line_id").to_numpy()))
        if sum(part.numbers.size for part in kept) > 2 * rows:
            kept = [_least(kept, rows)]
    drawn = _least(kept, rows)
    return Observations(drawn.values, drawn.lines)


class _Drawn(NamedTuple):
    numbers: npt.NDArray[np.uint64]
    values: npt.NDArray[np.float32]
    lines: npt.NDArray[np.object_]


def _least(parts: list[_Drawn], rows: int) -> _Drawn:
    """The ``rows`` least numbers of all parts, ascending."""
    numbers, values, lines = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(numbers, kind="stable")[:rows]
    return _Drawn(numbers[order], values[order], lines[order])


def _hash(name: str, key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, key=key).digest(), "little")


def _matrix(observations: pa.ChunkedArray, size: int) -> npt.NDArray[np.float32]:
    column = observations.combine_chunks()
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(lengths != size)  # a missing list has length NaN
    if wrong.size:
        remedy = "compare only decisions of policies with this observation"
        message = f"an observation has {lengths[wrong[0]]:g} features instead of {size}"
        raise EvaluationError(message, row=int(wrong[0]), remedy=remedy)
    flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    matrix: npt.NDArray[np.float32] = flat.reshape(len(column), size)
    return matrix
