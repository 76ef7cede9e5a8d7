"""What the chaos benchmark works on: a line in this process, an agent in another one, and the books of both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.environments.layout import CHANNELS, block_start
from agentpipe.serving.agent.journal import Journal
from agentpipe.serving.agent.simulated_line import LineOptions, SimulatedLine, Station

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.serving.agent.types import Frame

_READING, _MEAN, _COUNT = block_start("reading"), block_start("mean"), block_start("count")


def wait_for(
    condition: Callable[[], object],
    what: str,
    seconds: float = 120.0,
    *,
    pause: float = 0.005,
    more: Callable[[], object] = str,
) -> float:
    """Seconds until ``condition()`` was true; raises TimeoutError after ``seconds``, with what ``more()`` says."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"not in {seconds:g} s: {what} {more()}")
        time.sleep(pause)
    return time.monotonic() - started


def free_port() -> int:
    """A port of the loopback address that is free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Line:
    """A simulated line that is served by a thread of this process."""

    def __init__(self, environments: Sequence[EnvironmentSpec], options: LineOptions) -> None:
        self.served = SimulatedLine(environments, options)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)
        self._thread.start()
        self._started.wait()
        self.address = f"127.0.0.1:{self.served.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def serve() -> None:
            started = asyncio.Event()
            self._task = asyncio.ensure_future(self.served.serve(0, started))
            await started.wait()
            self._started.set()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

        self._loop.run_until_complete(serve())

    @property
    def taken(self) -> int:
        """Actions taken so far."""
        return len(self.served.taken)

    @property
    def running(self) -> bool:
        """Whether there are orders left."""
        return self._thread.is_alive()

    def freeze(self, station: Station, sensor: int, value: float) -> None:
        """From now on a sensor says ``value``, whatever happens, and the historian averages nothing else."""
        plain = Station.frame

        def frozen() -> Frame:
            asked = plain(station)
            if asked.observation[_COUNT + sensor // CHANNELS] > 0:
                asked.observation[[_READING + sensor, _MEAN + sensor]] = value
            return asked

        station.frame = frozen  # type: ignore[method-assign]

    def thaw(self, station: Station) -> None:
        """The sensor works again."""
        station.__dict__.pop("frame", None)

    def close(self) -> None:
        """Ends the line."""
        if self._task is not None and self.running:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10.0)


@dataclass
class Event:
    """One line of what an agent prints."""

    moment: float
    content: dict[str, Any]


class Agent:
    """``agentpipe agent`` as a process of its own."""

    def __init__(self, line: str, bundle: Path, home: Path, settings: dict[str, object]) -> None:
        self._command = [
            *(sys.executable, "-m", "agentpipe", "agent", "--json", "--no-memory"),
            *("--line", f"tcp://{line}", "--bundle", str(bundle), "--home", str(home), "--name", "chaos"),
        ]
        self._metrics = free_port()
        settings = {**settings, "metrics_port": self._metrics}
        names = {f"AGENTPIPE_AGENT__{name.upper()}": value for name, value in settings.items()}
        self._environment = {
            **os.environ,
            **{name: value if isinstance(value, str) else json.dumps(value) for name, value in names.items()},
        }
        self.events: list[Event] = []
        self.errors: list[str] = []
        self.start()

    def start(self) -> None:
        """Starts it, again after :meth:`kill`."""
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # cut off by SIGKILL
                self.events.append(Event(time.monotonic(), json.loads(line)))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self.errors.extend(self._process.stderr)

    def said(self, part: str, what: str, since: float) -> float | None:
        """When it first said after ``since`` that ``part`` (how its name begins) is lost or back; None: not yet."""
        self._check()
        for each in self.events:
            text = str(each.content.get("said", ""))
            if each.moment >= since and text.startswith(part) and what in text:
                return each.moment
        return None

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the agent ended with {self._process.returncode}: {''.join(self.errors)[-2_000:]}")

    def ready(self, since: float) -> bool:
        """Whether it was ready after ``since``."""
        self._check()
        return any(each.content.get("event") == "ready" for each in self.events if each.moment >= since)

    def newest(self) -> list[object]:
        """What it said last."""
        return [event.content.get("said") for event in self.events[-5:]]

    def level(self) -> int | None:
        """The rung of its ladder, 0 is the top; None where it does not say."""
        self._check()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return None
        values = [line.rpartition(" ")[2] for line in lines if line.startswith("agentpipe_agent_level{")]
        return int(float(values[0])) if values else None

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()

    def end(self) -> dict[str, Any]:
        """Ends it by SIGINT; its last figures."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)
        for reader in self._readers:
            reader.join()
        return next((e.content for e in reversed(self.events) if e.content.get("event") == "ended"), {})


@dataclass
class Books:
    """What the line took from the agent against what is on record of it."""

    taken: int = 0
    lost: list[str] = field(default_factory=list)
    """taken and not recorded"""
    twice: list[str] = field(default_factory=list)
    """recorded, or taken, more than once"""
    other: list[str] = field(default_factory=list)
    """recorded with another action"""
    open: int = 0
    """recorded and not taken: in flight at the end"""


def audit(line: SimulatedLine, home: Path) -> Books:
    """Holds what a line took against journal and inbox of an agent that has ended."""
    rows: list[tuple[str, int]] = []
    for path in sorted((home / "feedback" / "inbox").glob("*.jsonl")):
        decisions = [json.loads(text) for text in path.read_text().splitlines()]
        rows += [(each["decision_id"], int(each["action"])) for each in decisions]
    journal = Journal(home / "agent" / "chaos" / "journal")
    rows += [(known.decision_id, known.action) for known in journal.decisions() if not known.shipped]
    journal.close()
    recorded = dict(rows)
    by_agent = [(name, action) for name, action, who in line.taken if who == "agent"]
    books = Books(taken=len(by_agent))
    books.lost = [name for name, _ in by_agent if name not in recorded]
    books.twice = [
        name for name, count in (Counter(n for n, _ in rows) | Counter(n for n, _ in by_agent)).items() if count > 1
    ]
    books.other = [name for name, action in by_agent if recorded.get(name, action) != action]
    books.open = len(recorded.keys() - {name for name, _, _ in line.taken})
    return books


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and most of some durations."""
    if not seconds:
        return {}
    return {"median": round(float(np.median(seconds)), 3), "most": round(float(np.max(seconds)), 3)}
