"""Behaviour cloning from recorded episodes, as few as fifty: of an expert, of the oracle, or of people.

Episodes are read from sealed shards, or from Parquet files with the columns of decision records
(:mod:`agentpipe.feedback.schema`): ``line_id``, ``time``, ``observation``, ``last_action``, ``elapsed_minutes``,
``mask`` and ``action``; where there is a column ``kind``, only rows of kind ``decision`` count. The rows of a line in
the order of their times are its steps; an episode begins where there was no action before (``last_action`` = A). Two
more columns may be there, both or neither: ``reward``, and ``terminated``, true in the last row of an episode that
ended by itself.

A fixed set of episodes is learned from in several passes, unlike the simulator's endless expert
(:mod:`~agentpipe.learning.cloning.imitation`): see :mod:`~agentpipe.learning.cloning.demonstrated`.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import LearningError, NonFiniteError
from agentpipe.feedback.schema import MOST_MINUTES
from agentpipe.storage import digest_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from agentpipe.feedback.schema import FeedbackShape

COLUMNS: Final = ("line_id", "time", "observation", "last_action", "elapsed_minutes", "mask", "action")
PAYING: Final = ("reward", "terminated")
_STEPS: Final = ("observation", "last_action", "time", "mask", "action", "reward")
_REMEDY: Final = "correct the file, or leave this episode out"
_TYPES: Final = "give the column the type of decision records"

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Demonstrations:
    """E episodes, M steps together, one episode after the other."""

    observation: npt.NDArray[np.float32]
    """f32[M, D], raw"""
    last_action: npt.NDArray[np.int64]
    """i64[M]; A at the start of an episode"""
    time: npt.NDArray[np.float32]
    """f32[M], minutes since the start of the episode"""
    mask: npt.NDArray[np.bool_]
    """bool[M, A]"""
    action: npt.NDArray[np.int64]
    """i64[M]"""
    reward: npt.NDArray[np.float32]
    """f32[M], raw; 0 where none was recorded"""
    length: npt.NDArray[np.int64]
    """i64[E], steps of each episode, at least one"""
    paid: npt.NDArray[np.bool_]
    """bool[E]: rewards are known to the end, which came by itself; elsewhere there is no return to learn"""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """episodes that are not here, by reason"""

    def __len__(self) -> int:
        return len(self.length)

    @property
    def digest(self) -> str:
        """Digest of all that is learned from."""
        parts = [np.ascontiguousarray(getattr(self, name)) for name in (*_STEPS, "length", "paid")]
        return digest_bytes("".join(digest_bytes(part.tobytes()) for part in parts).encode())


def read_demonstrations(
    paths: Sequence[Path], shape: FeedbackShape, *, least: int = 50, successes_only: bool = True
) -> Demonstrations:
    """Reads recorded episodes.

    Left out, and counted, are episodes that failed (with ``successes_only``; only shards tell), that are there twice
    (in a table also row by row), whose beginning is not in the file, or of which a step is missing in between.

    Args:
        paths: sealed shards (folders) and Parquet files.
        shape: D features, A actions of the policy that is to learn.
        least: episodes that are enough.
        successes_only: see above.

    Raises:
        LearningError: fewer than ``least`` episodes are left; a file cannot be read or lacks a column; sizes differ
            from ``shape``; a value is of another type than in decision records, a time is negative or beyond a million
            minutes, an action unknown or forbidden by its mask, or an episode goes on after its end: names file and row
            (from 1; in a shard, the number of the record).
        NonFiniteError: an observation, a time or a reward is not finite; names file, row and field.
        CorruptError, VersionError, ShrunkError: a shard is damaged, of another format, or holds no observations.
    """
    left_out: dict[str, int] = {}
    seen: set[bytes] = set()
    kept: list[tuple[Arrays, bool]] = []

    def leave(reason: str) -> None:
        left_out[reason] = left_out.get(reason, 0) + 1

    for path in paths:
        read = _of_shard if path.is_dir() else _of_parquet
        for steps, paid in read(path, shape, successes_only, leave):
            digest = hashlib.sha256(steps["observation"].tobytes() + steps["action"].tobytes()).digest()
            if digest in seen:
                leave("there twice")
                continue
            seen.add(digest)
            kept.append((steps, paid))
    if len(kept) < max(least, 1):
        without = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        text = f"{len(kept)} episodes to learn from, at least {max(least, 1)} are needed"
        remedy = "record more episodes, or clone the simulator's expert instead"
        raise LearningError(text, left_out=without or None, field="demonstrations", remedy=remedy)
    columns = {name: np.concatenate([steps[name] for steps, _ in kept]) for name in _STEPS}
    length = np.array([len(steps["action"]) for steps, _ in kept], np.int64)
    return Demonstrations(**columns, length=length, paid=np.array([paid for _, paid in kept]), left_out=left_out)


# -- shards --------------------------------------------------------------------------------------------------------


def _of_shard(
    path: Path, shape: FeedbackShape, successes_only: bool, leave: Callable[[str], None]  # noqa: FBT001 - private
) -> Iterator[tuple[Arrays, bool]]:  # fmt: skip
    from agentpipe.experience.store.shard import open_shard

    shard = open_shard(path)
    for name, wanted in zip(("observation_size", "action_count"), shape, strict=True):
        if int(shard.manifest[name]) != wanted:
            text = f"recorded with {name} {shard.manifest[name]}, the policy has {wanted}"
            raise LearningError(text, file=path, field=name, remedy="give episodes of the policy's own environments")
    for row in np.argsort(shard.episodes["first"], kind="stable"):
        episode = shard.episodes[row]
        if successes_only and not episode["success"]:
            leave("failed")
            continue
        records = shard.steps(int(row))
        steps: Arrays = {
            "observation": records["observation"].astype(np.float32),
            "last_action": records["last_action"].astype(np.int64),
            "time": records["time"].astype(np.float32),
            "mask": shard.unpack_masks(records["mask"]),
            "action": records["action"].astype(np.int64),
            "reward": records["reward"].astype(np.float32),
        }
        _check(steps, int(episode["first"]) + 1 + np.arange(len(records)), path, shape.action_count)
        if _whole(steps, shape.action_count, leave):
            yield steps, bool(records["terminated"][-1])


# -- Parquet -------------------------------------------------------------------------------------------------------


def _of_parquet(
    path: Path, shape: FeedbackShape, successes_only: bool, leave: Callable[[str], None]  # noqa: FBT001 - private
) -> Iterator[tuple[Arrays, bool]]:  # fmt: skip
    del successes_only  # nothing in such a file tells of success
    steps, order, lines = _columns(path, shape)
    once = _once(lines, *steps.values())
    begins = steps["last_action"] == shape.action_count
    for _ in range(int(begins.sum() - begins[once].sum())):
        leave("there twice")
    steps, order, lines = {name: column[once] for name, column in steps.items()}, order[once], lines[once]
    terminated = steps.pop("terminated", None)
    del steps["moment"]
    _check(steps, order + 1, path, shape.action_count)
    first = (steps["last_action"] == shape.action_count) | np.append(True, lines[1:] != lines[:-1])
    edges = [*np.flatnonzero(first).tolist(), len(lines)]
    for low, high in itertools.pairwise(edges):
        if terminated is not None and terminated[low : high - 1].any():
            row = int(order[low + int(np.argmax(terminated[low:high]))]) + 1
            raise LearningError(
                "an episode goes on after its end", file=path, row=row, field="terminated", remedy=_REMEDY
            )
        episode = {name: column[low:high] for name, column in steps.items()}
        if _whole(episode, shape.action_count, leave):
            yield episode, terminated is not None and bool(terminated[high - 1])


def _columns(path: Path, shape: FeedbackShape) -> tuple[Arrays, npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Columns sorted by line and time, the place of each row in the file, and the line of each."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    remedy = "give the columns of decision records; see docs/aids.md"
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        there = set(file.schema_arrow.names)
        twice = sorted(name for name in there if file.schema_arrow.names.count(name) > 1)
        if twice:
            raise LearningError(f"column {twice[0]} is there twice", file=path, field=twice[0], remedy=remedy)
        missing = sorted(set(COLUMNS) - there) or sorted(set(PAYING) - there if set(PAYING) & there else ())
        if missing:
            raise LearningError(f"column {missing[0]} is missing", file=path, field=missing[0], remedy=remedy)
        wanted = [name for name in (*COLUMNS, *PAYING, "kind") if name in there]
        table = file.read(columns=wanted, use_threads=False).combine_chunks()
        place = np.arange(table.num_rows)
        if "kind" in there:
            chosen = pc.fill_null(pc.equal(table.column("kind"), "decision"), False)
            place, table = place[chosen.to_numpy().astype(np.bool_)], table.filter(chosen)
        for name in (name for name in wanted if name != "kind"):
            _refuse_nulls(table.column(name), name, place, path)
        steps = {
            "observation": _matrix(table, "observation", shape.observation_size, np.float32, place, path),
            "mask": _matrix(table, "mask", shape.action_count, np.bool_, place, path),
            "last_action": _vector(table, "last_action", np.int64, place, path),
            "action": _vector(table, "action", np.int64, place, path),
            "time": _vector(table, "elapsed_minutes", np.float32, place, path),
            "reward": np.zeros(table.num_rows, np.float32),
        }
        if set(PAYING) <= there:
            steps["reward"] = _vector(table, "reward", np.float32, place, path)
            steps["terminated"] = _vector(table, "terminated", np.bool_, place, path)
        lines = np.asarray(_text(table.column("line_id"), path).to_pylist(), dtype=np.str_)
        steps["moment"] = _moments(table.column("time"), path)
        order = np.lexsort((place, steps["moment"], lines))
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise LearningError(f"not a Parquet file of decisions: {error}", file=path, remedy=remedy) from error
    return {name: column[order] for name, column in steps.items()}, place[order], lines[order]


def _once(*columns: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The rows of M that are no copy of an earlier one, in their order."""
    count = len(columns[0])
    if count == 0:
        return np.zeros(0, np.int64)
    parts = [np.ascontiguousarray(column).reshape(count, -1).view(np.uint8) for column in columns]
    rows = np.ascontiguousarray(np.concatenate(parts, axis=1))
    _, first = np.unique(rows.view(np.dtype((np.void, rows.shape[1]))).ravel(), return_index=True)
    return np.sort(first)


