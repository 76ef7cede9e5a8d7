"""JSON lines: one row a line, in UTF-8. A byte-order mark, CRLF and blank lines are fine."""

from __future__ import annotations

import json
import os
from typing import IO, TYPE_CHECKING, Final

from agentpipe.feedback.rows import LONGEST_LINE, read_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentpipe.feedback.block import Refused, Row

BOM: Final = b"\xef\xbb\xbf"


class UnfinishedError(Exception):
    """The file is still being written, as far as one can see; ``remedy`` is for a person who says that it is not."""

    def __init__(self, why: str, remedy: str = "submit it when it is") -> None:
        super().__init__(why)
        self.remedy = remedy


def check(file: IO[bytes]) -> None:
    """Looks at the end of the file.

    Raises:
        UnfinishedError: the last line has no line end and is no JSON: somebody is still writing.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LONGEST_LINE - 1))
    last = file.read().rsplit(b"\n", 1)[-1].removeprefix(BOM).strip()
    file.seek(0)
    if not last:
        return
    try:
        json.loads(last)
    except (ValueError, RecursionError) as error:
        raise UnfinishedError("the last line has no end and is no JSON") from error


def read(file: IO[bytes]) -> Iterator[Row | Refused]:
    """Every non-blank line as exactly one result."""
    number = 0
    while True:
        line = file.readline(LONGEST_LINE + 2)
        if not line:
            return
        number += 1
        if number == 1:
            line = line.removeprefix(BOM)
        kept = line
        while kept and not kept.endswith(b"\n"):  # the rest of a line that is too long is passed over
            kept = file.readline(LONGEST_LINE)
        raw = line.removesuffix(b"\n").removesuffix(b"\r")
        text = raw.strip()
        if text:
            yield read_row(text, number, raw)
