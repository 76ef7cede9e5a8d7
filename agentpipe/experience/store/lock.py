"""One writer a shard: a lock that dies with its process and says who holds it."""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING, Final

from agentpipe.errors import LockHeldError
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from pathlib import Path

LOCK: Final = "lock"
CHECK: Final = "agentpipe buffer check"
"""a holder that compares LevelDB with the episodes, and is soon done"""
_LOOK_SECONDS: Final = 0.1
_CHECK_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.01


class WriterLock:
    """Held from the making of this until :meth:`release`.

    Args:
        directory: The open shard's directory.
        holder: What this writer is, for the message that others get.

    Raises:
        LockHeldError: another writer holds it; the message names what it is and its process.
    """

    def __init__(self, directory: Path, holder: str) -> None:
        self.path = directory / LOCK
        self.process = os.getpid()
        with typed_os_errors(self.path):
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(holder or "a writer")
        except BaseException:
            self.release()
            raise

    def _take(self, holder: str) -> None:
        began, held, other = time.monotonic(), self._try(), ""
        while not held:
            other = os.pread(self._descriptor, 4096, 0).decode(errors="replace").strip() or "another writer"
            # Who only looks holds it for an instant, as a check that writes its name does for a little longer.
            if time.monotonic() - began > (_CHECK_SECONDS if other.startswith(CHECK) else _LOOK_SECONDS):
                break
            time.sleep(_PAUSE_SECONDS)
            held = self._try()
        if not held:
            remedy = "wait until it ends: a shard has one writer, and any number of readers"
            raise LockHeldError(f"the shard is being written by {other}", file=self.path, remedy=remedy)
        with typed_os_errors(self.path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{holder} (process {self.process})".encode(), 0)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self.path.stat().st_ino == os.fstat(self._descriptor).st_ino
        except (BlockingIOError, FileNotFoundError):
            return False

    def release(self) -> None:
        """Lets others write."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