def _text(column: Any, path: Path) -> Any:  # noqa: ANN401 - pyarrow
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        text = f"line_id is of type {column.type}, which is no text"
        raise LearningError(text, file=path, field="line_id", remedy=_TYPES)
    return column.cast(pa.string())


def _moments(column: Any, path: Path) -> npt.NDArray[np.int64]:  # noqa: ANN401 - pyarrow
    import pyarrow as pa

    if not pa.types.is_timestamp(column.type):
        text = f"time is of type {column.type}, which is no point in time"
        raise LearningError(text, file=path, field="time", remedy=_TYPES)
    return np.asarray(column.cast(pa.int64()).to_numpy())


def _refuse_nulls(column: Any, name: str, place: npt.NDArray[np.int64], path: Path) -> None:  # noqa: ANN401 - pyarrow
    if column.null_count:
        row = int(place[int(np.argmax(column.is_null().to_numpy()))]) + 1
        raise LearningError(f"{name} is empty", file=path, row=row, field=name, remedy=_REMEDY)


def _vector(
    table: Any, name: str, dtype: npt.DTypeLike, place: npt.NDArray[np.int64], path: Path  # noqa: ANN401 - pyarrow
) -> npt.NDArray[Any]:  # fmt: skip
    return _cast(np.asarray(table.column(name).to_numpy()), name, np.dtype(dtype), place, path)


