"""Sets of steps to draw from: all steps of some shards, or those of recent policies."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CorruptError
from agentpipe.experience import graph
from agentpipe.experience.sampling import gather
from agentpipe.experience.sampling.definitions import idle_steps, key_fault_episodes, strictly_idle_steps
from agentpipe.experience.sampling.draw import MAX_SIZE, SamplingError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.remedies import mend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.experience.store.shard import Shard

HIDDEN: Final = frozenset({rec.CHECKSUM, "padding", "reserved"})
MASK: Final = "mask"
MAX_SHARDS: Final = 1 << 16

Ids = npt.NDArray[np.int64]


class SampleSet:
    """Steps of sealed shards, numbered 0 .. size - 1: shard after shard, in each as they were recorded.

    Mapped records are read where they lie; what is kept in memory besides is a few bytes a step, and that only once it
    is asked for.

    Args:
        shards: of one observation size and one number of actions.
        fresh: only steps of the newest so many policy ordinals: those above the newest ordinal of the set minus
            ``fresh``. None = all steps.

    Raises:
        SamplingError: shards of different shapes, too many shards or steps, or ``fresh`` below one. A set without
            steps is allowed; a sampler over it is not.
        CorruptError: a file was cut short, or a record names a policy that its shard does not have.
    """

    def __init__(self, shards: Sequence[Shard], *, fresh: int | None = None) -> None:
        self.shards = tuple(shards)
        self.fresh = fresh
        self._fields = _common_fields(self.shards)
        self._itemsize = self.shards[0].records.dtype.itemsize if self.shards else 0
        self._bases = np.array([shard.records.ctypes.data for shard in self.shards], np.uint64)
        counts = [len(shard.records) for shard in self.shards]
        self._chosen = np.empty(0, np.uint32)
        if fresh is not None:
            chosen = _recent(self.shards, fresh)
            self._chosen = np.concatenate(chosen) if chosen else self._chosen
            counts = [len(numbers) for numbers in chosen]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        self.size = int(self._starts[-1])
        if self.size > MAX_SIZE or len(self.shards) > MAX_SHARDS:
            text = f"{self.size} steps in {len(self.shards)} shards are too many"
            raise SamplingError(text, remedy="use fewer shards, or compact them")

    @property
    def action_count(self) -> int:
        """Actions of the environments."""
        return int(self.shards[0].manifest["action_count"]) if self.shards else 0

    def locate(self, ids: Ids) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
        """Number of the shard, u16[n], and of the record in it, i64[n], of each of ``ids``.

        Raises:
            SamplingError: an id out of range.
        """
        given = np.ascontiguousarray(ids, np.int64)
        shards, numbers = np.empty(len(given), np.uint16), np.empty(len(given), np.int64)
        wrong = gather.locate(self._starts, self._chosen, given, shards, numbers)
        if wrong >= 0:
            remedy = f"ids are from 0 to {self.size - 1}"
            raise SamplingError(f"id {given[wrong]} is out of range", position=int(wrong), remedy=remedy)
        return shards, numbers

    def gather(
        self, ids: Ids, fields: Sequence[str] | None = None, out: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Fields of the records of ``ids``, each as a contiguous array whose first axis is n.

        Args:
            ids: i64[n].
            fields: of :func:`~agentpipe.experience.store.records.step_dtype`; ``mask`` comes unpacked, bool ``[n, A]``.
                None = all but checksum and padding.
            out: arrays to write to, by field; missing ones are made.

        Raises:
            SamplingError: an id out of range, an unknown field, an array in ``out`` that does not fit.
            CorruptError: a file was cut short.
        """
        shards, numbers = self.locate(ids)
        self.still_whole(shards)
        addresses = np.empty(len(numbers), np.uint64)
        gather.record_addresses(self._bases, shards, numbers, self._itemsize, addresses)
        found = {}
        for name in self._fields if fields is None else fields:
            shape, dtype = self._shape(name)
            array = _target(name, (len(numbers), *shape), dtype, out)
            if array.size:
                _copy(addresses, self._fields[name][1], array)
            found[name] = array
        return found

    def _shape(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        if name not in self._fields:
            raise SamplingError(f"no field {name!r}", field=name, remedy=f"one of {', '.join(self._fields)}")
        if name == MASK:
            return (self.action_count,), np.dtype(np.bool_)
        field = self._fields[name][0]
        return field.shape, field.base

    def still_whole(self, shards: npt.NDArray[np.uint16] | None = None) -> None:
        """Makes sure that no file (of those ``shards``) was cut short since it was mapped.

        Raises:
            CorruptError: names the file.
        """
        if shards is None or len(self.shards) == 1:
            used: Any = range(len(self.shards))
        else:
            used = np.flatnonzero(np.bincount(shards, minlength=len(self.shards)))
        for number in used:
            self.shards[number].still_whole()

    def episodes(self, ids: Ids) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
        """Number of the shard, u16[n], and row of the episode in it, i64[n], of each of ``ids``."""
        shards, numbers = self.locate(ids)
        self.still_whole(shards)
        rows = np.empty(len(numbers), np.int64)
        for shard in np.unique(shards):
            here = shards == shard
            rows[here] = np.searchsorted(self.shards[shard].episodes["first"], numbers[here].astype(np.uint64), "right")
        return shards, rows - 1

    def _column(self, name: str) -> npt.NDArray[Any]:
        """One number of each step, [size]."""
        self.still_whole()
        dtype = self._shape(name)[1]
        return self._select([np.ascontiguousarray(shard.records[name]) for shard in self.shards], dtype)

    def _select(self, parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Joins one number of each record of each shard, and keeps those that have an id."""
        if self.fresh is not None:
            bounds = zip(self._starts[:-1], self._starts[1:], strict=True)
            parts = [part[self._chosen[begin:end]] for part, (begin, end) in zip(parts, bounds, strict=True)]
        return np.concatenate([np.empty(0, dtype), *parts])

    @cached_property
    def rewards(self) -> npt.NDArray[np.float32]:
        """Reward of each step, f32[size]."""
        return self._column("reward")

    @cached_property
    def _graph_figures(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        self.still_whole()
        found = [
            graph.influence(shard.graph, shard.episodes["steps"], np.ascontiguousarray(shard.records["reward"]))
            for shard in self.shards
        ]
        dependents = self._select([pair[0] for pair in found], np.uint32)
        return dependents, self._select([pair[1] for pair in found], np.float32)

    @property
    def dependents(self) -> npt.NDArray[np.uint32]:
        """Later steps that depend on each step, u32[size]."""
        return self._graph_figures[0]

    @property
    def influence(self) -> npt.NDArray[np.float32]:
        """Influence of each step (:mod:`agentpipe.experience.graph`), f32[size]."""
        return self._graph_figures[1]

    @cached_property
    def idle(self) -> npt.NDArray[np.bool_]:
        """See :func:`~agentpipe.experience.sampling.definitions.idle_steps`, bool[size]."""
        return idle_steps(self.dependents, self._column("earned"))

    @cached_property
    def idle_strict(self) -> npt.NDArray[np.bool_]:
        """See :func:`~agentpipe.experience.sampling.definitions.strictly_idle_steps`, bool[size]."""
        return strictly_idle_steps(self.dependents, self.rewards)

    @cached_property
    def key_fault(self) -> npt.NDArray[np.bool_]:
        """Steps of :func:`~agentpipe.experience.sampling.definitions.key_fault_episodes` of all shards, bool[size]."""
        if not self.shards:
            return np.zeros(0, np.bool_)
        self.still_whole()
        episodes = key_fault_episodes(np.concatenate([shard.episodes for shard in self.shards]))
        return episodes[self.episode]

    @cached_property
    def episode(self) -> npt.NDArray[np.uint32]:
        """Number of the episode of each step, u32[size]: rows of the first shard, then of the second, and so on."""
        self.still_whole()
        parts, before = [], 0
        for shard in self.shards:
            rows = np.arange(before, before + len(shard.episodes), dtype=np.uint32)
            parts.append(np.repeat(rows, shard.episodes["steps"]))
            before += len(rows)
        return self._select(parts, np.uint32)


def _common_fields(shards: Sequence[Shard]) -> dict[str, tuple[np.dtype[Any], int]]:
    """Type and offset of each field that can be gathered."""
    shapes = [(shard.manifest["observation_size"], shard.manifest["action_count"]) for shard in shards]
    for shard, shape in zip(shards, shapes, strict=True):
        if shape != shapes[0]:
            text = f"{shape[0]} features and {shape[1]} actions, others have {shapes[0][0]} and {shapes[0][1]}"
            raise SamplingError(text, file=shard.path, remedy="draw from shards of one kind of environment")
    described = (shards[0].records.dtype if shards else rec.step_dtype(0, 0)).fields
    assert described is not None
    return {str(name): (field[0], field[1]) for name, field in described.items() if name not in HIDDEN}


def _recent(shards: Sequence[Shard], fresh: int) -> list[npt.NDArray[np.uint32]]:
    """Records of each shard by one of the newest ``fresh`` policy ordinals."""
    if fresh < 1:
        raise SamplingError(f"a freshness window of {fresh}", field="fresh", remedy="at least one policy version")
    ordinals = [np.array([policy["ordinal"] for policy in shard.policies], np.int64) for shard in shards]
    newest = max((int(known.max()) for known in ordinals if len(known)), default=0)
    chosen = []
    for shard, known in zip(shards, ordinals, strict=True):
        recent = known > newest - fresh
        if recent.all() or not recent.any():
            count = len(shard.records) if recent.any() else 0
            chosen.append(np.arange(count, dtype=np.uint32))
        else:
            shard.still_whole()
            policy = np.ascontiguousarray(shard.records["policy"])
            if len(policy) and policy.max() >= len(known):
                record = int(policy.argmax())
                text = f"policy {policy[record]} of {len(known)}"
                raise CorruptError(text, file=shard.path, record=record, field="policy", remedy=mend(shard.path))
            chosen.append(np.flatnonzero(recent[policy]).astype(np.uint32))
    return chosen


def _target(
    name: str, shape: tuple[int, ...], dtype: np.dtype[Any], out: Mapping[str, npt.NDArray[Any]] | None
) -> npt.NDArray[Any]:
    array = None if out is None else out.get(name)
    if array is None:
        return np.empty(shape, dtype)
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous or not array.flags.writeable:
        text = f"{array.dtype}{list(array.shape)} cannot take {dtype}{list(shape)}"
        raise SamplingError(text, field=name, remedy="give a contiguous, writeable array of that type and shape")
    return array


def _copy(addresses: npt.NDArray[np.uint64], offset: int, out: npt.NDArray[Any]) -> None:
    rows = out.reshape(len(out), -1)
    if out.dtype == np.bool_:
        gather.copy_bits(addresses, offset, rows)
    elif out.dtype.itemsize % 4 == 0:
        gather.copy_words(addresses, offset, rows.view(np.uint32))
    else:
        gather.copy_bytes(addresses, offset, rows.view(np.uint8))
