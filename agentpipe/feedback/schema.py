"""The two records of production feedback: what was decided, and what a person later said of it."""

from __future__ import annotations

import datetime as dt
import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION: Final = 1
PROBABILITY_SUM_TOLERANCE: Final = 1e-3
Identifier = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")]


LARGEST: Final = 3.4028234e38  # of a 32-bit number


def utc_time(value: object) -> dt.datetime:
    """A time with a zone, as text in ISO 8601 or already parsed, in UTC.

    Raises:
        ValueError: not ISO 8601, no zone, or outside the calendar.
    """
    parsed = dt.datetime.fromisoformat(value) if isinstance(value, str) else value
    if not isinstance(parsed, dt.datetime):
        raise ValueError("a time is text such as 2026-03-29T01:30:00Z")  # noqa: TRY004 - pydantic wants ValueErrors
    if parsed.utcoffset() is None:
        raise ValueError("a time needs its zone, as in 2026-03-29T01:30:00Z")
    try:
        return parsed.astimezone(dt.UTC)
    except OverflowError as error:
        raise ValueError("a time outside the calendar") from error


UtcTime = Annotated[dt.datetime, BeforeValidator(utc_time)]


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


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Decision(_Record):
    """One decision of a policy in production, written by the runtime.

    ``observation`` (D numbers), ``mask`` and ``probabilities`` (A each) are what the policy saw and said; ``action``
    is what was done; ``result`` is free text of the runtime (``done``, ``timeout``, ...), empty while unknown.
    """

    decision_id: Identifier
    time: UtcTime
    line_id: Identifier
    policy_version: Identifier
    observation: list[float]
    last_action: int = Field(ge=0)
    elapsed_minutes: float = Field(ge=0)
    mask: list[bool]
    probabilities: list[float]
    action: int = Field(ge=0)
    result: str = Field("", max_length=200)

    @field_validator("observation", "probabilities")
    @classmethod
    def _finite(cls, value: list[float]) -> list[float]:
        for index, number in enumerate(value):
            if not abs(number) <= LARGEST:
                raise ValueError(f"number {index} is not a finite 32-bit number")
        return value


class Label(_Record):
    """What a person said of a decision, perhaps days later. ``confidence`` is in (0, 1]."""

    label_id: Identifier
    decision_id: Identifier
    time: UtcTime
    verdict: Verdict = Field(strict=False)
    error_type: ErrorType | None = Field(None, strict=False)
    confidence: float = Field(1.0, gt=0, le=1)
    annotator: Identifier
    corrected_action: int | None = Field(None, ge=0)


def check_shape(decision: Decision, shape: FeedbackShape) -> str | None:
    """Why ``decision`` cannot come from a policy of this shape; None when it can."""
    lengths = {
        "observation": (len(decision.observation), shape.observation_size),
        "mask": (len(decision.mask), shape.action_count),
        "probabilities": (len(decision.probabilities), shape.action_count),
    }
    for field, (found, wanted) in lengths.items():
        if found != wanted:
            return f"{field} has {found} entries instead of {wanted}"
    if decision.action >= shape.action_count or not decision.mask[decision.action]:
        return f"action {decision.action} is not allowed by the mask"
    if decision.last_action > shape.action_count:
        return f"last_action {decision.last_action} is out of range"
    if min(decision.probabilities) < 0 or abs(math.fsum(decision.probabilities) - 1) > PROBABILITY_SUM_TOLERANCE:
        return f"probabilities sum to {math.fsum(decision.probabilities):.6g} instead of 1, or one is negative"
    if any(p > 0 and not allowed for p, allowed in zip(decision.probabilities, decision.mask, strict=True)):
        return "an action that the mask forbids has a probability"
    return None


_TIME = pa.timestamp("us", tz="UTC")
_SOURCE = [pa.field("source", pa.string()), pa.field("line", pa.int64())]  # digest of the file it came in, line in it
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
KINDS: Final[Mapping[str, tuple[type[Decision | Label], str, pa.Schema]]] = {
    "decision": (Decision, "decision_id", DECISION_TABLE),
    "label": (Label, "label_id", LABEL_TABLE),
}


def as_row(record: Decision | Label, source: str, line: int) -> dict[str, Any]:
    """``record`` as a row of its table."""
    return {**record.model_dump(mode="python"), "source": source, "line": line}
