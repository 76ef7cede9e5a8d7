"""A line as a stream of rows, CSV or JSON lines: an example of an adapter for a plant of one's own.

Rows come from a file, a fifo, standard input (``-``) or ``tcp://HOST:PORT``; a mapping, a JSON file, says what its
columns mean; actions go out as lines of JSON. The next row is taken when the one before is answered or its time is
over. ::

    {
     "format": "csv",                                  "jsonl" is the other one
     "line_id": "press-4",                             a text, or {"column": "line"}
     "order_id": {"column": "order"},
     "elapsed_minutes": {"column": "minutes"},
     "observation": {"reading.0.0": "temperature", "clock.elapsed": {"column": "minutes", "scale": 1, "offset": 0}},
     "otherwise": 0,                                   of every feature that is not named
     "mask": {"column": "allowed"},                    names or numbers with blanks between; without it all are allowed
     "number": {"column": "step"},                     without it rows of an order are counted
     "result": {"column": "result"},                   not empty: the order is over
     "operator": {"column": "operator"},               not empty: this person has the line
     "seconds": 0.5,
     "actions": "actions.jsonl"                        where answers are appended; without it standard output
    }

``observation`` may also be a list with an entry for each feature: a column, a number, or an object as above. An empty
cell or null is a lost sensor.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from agentpipe.closing import Closing
from agentpipe.errors import CorruptError, LineError
from agentpipe.serving.agent.action_file import ActionFile
from agentpipe.serving.agent.messages import LONGEST_LINE, ForeignLineError, LineEndedError, NonsenseError, Reader, load
from agentpipe.serving.agent.socket_line import CONNECT_SECONDS, parse_url
from agentpipe.serving.agent.types import Frame
from agentpipe.serving.agent.vocabulary import vocabulary_of
from agentpipe.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agentpipe.serving.agent.types import Answer, Message
    from agentpipe.serving.signature import Signature

_FIELDS: Final = {
    "format", "line_id", "order_id", "elapsed_minutes", "observation", "otherwise", "mask", "number", "result",
    "operator", "seconds", "actions",
}  # fmt: skip
_NEEDED: Final = ("format", "line_id", "order_id", "elapsed_minutes", "observation")
_NUMBERS: Final = ("elapsed_minutes", "number", "seconds")
_AHEAD: Final = 1_024
"""rows that are read before they are asked for"""


class Mapped:
    """What the columns of a stream mean.

    Args:
        path: of the mapping.
        signature: of the line.

    Raises:
        ForeignLineError: the mapping cannot be used; names file and field.
    """

    def __init__(self, path: Path, signature: Signature) -> None:
        self._path, self._signature = path, signature
        self._vocabulary = vocabulary_of(signature)
        try:
            content = read_json(path)
        except CorruptError as error:
            raise ForeignLineError(error.message, file=path, remedy="write a mapping, or correct it") from error
        if not isinstance(content, dict):
            raise self._fault("", "a JSON object is expected")
        for name in sorted(set(content) - _FIELDS):
            raise self._fault(name, f"no such field; there are {', '.join(sorted(_FIELDS))}")
        for name in _NEEDED:
            if name not in content:
                raise self._fault(name, "is missing")
        self.format = content["format"]
        if self.format not in ("csv", "jsonl"):
            raise self._fault("format", "csv or jsonl is expected")
        self.actions = content.get("actions")
        if not (self.actions is None or isinstance(self.actions, str)):
            raise self._fault("actions", "the name of a file is expected")
        self._otherwise = self._number(content.get("otherwise", 0), "otherwise")
        self._features = self._observation(content["observation"])
        names = ("line_id", "order_id", "elapsed_minutes", "number", "mask", "result", "operator", "seconds")
        self._entries = {name: self._entry(content[name], name) for name in names if name in content}
        self._check_constants()
        columns = [entry[0] for entry in (*self._features, *self._entries.values()) if isinstance(entry, tuple)]
        self.columns = frozenset(columns)

    def _check_constants(self) -> None:
        for name in _NUMBERS:
            if isinstance(self._entries.get(name), str):
                raise self._fault(name, "a number or a column is expected")
        seconds = self._entries.get("seconds", 1.0)
        if not isinstance(seconds, tuple) and seconds <= 0:
            raise self._fault("seconds", "a number above 0 is expected")

    def _fault(self, field: str, message: str) -> ForeignLineError:
        return ForeignLineError(message, file=self._path, field=field or None, remedy="correct the mapping")

    def _number(self, value: object, field: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._fault(field, "a number is expected")
        return float(value)

    def _entry(self, value: object, field: str, *, texts_are_columns: bool = False) -> Any:  # noqa: ANN401 - a constant or a column
        """A constant, or a column as (name, scale, offset)."""
        if isinstance(value, dict):
            if set(value) - {"column", "scale", "offset"} or not isinstance(value.get("column"), str):
                raise self._fault(field, "a column is written {column: NAME, scale: 1, offset: 0}")
            numbers = (self._number(value.get(name, default), field) for name, default in (("scale", 1), ("offset", 0)))
            return (value["column"], *numbers)
        if isinstance(value, str):
            return (value, 1.0, 0.0) if texts_are_columns else value
        return self._number(value, field)

    def _observation(self, value: object) -> list[Any]:
        size, names = self._signature.observation_size, self._vocabulary.observations
        if isinstance(value, list):
            if len(value) != size:
                raise self._fault("observation", f"{len(value)} entries, the line has {size} features")
            return [self._entry(entry, f"observation {n}", texts_are_columns=True) for n, entry in enumerate(value)]
        if not isinstance(value, dict):
            raise self._fault("observation", "a list, or an object by names of features, is expected")
        features: list[Any] = [self._otherwise] * size
        for name, entry in value.items():
            if name not in names:
                known = "one is close" if names else "the line's names are not known: give a list"
                raise self._fault("observation", f"the line has no feature {name!r} ({known})")
            features[names.index(name)] = self._entry(entry, f"observation {name}", texts_are_columns=True)
        return features

    def text(self, name: str, row: Mapping[str, Any]) -> str:
        """A field of a row as text; empty where it has none."""
        entry = self._entries.get(name, "")
        value = row.get(entry[0]) if isinstance(entry, tuple) else entry
        return "" if value is None else str(value).strip()

    def question(self, row: Mapping[str, Any], number: int, last_action: int) -> dict[str, Any]:
        """A row as the message of a question; :class:`~agentpipe.serving.agent.messages.Reader` judges it.

        Raises:
            NonsenseError: a cell is no number, or an action that the line does not have.
        """
        observation = [self._value(entry, row, f"observation {n}") for n, entry in enumerate(self._features)]
        line, order = self.text("line_id", row), self.text("order_id", row)
        if "number" in self._entries:
            given = self._value(self._entries["number"], row, "number")
            number = int(given) if given is not None and given == int(given) else -1
        seconds = self._value(self._entries["seconds"], row, "seconds") if "seconds" in self._entries else None
        return {
            "type": "question",
            "decision_id": decision_id(line, order, number),
            "line_id": line,
            "order_id": order,
            "number": number,
            "observation": observation,
            "lost": [place for place, value in enumerate(observation) if value is None],
            "last_action": last_action,
            "elapsed_minutes": self._value(self._entries["elapsed_minutes"], row, "elapsed_minutes"),
            "mask": self._mask(row),
            **({} if seconds is None else {"seconds": seconds}),
        }

    def _value(self, entry: Any, row: Mapping[str, Any], field: str) -> float | None:  # noqa: ANN401 - see _entry
        if not isinstance(entry, tuple):
            if isinstance(entry, str):
                raise NonsenseError(f"{field} is {entry!r}, no number", field=field)
            return float(entry)
        name, scale, offset = entry
        cell = row.get(name)
        if cell is None or (isinstance(cell, str) and not cell.strip()):
            return None
        try:
            value: float = math.nan if "_" in str(cell) else float(cell) * scale + offset
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value) or isinstance(cell, bool):
            raise NonsenseError(f"{name} is {str(cell)[:60]!r}, no number", field=field)
        return value

    def _mask(self, row: Mapping[str, Any]) -> list[bool]:
        count = self._signature.action_count
        if "mask" not in self._entries:
            return [True] * count
        mask = [False] * count
        for word in self.text("mask", row).split():
            action = self._vocabulary.action(int(word) if word.isdecimal() and len(word) < 9 else word)
            if action is None or action >= count:
                raise NonsenseError(f"the line has no action {word[:60]!r}", field="mask")
            mask[action] = True
        return mask


def decision_id(line: str, order: str, number: int) -> str:
    """The id of a question: another one for every other line, order or number.

    In the line's name ``-`` is written ``%2D`` and ``%`` as ``%25``, so that its end is known.
    """
    return f"{line.replace('%', '%25').replace('-', '%2D')}-{order}-{number}"


class StreamLine(Closing):
    """Rows that come one after the other; :meth:`receive` belongs to one thread, :meth:`act` may be another's.

    Args:
        lines: of the stream, without line ends.
        mapped: what they mean.
        signature: of the policy.
        seconds: until when a question wants its answer where the mapping does not say.
        actions: where answers go.
        close: lets go of the stream.
    """

    def __init__(
        self,
        lines: Iterator[bytes],
        mapped: Mapped,
        signature: Signature,
        *,
        seconds: float,
        actions: ActionFile,
        close: contextlib.ExitStack,
    ) -> None:
        self.signature, self._mapped, self._actions, self._stack = signature, mapped, actions, close
        self._reader = Reader(signature, seconds)
        self._rows: queue.Queue[Mapping[str, Any] | LineError | None] = queue.Queue(_AHEAD)
        self._waiting: list[Message] = []
        self._orders: dict[str, tuple[str, int, int]] = {}
        """by line: order, questions so far, last action"""
        self._persons: dict[str, str] = {}
        self._open: Frame | None = None
        """the question that is not answered yet"""
        self._answered = threading.Event()
        self._ended = False
        threading.Thread(target=self._read, args=(lines,), name="stream", daemon=True).start()

    def receive(self, timeout: float) -> Message | None:
        """The next message; see :class:`~agentpipe.serving.agent.types.LineAdapter`.

        Raises:
            NonsenseError: a row makes no sense; the next call goes on with the one after it.
            ForeignLineError: the stream lacks a column that the mapping names.
            LineEndedError: that was the last row.
        """
        if self._waiting:
            return self._waiting.pop(0)
        end = time.monotonic() + timeout
        if self._open is not None:
            if not self._answered.wait(max(0.0, min(end, self._open.deadline) - time.monotonic())) and (
                time.monotonic() < self._open.deadline
            ):
                return None
            self._open = None
        try:
            row = self._rows.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return None
        if row is None or isinstance(row, ForeignLineError):
            self._rows.put(row)  # so says every later call
            raise LineEndedError("the stream has ended") if row is None else row
        if isinstance(row, LineError):
            raise row
        self._waiting = self._messages(row)
        return self._waiting.pop(0) if self._waiting else None

    def act(self, frame: Frame, answer: Answer) -> None:
        """Appends the answer as a line of JSON.

        Raises:
            LineError: it cannot be written; nothing of it is, then or later.
        """
        name = vocabulary_of(self.signature).action_name(answer.action) if answer.action >= 0 else "ask a person"
        message = {
            "decision_id": frame.decision_id,
            "line_id": frame.line_id,
            "order_id": frame.order_id,
            "action": answer.action,
            "name": name,
            "by": answer.decided_by,
            "notes": list(answer.notes),
        }
        self._actions.write(json.dumps(message))
        order, count, _ = self._orders.get(frame.line_id, (frame.order_id, frame.number + 1, answer.action))
        if answer.action >= 0 and order == frame.order_id:
            self._orders[frame.line_id] = (order, count, answer.action)
        if self._open is not None and self._open.decision_id == frame.decision_id:
            self._answered.set()

    def close(self) -> None:
        """Lets go of the stream."""
        self._ended = True
        self._stack.close()

    # ------------------------------------------------------------------------------------------------ rows

    def _messages(self, row: Mapping[str, Any]) -> list[Message]:
        """What a row says: a person came or went, an order is over, or a question."""
        text = self._mapped.text
        line, order = text("line_id", row), text("order_id", row)
        found: list[Message] = []
        person, before = text("operator", row), self._persons.get(line, "")
        if person != before:
            self._persons[line] = person
            said = {"type": "takeover", "line_id": line, "active": bool(person), "who": person or before}
            found.append(self._reader.message(said))
        result = text("result", row)
        if result:
            over = self._reader.message({"type": "ended", "line_id": line, "order_id": order, "result": result})
            self._orders.pop(line, None)
            return [*found, over]
        known, count, last = self._orders.get(line, ("", 0, self.signature.no_action))
        if known != order:
            count, last = 0, self.signature.no_action
        question = self._reader.message(self._mapped.question(row, count, last))
        assert isinstance(question, Frame)
        self._orders[line] = (order, count + 1, last)
        if not person:
            self._open = question
            self._answered.clear()
        return [*found, question]

    def _read(self, lines: Iterator[bytes]) -> None:
        """Reads ahead, in a thread of its own: a fifo or standard input cannot be waited for with a time-out."""
        with contextlib.suppress(OSError, ValueError):  # closed while it was read
            for row in _rows(lines, self._mapped):
                while not self._ended:
                    with contextlib.suppress(queue.Full):
                        self._rows.put(row, timeout=0.2)
                        break
                if self._ended or isinstance(row, ForeignLineError):
                    return
        self._rows.put(None)


def _rows(lines: Iterator[bytes], mapped: Mapped) -> Iterator[Mapping[str, Any] | LineError]:
    header: list[str] | None = None
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")  # noqa: PLW2901 - a byte-order mark is no part of it
        if not line.strip():
            continue
        try:
            if mapped.format == "jsonl":
                yield load(line)
                continue
            cells = next(csv.reader([_text(line)], strict=True))
        except (NonsenseError, csv.Error) as error:
            yield NonsenseError(f"row {number}: {getattr(error, 'message', error)}", row=number)
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            if (fault := _header_fault(header, mapped)) is not None:
                yield fault
                return
        elif len(cells) != len(header):
            yield NonsenseError(f"row {number} has {len(cells)} cells, the header {len(header)}", row=number)
        else:
            yield dict(zip(header, cells, strict=True))


def _text(line: bytes) -> str:
    if len(line) > LONGEST_LINE:
        raise NonsenseError(f"a row of more than {LONGEST_LINE:,} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise NonsenseError("not UTF-8") from error


def _header_fault(header: list[str], mapped: Mapped) -> ForeignLineError | None:
    if len(set(header)) != len(header):
        return ForeignLineError("a column occurs twice in the header", remedy="correct the stream")
    missing = sorted(mapped.columns - set(header))
    if missing:
        return ForeignLineError(
            f"the stream has no column {missing[0]!r}", field=missing[0], remedy="correct the mapping"
        )
    return None


def _split(stream: IO[bytes], *, close: bool) -> Iterator[bytes]:
    """Lines of a stream, closed by the thread that reads it; the rest of one that is too long is passed over."""
    try:
        while line := stream.readline(LONGEST_LINE + 2):
            kept = line
            while not line.endswith(b"\n") and len(line) > LONGEST_LINE:
                line = stream.readline(LONGEST_LINE + 2)
            yield kept.rstrip(b"\r\n")
    finally:
        if close:
            stream.close()


def open_stream_line(source: str, mapping: Path, signature: Signature, seconds: float) -> StreamLine:
    """The line that is read from ``source``.

    Args:
        source: a file or fifo, ``-`` for standard input, or ``tcp://HOST:PORT``.
        mapping: see the module.
        signature: of the policy.
        seconds: until when a question wants its answer where the mapping does not say.

    Raises:
        ForeignLineError: the mapping cannot be used.
        LineError: the stream, or the file of actions, cannot be opened.
    """
    mapped = Mapped(mapping, signature)
    with contextlib.ExitStack() as stack:
        actions = stack.enter_context(ActionFile(None if mapped.actions is None else Path(mapped.actions)))
        try:
            stream = _opened(source, stack)
        except OSError as error:
            text = f"cannot be opened: {error.strerror or error}"
            raise LineError(text, source=source, remedy="name a stream that is there") from error
        lines = _split(stream, close=source != "-")
        return StreamLine(lines, mapped, signature, seconds=seconds, actions=actions, close=stack.pop_all())
    raise AssertionError("nothing above suppresses an error")


def _opened(source: str, stack: contextlib.ExitStack) -> IO[bytes]:
    if source == "-":
        return sys.stdin.buffer
    if not source.startswith("tcp://"):
        return Path(source).open("rb")
    connection = stack.enter_context(socket.create_connection(parse_url(source), CONNECT_SECONDS))
    connection.settimeout(None)
    stack.callback(_shut, connection)
    return connection.makefile("rb")


def _shut(connection: socket.socket) -> None:
    """Wakes the thread that reads."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
