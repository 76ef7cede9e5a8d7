"""A simulated line in a thread of the test, and an operator who talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

from agentpipe.environments.catalog import load_catalog
from agentpipe.serving.agent.simulated_line import LineOptions, SimulatedLine


class RunningLine:
    """The line, its address, and what it says when it is done."""

    def __init__(self, line: SimulatedLine) -> None:
        self.line = line
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task | None = None
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(30)

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, started = asyncio.get_running_loop(), asyncio.Event()
        self._task = asyncio.create_task(self.line.serve(0, started))
        await started.wait()
        self._started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.line.port}"

    def wait(self, seconds: float = 60.0) -> None:
        """Until every order is worked."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), self.line.figures()

    def stop(self) -> None:
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(30)


@contextlib.contextmanager
def running_line(count: int = 1, **options):
    """A line of ``count`` hold-out environments."""
    environments = load_catalog().environments("holdout", "sensor-1")[:count]
    running = RunningLine(SimulatedLine(environments, LineOptions(run="r", **options)))
    running.start()
    try:
        yield running
    finally:
        running.stop()


class Operator:
    """A person at the line."""

    def __init__(self, url: str, who: str = "ann") -> None:
        host, _, port = url.removeprefix("tcp://").partition(":")
        self._socket = socket.create_connection((host, int(port)), 30)
        self._file = self._socket.makefile("rw")
        self._file.write(json.dumps({"type": "hello", "protocol": 1, "role": "operator", "who": who}) + "\n")
        self._file.flush()

    def say(self, kind: str, **fields):
        self._file.write(json.dumps({"type": kind, **fields}) + "\n")
        self._file.flush()
        return json.loads(self._file.readline())

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def wait_for(condition, seconds: float = 60.0):
    """Polls until ``condition()`` is true, and returns it."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.005)
    return found
