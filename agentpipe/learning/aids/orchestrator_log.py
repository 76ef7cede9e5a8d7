"""What the orchestrator decided, and what came of it: one row for each group, combination and reason of a decision."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from agentpipe.environments.layout import PROTOCOLS, SENSOR_TYPES
from agentpipe.errors import CorruptError
from agentpipe.learning.aids.orchestrator_bandit import ARMS, levels_of_arm
from agentpipe.storage import typed_os_errors, write_bytes

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

FILE: Final = "orchestrator.parquet"
REASONS: Final = ("floor", "explore", "exploit")
"""spread evenly; drawn, although another one is expected to be higher; drawn, and expected to be the highest"""
CLASSES: Final = (
    "none",
    "sensor",
    "network",
    "load",
    "sensor × network",
    "sensor × load",
    "network × load",
    "all three",
)
"""which kinds a combination disturbs beyond background"""
EVERYWHERE: Final = -1
"""group of a move that does not depend on it"""
GROUPS: Final = len(SENSOR_TYPES) * len(PROTOCOLS)
ROW: Final = np.dtype(
    [
        ("update", "<i4"),  # that the decision was made for, from 1
        ("group", "i1"),  # sensor type x protocol, EVERYWHERE for the floor
        ("arm", "<i2"),  # levels of sensor, network and load, as digits to the base of six
        ("reason", "i1"),  # REASONS
        ("environments", "<i4"),  # that were given the combination
        ("episodes", "<i4"),  # that began under it until the next decision
        ("decisions", "<i8"),  # with a choice that the policy took in them until then
        ("expected", "<f4"),  # entropy in nats that was expected, NaN where nothing was known
        ("entropy", "<f8"),  # its sum over the decisions
    ]
)
_DIGEST: Final = b"agentpipe.content"
_CLASS_OF_KINDS: Final = (0, 3, 2, 6, 1, 5, 4, 7)  # bits: sensor 4, network 2, load 1

Rows = npt.NDArray[Any]


def class_of(arms: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """i64[k], index into :data:`CLASSES` of combinations [k]."""
    disturbed = levels_of_arm(arms.astype(np.int64)) > 0
    classes: npt.NDArray[np.int64] = np.array(_CLASS_OF_KINDS)[disturbed @ np.array([4, 2, 1])]
    return classes


def group_name(group: int) -> str:
    """Sensor type and protocol of a group, such as ``smart_hart / profinet``; ``all`` for :data:`EVERYWHERE`."""
    if group == EVERYWHERE:
        return "all"
    return f"{SENSOR_TYPES[group // len(PROTOCOLS)]} / {PROTOCOLS[group % len(PROTOCOLS)]}"


def log_digest(rows: Rows) -> str:
    """SHA-256 of the content of ``rows`` (:data:`ROW`): equal decisions and measurements, equal digest."""
    return hashlib.sha256(np.ascontiguousarray(rows, ROW).tobytes()).hexdigest()


def measured(rows: Rows) -> npt.NDArray[np.float64]:
    """f64[k]: mean entropy in nats of the decisions of each row, NaN where there were none."""
    means = np.full(len(rows), np.nan)
    np.divide(rows["entropy"], rows["decisions"], out=means, where=rows["decisions"] > 0)
    return means


def log_table(rows: Rows) -> pa.Table:
    """``rows`` as people read them; the file's metadata hold the digest of the content."""
    levels = levels_of_arm(rows["arm"].astype(np.int64))
    groups = [group_name(group) for group in range(EVERYWHERE, GROUPS)]
    columns = {
        "update": pa.array(rows["update"]),
        "group": _coded(rows["group"] - EVERYWHERE, groups),
        "sensor": pa.array(levels[:, 0]),
        "network": pa.array(levels[:, 1]),
        "load": pa.array(levels[:, 2]),
        "combination": _coded(class_of(rows["arm"]), CLASSES),
        "reason": _coded(rows["reason"], REASONS),
        "environments": pa.array(rows["environments"]),
        "episodes": pa.array(rows["episodes"]),
        "decisions": pa.array(rows["decisions"]),
        "expected_entropy": pa.array(rows["expected"], from_pandas=True),
        "entropy_sum": pa.array(rows["entropy"]),
        "measured_entropy": pa.array(measured(rows), from_pandas=True),
    }
    return pa.table(columns).replace_schema_metadata({_DIGEST: log_digest(rows)})


def _coded(codes: npt.NDArray[np.integer[Any]], names: Collection[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int8)), pa.array(list(names), pa.string()))


def write_log(path: Path, rows: Rows) -> str:
    """Writes ``rows`` to ``path``, durably and whole or not at all; returns the digest of their content.

    Raises:
        DiskFullError, HomeError: it cannot be written.
    """
    buffer = io.BytesIO()
    pq.write_table(log_table(rows), buffer, compression="zstd", write_page_checksum=True)
    write_bytes(path, buffer.getvalue())
    return log_digest(rows)


def read_log(path: Path) -> Rows:
    """The rows (:data:`ROW`) that :func:`write_log` wrote.

    Raises:
        CorruptError: missing, damaged, or changed since it was written.
        HomeError: it cannot be read.
    """
    remedy = "it is made again when the training that wrote it is resumed from its last checkpoint"
    if not path.is_file():
        raise CorruptError("there is no log of decisions", file=path, remedy=remedy)
    with typed_os_errors(path):
        data = path.read_bytes()
    try:
        table = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read(use_threads=False)
        columns = {name: table[name].to_pylist() for name in table.column_names}
        rows = np.zeros(table.num_rows, ROW)
        groups = {group_name(group): group for group in range(EVERYWHERE, GROUPS)}
        rows["group"] = [groups[name] for name in columns["group"]]
        rows["reason"] = [REASONS.index(name) for name in columns["reason"]]
        rows["arm"] = np.array([columns[kind] for kind in ("sensor", "network", "load")], np.int64).T @ [36, 6, 1]
        rows["expected"] = [np.nan if value is None else value for value in columns["expected_entropy"]]
        rows["entropy"] = columns["entropy_sum"]
        for name in ("update", "environments", "episodes", "decisions"):
            rows[name] = columns[name]
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise CorruptError(f"not a log of decisions: {error}", file=path, remedy=remedy) from error
    if (table.schema.metadata or {}).get(_DIGEST) != log_digest(rows).encode():
        raise CorruptError("the log does not match its digest", file=path, field="digest", remedy=remedy)
    return rows


def coupling_shares(rows: Rows, reasons: Collection[str] = REASONS) -> dict[str, float]:
    """Share of the moves (environments given a combination) of each class.

    Args:
        rows: of the log.
        reasons: moves for one of these alone.

    Returns:
        A share for each of :data:`CLASSES`, and ``sensor × network or more`` with the triples among them; NaN where
        there is no such move. By chance they are those of :func:`chance_shares`.
    """
    chosen = rows[np.isin(rows["reason"], [REASONS.index(reason) for reason in reasons])]
    return _shares(np.bincount(class_of(chosen["arm"]), chosen["environments"], len(CLASSES)))


def chance_shares() -> dict[str, float]:
    """What :func:`coupling_shares` gives when every combination is as frequent as any other."""
    return _shares(np.bincount(class_of(np.arange(ARMS)), minlength=len(CLASSES)))


def _shares(counts: npt.NDArray[Any]) -> dict[str, float]:
    total = float(counts.sum())
    shares = {
        name: float(count) / total if total else float("nan") for name, count in zip(CLASSES, counts, strict=True)
    }
    return {**shares, "sensor × network or more": shares["sensor × network"] + shares["all three"]}
