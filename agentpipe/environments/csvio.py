"""Strict CSV reading: whatever is wrong with a file becomes a typed error naming file, row, field and remedy.

Rows are numbered as a person's editor numbers lines: the header is row 1. A byte-order mark and CRLF line ends are
fine.
"""

from __future__ import annotations

import csv
import io
import math
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentpipe.errors import HomeError, InputError
from agentpipe.storage import digest_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_COUNT = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_RESTORE = "restore the file from its original; it may have been cut off while it was written"


@dataclass(frozen=True)
class CsvRow:
    """One data row: its line number in the file and its cells by column name, surrounding blanks removed."""

    file: Path
    number: int
    cells: dict[str, str]
    error: type[InputError]

    def text(self, field: str) -> str:
        """The cell of ``field``; raises the file's typed error when it is empty."""
        value = self.cells[field]
        if not value:
            raise self.fail(f"{field} is empty", field, "give a value")
        return value

    def choice(self, field: str, allowed: Sequence[str]) -> str:
        """The cell of ``field``, which must be one of ``allowed``."""
        value = self.text(field)
        if value not in allowed:
            raise self.fail(f"unknown {field} {value!r}", field, f"use one of: {', '.join(allowed)}")
        return value

    def whole(self, field: str, low: int, high: int) -> int:
        """The cell of ``field`` as a whole number in [low, high]."""
        value = self.text(field)
        if not _COUNT.fullmatch(value):
            raise self.fail(f"{field} {value!r} is not a whole number", field, f"give a whole number {low} … {high}")
        if not low <= int(value) <= high:
            raise self.fail(f"{field} {value} is out of range", field, f"give a whole number {low} … {high}")
        return int(value)

    def number_in(self, field: str, low: float, high: float, unit: str = "") -> float:
        """The cell of ``field`` as a finite number in [low, high]; −0 becomes 0."""
        value = self.finite(field)
        if not low <= value <= high:
            permitted = f"{low:g} … {high:g} {unit}".rstrip()
            raise self.fail(f"{field} {self.cells[field]} is out of range", field, f"give a number in {permitted}")
        return value

    def finite(self, field: str) -> float:
        """The cell of ``field`` as a finite number."""
        text = self.text(field)
        value = parse_number(text)
        if value is None:
            raise self.fail(f"{field} {text!r} is not a finite number", field, "give a decimal number such as 0.05")
        return value

    def fail(self, message: str, field: str | None, remedy: str) -> InputError:
        """The file's typed error, naming this row."""
        return self.error(message, file=self.file, row=self.number, field=field, remedy=remedy)


