"""Making the long-term memory while the agent works: by a process of its own that gives way to everything else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Final

from agentpipe.errors import AgentpipeError, InputError, ServingError, StoreError
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from pathlib import Path

LEAST_PRIORITY: Final = "19"
_OF_THE_STORE: Final = ("CorruptError", "VersionError", "HomeError", "DiskFullError")
_ENDING_SECONDS: Final = 5.0
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


class MemoryMaker:
    """``agentpipe agent remember`` with the least priority and one thread, waited for and ended by its parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._ended = threading.Event()

    @property
    def running(self) -> int:
        """Number of the process; 0 while there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    @property
    def ended(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._ended.is_set()

    def make(self, home: Path, bundle: Path) -> bool:
        """Makes the memory of ``home``, however long it takes; False where :meth:`close` came first.

        Raises:
            InputError: nothing was recorded that could be remembered.
            StoreError: a shard is damaged, or the memory cannot be written.
            ServingError: the process ended otherwise.
        """
        command = [sys.executable, "-m", "agentpipe", "agent", "remember", "--json"]
        command += ["--home", str(home.resolve()), "--bundle", str(bundle.resolve())]
        if nice := shutil.which("nice"):
            command = [nice, "-n", LEAST_PRIORITY, *command]
        with self._lock, typed_os_errors(home):
            if self._ended.is_set():
                return False
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C at a terminal is the agent's to pass on
            )
        output, _ = self._process.communicate()
        if self._ended.is_set():
            return False
        if self._process.returncode:
            raise _error(output, self._process.returncode)
        return True

    def close(self) -> None:
        """Ends the process, if it runs; what it had begun is removed."""
        with self._lock:
            self._ended.set()
            process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _error(output: str, code: int) -> AgentpipeError:
    """What the process said, as the error that it was."""
    said: dict[str, str] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = dict(json.loads(output)["error"])
    text = said.get("message") or f"the process ended with {code}"
    remedy = said.get("remedy") or "agentpipe agent remember says why"
    name = said.get("type", "")
    if name == "InputError":
        return InputError(text, remedy=remedy)
    return (StoreError if name in _OF_THE_STORE else ServingError)(text, remedy=remedy)
