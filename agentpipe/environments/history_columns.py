"""Which column of a machine-history table is what: failure flag, fault modes, channels, identifiers, text."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentpipe.environments.csvio import CsvFile, parse_number
from agentpipe.environments.layout import CHANNELS
from agentpipe.errors import MachineHistoryError

FLAG_NAMES = ("machine_failure", "failure", "failed", "fail", "target")
_IDENTIFIERS = ("udi", "uid", "id", "index", "row", "row_id", "unnamed_0")
_UNIT = re.compile(r"^(?P<name>.*?)\s*[\[(](?P<unit>[^\])]*)[\])]\s*$")
_BINARY = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
LARGEST = 1e30
"""Largest amount in a channel: above it squares overflow, and nothing measures so much."""
_MOSTLY = 0.95  # a column with this share of numbers (or of 0 and 1) is meant to hold nothing else

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """The table as arrays over its rows; NaN where a cell is empty.

    ``flag`` f64[rows] is the failure flag, ``modes`` and ``channels`` hold f64[rows] by header; ``ignored`` says of
    every other column why it is not used.
    """

    flag_name: str
    flag: Floats
    modes: dict[str, Floats]
    channels: dict[str, Floats]
    identifiers: tuple[str, ...]
    ignored: dict[str, str]


def plain(header: str) -> str:
    """``Air temperature [K]`` as ``air_temperature``."""
    match = _UNIT.match(header)
    name = match["name"] if match else header
    return re.sub(r"\W+", "_", name.strip().lower()).strip("_")


def unit_of(header: str) -> str:
    """``Air temperature [K]`` as ``K``; empty when the header names no unit."""
    match = _UNIT.match(header)
    return match["unit"].strip() if match else ""


def classify(content: CsvFile, failure_column: str | None = None) -> Columns:
    """Sorts the columns of a table.

    Args:
        content: The table.
        failure_column: The failure flag's header (``None``: found by its name).

    Raises:
        MachineHistoryError: no failure flag, no mode column, fewer than five channels, or a cell that does not fit its
            column (naming row and field).
    """
    cells = {name: [row.cells[name] for row in content.rows] for name in content.columns}
    binary = {name: values for name in content.columns if (values := _binary(content, name, cells[name])) is not None}
    flag_name = _flag(content, binary, failure_column)
    ignored: dict[str, str] = {}
    modes = _modes(binary, flag_name, ignored)
    if not modes:
        remedy = "the table needs one 0/1 column for each fault mode, beside the failure flag"
        raise MachineHistoryError("no fault-mode column found", file=content.path, row=1, remedy=remedy)
    others = {name: values for name, values in cells.items() if name not in binary}
    channels, identifiers = _channels(content, others, ignored)
    if len(channels) < CHANNELS:
        found = ", ".join(channels) or "none"
        message = f"{len(channels)} numeric channel columns found ({found}), {CHANNELS} needed"
        remedy = f"give a table with at least {CHANNELS} sensor columns of numbers that vary"
        raise MachineHistoryError(message, file=content.path, row=1, remedy=remedy)
    return Columns(flag_name, binary[flag_name], modes, channels, identifiers, ignored)


def _modes(binary: dict[str, Floats], flag_name: str, ignored: dict[str, str]) -> dict[str, Floats]:
    failures = np.nansum(binary[flag_name])
    others = {name: values for name, values in binary.items() if name != flag_name}
    for name, values in others.items():
        if np.nansum(values) > failures:
            ignored[name] = "a 0/1 column with more ones than there are failures: not a fault mode"
    return {name: values for name, values in others.items() if name not in ignored}


def _channels(
    content: CsvFile, cells: dict[str, list[str]], ignored: dict[str, str]
) -> tuple[dict[str, Floats], tuple[str, ...]]:
    channels: dict[str, Floats] = {}
    identifiers: list[str] = []
    for name, values in cells.items():
        numbers = _numbers(content, name, values)
        if numbers is None:
            ignored[name] = "text"
        elif plain(name) in _IDENTIFIERS or bool(np.all(np.diff(numbers) > 0)):
            identifiers.append(name)
            ignored[name] = "an identifier or a clock"
        elif np.nanmin(numbers) == np.nanmax(numbers):
            ignored[name] = "constant"
        else:
            channels[name] = numbers
    return channels, tuple(identifiers)


def _flag(content: CsvFile, binary: dict[str, Floats], wanted: str | None) -> str:
    if wanted is not None:
        candidates = [wanted] if wanted in binary else []
    else:
        named = {plain(name): name for name in reversed(list(binary))}
        candidates = [named[name] for name in FLAG_NAMES if name in named][:1]
        candidates = candidates or [name for name in binary if "fail" in name.lower()]
    if len(candidates) != 1:
        problem = "several columns could be the failure flag" if candidates else "no failure flag found"
        remedy = f"name the 0/1 column that says whether the machine failed: {FLAG_NAMES[0]}"
        found = ", ".join(candidates or binary) or "none"
        raise MachineHistoryError(problem, file=content.path, row=1, zero_one_columns=found, remedy=remedy)
    return candidates[0]


def _binary(content: CsvFile, name: str, cells: list[str]) -> Floats | None:
    values = [_BINARY.get(cell.lower()) for cell in cells]
    filled = [(cell, value) for cell, value in zip(cells, values, strict=True) if cell]
    fitting = sum(value is not None for _, value in filled)
    named = plain(name) in FLAG_NAMES and _is_number_column(cells)
    if not filled or (fitting < _MOSTLY * len(filled) and not named):
        return None
    for row, value in zip(content.rows, values, strict=True):
        if value is None and row.cells[name]:
            raise row.fail(f"{name} {row.cells[name]!r} is neither 0 nor 1", name, "correct or remove the row")
    return np.array([np.nan if value is None else value for value in values])


def _is_number_column(cells: list[str]) -> bool:
    filled = [cell for cell in cells if cell]
    return bool(filled) and sum(parse_number(cell) is not None for cell in filled) >= _MOSTLY * len(filled)


def _numbers(content: CsvFile, name: str, cells: list[str]) -> Floats | None:
    if not _is_number_column(cells):
        return None
    values = [parse_number(cell) for cell in cells]
    for row, value in zip(content.rows, values, strict=True):
        if value is None and row.cells[name]:
            message = f"{name} {row.cells[name]!r} is not a finite number"
            raise row.fail(message, name, "correct the cell, empty it, or remove the row")
        if value is not None and abs(value) > LARGEST:
            message = f"{name} {row.cells[name]} is out of range"
            raise row.fail(message, name, f"give a number in {-LARGEST:g} … {LARGEST:g}, or empty the cell")
    return np.array([np.nan if value is None else value for value in values])
