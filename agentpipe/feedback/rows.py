"""From a JSON object to a row whose fields have the right types. Pure: touches no store."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from agentpipe.feedback.block import Refused, Row
from agentpipe.feedback.schema import FIELDS, utc_microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentpipe.feedback.schema import Type

DEEPEST: Final = 8
"""brackets within brackets that a row may have; a valid one has two"""
LONGEST_LINE: Final = 1 << 20
"""bytes of one row"""
KEPT_OF_LONG: Final = 4096
"""bytes of a longer row that quarantine shows"""
TOO_LONG: Final = f"a row has at most {LONGEST_LINE:,} bytes"


class FaultError(Exception):
    """Why a row, or a whole file, is not taken; ``digest`` is that of the file's content where it could be read."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.digest = ""


def read_row(text: bytes, line: int | str, raw: bytes | None = None) -> Row | Refused:
    """One JSON object ``{"kind": "decision" | "label", ...}`` in UTF-8 as a row, or why it is none."""
    kept = text if raw is None else raw
    try:
        if len(text) > LONGEST_LINE:
            kept = kept[:KEPT_OF_LONG]
            return Refused("too_long", TOO_LONG, line, kept)
        return typed_row(load_object(text), line, kept)
    except FaultError as fault:
        return Refused(fault.reason, fault.detail, line, kept)


def typed_row(content: dict[str, Any], line: int | str, raw: bytes) -> Row:
    """``content`` as a row.

    Raises:
        FaultError: unknown kind, a field that is missing, unknown or of another type.
    """
    content = dict(content)
    kind = content.pop("kind", None)
    if not isinstance(kind, str) or kind not in FIELDS:
        raise FaultError("unknown_kind", f"kind is {_short(kind)} instead of decision or label")
    fields = FIELDS[kind]
    for name in content:
        if name not in fields:
            raise FaultError("unknown_field", f"{_short(name)} is no field of a {kind}")
    found: dict[str, Any] = {}
    for name, field in fields.items():
        value = content.get(name)
        if value is None:
            if not field.optional:
                raise FaultError("missing_field", f"{name} is missing")
            continue
        found[name] = _CONVERT[field.type](name, value)
    return Row(kind, found, line, raw)


def load_object(text: bytes) -> dict[str, Any]:
    """The JSON object in ``text``.

    Raises:
        FaultError: not UTF-8, not an object, and what :func:`load_json` finds.
    """
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise FaultError("not_utf8", f"byte {error.start} (0x{text[error.start]:02x}) is not UTF-8") from error
    content = load_json(decoded)
    if not isinstance(content, dict):
        raise FaultError("not_json", f"a JSON {type(content).__name__} instead of an object")
    return content


def load_json(text: str) -> object:
    """What the JSON ``text`` says.

    Raises:
        FaultError: not JSON, a name that occurs twice, nested too deeply, a NaN, a number of thousands of digits.
    """
    if text.count("[") + text.count("{") > DEEPEST and _depth(text) > DEEPEST:
        raise FaultError("too_deep", f"brackets are nested more than {DEEPEST} deep")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise FaultError("not_json", str(error)) from error
    except ValueError as error:
        raise FaultError("number_out_of_range", "a number of thousands of digits") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FaultError("duplicate_field", f"{_short(twice)} occurs twice in one object")
    return content


def _no_constant(name: str) -> NoReturn:
    raise FaultError("number_out_of_range", f"{name} is not a finite number")


def _depth(text: str) -> int:
    """How deep brackets are nested outside of strings, counted without recursion."""
    deepest = depth = 0
    inside = escaped = False
    for character in text:
        if inside:
            inside = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            inside = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


# ---------------------------------------------------------------------------------------------- types


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise FaultError("invalid_field", f"{name}: {_short(value)} is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FaultError("not_utf8", f"{name}: half a character") from error
    return value


def _time(name: str, value: object) -> int:
    if not isinstance(value, str):
        raise FaultError("invalid_time", f"{name}: a time is text such as 2026-03-29T01:30:00Z")
    try:
        return utc_microseconds(value)
    except ValueError as error:
        raise FaultError("invalid_time", f"{name}: {error}".encode(errors="replace").decode()) from error


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise FaultError("invalid_field", f"{name}: {_short(value)} is no whole number")
    if not -(2**63) < value < 2**63:
        raise FaultError("number_out_of_range", f"{name}: {_short(value)}")
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise FaultError("invalid_field", f"{name}: {_short(value)} is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FaultError("number_out_of_range", f"{name}: not a finite number")
    return number


def _list(name: str, value: object, allowed: set[type], what: str) -> list[Any]:
    if not isinstance(value, list):
        raise FaultError("invalid_field", f"{name}: {_short(value)} is no list")
    types = set(map(type, value))
    if list in types or dict in types:
        raise FaultError("nested_list", f"{name}: a list within the list")
    if not types <= allowed:
        wrong = next(index for index, item in enumerate(value) if type(item) not in allowed)
        raise FaultError("invalid_field", f"{name}: entry {wrong} is {_short(value[wrong])}, not {what}")
    return value


def _numbers(name: str, value: object) -> np.ndarray[Any, Any]:
    entries = _list(name, value, {int, float}, "a number")
    try:
        numbers = np.array(entries, dtype=np.float64)
    except OverflowError as error:
        raise FaultError("number_out_of_range", f"{name}: not a finite number") from error
    if not np.isfinite(numbers).all():
        raise FaultError("number_out_of_range", f"{name}: not a finite number")
    return numbers


def _flags(name: str, value: object) -> np.ndarray[Any, Any]:
    return np.array(_list(name, value, {bool}, "true or false"), dtype=np.bool_)


_CONVERT: Final[Mapping[Type, Callable[[str, object], Any]]] = {
    "id": _text,
    "text": _text,
    "time": _time,
    "whole": _whole,
    "number": _number,
    "numbers": _numbers,
    "flags": _flags,
}


def _short(value: object) -> str:
    """``value`` as it may stand in a sentence: at most 60 characters, all of them printable in UTF-8."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return "a number of more than 63 bits"
    if isinstance(value, list | dict):
        return f"a JSON {type(value).__name__}"
    text = repr(value).encode(errors="replace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
