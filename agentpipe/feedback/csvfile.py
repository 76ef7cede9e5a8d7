"""CSV: a header, then one row a record, of both kinds; lists are JSON arrays in a cell, an empty cell is left out.

UTF-8, separated by commas, quoted as RFC 4180 says; a byte-order mark and CRLF are fine, and so are line ends within
quotes. A row counts under the line that it begins in; the header is line 1. A row that is too long is passed over to
its end, and kept in its beginning only.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
from typing import IO, TYPE_CHECKING, Any, Final

from agentpipe.environments.csvio import parse_number
from agentpipe.feedback.block import Refused
from agentpipe.feedback.jsonl import UnfinishedError
from agentpipe.feedback.rows import KEPT_OF_LONG, LONGEST_LINE, TOO_LONG, FaultError, load_json, typed_row
from agentpipe.feedback.schema import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agentpipe.feedback.block import Row

_TYPES: Final = {name: field.type for fields in FIELDS.values() for name, field in fields.items()}
_WHOLE: Final = re.compile(r"([+-]?\d+)(\.0*)?", re.ASCII)  # pandas writes 25.0 in a column with gaps
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_LONGEST_WHOLE: Final = 19  # digits of a 64-bit number


def check(file: IO[bytes]) -> None:
    """Goes through all records.

    Raises:
        UnfinishedError: the last line has no line end, or a quote is still open.
        FaultError: no header, a column that occurs twice, broken quoting.
    """
    file.seek(-1, os.SEEK_END)
    if file.read(1) not in (b"\n", b"\r"):
        remedy = "it may be cut off; end the file with a line end if it is whole"
        raise UnfinishedError("the last line has no line end", remedy)
    file.seek(0)
    for _ in _records(file):
        pass


def read(file: IO[bytes]) -> Iterator[Row | Refused]:
    """Every record as exactly one result, after :func:`check` found nothing."""
    names: tuple[str, ...] = ()
    for line, cells in _records(file):
        if isinstance(cells, str):
            yield Refused("too_long", TOO_LONG, line, _bytes(cells)[:KEPT_OF_LONG])
            continue
        if not names:
            names = _header(cells)
            continue
        if len(cells) != len(names):
            detail = f"the row has {len(cells)} cells, the header {len(names)}"
            yield Refused("malformed_row", detail, line, _bytes(json.dumps(cells, ensure_ascii=False)))
            continue
        yield row_of_cells(dict(zip(names, (cell.strip() for cell in cells), strict=True)), line)


def row_of_cells(cells: Mapping[str, str], line: int | str) -> Row | Refused:
    """One record, from its cells by column."""
    raw = _bytes(json.dumps(cells, ensure_ascii=False))
    try:
        if len(raw) > LONGEST_LINE:
            return Refused("too_long", TOO_LONG, line, raw[:KEPT_OF_LONG])
        _check_text("".join(cells.values()))
        content = {name: _value(name, cell) for name, cell in cells.items() if cell}
        return typed_row(content, line, raw)
    except FaultError as fault:
        return Refused(fault.reason, fault.detail, line, raw)


def _value(name: str, cell: str) -> Any:  # noqa: ANN401 - JSON
    """What a cell holds by the type of its column; what does not read as that stays text, and is refused as such."""
    kind = _TYPES.get(name, "text")
    if kind in ("numbers", "flags"):
        try:
            return load_json(cell)
        except FaultError as fault:
            raise FaultError(fault.reason, f"{name}: {fault.detail}") from fault
    if kind == "whole" and (whole := _WHOLE.fullmatch(cell)):
        if len(whole[1]) > _LONGEST_WHOLE:
            raise FaultError("number_out_of_range", f"{name}: a number of more than 63 bits")
        return int(whole[1])
    if kind == "number" and _NUMBER.fullmatch(cell):
        number = parse_number(cell)
        if number is None:
            raise FaultError("number_out_of_range", f"{name}: not a finite number")
        return number
    return cell


def _records(file: IO[bytes]) -> Iterator[tuple[int, list[str] | str]]:
    """Records that are not blank, the header first, each with the line it begins in; of a too long one its beginning.

    Raises:
        UnfinishedError: a quote is open at the end.
        FaultError: no header, a column that occurs twice, broken quoting.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = _Lines(text)
    reader = csv.reader(lines, strict=True)
    header = True
    try:
        while True:
            first = lines.begin()
            try:
                cells = next(reader)
            except StopIteration:
                break
            except _TooLongError as error:
                if header:
                    detail = f"line {first}: column names of more than {LONGEST_LINE:,} characters"
                    raise FaultError("not_csv", detail) from error
                yield first, str(error)
                continue
            if any(cell.strip() for cell in cells):
                if header:
                    _header(cells)
                    header = False
                yield first, cells
        if header:
            raise FaultError("no_header", "there is no line with column names")
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise UnfinishedError("a quote is open at the end") from error
        raise FaultError("not_csv", f"line {first}: {error}") from error
    finally:
        text.detach()


