"""The built-in simulator as a line over a socket: what an agent would meet in a plant, on the loopback address.

Each environment is a station that works one order after the other. The simulator's clock stands between two actions, so
the safe thing to do without an answer is to hold: a deadline that is missed is counted, and the same question is asked
again under the same id. An answer that comes late is still one to that question, so what was decided is what is done.

One agent is connected at a time; a newer connection takes the place of an older one, which is told so, and every open
question is asked again. An operator connects to the same port, takes stations over, acts there, and hands them back.
Where the agent asks for a person, a simulated one (the rules) takes over for one action, unless there is to be none.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import secrets
import time
from typing import TYPE_CHECKING, Any, Final, Literal

from agentpipe.environments.layout import (
    ACTION_COUNT,
    ACTION_NAMES,
    OBSERVATION_NAMES,
    OBSERVATION_SIZE,
    REASONS,
    SIMULATOR_VERSION,
    Purpose,
)
from agentpipe.errors import InputError, LineError
from agentpipe.serving.agent.messages import LONGEST_LINE, MOST_SECONDS, PROTOCOL, NonsenseError, encode, load, question
from agentpipe.serving.agent.types import Frame
from agentpipe.serving.signature import policy_signature
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.pool import LinePool

HOST: Final = "127.0.0.1"
BEAT: Final = 1.0
"""seconds between two signs of life"""
ENDED_AGAIN: Final = 16
"""ended orders of a station that a new connection is told of"""
_MOST_UNSENT: Final = 4 << 20
_LOOK: Final = {"type": "look"}
"""wakes a station: it is held, handed back or done, or another agent has come"""


@dataclasses.dataclass(frozen=True)
class LineOptions:
    """How a line behaves.

    Args:
        seconds: until when a question wants its answer.
        every: least seconds between two questions of a station.
        orders: of all stations together, after which the line is done; None: it never is.
        operator: who comes when the agent asks for a person: ``rules`` (for one action), or ``none``.
        seed: of the simulator.
        purpose: of the episodes.
        first_episode: number of the first episode of every station.
        record: file to which each action taken is appended as a line of JSON; None: nowhere.
        run: begins every id; a random one where it is empty.

    Raises:
        InputError: ``seconds`` or ``every`` is not a number in the allowed range.
    """

    seconds: float = 0.5
    every: float = 0.0
    orders: int | None = None
    operator: Literal["rules", "none"] = "rules"
    seed: int = 0
    purpose: Purpose = Purpose.REPORT
    first_episode: int = 0
    record: Path | None = None
    run: str = ""

    def __post_init__(self) -> None:
        """Refuses times that are none, with InputError."""
        for name, least in (("seconds", 0.001), ("every", 0.0)):
            value = getattr(self, name)
            if not least <= value <= MOST_SECONDS:  # nor a NaN
                remedy = f"give a number from {least:g} to {MOST_SECONDS:g}"
                raise InputError(f"{name} is {value:g}", field=name, remedy=remedy)


class Station:
    """One environment as a place where orders are worked."""

    def __init__(self, name: str, row: int, run: str, pool: LinePool) -> None:
        self.name, self.pool = name, pool
        self._prefix = f"{run}-{row}"
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.ended: list[dict[str, Any]] = []
        self.holder = ""
        """the person who has it"""
        self.released_by = ""
        """the person who handed it back last"""
        self.answered = self.missed = self.asked_again = self.stale = self.illegal = self.persons = 0
        self.orders = self.successes = 0

    @property
    def order_id(self) -> str:
        """Of the present order."""
        return f"{self._prefix}-{int(self.pool.episode[0])}"

    @property
    def decision_id(self) -> str:
        """Of the present question."""
        return f"{self.order_id}-{int(self.pool.plant().step[0])}"

    def frame(self) -> Frame:
        """The present question."""
        pool, now = self.pool, time.monotonic()
        return Frame(
            self.decision_id,
            self.name,
            self.order_id,
            int(pool.plant().step[0]),
            pool.observation[0].copy(),
            int(pool.last_action[0]),
            float(pool.time[0]),
            pool.mask[0].copy(),
            now,
            now,
            dt.datetime.now(dt.UTC),
        )

    def take(self, action: int) -> dict[str, Any] | None:
        """Takes an action; the message of the order's end, where it ends with it."""
        import numpy as np

        order = self.order_id
        self.pool.step(np.array([action], np.int64))
        if not (self.pool.terminated[0] or self.pool.truncated[0]):
            return None
        success = bool(self.pool.result_success[0])
        self.orders += 1
        self.successes += success
        result = "done" if success else REASONS[self.pool.result_reason[0]]
        message = {"type": "ended", "line_id": self.name, "order_id": order, "result": result, "success": success}
        self.ended = [*self.ended, message][-ENDED_AGAIN:]
        return message

    def forget_looks(self) -> None:
        """It is looking now; answers stay, for a late one is one all the same."""
        kept = []
        while not self.inbox.empty():
            kept.append(self.inbox.get_nowait())
        for message in kept:
            if message is not _LOOK:
                self.inbox.put_nowait(message)

    def figures(self) -> dict[str, Any]:
        """What has happened here."""
        names = ("orders", "successes", "answered", "missed", "asked_again", "stale", "illegal", "persons")
        return {"line_id": self.name, "holder": self.holder, **{name: getattr(self, name) for name in names}}


