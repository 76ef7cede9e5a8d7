"""What makes a row of feedback valid: one judgement, vectorised, for every format."""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentpipe.feedback.block import MISSING
from agentpipe.feedback.schema import (
    CLOCK_SKEW,
    EPOCH,
    ERROR_TYPES,
    FIELDS,
    KEY,
    LARGEST,
    LONGEST_TEXT,
    MOST_MINUTES,
    PROBABILITY_SUM_TOLERANCE,
    TABLES,
    VERDICTS,
    FeedbackShape,
    day_number,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import numpy.typing as npt

    from agentpipe.feedback.block import Block

    Flags = npt.NDArray[np.bool_]

MICROSECONDS_OF_DAY: Final = 86_400_000_000
_SPACE = r"[\x00-\x20\x7f-\x{9f}\pZ]"  # blanks and control characters, of any script


@dataclass(frozen=True)
class Rules:
    """What rows are held against.

    Args:
        shape: Sizes that a decision must have.
        now: Aware; a row more than five minutes later is from the future.
        late_days: A row whose UTC day lies more than so many days before the UTC day of ``now`` is late; None: never.
        versions: The policy versions that decisions may name; None: any.
    """

    shape: FeedbackShape
    now: dt.datetime
    late_days: int | None = None
    versions: Collection[str] | None = None


class Accepted(NamedTuple):
    """The valid rows of a block.

    ``rows`` are their places in the block, ``days`` their UTC days (days since 1970), ``digests`` SHA-256 of each row's
    content (32 bytes), ``table`` their columns in the stored schema, without source and line.
    """

    rows: npt.NDArray[np.int64]
    ids: list[str]
    days: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint8]
    table: pa.Table

    def take(self, chosen: Flags) -> Accepted:
        """Those of the rows for which ``chosen`` is true."""
        if chosen.all():
            return self
        ids = [identifier for identifier, keep in zip(self.ids, chosen, strict=True) if keep]
        table = self.table.filter(pa.array(chosen))
        return Accepted(self.rows[chosen], ids, self.days[chosen], self.digests[chosen], table)


