"""What goes over the wire between a line and its agent: newline-delimited JSON, and nothing that is not understood.

From the line: ``hello`` (protocol, signature, lines, beat), ``question``, ``takeover``, ``ended``, at times a ``beat``.
From the agent: ``hello``, ``answer`` (decision_id, action), ``ask`` (decision_id, reason; a person is wanted),
``refused`` (what was nonsense, and why). An agent whose place another one takes is told ``displaced`` (by). A deadline
is what is left of it, in seconds, since the clocks of two machines differ. A lost sensor is ``null`` and declared in
``lost``.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from agentpipe.errors import BundleError, LineError
from agentpipe.serving.agent.types import Frame, OrderEnded, Takeover
from agentpipe.serving.signature import Signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from agentpipe.serving.agent.types import Message

PROTOCOL: Final = 1
LONGEST_LINE: Final = 1 << 20
"""bytes of one message"""
LONGEST_TEXT: Final = 200
MOST_LINES: Final = 1_024
"""names of lines whose last question is remembered"""
MOST_MINUTES: Final = 1e6
MOST_SECONDS: Final = 86_400.0
"""of a deadline"""
LARGEST: Final = float(np.finfo(np.float32).max)
_SPACE: Final = re.compile(r"[\x00-\x20\x7f-\x9f\s]")
FIELDS: Final = {
    "hello": ({"protocol", "signature", "lines"}, {"beat"}),
    "question": (
        {"decision_id", "line_id", "order_id", "number", "observation", "last_action", "elapsed_minutes", "mask"},
        {"seconds", "lost"},
    ),
    "takeover": ({"line_id", "active", "who"}, set()),
    "ended": ({"line_id", "order_id", "result"}, {"success"}),
}


class NonsenseError(LineError):
    """Raised when a line says something that makes no sense; the connection goes on.

    ``decision_id`` is that of the question where it could be read.
    """

    def __init__(self, message: str, *, decision_id: str = "", **where: object) -> None:
        remedy = "the message is not acted on; correct the line or its mapping"
        super().__init__(message, remedy=remedy, decision_id=decision_id or None, **where)
        self.decision_id = decision_id


class ForeignLineError(LineError):
    """Raised when a line has another protocol, other sizes or other names than the policy: waiting does not help."""


class DisplacedError(LineError):
    """Raised when another agent has taken this one's place at the line."""

    event = "displaced"


class LineEndedError(LineError):
    """Raised when a line says nothing more, ever: its stream has ended."""


@dataclass(frozen=True)
class Hello:
    """How a line introduces itself."""

    signature: Signature
    lines: tuple[str, ...]
    beat: float | None
    """seconds between two signs of life; None where it gives none"""


