"""Text from outside (reasons, versions, names) made harmless for Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from agentpipe.evaluation.tables import markdown_table

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 120
"""Characters of one such text that are shown."""
_SPACE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]+")
_SPECIAL = re.compile(r"([\\`*_\[\]!#~|])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def one_line(text: object, most: int = MOST) -> str:
    """``text`` on one line, without control characters and marks of direction, at most ``most`` characters."""
    line = _SPACE.sub(" ", str(text)).strip()
    return line if len(line) <= most else f"{line[: most - 1]}…"


def plain(text: object, most: int = MOST) -> str:
    """:func:`one_line`, with everything that Markdown or HTML would take for more than text escaped."""
    return _SPECIAL.sub(r"\\\1", one_line(text, most)).translate(_ENTITIES)


def safe_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose cells are :func:`plain`."""
    return markdown_table([plain(cell) for cell in header], [[plain(cell) for cell in row] for row in rows])
