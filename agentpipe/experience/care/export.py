"""Export to Arrow or Parquet: one row a step, for whatever reads tables.

Written in row groups, so that memory stays bounded; the file appears under its name whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from agentpipe.environments.compound import describe_compound
from agentpipe.errors import HomeError, InputError
from agentpipe.experience.care.columns import described, vocabularies
from agentpipe.experience.graph import influence
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agentpipe.experience.store.shard import Shard

GROUP_STEPS: Final = 16_384
"""steps of a row group, give or take an episode"""
SUFFIXES: Final = (".parquet", ".arrow")
_PLAIN: Final = {
    "episode": pa.uint32(),
    "step": pa.uint16(),
    "segment": pa.int8(),
    "time": pa.float32(),
    "action": pa.int16(),
    "last_action": pa.int16(),
    "log_probability": pa.float32(),
    "value": pa.float32(),
    "reward": pa.float32(),
    "fingerprint": pa.uint32(),
    "produced": pa.uint32(),
    "used": pa.uint32(),
}
_FLAGS: Final = ("terminated", "truncated", "earned")
_OF_EPISODE: Final = {"success": pa.bool_(), "reason": pa.int8(), "cut": pa.bool_()}


def export_steps(shards: Sequence[Shard], out: Path, *, group_steps: int = GROUP_STEPS) -> int:
    """Writes every step of ``shards`` to ``out`` and returns how many.

    The columns are those of :data:`~agentpipe.experience.care.columns.COLUMNS`; the schema's metadata say unit and
    meaning of each, and as JSON lists what the numbers in them are called. Episodes come in the order of the shards.

    Args:
        shards: with full records and of one shape.
        out: a name that ends in ``.parquet`` or ``.arrow``.
        group_steps: steps held in memory at once, give or take an episode.

    Raises:
        InputError: another suffix, no shards, or shards of different shapes or vocabularies.
        DiskFullError, HomeError: it cannot be written; what was there before is untouched.
    """
    if out.suffix not in SUFFIXES:
        raise InputError(
            f"cannot write {out.suffix or 'a file without suffix'}", file=out, remedy="use .parquet or .arrow"
        )
    if not shards:
        raise InputError("no shard to export", file=out, remedy="name a shard, or a cell that is materialised")
    shapes = {(shard.manifest["observation_size"], shard.manifest["action_count"]) for shard in shards}
    if len(shapes) > 1:
        raise InputError("the shards are of different shapes", file=out, remedy="export them one at a time")
    words = [vocabularies(shard.manifest) for shard in shards]
    if any(other != words[0] for other in words):
        raise InputError("their numbers mean different things", file=out, remedy="export them one at a time")
    schema = _schema(*shapes.pop(), {"shards": ",".join(shard.digest for shard in shards), **words[0]})
    steps = 0
    with _aside(out) as file, _writer(file, schema, out.suffix) as write:
        for shard in shards:
            shard.still_whole()
            for first, last in _groups(shard.episodes["steps"], group_steps):
                shard.still_whole()
                batch = _batch(shard, first, last, schema)
                write(batch)
                steps += batch.num_rows
    return steps


def _schema(observation_size: int, action_count: int, metadata: dict[str, str]) -> pa.Schema:
    observation = pa.list_(pa.float32(), observation_size)
    fields = {
        "environment": pa.string(),
        **_PLAIN,
        "time_ns": pa.timestamp("ns", "UTC"),
        "observation": observation,
        "mask": pa.list_(pa.bool_(), action_count),
        "policy": pa.string(),
        **dict.fromkeys(_FLAGS, pa.bool_()),
        "parents": pa.list_(pa.uint16()),
        "dependents": pa.uint32(),
        "influence": pa.float32(),
        "final_observation": observation,
        **_OF_EPISODE,
        "compound": pa.string(),
    }
    described_fields = [pa.field(name, kind, metadata=described(name)) for name, kind in fields.items()]
    return pa.schema(described_fields, metadata=metadata)


def _groups(lengths: npt.NDArray[np.uint32], group_steps: int) -> Iterator[tuple[int, int]]:
    """Ranges of episode rows, each of about ``group_steps`` steps."""
    first = held = 0
    for row, length in enumerate(lengths.tolist()):
        held += length
        if held >= group_steps:
            yield first, row + 1
            first, held = row + 1, 0
    if held:
        yield first, len(lengths)


def _batch(shard: Shard, first: int, last: int, schema: pa.Schema) -> pa.RecordBatch:
    episodes = shard.episodes[first:last]
    lengths = episodes["steps"].astype(np.int64)
    steps = np.concatenate([shard.steps(row) for row in range(first, last)])
    words = np.concatenate([shard.parents(row).reshape(-1) for row in range(first, last)])
    dependents, influences = influence(words, lengths, np.ascontiguousarray(steps["reward"]))
    policies = np.array([policy["version"] for policy in shard.manifest["policies"]], dtype=object)
    names = np.array([shard.names[int(index)] for index in episodes["environment"]], dtype=object)
    columns: dict[str, Any] = {
        "environment": np.repeat(names, lengths),
        **{name: np.ascontiguousarray(steps[name]) for name in _PLAIN},
        "time_ns": pa.array(steps["time_ns"], pa.int64()).cast(schema.field("time_ns").type),
        "observation": _fixed(steps["observation"]),
        "mask": _fixed(shard.unpack_masks(steps["mask"])),
        "policy": policies[steps["policy"]],
        **{name: steps[name].astype(np.bool_) for name in _FLAGS},
        "parents": _parents(shard, first, last),
        "dependents": dependents,
        "influence": influences,
        "final_observation": _finals(shard, first, last, lengths),
        **{
            name: np.repeat(episodes[name].astype(kind.to_pandas_dtype()), lengths)
            for name, kind in _OF_EPISODE.items()
        },
        "compound": np.repeat(_compounds(episodes["compound"]), lengths),
    }
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for field, column in ((field, columns[field.name]) for field in schema)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _compounds(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.object_]:
    distinct, inverse = np.unique(codes, axis=0, return_inverse=True)
    return np.array([describe_compound(three) for three in distinct], dtype=object)[inverse.reshape(-1)]


def _fixed(rows: npt.NDArray[Any], absent: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    mask = None if absent is None else pa.array(absent)
    return pa.FixedSizeListArray.from_arrays(flat, rows.shape[1], mask=mask)


def _parents(shard: Shard, first: int, last: int) -> pa.Array:
    """The parents of each step of some episodes, as lists."""
    counts, values = [np.zeros(1, np.int64)], []
    for row in range(first, last):
        words = np.ascontiguousarray(shard.parents(row), "<u8")
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        counts.append(bits.sum(axis=1, dtype=np.int64))
        values.append(np.nonzero(bits)[1].astype(np.uint16))
    offsets = np.cumsum(np.concatenate(counts)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(values)))


def _finals(shard: Shard, first: int, last: int, lengths: npt.NDArray[np.int64]) -> pa.Array:
    """The final observation at the last step of a cut episode, null elsewhere."""
    ends = np.cumsum(lengths) - 1
    rows = np.zeros((int(lengths.sum()), shard.manifest["observation_size"]), np.float32)
    absent = np.ones(len(rows), np.bool_)
    for row in range(first, last):
        final = shard.final(row)
        if final is not None:
            rows[ends[row - first]], absent[ends[row - first]] = final["observation"], False
    return _fixed(rows, absent)


@contextlib.contextmanager
def _writer(file: BinaryIO, schema: pa.Schema, suffix: str) -> Iterator[Callable[[pa.RecordBatch], None]]:
    if suffix == ".arrow":
        with pa.ipc.new_file(file, schema) as arrow:
            yield arrow.write_batch
        return
    with pq.ParquetWriter(file, schema, compression="zstd") as parquet:
        yield parquet.write_batch


@contextlib.contextmanager
def _aside(out: Path) -> Iterator[BinaryIO]:
    """A file beside ``out`` that takes its name when the body ends well."""
    with typed_os_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor, name = tempfile.mkstemp(prefix=".staging-", dir=out.parent)
        except FileNotFoundError as error:  # of folders that take no files, such as /proc
            raise HomeError("no file can be made here", file=out, remedy="choose another --out") from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(out)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
            raise