def _cast(
    values: npt.NDArray[Any], name: str, dtype: np.dtype[Any], place: npt.NDArray[np.int64], path: Path
) -> npt.NDArray[Any]:
    """``values``, one or as many for each of the rows ``place``, as ``dtype``: nothing is cut off, no text is true."""
    kinds = {"b": "b", "i": "iuf", "f": "iuf"}[dtype.kind]
    if len(values) and values.dtype.kind not in kinds:
        text = f"{name} is of type {values.dtype}, which is no {dtype}"
        raise LearningError(text, file=path, field=name, remedy=_TYPES)
    if dtype.kind == "i":
        with np.errstate(invalid="ignore"):
            bad = values != values.astype(dtype)
        if bad.any():
            row = int(np.argmax(bad))
            text = f"{name} {values[row]} is no whole number"
            raise LearningError(text, file=path, row=int(place[row]) + 1, field=name, remedy=_REMEDY)
    with np.errstate(over="ignore"):  # too large for a float32 becomes infinite, and is refused as that
        return values.astype(dtype)


def _matrix(
    table: Any, name: str, width: int, dtype: npt.DTypeLike, place: npt.NDArray[np.int64], path: Path  # noqa: ANN401
) -> npt.NDArray[Any]:  # fmt: skip
    import pyarrow.compute as pc

    column = table.column(name)
    lengths = pc.list_value_length(column).to_numpy()
    if (lengths != width).any():
        row = int(np.argmax(lengths != width))
        text = f"{name} has {lengths[row]} values, the policy has {width}"
        raise LearningError(text, file=path, row=int(place[row]) + 1, field=name, remedy=_REMEDY)
    values = pc.list_flatten(column)
    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy())) // width
        raise LearningError(
            f"{name} has an empty value", file=path, row=int(place[row]) + 1, field=name, remedy=_REMEDY
        )
    flat = np.asarray(values.to_numpy(zero_copy_only=False))
    return _cast(flat, name, np.dtype(dtype), place, path).reshape(len(lengths), width)


