"""A running agent follows the champion, or the bundle that it was given: it looks, verifies, and installs.

Everything is read, checked and loaded here, in a thread of its own, before it has an order: hashes of all files, the
signature, known rows. What does not pass is refused and said, and the policy in use goes on.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from agentpipe.errors import AgentpipeError, BundleError, ServingError
from agentpipe.serving import layout
from agentpipe.serving.agent.deciders import read_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from agentpipe.serving.agent.deciders import PolicyFiles
    from agentpipe.serving.agent.generations import Generations
    from agentpipe.serving.agent.types import Decider

SERVER_SECONDS: Final = 30.0
"""for which a new policy waits for servers of the present one: they look for new versions every few seconds"""
PROBE_SECONDS: Final = 2.0


class Follower:
    """Looks every ``every`` seconds which bundle is the one to use, and installs another one.

    Args:
        generations: where it is installed.
        find: the folder of the bundle to use.
        rungs: deciders of a bundle, best first, without the rules; the last one answers in this process.
        up: whether a rung answers at present; one that does is waited for, :data:`SERVER_SECONDS` at most.
        every: seconds between two looks.
        installed: told of the bundles before and after a change.
        refused: told once of each reason why a bundle is not used.
    """

    def __init__(
        self,
        generations: Generations,
        find: Callable[[], Path],
        rungs: Callable[[PolicyFiles], Sequence[Decider]],
        *,
        up: Callable[[str], bool],
        every: float,
        installed: Callable[[PolicyFiles, PolicyFiles], object],
        refused: Callable[[str], object],
    ) -> None:
        self._generations, self._find, self._rungs, self._up = generations, find, rungs, up
        self._every, self._installed, self._refused = every, installed, refused
        self.trouble = ""
        """why the bundle that is to be used is not"""
        self._seen = self._mark(generations.newest.files.path)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self, wait: float = 5.0) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(wait)

    def probe(self, timeout: float) -> None:
        """As a part that is probed.

        Raises:
            ServingError: the bundle that is to be used is refused.
        """
        del timeout
        if self.trouble:
            raise ServingError(self.trouble)

    def look(self) -> bool:
        """Looks once; True where another policy was installed."""
        try:
            path = self._find()
            mark = self._mark(path)
            changed = mark != self._seen and self._install(path)
        except (AgentpipeError, OSError) as error:
            why = error.message if isinstance(error, AgentpipeError) else f"it cannot be read: {error.strerror}"
            self._refuse(why)
            return False
        self._seen, self.trouble = mark, ""
        return changed

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - whatever a bundle does, the next one is looked at
                self._refuse(f"{type(error).__name__}: {error}")

    def _refuse(self, why: str) -> None:
        if why != self.trouble and not self._stop.is_set():
            self.trouble = why
            self._refused(why)

    @staticmethod
    def _mark(path: Path) -> tuple[Path, bytes]:
        """What tells one bundle from another without reading all of it."""
        sums = path / layout.SUMS
        return path, sums.read_bytes() if sums.is_file() else b""

    def _install(self, path: Path) -> bool:
        before = self._generations.newest.files
        files = read_policy(path)
        if not files.signature.same_line(before.signature):
            remedy = "end the agent and start it at a line of the new bundle"
            raise BundleError("the new bundle is of another line", bundle=path, remedy=remedy)
        if files.version == before.version:
            return False  # built again, or its measurements were written anew
        deciders = self._rungs(files)
        try:
            deciders[-1].probe(PROBE_SECONDS)
            self._wait_for_servers(deciders[:-1])
            if self._stop.is_set():
                raise ServingError("the agent ends")
            self._generations.install(files, deciders)
        except AgentpipeError:
            for decider in deciders:
                decider.close()
            raise
        self._installed(before, files)
        return True

    def _wait_for_servers(self, servers: Sequence[Decider]) -> None:
        """Until those that answer for the present policy do so for the new one, or it has been long enough."""
        missing = [server for server in servers if self._up(server.name)]
        end = time.monotonic() + SERVER_SECONDS
        while missing and time.monotonic() < end and not self._stop.is_set():
            still = []
            for server in missing:
                try:
                    server.probe(PROBE_SECONDS)
                except (AgentpipeError, OSError):
                    still.append(server)
            missing = still
            if missing:
                self._stop.wait(0.5)