def encode(message: Mapping[str, Any]) -> bytes:
    """One message as it is sent."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def load(line: bytes) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        NonsenseError: too long, not UTF-8, not JSON, no object, a NaN, a field twice, nested too deeply.
    """
    if len(line) > LONGEST_LINE:
        raise NonsenseError(f"a message of more than {LONGEST_LINE:,} bytes")
    try:
        content = json.loads(line.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise NonsenseError(f"no JSON: {str(error)[:LONGEST_TEXT]}") from error
    if not isinstance(content, dict):
        raise NonsenseError(f"a JSON {type(content).__name__} instead of an object")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a field occurs twice")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


class Reader:
    """Turns what a line says into messages, and remembers enough to notice what cannot be.

    Args:
        signature: of the policy; what a line says must fit it.
        seconds: of a question without a deadline.
    """

    def __init__(self, signature: Signature, seconds: float) -> None:
        self.signature = signature
        self._seconds = seconds
        self._last: OrderedDict[str, tuple[str, int, str]] = OrderedDict()
        """by line: order, number and id of the last question"""

    def hello(self, line: bytes) -> Hello:
        """Reads the line's first message.

        Raises:
            NonsenseError: it is no hello.
            ForeignLineError: another protocol, other sizes, other names.
        """
        content = load(line)
        _check_fields(content, "hello")
        if content["protocol"] != PROTOCOL:
            text = f"the line speaks protocol {content['protocol']!r}, this agent {PROTOCOL}"
            raise ForeignLineError(text, remedy="run the agentpipe of the line")
        try:
            found = Signature.from_json(content["signature"])
        except BundleError as error:
            raise ForeignLineError(f"signature: {error.message}", remedy="run the agentpipe of the line") from error
        own = self.signature
        for name in ("observation_size", "action_count", "no_action", "observation_digest", "action_digest"):
            if getattr(found, name) != getattr(own, name):
                text = f"{name} of the line is {getattr(found, name)!r}, of the policy {getattr(own, name)!r}"
                raise ForeignLineError(text, field=name, remedy="give the agent a bundle of this line")
        lines = content["lines"]
        if not isinstance(lines, list):
            raise NonsenseError("lines is no list", field="lines")
        beat = content.get("beat")
        beats = None if beat is None else _number(beat, "beat", 0.001, MOST_SECONDS)
        return Hello(found, tuple(_identifier(name, "lines") for name in lines), beats)

    def message(
        self, line: bytes | Mapping[str, Any], *, since: float | None = None, doubtful: bool = False
    ) -> Message:
        """Reads any later message.

        Args:
            line: what was said.
            since: monotonic seconds before which it was not there, which deadlines are counted from; now where None.
            doubtful: it may have waited unread since then.

        Raises:
            NonsenseError: it makes no sense; the message says what of it.
        """
        content = load(line) if isinstance(line, bytes) else line
        try:
            return self._read(content, since, doubtful=doubtful)
        except NonsenseError as error:
            identifier = content.get("decision_id")
            known = identifier if isinstance(identifier, str) and _named(identifier) else ""
            raise NonsenseError(error.message, decision_id=known, field=error.where.get("field")) from error

    def _read(self, content: Mapping[str, Any], since: float | None, *, doubtful: bool) -> Message:
        kind = content.get("type")
        if kind == "question":
            return self._question(content, time.monotonic() if since is None else since, doubtful=doubtful)
        if kind == "takeover":
            return _takeover(content)
        if kind == "ended":
            return _ended(content)
        raise NonsenseError(f"no message is called {_short(kind)}", field="type")

    def _question(self, content: Mapping[str, Any], now: float, *, doubtful: bool) -> Frame:
        _check_fields(content, "question")
        received = dt.datetime.now(dt.UTC)
        identifier, line, order = (_identifier(content[name], name) for name in ("decision_id", "line_id", "order_id"))
        number = _whole(content["number"], "number", 0, 2**31 - 1)
        self._in_order(line, order, number, identifier)
        seconds = content.get("seconds", self._seconds)
        left = _number(seconds, "seconds", -MOST_SECONDS, MOST_SECONDS)
        if left <= 0:
            raise NonsenseError(f"its deadline has passed {abs(left):g} s ago", field="seconds")
        frame = Frame(
            decision_id=identifier,
            line_id=line,
            order_id=order,
            number=number,
            observation=_observation(content, self.signature.observation_size),
            last_action=_whole(content["last_action"], "last_action", 0, self.signature.no_action),
            elapsed_minutes=_number(content["elapsed_minutes"], "elapsed_minutes", 0.0, MOST_MINUTES),
            mask=_mask(content["mask"], self.signature.action_count),
            received=now,
            deadline=now + left,
            time=received,
            doubtful=doubtful,
        )
        self._last[line] = (order, number, identifier)
        self._last.move_to_end(line)
        if len(self._last) > MOST_LINES:
            self._last.popitem(last=False)
        return frame

    def _in_order(self, line: str, order: str, number: int, identifier: str) -> None:
        last_order, last_number, last_identifier = self._last.get(line, ("", -1, ""))
        if order != last_order:
            return
        if identifier == last_identifier and number != last_number:
            raise NonsenseError(f"question {last_number} comes again as number {number}", field="number")
        if identifier != last_identifier and number <= last_number:
            raise NonsenseError(f"question {number} of the order comes after number {last_number}", field="number")


def _takeover(content: Mapping[str, Any]) -> Takeover:
    _check_fields(content, "takeover")
    if not isinstance(content["active"], bool):
        raise NonsenseError("active is neither true nor false", field="active")
    return Takeover(_identifier(content["line_id"], "line_id"), content["active"], _text(content["who"], "who"))


def _ended(content: Mapping[str, Any]) -> OrderEnded:
    _check_fields(content, "ended")
    success = content.get("success")
    if not (success is None or isinstance(success, bool)):
        raise NonsenseError("success is neither true nor false", field="success")
    line, order = (_identifier(content[name], name) for name in ("line_id", "order_id"))
    return OrderEnded(line, order, _text(content["result"], "result"), success)


# ---------------------------------------------------------------------------------------------- fields


def _check_fields(content: Mapping[str, Any], kind: str) -> None:
    needed, optional = FIELDS[kind]
    names = set(content) - {"type"}
    if content.get("type") != kind:
        raise NonsenseError(f"a {kind} is expected, not {_short(content.get('type'))}", field="type")
    for name in sorted(needed - names):
        raise NonsenseError(f"a {kind} without {name}", field=name)
    for name in sorted(names - needed - optional):
        raise NonsenseError(f"{_short(name)} is no field of a {kind}", field=_short(name))


def _named(text: str) -> bool:
    return 0 < len(text) <= LONGEST_TEXT and not _SPACE.search(text) and text.isprintable()


def _identifier(value: object, name: str) -> str:
    if not isinstance(value, str) or not _named(value):
        text = f"{name} is {_short(value)}, not a name of 1 to {LONGEST_TEXT} characters without blanks"
        raise NonsenseError(text, field=name)
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or not value.isprintable():
        raise NonsenseError(f"{name} is {_short(value)}, not a text of at most {LONGEST_TEXT} characters", field=name)
    return value


def _whole(value: object, name: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise NonsenseError(f"{name} is {_short(value)}, not a whole number from {low} to {high}", field=name)
    return value


def _number(value: object, name: str, low: float, high: float) -> float:
    whole = isinstance(value, int | float) and not isinstance(value, bool)
    if not whole or not low <= value <= high or not math.isfinite(value):  # type: ignore[operator, arg-type]
        raise NonsenseError(f"{name} is {_short(value)}, not a number from {low:g} to {high:g}", field=name)
    return float(value)  # type: ignore[arg-type]


def _observation(content: Mapping[str, Any], size: int) -> npt.NDArray[np.float32]:
    values, lost = content["observation"], content.get("lost", [])
    if not isinstance(values, list) or len(values) != size:
        found = f"{len(values)} numbers" if isinstance(values, list) else _short(values)
        raise NonsenseError(f"observation is {found}, not {size} numbers", field="observation")
    if not isinstance(lost, list):
        raise NonsenseError("lost is no list of places", field="lost")
    declared = {_whole(place, "lost", 0, size - 1) for place in lost}
    row = np.empty(size, np.float32)
    for place, value in enumerate(values):
        if value is None and place in declared:
            row[place] = np.nan
        elif isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST:
            row[place] = value
        else:
            text = f"observation {place} is {_short(value)}"
            raise NonsenseError(text + (", and not declared lost" if value is None else ""), field="observation")
    return row


def _mask(value: object, count: int) -> npt.NDArray[np.bool_]:
    if not isinstance(value, list) or len(value) != count or not all(isinstance(entry, bool) for entry in value):
        raise NonsenseError(f"mask is not {count} times true or false", field="mask")
    if not any(value):
        raise NonsenseError("mask allows no action", field="mask")
    return np.array(value, np.bool_)


def _short(value: object) -> str:
    if isinstance(value, list | dict):
        return f"a JSON {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return "a number of more than 63 bits"
    text = repr(value).encode(errors="replace").decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_frame(frame: Frame, signature: Signature) -> None:
    """Refuses a question that no adapter should have let through; a NaN is a lost sensor.

    Raises:
        NonsenseError: names the field.
    """
    size, count = signature.observation_size, signature.action_count
    for name in ("decision_id", "line_id", "order_id"):
        _identifier(getattr(frame, name), name)
    observation, mask = frame.observation, frame.mask
    if observation.shape != (size,) or observation.dtype != np.float32:
        raise NonsenseError(f"observation is {observation.dtype}{list(observation.shape)}", field="observation")
    if np.isinf(observation).any():
        raise NonsenseError("observation holds an infinity", field="observation")
    if mask.shape != (count,) or mask.dtype != np.bool_ or not mask.any():
        raise NonsenseError(f"mask is {mask.dtype}{list(mask.shape)}, or allows no action", field="mask")
    _whole(frame.last_action, "last_action", 0, signature.no_action)
    _number(frame.elapsed_minutes, "elapsed_minutes", 0.0, MOST_MINUTES)
    if not math.isfinite(frame.deadline) or frame.time.utcoffset() is None:
        raise NonsenseError("a deadline that is no number, or a time without its zone", field="deadline")


def question(frame: Frame, seconds: float) -> dict[str, Any]:
    """The message of a question; ``seconds`` is what is left of its deadline."""
    lost = np.flatnonzero(np.isnan(frame.observation)).tolist()
    values = [None if math.isnan(value) else value for value in frame.observation.tolist()]
    return {
        "type": "question",
        "decision_id": frame.decision_id,
        "line_id": frame.line_id,
        "order_id": frame.order_id,
        "number": frame.number,
        "observation": values,
        "lost": lost,
        "last_action": frame.last_action,
        "elapsed_minutes": frame.elapsed_minutes,
        "mask": frame.mask.tolist(),
        "seconds": seconds,
    }