class SimulatedLine:
    """A server of stations; run it with :meth:`serve`.

    Args:
        environments: one station each.
        options: how it behaves.

    Raises:
        TableError, CatalogError, SimulationError: the project's data cannot be used.
    """

    def __init__(self, environments: Sequence[EnvironmentSpec], options: LineOptions | None = None) -> None:
        from agentpipe.environments.datafiles import data_dir
        from agentpipe.environments.line_profile import default_profile
        from agentpipe.environments.pool import build_pool
        from agentpipe.environments.rules import RulesPlayer
        from agentpipe.environments.table import load_table

        self.options = options or LineOptions()
        profile, table = default_profile(), load_table(data_dir() / "disturbances.csv")
        run = self.options.run or secrets.token_hex(4)
        self._operator = RulesPlayer(profile)
        self.stations: dict[str, Station] = {}
        for row, environment in enumerate(environments):
            pool = build_pool(
                [environment],
                table,
                profile,
                seed=self.options.seed,
                purpose=self.options.purpose,
                first_episode=self.options.first_episode,
            )
            name = environment.environment_id
            name = name if name not in self.stations else f"{name}.{row}"
            self.stations[name] = Station(name, row, run, pool)
        self.signature = policy_signature(
            OBSERVATION_SIZE,
            ACTION_COUNT,
            simulator_version=SIMULATOR_VERSION,
            observation_names=OBSERVATION_NAMES,
            action_names=ACTION_NAMES,
        )
        self.port = 0
        self.taken: list[tuple[str, int, str]] = []
        """decision id, action, and who took it (``agent`` or a person)"""
        self._agent: asyncio.StreamWriter | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._record: Any = None

    # ------------------------------------------------------------------------------------------- the server

    async def serve(self, port: int = 0, started: asyncio.Event | None = None) -> None:
        """Serves until every order is worked, or it is cancelled.

        Raises:
            LineError: the port is in use.
            InputError, HomeError, DiskFullError: the record cannot be written.
        """
        if self.options.record is not None:
            try:
                with typed_os_errors(self.options.record):
                    self._record = self.options.record.open("a", buffering=1)
            except OSError as error:
                text = f"the record cannot be written: {error.strerror}"
                raise InputError(text, file=self.options.record, remedy="name a file in an existing folder") from error
        try:
            server = await asyncio.start_server(self._connected, HOST, port, limit=LONGEST_LINE)
        except OSError as error:
            self._close_record()
            raise LineError(f"port {port} cannot be used: {error.strerror}", remedy="choose another") from error
        self.port = int(server.sockets[0].getsockname()[1])
        beating = asyncio.create_task(self._beat())
        working = [asyncio.create_task(self._work(station)) for station in self.stations.values()]
        if started is not None:
            started.set()
        try:
            await asyncio.gather(*working)
            await asyncio.sleep(0.05)  # the last message is on its way
        finally:
            server.close()
            if self._agent is not None:
                self._agent.close()
            tasks = (beating, *working, *self._connections)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._close_record()

    def _close_record(self) -> None:
        if self._record is not None:
            with contextlib.suppress(OSError):
                self._record.close()

    def figures(self) -> dict[str, Any]:
        """What has happened, over all stations and at each."""
        each = [station.figures() for station in self.stations.values()]
        numbers = [name for name, value in each[0].items() if isinstance(value, int)]
        return {**{name: sum(figures[name] for figures in each) for name in numbers}, "stations": each}

    @property
    def done(self) -> bool:
        """Whether all orders are worked."""
        wanted = self.options.orders
        return wanted is not None and sum(station.orders for station in self.stations.values()) >= wanted

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            self._send({"type": "beat"})

    def _send(self, message: dict[str, Any]) -> bool:
        writer = self._agent
        if writer is None or writer.is_closing():
            return False
        if writer.transport.get_write_buffer_size() > _MOST_UNSENT:  # nobody reads at the other end
            writer.transport.abort()
            return False
        writer.write(encode(message))
        return True

    # ------------------------------------------------------------------------------------------- a station

    async def _work(self, station: Station) -> None:
        while not self.done:
            station.forget_looks()
            if station.holder or not self._send(question(station.frame(), self.options.seconds)):
                await station.inbox.get()  # handed back, or an agent has come
                continue
            action = await self._answer(station)
            if action is not None:
                self._take(station, action, "agent")
                station.answered += 1
            await asyncio.sleep(self.options.every)

    async def _answer(self, station: Station) -> int | None:
        """The action that the agent wants, None where the question must be asked again."""
        identifier, end = station.decision_id, time.monotonic() + self.options.seconds
        while not station.holder:
            try:
                # not wait_for: in Python 3.11 it forgets a cancellation that comes together with a message
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    message = await station.inbox.get()
            except TimeoutError:
                station.missed += self._agent is not None
                station.asked_again += 1
                return None
            if message is _LOOK:
                station.asked_again += 1
                return None
            if message["decision_id"] != identifier or identifier != station.decision_id:
                station.stale += 1
            elif message["type"] == "ask":
                await self._person(station)
                return None
            elif station.pool.mask[0, message["action"]]:
                return int(message["action"])
            else:
                station.illegal += 1
                await self._person(station)
                return None
        return None

    async def _person(self, station: Station) -> None:
        """The agent wants a person."""
        station.persons += 1
        if self.options.operator == "none":
            self.hold(station, "operator")
            return
        self.hold(station, "rules")
        await asyncio.sleep(0)
        if station.holder != "rules":  # a person has taken it over meanwhile
            return
        self._take(station, int(self._operator.act(station.pool).actions[0]), "rules")
        self.release(station, "rules")

    def _take(self, station: Station, action: int, who: str) -> None:
        identifier = station.decision_id
        self.taken.append((identifier, action, who))
        if self._record is not None:
            self._record.write(json.dumps({"decision_id": identifier, "action": action, "who": who}) + "\n")
        ended = station.take(action)
        if ended is not None:
            self._send(ended)
        if self.done:
            for other in self.stations.values():
                other.inbox.put_nowait(_LOOK)

    # ------------------------------------------------------------------------------------------- persons

    def hold(self, station: Station, who: str) -> None:
        """A person takes a station over."""
        station.holder = who
        station.inbox.put_nowait(_LOOK)
        self._send(_takeover(station))

    def release(self, station: Station, who: str) -> None:
        """A person hands it back: the one who has it, or another one."""
        station.holder, station.released_by = "", who
        self._send(_takeover(station))
        station.inbox.put_nowait(_LOOK)

    # ------------------------------------------------------------------------------------------- connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # cancelled: the line ends, and a task of asyncio's streams that ends otherwise is complained of
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, asyncio.CancelledError):
            try:
                hello = load(await reader.readline())
            except NonsenseError as error:
                writer.write(encode({"type": "refused", "reason": error.message}))
                hello = {}
            if hello.get("type") == "hello" and hello.get("protocol") == PROTOCOL:
                if hello.get("role") == "operator":
                    await self._operate(reader, writer, str(hello.get("who", "operator"))[:80])
                else:
                    await self._serve_agent(reader, writer, str(hello.get("name", ""))[:80])
        writer.close()

    async def _serve_agent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        if self._agent is not None:
            self._displace(self._agent, name)
        self._agent = writer
        lines = list(self.stations)
        self._send(
            {"type": "hello", "protocol": PROTOCOL, "signature": self.signature.to_json(), "lines": lines, "beat": BEAT}
        )
        for station in self.stations.values():
            self._send(_takeover(station))  # also where nobody has it: the agent may know of an earlier takeover
            for message in station.ended:
                self._send(message)
            station.inbox.put_nowait(_LOOK)
        try:
            while line := await reader.readline():
                with contextlib.suppress(NonsenseError):
                    self._heard(load(line))
        finally:
            if self._agent is writer:
                self._agent = None

    def _displace(self, earlier: asyncio.StreamWriter, name: str) -> None:
        """Tells an agent that another one has its place now, and lets go of it."""
        self._send({"type": "displaced", "by": name})
        if earlier.transport.get_write_buffer_size():  # it does not read
            earlier.transport.abort()
        else:
            earlier.close()

    def _heard(self, message: dict[str, Any]) -> None:
        identifier, action = message.get("decision_id"), message.get("action")
        station = next((s for s in self.stations.values() if s.decision_id == identifier), None)
        asks = message.get("type") == "ask"
        answers = message.get("type") == "answer" and type(action) is int and 0 <= action < ACTION_COUNT
        if station is not None and (asks or answers):
            station.inbox.put_nowait(message)
        elif message.get("type") == "answer":
            next(iter(self.stations.values())).stale += 1

    async def _operate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, who: str) -> None:
        while line := await reader.readline():
            try:
                reply = self._control(load(line), who)
            except NonsenseError as error:
                reply = {"ok": False, "reason": error.message}
            writer.write(encode(reply))
            await writer.drain()

    def _control(self, message: dict[str, Any], who: str) -> dict[str, Any]:
        kind, names = message.get("type"), message.get("line_id")
        if kind == "figures":
            return {"ok": True, **self.figures()}
        chosen = [station for name, station in self.stations.items() if names in (None, name)]
        if not chosen:
            raise NonsenseError(f"there is no line {names!r}"[:200], field="line_id")
        if kind == "release":
            chosen = _with_holder(chosen)
        for station in chosen:
            if kind == "takeover":
                self.hold(station, who)
            elif kind == "release":
                self.release(station, who)
            elif kind == "act":
                self._act(station, message.get("action"), who)
            else:
                raise NonsenseError("takeover, release, act and figures are known", field="type")
        return {"ok": True, "lines": [station.name for station in chosen]}

    def _act(self, station: Station, action: object, who: str) -> None:
        if not station.holder:
            raise NonsenseError("take it over first", field="line_id")
        if type(action) is not int or not 0 <= action < ACTION_COUNT or not station.pool.mask[0, action]:
            raise NonsenseError(f"action {action!r} is not allowed now"[:200], field="action")
        self._take(station, action, who)


def _takeover(station: Station) -> dict[str, Any]:
    """The message that says who has the station, or who handed it back: the line, where no person did."""
    who = station.holder or station.released_by or "the line"
    return {"type": "takeover", "line_id": station.name, "active": bool(station.holder), "who": who}


def _with_holder(stations: list[Station]) -> list[Station]:
    """Those of ``stations`` that somebody has.

    Raises:
        NonsenseError: nobody has any of them.
    """
    held = [station for station in stations if station.holder]
    if not held:
        names = ", ".join(station.name for station in stations)
        raise NonsenseError(f"nobody holds {names}: nothing to release"[:200], field="line_id")
    return held
