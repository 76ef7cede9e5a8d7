"""Whether a row of JSON is valid feedback, said a second time: row by row, by pydantic models, without columns."""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agentpipe.feedback.schema import ErrorType, Verdict

LARGEST = 3.4028234663852886e38
Identifier = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x20\x7f-\u009f\p{Z}]+$")]


def utc_time(value):
    parsed = dt.datetime.fromisoformat(value) if isinstance(value, str) else None
    if parsed is None or parsed.utcoffset() is None:
        raise ValueError("no time with a zone")
    try:
        return parsed.astimezone(dt.UTC)
    except OverflowError as error:
        raise ValueError("outside the calendar") from error


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Decision(Record):
    decision_id: Identifier
    time: Annotated[dt.datetime, BeforeValidator(utc_time)]
    line_id: Identifier
    policy_version: Identifier
    observation: list[float]
    last_action: int = Field(ge=0)
    elapsed_minutes: float = Field(ge=0, le=1_000_000)
    mask: list[bool]
    probabilities: list[float]
    action: int = Field(ge=0)
    result: str | None = Field("", max_length=200)


class Label(Record):
    label_id: Identifier
    decision_id: Identifier
    time: Annotated[dt.datetime, BeforeValidator(utc_time)]
    verdict: Verdict = Field(strict=False)
    error_type: ErrorType | None = Field(None, strict=False)
    confidence: float | None = Field(1.0, gt=0, le=1)
    annotator: Identifier
    corrected_action: int | None = Field(None, ge=0)


def unique(pairs):
    if len(dict(pairs)) != len(pairs):
        raise ValueError("twice")
    return dict(pairs)


def is_valid(line, shape, now):
    """True where ``line`` (bytes) is a decision or label that a policy of ``shape`` can have led to."""
    try:
        content = json.loads(line.decode(), object_pairs_hook=unique)
        model = {"decision": Decision, "label": Label}[content.pop("kind")]
        record = model.model_validate(content)
    except (ValueError, ValidationError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    if record.time > now + dt.timedelta(minutes=5):
        return False
    if isinstance(record, Label):
        return record.corrected_action is None or record.corrected_action < shape.action_count
    numbers = [*record.observation, *record.probabilities]
    lengths = (len(record.observation), len(record.mask), len(record.probabilities))
    return (
        lengths == (shape.observation_size, shape.action_count, shape.action_count)
        and all(abs(number) <= LARGEST for number in numbers)
        and record.action < shape.action_count
        and record.mask[record.action]
        and record.last_action <= shape.action_count
        and min(record.probabilities) >= 0
        and abs(math.fsum(record.probabilities) - 1) <= 1e-3
        and not any(p > 0 and not allowed for p, allowed in zip(record.probabilities, record.mask, strict=True))
    )
