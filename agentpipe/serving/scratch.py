"""A folder for one server's log, held by a lock that dies with its process, so that the next start knows whose is gone.

The lock holds the prefix of the server's shared memory: what a killed process left of that goes with its folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

_PREFIX: Final = "agentpipe-triton-"
_LOCK: Final = "lock"
_SHARED: Final = Path("/dev/shm")  # noqa: S108 - where the stub puts it
_NAME: Final = re.compile(r"agentpipe_[0-9]+_[0-9]+")
_UNLOCKED_SECONDS: Final = 3_600.0
"""after which a folder without a lock is one that was never finished, or of before there were locks"""


class Scratch:
    """A new folder below the system's folder of temporary files.

    Args:
        shared_memory: prefix of what the server puts into shared memory.
    """

    def __init__(self, shared_memory: str) -> None:
        remove_abandoned()
        self._shared_memory = shared_memory
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked before it has its name: whoever sees the file sees it held.
        draft = self.path / "draft"
        self._lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, shared_memory.encode())
        draft.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Removes folder and shared memory; a second call does nothing."""
        if self._lock >= 0:
            _remove(self.path, self._shared_memory)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned() -> int:
    """Removes the folders, and shared memory, of processes of this user that are gone; how many."""
    removed = 0
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it, or it is another user's
            found = path.lstat()
            if found.st_uid != os.getuid() or path.is_symlink() or not path.is_dir():
                continue
            removed += _remove_if_abandoned(path, time.time() - found.st_mtime)
    return removed


def _remove_if_abandoned(path: Path, age: float) -> bool:
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if age > _UNLOCKED_SECONDS:
            _remove(path, "")
        return age > _UNLOCKED_SECONDS
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path, os.read(descriptor, 100).decode(errors="replace"))
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(path: Path, shared_memory: str) -> None:
    if _NAME.fullmatch(shared_memory):
        for leftover in _SHARED.glob(f"{shared_memory}*"):
            leftover.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
