"""The two records of production feedback: what was decided, and what a person later said of it."""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBABILITY_SUM_TOLERANCE: Final = 1e-3
LONGEST_TEXT: Final = 200
"""characters of an identifier or a result"""
LARGEST: Final = 3.4028234663852886e38
MOST_MINUTES: Final = 1e6
"""since the order was opened: almost two years; far longer ones make training overflow"""
"""of a 32-bit floating-point number"""
CLOCK_SKEW: Final = dt.timedelta(minutes=5)
"""how far ahead of ours a sender's clock may be"""
EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

Type = Literal["id", "text", "time", "whole", "number", "numbers", "flags"]


class FeedbackShape(NamedTuple):
    """Sizes that a decision must have: D observation features, A actions."""

    observation_size: int
    action_count: int


class Verdict(StrEnum):
    """A person's judgement. ``needs_improvement`` is a weak negative."""

    CORRECT = "correct"
    WRONG = "wrong"
    NEEDS_IMPROVEMENT = "needs_improvement"


class ErrorType(StrEnum):
    """Which part of the agent was at fault."""

    PERCEPTION = "perception"
    PLANNING = "planning"
    EXECUTION = "execution"


VERDICTS: Final = tuple(str(verdict) for verdict in Verdict)
ERROR_TYPES: Final = tuple(str(error) for error in ErrorType)


class Field(NamedTuple):
    """One field of a record: what it holds, and whether a row may leave it out (or give null)."""

    type: Type
    optional: bool = False


# ``observation`` (D numbers), ``mask`` and ``probabilities`` (A each) are what the policy saw and said; ``last_action``
# is the action before (A where there was none); ``action`` is what was done; ``result`` is free text of the runtime
# (``done``, ``timeout``, ...), empty while unknown.
DECISION: Final[Mapping[str, Field]] = {
    "decision_id": Field("id"),
    "time": Field("time"),
    "line_id": Field("id"),
    "policy_version": Field("id"),
    "observation": Field("numbers"),
    "last_action": Field("whole"),
    "elapsed_minutes": Field("number"),
    "mask": Field("flags"),
    "probabilities": Field("numbers"),
    "action": Field("whole"),
    "result": Field("text", optional=True),
}
# ``confidence`` is in (0, 1], 1 where it is left out.
LABEL: Final[Mapping[str, Field]] = {
    "label_id": Field("id"),
    "decision_id": Field("id"),
    "time": Field("time"),
    "verdict": Field("text"),
    "error_type": Field("text", optional=True),
    "confidence": Field("number", optional=True),
    "annotator": Field("id"),
    "corrected_action": Field("whole", optional=True),
}
FIELDS: Final[Mapping[str, Mapping[str, Field]]] = {"decision": DECISION, "label": LABEL}
KEY: Final[Mapping[str, str]] = {"decision": "decision_id", "label": "label_id"}

_TIME = pa.timestamp("us", tz="UTC")
# where a row came from: the digest of its file and the line in it, or a stream and its entry
_SOURCE = [pa.field("source", pa.string()), pa.field("line", pa.string())]
DECISION_TABLE: Final = pa.schema(
    [
        pa.field("decision_id", pa.string()),
        pa.field("time", _TIME),
        pa.field("line_id", pa.string()),
        pa.field("policy_version", pa.string()),
        pa.field("observation", pa.list_(pa.float32())),
        pa.field("last_action", pa.int32()),
        pa.field("elapsed_minutes", pa.float32()),
        pa.field("mask", pa.list_(pa.bool_())),
        pa.field("probabilities", pa.list_(pa.float32())),
        pa.field("action", pa.int32()),
        pa.field("result", pa.string()),
        *_SOURCE,
    ]
)
LABEL_TABLE: Final = pa.schema(
    [
        pa.field("label_id", pa.string()),
        pa.field("decision_id", pa.string()),
        pa.field("time", _TIME),
        pa.field("verdict", pa.string()),
        pa.field("error_type", pa.string()),
        pa.field("confidence", pa.float32()),
        pa.field("annotator", pa.string()),
        pa.field("corrected_action", pa.int32()),
        *_SOURCE,
    ]
)
TABLES: Final[Mapping[str, pa.Schema]] = {"decision": DECISION_TABLE, "label": LABEL_TABLE}


def utc_microseconds(text: str) -> int:
    """Microseconds since 1970 (UTC) of a time in ISO 8601 with its zone.

    Raises:
        ValueError: not ISO 8601, no zone, or outside the calendar.
    """
    parsed = dt.datetime.fromisoformat(text)
    if parsed.utcoffset() is None:
        raise ValueError("a time needs its zone, as in 2026-03-29T01:30:00Z")
    try:
        return (parsed.astimezone(dt.UTC) - EPOCH) // dt.timedelta(microseconds=1)
    except OverflowError as error:
        raise ValueError("a time outside the calendar") from error


def utc_day(number: int) -> dt.date:
    """The date of a day that is counted from 1970-01-01."""
    return EPOCH.date() + dt.timedelta(days=number)


def day_number(day: dt.date) -> int:
    """Days since 1970-01-01."""
    return (day - EPOCH.date()).days
