"""The disturbance table: one immutable version, its digests, and which row an environment gets (S3).

Digests cover content only: kind, intensity, variant and the parameter values as 64-bit floats, never file layout,
names of files or time stamps. An environment picks its row by a stable hash of its id, so the choice survives restarts.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments.csvio import CsvRow, read_csv
from agentpipe.environments.parameters import (
    CELL_INDEX,
    CELLS,
    INTENSITIES,
    KINDS,
    PARAMETER_INDEX,
    PARAMETER_NAMES,
    PARAMETERS,
    cell_name,
)
from agentpipe.errors import TableError
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

TABLE_FORMAT = 1
KEY_COLUMNS = ("kind", "intensity", "variant")
COLUMNS = (*KEY_COLUMNS, *PARAMETER_NAMES)
MAX_VARIANT = 9_999


class TableRow(NamedTuple):
    """One disturbance; ``values`` in the order of ``PARAMETER_NAMES``."""

    kind: str
    intensity: int
    variant: int
    values: tuple[float, ...]

    @property
    def key(self) -> tuple[str, int, int]:
        """(kind, intensity, variant): unique in a table."""
        return self.kind, self.intensity, self.variant

    @property
    def cell(self) -> str:
        """The cell that the row belongs to, such as ``sensor-3``."""
        return cell_name(self.kind, self.intensity)

    def content(self) -> list[object]:
        """What digests cover: key, then (name, value) of every parameter."""
        named = [[name, value] for name, value in zip(PARAMETER_NAMES, self.values, strict=True)]
        return [self.kind, self.intensity, self.variant, named]


class Fingerprint(NamedTuple):
    """Identity of a disturbance: SHA-256 for programs, CRC-32 (8 hexadecimal digits) for people."""

    sha256: str
    crc32: str


class ValueChange(NamedTuple):
    """One value that differs between two tables."""

    kind: str
    intensity: int
    variant: int
    column: str
    before: float
    after: float


@dataclass(frozen=True)
class TableDiff:
    """What turns one table into another; rows as (kind, intensity, variant)."""

    changed: tuple[ValueChange, ...]
    added: tuple[tuple[str, int, int], ...]
    removed: tuple[tuple[str, int, int], ...]
    cells: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.removed)

    def to_json(self) -> dict[str, object]:
        """JSON-ready form."""
        return {
            "changed": [change._asdict() for change in self.changed],
            "added": [list(key) for key in self.added],
            "removed": [list(key) for key in self.removed],
            "cells": list(self.cells),
        }


def choose_variant(environment_id: str, count: int) -> int:
    """Which of ``count`` rows an environment gets: first eight bytes of SHA-256 of its id, big-endian, mod count."""
    return int.from_bytes(hashlib.sha256(environment_id.encode()).digest()[:8], "big") % count


class DisturbanceTable:
    """One version of the disturbance table; immutable.

    Build one with :func:`table_from_rows` or :func:`load_table`, which check it.

    Args:
        rows: Checked rows, sorted by cell and variant, every cell present.
    """

    def __init__(self, rows: tuple[TableRow, ...]) -> None:
        self.rows = rows
        self.parameters: npt.NDArray[np.float32] = np.array([row.values for row in rows], dtype=np.float32)
        self.parameters.flags.writeable = False
        groups: dict[str, list[int]] = {cell: [] for cell in CELLS}
        for index, row in enumerate(rows):
            groups[row.cell].append(index)
        self._groups = {cell: tuple(indexes) for cell, indexes in groups.items()}

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DisturbanceTable) and self.version == other.version

    def __hash__(self) -> int:
        return hash(self.version)

    def __repr__(self) -> str:
        return f"DisturbanceTable({len(self)} rows, version {self.version[:12]})"

    @functools.cached_property
    def cell_digests(self) -> Mapping[str, str]:
        """SHA-256 of each cell's content, by cell, in the order of ``CELLS``."""
        contents = {cell: [self.rows[index].content() for index in self._groups[cell]] for cell in CELLS}
        return {cell: digest_bytes(canonical_json(content)) for cell, content in contents.items()}

    @functools.cached_property
    def version(self) -> str:
        """SHA-256 over the cell digests: equal versions mean equal content."""
        return digest_bytes(canonical_json({"format": TABLE_FORMAT, "cells": dict(self.cell_digests)}))

    def cell_rows(self, cell: str) -> tuple[int, ...]:
        """Row numbers of a cell, in order of variant.

        Raises:
            TableError: no such cell.
        """
        if cell not in self._groups:
            raise TableError(f"unknown cell {cell!r}", field="cell", remedy=f"use one of: {', '.join(CELLS)}")
        return self._groups[cell]

    def row_for(self, environment_id: str) -> int:
        """The row number of an environment, whose id ends in ``.<cell>``.

        Raises:
            TableError: the id names no cell.
        """
        rows = self.cell_rows(environment_id.rpartition(".")[2])
        return rows[choose_variant(environment_id, len(rows))]

    def rows_for(self, environment_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Row numbers i64[n] of many environments."""
        return np.array([self.row_for(environment_id) for environment_id in environment_ids], dtype=np.int64)

    def row_fingerprint(self, row: int) -> Fingerprint:
        """Fingerprint of a row's parameters: two rows with the same physical disturbance share it."""
        content = canonical_json(self.rows[row].content()[-1])
        return Fingerprint(digest_bytes(content), f"{zlib.crc32(content):08x}")

    def fingerprint(self, environment_id: str) -> Fingerprint:
        """Fingerprint of the disturbance that an environment gets in this version."""
        return self.row_fingerprint(self.row_for(environment_id))

    def column(self, name: str) -> npt.NDArray[np.float32]:
        """One parameter, f32[rows]; ``KeyError`` when there is none of that name."""
        return self.parameters[:, PARAMETER_INDEX[name]]


def check_value(column: str, value: float, *, file: object = None, row: object = None) -> float:
    """``value`` when it is permitted for the parameter ``column``, −0 as 0.

    Raises:
        TableError: unknown parameter, not finite, or out of range.
    """
    if column not in PARAMETER_INDEX:
        remedy = f"use one of: {', '.join(PARAMETER_NAMES)}"
        raise TableError(f"unknown parameter {column!r}", file=file, row=row, field=column, remedy=remedy)
    parameter = PARAMETERS[PARAMETER_INDEX[column]]
    if not parameter.low <= value <= parameter.high:  # false for NaN too
        remedy = f"give a number in {parameter.low:g} … {parameter.high:g} {parameter.unit}"
        raise TableError(f"{column} {value:g} is out of range", file=file, row=row, field=column, remedy=remedy)
    return float(value) + 0.0


def table_from_rows(rows: Iterable[TableRow], source: object = None) -> DisturbanceTable:
    """Checks rows and makes a table of them.

    Raises:
        TableError: an unknown kind or intensity, a value not permitted, a doubled row, a cell without rows.
    """
    by_key: dict[tuple[str, int, int], TableRow] = {}
    for row in rows:
        name = "/".join(str(part) for part in row.key)
        if row.cell not in CELL_INDEX or not 0 <= row.variant <= MAX_VARIANT or len(row.values) != len(PARAMETERS):
            remedy = f"kinds: {', '.join(KINDS)}; intensities: 1 … 5; variants: 0 … {MAX_VARIANT}"
            raise TableError(f"not a row of a disturbance table: {name}", file=source, row=name, remedy=remedy)
        if row.key in by_key:
            raise TableError("the row occurs twice", file=source, row=name, field="variant", remedy="remove one")
        values = zip(PARAMETER_NAMES, row.values, strict=True)
        checked = tuple(check_value(column, value, file=source, row=name) for column, value in values)
        _check_loss(checked, source, name)
        by_key[row.key] = row._replace(values=checked)
    present = {row.cell for row in by_key.values()}
    for cell in CELLS:
        if cell not in present:
            kind, _, intensity = cell.partition("-")
            message = f"cell {cell} has no rows: intensity {intensity} is missing from {kind}"
            remedy = "every kind needs every intensity 1 … 5; restore the rows"
            raise TableError(message, file=source, field="intensity", remedy=remedy)
    ordered = sorted(by_key.values(), key=lambda row: (CELL_INDEX[row.cell], row.variant))
    return DisturbanceTable(tuple(ordered))


def _check_loss(values: Sequence[float], source: object, row: str) -> None:
    good, bad = values[PARAMETER_INDEX["network_loss_good"]], values[PARAMETER_INDEX["network_loss_bad"]]
    if good > bad:
        message = f"network_loss_good {good:g} exceeds network_loss_bad {bad:g}"
        remedy = "the good state must lose no more than the bad one"
        raise TableError(message, file=source, row=row, field="network_loss_good", remedy=remedy)


def load_table(path: Path) -> DisturbanceTable:
    """Reads a disturbance table from a CSV file.

    Raises:
        TableError: anything wrong with the file, naming row (line number) and field.
    """
    content = read_csv(path, columns=COLUMNS, error=TableError)
    rows: list[TableRow] = []
    first_line: dict[tuple[str, int, int], int] = {}
    for line in content.rows:
        row = _parse_row(line)
        if row.key in first_line:
            message = f"{row.kind}, intensity {row.intensity}, variant {row.variant} occurs twice"
            raise line.fail(message, "variant", f"remove it here or in row {first_line[row.key]}")
        first_line[row.key] = line.number
        rows.append(row)
    return table_from_rows(rows, path)


def _parse_row(line: CsvRow) -> TableRow:
    kind = line.choice("kind", KINDS)
    intensity = line.whole("intensity", INTENSITIES[0], INTENSITIES[-1])
    variant = line.whole("variant", 0, MAX_VARIANT)
    values = tuple(line.number_in(p.name, p.low, p.high, p.unit) for p in PARAMETERS)
    _check_loss(values, line.file, str(line.number))
    return TableRow(kind, intensity, variant, values)


def table_to_csv(table: DisturbanceTable) -> bytes:
    """The table as CSV: shortest decimals that read back to the same 64-bit values, LF line ends."""
    lines = [",".join(COLUMNS)]
    for row in table.rows:
        values = (repr(value).removesuffix(".0") for value in row.values)
        lines.append(",".join((row.kind, str(row.intensity), str(row.variant), *values)))
    return ("\n".join(lines) + "\n").encode()


def diff_tables(before: DisturbanceTable, after: DisturbanceTable) -> TableDiff:
    """Row-wise difference; ``cells`` are exactly those whose digest differs, in order."""
    old = {row.key: row for row in before.rows}
    new = {row.key: row for row in after.rows}
    changed = [
        ValueChange(*row.key, column, was, now)
        for row in after.rows
        if row.key in old
        for column, was, now in zip(PARAMETER_NAMES, old[row.key].values, row.values, strict=True)
        if was != now
    ]
    cells = tuple(cell for cell in CELLS if before.cell_digests[cell] != after.cell_digests[cell])
    added = tuple(row.key for row in after.rows if row.key not in old)
    removed = tuple(row.key for row in before.rows if row.key not in new)
    return TableDiff(tuple(changed), added, removed, cells)
