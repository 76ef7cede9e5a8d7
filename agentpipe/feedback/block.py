"""Rows of one kind as columns, on their way to be judged: what every format is turned into.

A block holds what fits the *types* of the fields; whether the values make sense is judged once for all formats
(:mod:`agentpipe.feedback.rules`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from agentpipe.feedback.schema import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

MISSING: Final = -(2**63)
"""In a column of whole numbers: the row leaves the field out."""


@dataclass(frozen=True)
class Refused:
    """A row, or a whole file (line 0), that is not taken: a short reason to count by, and what exactly is wrong.

    ``raw`` are the bytes of the row as it came, or the row as a JSON object where its format has no lines.
    """

    reason: str
    detail: str
    line: int | str = 0
    raw: bytes = b""


@dataclass(frozen=True)
class Row:
    """One row whose fields have the right types; lists are arrays, the time is microseconds since 1970 (UTC)."""

    kind: str
    fields: dict[str, Any]
    line: int | str
    raw: bytes
    source: int = 0
    """number of the source it came from, given by the batch"""


@dataclass(frozen=True)
class Block:
    """n rows of one kind in columns.

    Columns by the type of their field: ``id`` and ``text`` are ``pa.StringArray`` (null: left out); ``time`` i64[n];
    ``whole`` i64[n] (``MISSING``: left out); ``number`` f64[n] (NaN where left out, see ``absent``); ``numbers`` and
    ``flags`` are (lengths i64[n], values f64 or bool, all rows one after the other).
    """

    kind: str
    columns: dict[str, Any]
    sources: npt.NDArray[np.int64]
    lines: Sequence[int | str]
    raw: Callable[[int], bytes]
    """the bytes of a row, asked for where it is refused"""
    refused: dict[int, tuple[str, str]] = field(default_factory=dict)
    """what the format has already found wrong: row → reason and detail"""

    def __len__(self) -> int:
        return len(self.sources)


def block_of(kind: str, rows: Sequence[Row]) -> Block:
    """Rows of one kind, turned into columns."""
    columns: dict[str, Any] = {}
    for name, definition in FIELDS[kind].items():
        values: list[Any] = [row.fields.get(name) for row in rows]
        if definition.type in ("id", "text"):
            columns[name] = pa.array(values, type=pa.string())
        elif definition.type in ("whole", "time"):
            columns[name] = np.array([MISSING if value is None else value for value in values], dtype=np.int64)
        elif definition.type == "number":
            columns[name] = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        else:
            kind_of = np.bool_ if definition.type == "flags" else np.float64
            lengths = np.array([len(value) for value in values], dtype=np.int64)
            columns[name] = (lengths, np.concatenate([np.empty(0, kind_of), *values]).astype(kind_of))
    return Block(
        kind,
        columns,
        np.array([row.source for row in rows], dtype=np.int64),
        [row.line for row in rows],
        lambda index: rows[index].raw,
    )


def blocks_of(rows: Sequence[Row]) -> list[Block]:
    """Rows of both kinds as one block a kind, each in the order in which they came."""
    found = []
    for kind in FIELDS:
        chosen = [row for row in rows if row.kind == kind]
        if chosen:
            found.append(block_of(kind, chosen))
    return found