class Judge:
    """Marks the rows of one block that are not valid; of several faults the first that is looked for counts."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.valid: Flags = np.ones(len(block), dtype=np.bool_)
        self.faults: dict[int, tuple[str, str]] = {}
        for row, fault in block.refused.items():
            self.valid[row] = False
            self.faults[row] = fault

    def mark(self, wrong: Flags, reason: str, detail: str | Callable[[int], str]) -> None:
        """Refuses the rows where ``wrong``, unless they are refused already."""
        for row in np.flatnonzero(wrong & self.valid).tolist():
            self.faults[row] = (reason, detail if isinstance(detail, str) else detail(row))
        self.valid &= ~wrong


def judge(block: Block, rules: Rules) -> tuple[Accepted, dict[int, tuple[str, str]]]:
    """The valid rows of ``block``, and reason and detail for each of the others.

    Whether an id came before is not judged here (:mod:`agentpipe.feedback.batch`).
    """
    marks = Judge(block)
    _times(marks, rules)
    for name, field in FIELDS[block.kind].items():
        if field.type in ("id", "text"):
            _texts(marks, name, empty=field.type == "text")
    if block.kind == "decision":
        matrices = _decisions(marks, rules)
    else:
        matrices = {}
        _labels(marks, rules)
    return _accepted(block, marks.valid, matrices), marks.faults


# ---------------------------------------------------------------------------------------------- both kinds


def _times(marks: Judge, rules: Rules) -> None:
    time = marks.block.columns["time"]

    def text(row: int) -> str:
        return (EPOCH + dt.timedelta(microseconds=int(time[row]))).isoformat()

    latest = (rules.now + CLOCK_SKEW - EPOCH) // dt.timedelta(microseconds=1)
    marks.mark(time > latest, "future_time", lambda row: f"time {text(row)} is later than now")
    if rules.late_days is not None:
        first = day_number(rules.now.astimezone(dt.UTC).date()) - rules.late_days
        detail = f"its UTC day lies more than {rules.late_days} days back"
        late = np.floor_divide(time, MICROSECONDS_OF_DAY) < first
        marks.mark(late, "late", lambda row: f"time {text(row)}: {detail}")


def _texts(marks: Judge, name: str, *, empty: bool) -> None:
    column = marks.block.columns[name]
    lengths = pc.fill_null(pc.utf8_length(column), 0).to_numpy(zero_copy_only=False)
    marks.mark(lengths > LONGEST_TEXT, "invalid_field", f"{name}: more than {LONGEST_TEXT} characters")
    if not empty:
        marks.mark(lengths == 0, "invalid_field", f"{name}: empty")
        spaced = pc.fill_null(pc.match_substring_regex(column, _SPACE), False)
        marks.mark(_flags(spaced), "invalid_field", f"{name}: blanks or control characters")


def _among(marks: Judge, name: str, allowed: Collection[str], *, optional: bool) -> None:
    column = marks.block.columns[name]
    known = pc.is_in(column, value_set=pa.array(sorted(allowed), type=pa.string()))
    wrong = ~_flags(known)
    if optional:
        wrong &= ~_flags(pc.is_null(column))
    marks.mark(wrong, "invalid_field", lambda row: f"{name}: {column[row].as_py()!r} is none of {', '.join(allowed)}")


def _whole(marks: Judge, name: str) -> None:
    column = marks.block.columns[name]
    wrong = (column != MISSING) & ((column < 0) | (column >= 2**31))
    marks.mark(wrong, "invalid_field", lambda row: f"{name}: {column[row]} is out of range")


def _flags(array: pa.Array) -> Flags:
    values: Flags = array.to_numpy(zero_copy_only=False).astype(np.bool_)
    return values


# ---------------------------------------------------------------------------------------------- one kind each


def _labels(marks: Judge, rules: Rules) -> None:
    columns = marks.block.columns
    _among(marks, "verdict", VERDICTS, optional=False)
    _among(marks, "error_type", ERROR_TYPES, optional=True)
    confidence = columns["confidence"]
    wrong = ~np.isnan(confidence) & ~((confidence > 0) & (confidence <= 1))
    marks.mark(wrong, "invalid_field", lambda row: f"confidence: {confidence[row]:g} is not in (0, 1]")
    _whole(marks, "corrected_action")
    corrected = columns["corrected_action"]
    detail = "corrected_action {} is none of the policy's {} actions"
    beyond = corrected >= rules.shape.action_count
    marks.mark(beyond, "does_not_fit_policy", lambda row: detail.format(corrected[row], rules.shape.action_count))


def _decisions(marks: Judge, rules: Rules) -> dict[str, npt.NDArray[Any]]:
    columns = marks.block.columns
    elapsed = columns["elapsed_minutes"]
    marks.mark(~(elapsed >= 0), "invalid_field", lambda row: f"elapsed_minutes: {elapsed[row]:g} is out of range")
    detail = f"elapsed_minutes: {{:.10g}} is more than {MOST_MINUTES:,.0f}"
    marks.mark(elapsed > MOST_MINUTES, "number_out_of_range", lambda row: detail.format(elapsed[row]))
    _whole(marks, "action")
    _whole(marks, "last_action")
    size, actions = rules.shape
    for name, wanted in (("observation", size), ("mask", actions), ("probabilities", actions)):
        _lengths(marks, name, wanted)
    observation = _matrix(marks, "observation", size)
    probabilities = _matrix(marks, "probabilities", actions)
    mask = _matrix(marks, "mask", actions)
    for name, values in (("observation", observation), ("probabilities", probabilities)):
        beyond = ~(np.abs(values) <= LARGEST).all(axis=1)
        marks.mark(beyond, "number_out_of_range", f"{name}: a number that is not a finite 32-bit number")
    _actions(marks, mask, actions)
    _probabilities(marks, probabilities, mask)
    if rules.versions is not None:
        versions = columns["policy_version"]
        known = pc.is_in(versions, value_set=pa.array(sorted(rules.versions), type=pa.string()))
        detail = "policy_version {} is not known here"
        marks.mark(~_flags(known), "unknown_policy_version", lambda row: detail.format(versions[row].as_py()))
    return {"observation": observation, "mask": mask, "probabilities": probabilities}


def _lengths(marks: Judge, name: str, wanted: int) -> None:
    lengths = marks.block.columns[name][0]
    detail = "{} has {} entries instead of {}"
    marks.mark(lengths != wanted, "does_not_fit_policy", lambda row: detail.format(name, lengths[row], wanted))


def _matrix(marks: Judge, name: str, width: int) -> npt.NDArray[Any]:
    """The lists of a field as a matrix; rows of another length, refused already, are zero."""
    lengths, values = marks.block.columns[name]
    right = lengths == width
    if right.all():
        return values.reshape(len(lengths), width)  # type: ignore[no-any-return]
    matrix = np.zeros((len(lengths), width), dtype=values.dtype)
    matrix[right] = values[np.repeat(right, lengths)].reshape(-1, width)
    return matrix


def _actions(marks: Judge, mask: Flags, actions: int) -> None:
    action, last = marks.block.columns["action"], marks.block.columns["last_action"]
    inside = (action >= 0) & (action < actions)
    allowed = inside & mask[np.arange(len(action)), np.where(inside, action, 0)]
    marks.mark(~allowed, "does_not_fit_policy", lambda row: f"action {action[row]} is not allowed by the mask")
    marks.mark(last > actions, "does_not_fit_policy", lambda row: f"last_action {last[row]} is out of range")


def _probabilities(marks: Judge, probabilities: npt.NDArray[np.float64], mask: Flags) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        sums = probabilities.sum(axis=1, dtype=np.float64)
    marks.mark(np.any(probabilities < 0, axis=1), "probabilities", "a probability is negative")
    wrong = ~(np.abs(sums - 1) <= PROBABILITY_SUM_TOLERANCE)
    marks.mark(wrong, "probabilities", lambda row: f"probabilities sum to {sums[row]:.6g} instead of 1")
    forbidden = np.any((probabilities > 0) & ~mask, axis=1)
    marks.mark(forbidden, "probabilities", "an action that the mask forbids has a probability")


# ---------------------------------------------------------------------------------------------- what is valid


def _accepted(block: Block, valid: Flags, matrices: dict[str, npt.NDArray[Any]]) -> Accepted:
    rows = np.flatnonzero(valid)
    schema = TABLES[block.kind]
    stored: dict[str, pa.Array] = {}
    for name, field in FIELDS[block.kind].items():
        column, kind = block.columns[name], schema.field(name).type
        if name in matrices:
            stored[name] = _lists(matrices[name] if valid.all() else matrices[name][rows], kind)
        elif field.type in ("id", "text"):
            chosen = column.take(pa.array(rows))
            stored[name] = pc.fill_null(chosen, "") if name == "result" else chosen
        elif field.type == "time":
            stored[name] = pa.array(column[rows], type=pa.int64()).cast(kind)
        elif field.type == "whole":
            stored[name] = pa.array(column[rows].astype(np.int32), type=kind, mask=column[rows] == MISSING)
        else:
            stored[name] = pa.array(np.where(np.isnan(column[rows]), 1.0, column[rows]).astype(np.float32), type=kind)
    table = pa.table(stored)
    days = np.floor_divide(block.columns["time"][rows], MICROSECONDS_OF_DAY)
    return Accepted(rows, stored[KEY[block.kind]].to_pylist(), days, content_digests(table), table)


def _lists(matrix: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    rows, width = matrix.shape
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * width)
    values = matrix.reshape(-1).astype(kind.value_type.to_pandas_dtype())
    return pa.ListArray.from_arrays(offsets, pa.array(values, type=kind.value_type))


def content_digests(table: pa.Table) -> npt.NDArray[np.uint8]:
    """SHA-256 of each row's content, u8[n, 32]: its texts, then all its numbers in little endian.

    Texts are joined by a control character, which no identifier has; the free text comes last, so nothing is ambiguous.
    """
    numbers: list[npt.NDArray[np.uint8]] = []
    texts: list[pa.Array] = []
    count = table.num_rows
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if pa.types.is_string(column.type):
            texts.append(pc.fill_null(column, ""))
            continue
        values = column.flatten() if pa.types.is_list(column.type) else column
        if pa.types.is_timestamp(values.type):
            values = values.cast(pa.int64())
        filled = pc.fill_null(values, -1) if values.null_count else values  # null: no corrected action
        array = filled.to_numpy(zero_copy_only=False)
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        numbers.append(little.view(np.uint8).reshape(count, -1) if count else np.empty((0, 0), np.uint8))
    packed = np.concatenate(numbers, axis=1)
    width, view = packed.shape[1], memoryview(packed.tobytes())
    words = pc.binary_join_element_wise(*texts, "\x1f").cast(pa.binary()).to_pylist()
    found: list[bytes] = []
    for start, text in zip(range(0, width * count, width) if count else (), words, strict=True):
        sha = hashlib.sha256(text)
        sha.update(view[start : start + width])
        found.append(sha.digest())
    return np.frombuffer(b"".join(found), dtype=np.uint8).reshape(count, 32)