# -- both ----------------------------------------------------------------------------------------------------------


def _check(steps: Arrays, rows: npt.NDArray[np.int64], path: Path, actions: int) -> None:
    """Refuses the first row whose action is unknown or forbidden, or that holds what is not finite."""
    count = len(rows)
    if not count:
        return
    for name in ("observation", "time", "reward"):
        bad = ~np.isfinite(steps[name].reshape(count, -1)).all(axis=1)
        if bad.any():
            raise NonFiniteError("not finite", file=path, row=int(rows[np.argmax(bad)]), field=name, remedy=_REMEDY)
    action, last = steps["action"], steps["last_action"]
    known = (action >= 0) & (action < actions)
    legal = known & steps["mask"][np.arange(count), np.where(known, action, 0)]
    time = steps["time"]
    problems = (
        ("time", (time < 0) | (time > MOST_MINUTES), "{} minutes since the start"),
        ("action", ~known, "unknown action {}"),
        ("last_action", (last < 0) | (last > actions), "unknown last action {}"),
        ("action", ~legal, "action {} is not allowed by its mask"),
    )
    for name, bad, text in problems:
        if bad.any():
            row = int(np.argmax(bad))
            said = text.format(steps[name][row])
            raise LearningError(said, file=path, row=int(rows[row]), field=name, remedy=_REMEDY)


def _whole(steps: Arrays, actions: int, leave: Callable[[str], None]) -> bool:
    """Whether an episode has its beginning, and every step follows from the one before."""
    if steps["last_action"][0] != actions:
        leave("without its beginning")
        return False
    if (steps["last_action"][1:] != steps["action"][:-1]).any():
        leave("with a step missing")
        return False
    return True
