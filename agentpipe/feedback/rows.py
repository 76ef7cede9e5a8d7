"""From the bytes of a JSON-lines file to valid records and refused rows. Pure: touches no store."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic import ValidationError

from agentpipe.feedback.schema import KINDS, Decision, FeedbackShape, Label, check_shape

if TYPE_CHECKING:
    from collections.abc import Iterator

CLOCK_SKEW: Final = dt.timedelta(minutes=5)  # how far ahead of ours a sender's clock may be
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Accepted:
    """A valid record and the line it stands in (from 1)."""

    kind: str
    record: Decision | Label
    line: int


@dataclass(frozen=True)
class Refused:
    """A line that is not taken: a short reason to count by, what exactly is wrong, and the line itself."""

    reason: str
    detail: str
    line: int
    raw: str


class _RefusalError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def parse_lines(data: bytes, shape: FeedbackShape, now: dt.datetime) -> Iterator[Accepted | Refused]:
    """Every non-blank line of ``data`` as exactly one result. A byte-order mark and CRLF are allowed.

    Args:
        data: Lines of ``{"kind": "decision" | "label", ...}`` in UTF-8.
        shape: Sizes that decisions must have.
        now: Aware; rows more than five minutes later are from the future.
    """
    for number, line in enumerate(data.removeprefix(_BOM).split(b"\n"), 1):
        text = line.strip()
        if not text:
            continue
        try:
            yield _parse(text, number, shape, now)
        except _RefusalError as refusal:
            raw = line.decode(errors="backslashreplace").rstrip("\r")
            yield Refused(refusal.reason, refusal.detail, number, raw)


def is_unfinished(data: bytes) -> bool:
    """True where the last line has no line end and is no JSON: somebody is still writing."""
    last = data.rsplit(b"\n", 1)[-1].strip()
    if not last:
        return False
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return True
    return False


def _parse(text: bytes, number: int, shape: FeedbackShape, now: dt.datetime) -> Accepted:
    content = _load(text)
    kind = content.pop("kind", None)
    if kind not in KINDS:
        raise _RefusalError("unknown_kind", f"kind is {kind!r} instead of decision or label")
    try:
        record = KINDS[kind][0].model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "row"
        reason = {"missing": "missing_field", "extra_forbidden": "unknown_field"}.get(first["type"], "invalid_field")
        raise _RefusalError("invalid_time" if field == "time" else reason, f"{field}: {first['msg']}") from error
    if record.time > now + CLOCK_SKEW:
        raise _RefusalError("future_time", f"time {record.time.isoformat()} is later than now")
    if isinstance(record, Decision):
        problem = check_shape(record, shape)
        if problem is not None:
            raise _RefusalError("does_not_fit_policy", problem)
    elif record.corrected_action is not None and record.corrected_action >= shape.action_count:
        raise _RefusalError("does_not_fit_policy", f"corrected_action {record.corrected_action} is out of range")
    return Accepted(kind, record, number)


def _load(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _RefusalError("not_utf8", str(error)) from error
    except RecursionError as error:
        raise _RefusalError("not_json", "nested too deeply") from error
    except ValueError as error:
        raise _RefusalError("not_json", str(error)) from error
    if not isinstance(content, dict):
        raise _RefusalError("not_json", f"a JSON {type(content).__name__} instead of an object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
