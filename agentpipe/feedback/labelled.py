"""Labelled decisions as arrays: what a day's corrections teach."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentpipe.errors import CorruptError
from agentpipe.feedback.damage import REMEDY
from agentpipe.feedback.index import CURRENT, index_path, reading
from agentpipe.feedback.schema import day_number, utc_day
from agentpipe.feedback.store import decisions_of
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Collection, Sequence
    from pathlib import Path

    import numpy.typing as npt

CORRECT, WRONG, NEEDS_IMPROVEMENT = 0, 1, 2  # verdict; the order of ``schema.Verdict``
PERCEPTION, PLANNING, EXECUTION = 0, 1, 2  # error type; the order of ``schema.ErrorType``
_COLUMNS: Final = [
    "decision_id",
    "line_id",
    "policy_version",
    "observation",
    "last_action",
    "elapsed_minutes",
    "mask",
    "probabilities",
    "action",
]
_QUERY: Final = f"""
SELECT labels.id, labels.decision, verdict, error, confidence, corrected, decisions.day
FROM labels JOIN decisions ON decisions.id = labels.decision
WHERE labels.day = ? AND state = {CURRENT} ORDER BY labels.id
"""  # noqa: S608 - only a constant


@dataclass(frozen=True)
class LabelledDecisions:
    """n decisions with the label that counts for each: D observation features, A actions.

    ``verdict`` is 0 correct, 1 wrong, 2 needs improvement; ``error_type`` 0 perception, 1 planning, 2 execution, −1
    none; ``corrected_action`` −1 where the annotator gave none, or one that the decision's mask forbids (a label may
    come before its decision, so that its intake cannot tell).
    """

    label_id: tuple[str, ...]
    decision_id: tuple[str, ...]
    line_id: tuple[str, ...]
    policy_version: tuple[str, ...]
    observation: npt.NDArray[np.float32]
    """f32[n, D]"""
    last_action: npt.NDArray[np.int64]
    """i64[n]; A where there was none"""
    time: npt.NDArray[np.float32]
    """f32[n], elapsed minutes of the order"""
    mask: npt.NDArray[np.bool_]
    """bool[n, A]"""
    action: npt.NDArray[np.int64]
    """i64[n]"""
    probabilities: npt.NDArray[np.float32]
    """f32[n, A]"""
    verdict: npt.NDArray[np.int8]
    error_type: npt.NDArray[np.int8]
    confidence: npt.NDArray[np.float32]
    """f32[n], in (0, 1]"""
    corrected_action: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.label_id)

    def take(self, rows: npt.NDArray[Any] | Sequence[int]) -> LabelledDecisions:
        """The rows with these numbers (or where a boolean array is true), in the order given."""
        chosen = np.asarray(rows)
        places = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64)
        taken: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            taken[field.name] = (
                tuple(values[place] for place in places.tolist()) if isinstance(values, tuple) else values[places]
            )
        return LabelledDecisions(**taken)

    def without(self, ids: Collection[str]) -> LabelledDecisions:
        """The rows whose label is not among ``ids``."""
        known = ids if isinstance(ids, set | frozenset) else frozenset(ids)
        return self.take(np.array([identifier not in known for identifier in self.label_id], dtype=np.bool_))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over every field in its order, shapes and types included."""
        content: list[Any] = []
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if isinstance(values, tuple):
                content.append([field.name, list(values)])
            else:
                little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
                content.append([field.name, str(values.dtype), list(values.shape), digest_bytes(little.tobytes())])
        return digest_bytes(canonical_json(content))


def read_labelled(store: Path, day: dt.date) -> LabelledDecisions:
    """The decisions that were labelled on the UTC ``day``, joined with their labels and sorted by label id.

    A decision may be of any day. Left out are labels whose decision did not come yet, and those that a later label of
    the same decision supersedes, also one of a later day.

    Raises:
        CorruptError: the index or a part is missing or damaged, or a part lacks a decision that the index has.
    """
    with reading(store) as connection:
        rows = connection.execute(_QUERY, (day_number(day),)).fetchall() if connection else []
        if not all(map(_makes_sense, rows)):
            message = "labels of a day are damaged"
            raise CorruptError(message, file=index_path(store), day=day.isoformat(), remedy=REMEDY)
    labels, decisions, verdict, error, confidence, corrected, of_day = zip(*rows, strict=True) if rows else ((),) * 7
    found = _decisions(store, sorted(set(of_day)), decisions)
    mask = _matrix(found, "mask", np.bool_)
    return LabelledDecisions(
        label_id=tuple(labels),
        decision_id=tuple(decisions),
        line_id=tuple(found.column("line_id").to_pylist()),
        policy_version=tuple(found.column("policy_version").to_pylist()),
        observation=_matrix(found, "observation", np.float32),
        last_action=_vector(found, "last_action", np.int64),
        time=_vector(found, "elapsed_minutes", np.float32),
        mask=mask,
        action=_vector(found, "action", np.int64),
        probabilities=_matrix(found, "probabilities", np.float32),
        verdict=np.array(verdict, dtype=np.int8),
        error_type=np.array(error, dtype=np.int8),
        confidence=np.array(confidence, dtype=np.float32),
        corrected_action=_permitted(np.array(corrected, dtype=np.int64), mask),
    )


def _makes_sense(row: tuple[Any, ...]) -> bool:
    """False for what no intake writes: it would train on it."""
    label, decision, verdict, error, confidence, corrected, day = row
    return (
        isinstance(label, str)
        and isinstance(decision, str)
        and verdict in (CORRECT, WRONG, NEEDS_IMPROVEMENT)
        and error in (-1, PERCEPTION, PLANNING, EXECUTION)
        and isinstance(confidence, float)
        and 0 < confidence <= 1
        and isinstance(corrected, int)
        and -1 <= corrected < 2**31
        and isinstance(day, int)
    )


def _permitted(corrected: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    inside = (corrected >= 0) & (corrected < mask.shape[1])
    allowed = mask[np.arange(len(mask)), np.where(inside, corrected, 0)] if mask.size else inside
    return np.where(inside & allowed, corrected, -1)


def _decisions(store: Path, of_days: Sequence[int], ids: Sequence[str]) -> pa.Table:
    """The decisions with these ids, in the order given; whole days are looked through, little of them is kept."""
    wanted = pa.array(ids, type=pa.string())
    kept: list[pa.Table] = []
    for table in decisions_of(store, [utc_day(number) for number in of_days], _COLUMNS):
        chosen = table.filter(pc.is_in(table.column("decision_id"), value_set=wanted))
        if chosen.num_rows:
            kept.append(chosen)
    if not kept:
        if ids:
            raise CorruptError("decisions that the index has are missing", file=store, remedy="restore it from a copy")
        return _empty()
    found = pa.concat_tables(kept)
    places = pc.index_in(wanted, value_set=found.column("decision_id").combine_chunks())
    if places.null_count:
        lost = ids[pc.index(pc.is_null(places), value=True).as_py()]
        raise CorruptError("a decision is missing", file=store, decision=lost, remedy="restore it from a copy")
    return found.take(places)


def _empty() -> pa.Table:
    from agentpipe.feedback.schema import DECISION_TABLE

    return DECISION_TABLE.empty_table().select(_COLUMNS)


def _vector(table: pa.Table, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return table.column(name).to_numpy().astype(dtype)  # type: ignore[no-any-return]


def _matrix(table: pa.Table, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    values = pc.list_flatten(table.column(name)).to_numpy().astype(dtype)
    return values.reshape(table.num_rows, len(values) // table.num_rows if table.num_rows else 0)  # type: ignore[no-any-return]