@dataclass(frozen=True)
class CsvFile:
    """A whole CSV file in memory; ``sha256`` is that of its bytes, ``notes`` says what was tolerated in it."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[CsvRow, ...]
    sha256: str
    notes: tuple[str, ...]


def parse_number(text: str) -> float | None:
    """``text`` as a finite float (−0 becomes 0), or ``None``: NaN, infinities, ``1e400`` and ``1_000`` are none."""
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value + 0.0 if math.isfinite(value) else None


def read_csv(
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    error: type[InputError] = InputError,
    final_line_break: bool = True,
) -> CsvFile:
    """Reads a comma-separated UTF-8 file whole.

    Args:
        path: The file.
        columns: Exactly these columns must be there, in any order; ``None`` accepts any header.
        error: The error type to raise.
        final_line_break: A last line without a line break is refused (it may be half a line); otherwise it is noted.

    Raises:
        InputError: (as ``error``) missing, unreadable, empty, wrongly encoded, NUL bytes, broken quoting, unknown,
        missing
            or doubled columns, a row with too few or too many fields, no data rows, a half-written last line.
    """
    data = read_input(path, error)
    text, notes = _decode(path, data, error)
    if not text.endswith(("\n", "\r")):
        if final_line_break:
            lines = len(text.splitlines())
            remedy = f"{_RESTORE}; if it is complete, add a line break at its end"
            raise error("the last line has no line break", file=path, row=lines, remedy=remedy)
        notes.append("the last line has no line break")
    lines_iterator = _lines(path, text, error)
    _, header = next(lines_iterator, (1, []))
    if not header:
        raise error("the file is empty", file=path, remedy=_RESTORE)
    names = _check_header(path, header, columns, error)
    rows = tuple(_rows(path, names, lines_iterator, error))
    if not rows:
        raise error("the file has a header and no rows", file=path, row=1, remedy=_RESTORE)
    return CsvFile(path, names, rows, digest_bytes(data), tuple(notes))


def read_input(path: Path, error: type[InputError]) -> bytes:
    """The bytes of an input file, or a typed error saying why they cannot be read or that there are none."""
    try:
        if not path.is_dir() and not stat.S_ISREG(path.stat().st_mode):  # a device or a pipe may never end
            raise error("this is not a plain file", file=path, remedy="give a CSV file")
        data = path.read_bytes()
    except FileNotFoundError as cause:
        raise error("the file does not exist", file=path, remedy="check the path") from cause
    except IsADirectoryError as cause:
        raise error("this is a folder, not a file", file=path, remedy="give the file itself") from cause
    except PermissionError as cause:
        raise error("the file may not be read", file=path, remedy="change its permissions") from cause
    except OSError as cause:
        raise HomeError(f"the file cannot be read: {cause.strerror}", file=path, remedy="check the disk") from cause
    if not data.strip():
        raise error("the file is empty", file=path, remedy=_RESTORE)
    return data


def _decode(path: Path, data: bytes, error: type[InputError]) -> tuple[str, list[str]]:
    notes: list[str] = []
    if data.startswith(_WIDE_BOMS):
        raise error("the file is UTF-16, not UTF-8", file=path, remedy="save it as UTF-8")
    if data.startswith(_BOM):
        data = data[len(_BOM) :]
        notes.append("byte-order mark removed")
    nul = data.find(b"\0")
    if nul >= 0:
        row = data.count(b"\n", 0, nul) + 1
        raise error("the file holds a NUL byte", file=path, row=row, remedy=_RESTORE)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        row = data.count(b"\n", 0, cause.start) + 1
        message = f"byte {cause.start} (0x{data[cause.start]:02x}) is not UTF-8"
        raise error(message, file=path, row=row, remedy="save the file as UTF-8") from cause
    if not text.strip():
        raise error("the file is empty", file=path, remedy=_RESTORE)
    if "\r\n" in text:
        notes.append("CRLF line ends")
    return text, notes


def _lines(path: Path, text: str, error: type[InputError]) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    first = 1
    try:
        for fields in reader:
            if fields and any(field.strip() for field in fields):
                yield first, fields
            elif fields and len(fields) > 1:
                raise error("every field of the row is empty", file=path, row=first, remedy="fill or remove the row")
            first = reader.line_num + 1
    except csv.Error as cause:
        raise error(f"broken quoting: {cause}", file=path, row=first, remedy=_RESTORE) from cause


def _check_header(
    path: Path, header: list[str], columns: Sequence[str] | None, error: type[InputError]
) -> tuple[str, ...]:
    names = tuple(name.strip() for name in header)
    for mark, separator in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and mark in names[0]:
            remedy = "save it with commas between the fields (and points in numbers)"
            raise error(f"the fields are separated by {separator}, not by commas", file=path, row=1, remedy=remedy)
    seen: set[str] = set()
    for position, name in enumerate(names, 1):
        if not name:
            raise error(f"column {position} has no name", file=path, row=1, remedy="name every column once")
        if name in seen:
            raise error(f"column {name!r} occurs twice", file=path, row=1, field=name, remedy="name every column once")
        seen.add(name)
    for name in names if columns is not None else ():
        if name not in (columns or ()):
            remedy = f"remove it; the columns are: {', '.join(columns or ())}"
            raise error(f"unknown column {name!r}", file=path, row=1, field=name, remedy=remedy)
    for name in columns or ():
        if name not in seen:
            remedy = f"add it; the columns are: {', '.join(columns or ())}"
            raise error(f"column {name!r} is missing", file=path, row=1, field=name, remedy=remedy)
    return names


def _rows(
    path: Path, names: tuple[str, ...], lines: Iterator[tuple[int, list[str]]], error: type[InputError]
) -> Iterator[CsvRow]:
    for number, fields in lines:
        if len(fields) != len(names):
            missing = names[len(fields)] if len(fields) < len(names) else None
            message = f"the row has {len(fields)} fields, the header {len(names)}"
            raise error(message, file=path, row=number, field=missing, remedy=_RESTORE)
        cells = dict(zip(names, (field.strip() for field in fields), strict=True))
        yield CsvRow(path, number, cells, error)