class _TooLongError(Exception):
    """The record that is being read has more than ``LONGEST_LINE`` characters; the text is its beginning."""


class _Lines:
    """The lines of a file for ``csv.reader``, which asks for as many as a record has; memory is bounded by a record.

    Raises:
        _TooLongError: (when iterated) the record is too long; the next line is the first one after it.
    """

    def __init__(self, text: io.TextIOWrapper[Any]) -> None:
        self._text = text
        self._number = 0
        self._ahead = ""
        self._held: list[str] = []
        self._size = 0

    def begin(self) -> int:
        """A record begins; returns the number of its first line."""
        self._held, self._size = [], 0
        return self._number + 1

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._next()
        self._held.append(line)
        self._size += len(line)
        if self._size > LONGEST_LINE:
            self._pass_over()
            raise _TooLongError("".join(self._held)[:KEPT_OF_LONG])
        return line

    def _next(self) -> str:
        line, self._ahead = self._ahead, ""
        if line != "\r":
            line += self._text.readline(LONGEST_LINE + 1)
        if not line:
            raise StopIteration
        if line.endswith("\r") and (line == "\r" or len(line) > LONGEST_LINE):  # its line feed may have been cut off
            ahead = self._text.readline(1)
            line, self._ahead = (line + ahead, "") if ahead == "\n" else (line, ahead)
        self._number += line.endswith(("\n", "\r"))
        return line

    def _pass_over(self) -> None:
        """Reads on to the end of the record."""
        state = _FIELD
        for line in itertools.chain(self._held, iter(self._next, None)):
            state = _state_after(line, state)
            if state == _END:
                return
        if state == _QUOTED:
            raise UnfinishedError("a quote is open at the end")


_FIELD, _PLAIN, _QUOTED, _QUOTE, _END = range(5)
"""before a field, in one, in quotes, after a quote within quotes, after the record"""
_ENDS: Final = {_PLAIN: re.compile(r"[,\r\n]"), _QUOTED: re.compile('"')}


def _state_after(text: str, state: int) -> int:
    """Where ``csv.reader`` is after ``text``: a line, or a piece of one.

    Raises:
        FaultError: something else than a comma follows a closing quote.
    """
    place = 0
    while place < len(text):
        if state in _ENDS:
            found = _ENDS[state].search(text, place)
            if found is None:
                return state
            place = found.start()
        mark = text[place]
        place += 1
        if mark in "\r\n" and state != _QUOTED:
            return _END
        if state == _QUOTED:
            state = _QUOTE
        elif mark == '"' and state in (_FIELD, _QUOTE):
            state = _QUOTED
        elif mark == ",":
            state = _FIELD
        elif state == _QUOTE:
            raise FaultError("not_csv", "',' expected after '\"'")
        else:
            state = _PLAIN
    return state


def _header(cells: list[str]) -> tuple[str, ...]:
    names = tuple(cell.strip() for cell in cells)
    _check_text("".join(names))
    if "kind" not in names:
        raise FaultError("no_header", "the first line has no column kind; columns are separated by commas")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FaultError("duplicate_column", f"column {twice[0]!r} occurs twice")
    return names


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start]) - 0xDC00
        raise FaultError("not_utf8", f"byte 0x{code:02x} is not UTF-8") from error


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
