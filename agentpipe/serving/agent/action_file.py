"""Where a stream's answers go: each line is written at once, whole or not at all, and nothing is kept for later."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import TYPE_CHECKING

from agentpipe.closing import Closing
from agentpipe.errors import LineError

if TYPE_CHECKING:
    from pathlib import Path

_REMEDY = "look at where actions go"


class ActionFile(Closing):
    """Lines that are appended to a file, or to standard output.

    There is no buffer: a line that could not be written is not written afterwards, when whoever asked has gone on.

    Args:
        path: of the file; standard output if None.

    Raises:
        LineError: it cannot be opened.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._name = "standard output" if path is None else str(path)
        try:
            if path is None:
                self._descriptor = os.dup(sys.stdout.fileno())
            else:
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            text = f"actions cannot be written to {self._name}: {reason}"
            raise LineError(text, file=self._name, field="actions", remedy="correct actions in the mapping") from error
        self._open = True
        self._torn = path is not None and _ends_within_a_line(path)

    def write(self, line: str) -> None:
        """Writes ``line`` and its end.

        Raises:
            LineError: it cannot be written; what was written of it is cut off again.
        """
        data, done = f"{line}\n".encode(), 0
        if self._torn:
            data = b"\n" + data
        try:
            if not self._open:
                raise OSError("it is closed")  # noqa: TRY301 - said as whatever else goes wrong
            while done < len(data):
                done += os.write(self._descriptor, data[done:])
        except OSError as error:
            if done:
                self._cut_off(done)
            text = f"the answer cannot be written to {self._name}: {error.strerror or error}"
            raise LineError(text, remedy=_REMEDY) from error
        self._torn = False

    def _cut_off(self, written: int) -> None:
        """Takes back the last ``written`` bytes; where that cannot be done, the next line begins on a line of its own.

        A pipe has taken them for good, and behind another writer's bytes nothing is cut.
        """
        torn, self._torn = self._torn, True
        with contextlib.suppress(OSError):
            found, end = os.fstat(self._descriptor), os.lseek(self._descriptor, 0, os.SEEK_CUR)
            if stat.S_ISREG(found.st_mode) and found.st_size == end:
                os.ftruncate(self._descriptor, end - written)
                os.lseek(self._descriptor, end - written, os.SEEK_SET)
                self._torn = torn

    def close(self) -> None:
        """Lets go of the file; a second call does nothing."""
        if self._open:
            self._open = False
            os.close(self._descriptor)


def _ends_within_a_line(path: Path) -> bool:
    """Whether somebody who was killed left the beginning of a line there."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
    return False
