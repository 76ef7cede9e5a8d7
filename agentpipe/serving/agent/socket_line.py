"""A line at the other end of a TCP connection, such as ``agentpipe line``.

What is said there: :mod:`~agentpipe.serving.agent.messages`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, NoReturn
from urllib.parse import urlsplit

from agentpipe.closing import Closing
from agentpipe.errors import LineError
from agentpipe.serving.agent.messages import (
    LONGEST_LINE,
    PROTOCOL,
    DisplacedError,
    NonsenseError,
    Reader,
    encode,
    load,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentpipe.serving.agent.types import Answer, Frame, Message
    from agentpipe.serving.signature import Signature

LONGEST_NAME: Final = 80
BEATS: Final = 5
"""signs of life that may be missing before the line counts as lost"""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
FIRST_DISPLACED, LONGEST_DISPLACED = 1.0, 30.0
"""seconds that an agent keeps away after another one has taken its place; twice as long each time"""
UNCONTESTED: Final = 60.0
"""seconds after which a connection counts as this agent's own"""
STOOD_STILL: Final = 0.25
"""seconds for which nobody has looked at the connection: what is read then may have waited for as long"""
_READ: Final = 1 << 16
SEND_SECONDS: Final = 1.0
"""that sending may take at most"""
CONNECT_SECONDS: Final = 2.0


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``.

    Raises:
        LineError: it is nothing like that.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise LineError(f"{url!r} is no address: {error}", remedy="write tcp://HOST:PORT") from error
    if parts.scheme != "tcp" or not host or not port or parts.path not in ("", "/") or parts.query:
        raise LineError(f"{url!r} is no address of a line", remedy="write tcp://HOST:PORT")
    return host, port


class SocketLine(Closing):
    """The line at ``url``. :meth:`receive` belongs to one thread, :meth:`act` may be called from another.

    Args:
        url: ``tcp://HOST:PORT``.
        signature: of the policy; the line's must agree.
        seconds: until when a question wants its answer where it does not say so.
        agent: name that the line is told.

    Raises:
        LineError: ``url`` is no address. Nothing is connected yet.
    """

    def __init__(self, url: str, signature: Signature, *, seconds: float = 0.5, agent: str = "agent") -> None:
        self._address = parse_url(url)
        self.url, self.signature, self.agent = url, signature, agent
        self.lines: tuple[str, ...] = ()
        """names of its stations, once it is connected"""
        self._seconds = seconds
        self._reader = Reader(signature, seconds)
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._silence: float | None = None
        self._heard = 0.0
        self._empty = 0.0
        """when nothing was there to be read, as far as one knows"""
        self._since, self._doubtful = 0.0, False
        """of what is in the buffer: before that moment it was not there; whether it may have waited since then"""
        self._connected_at = 0.0
        self._displaced, self._away = "", FIRST_DISPLACED
        self._pause, self._next_try = FIRST_PAUSE, 0.0
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as one knows."""
        return self._socket is not None

    @property
    def displaced(self) -> str:
        """Which agent has taken this one's place, until the line was this one's again for a minute; else empty."""
        if self._displaced and self.connected and time.monotonic() - self._connected_at > UNCONTESTED:
            self._displaced, self._away = "", FIRST_DISPLACED
        return self._displaced

    def receive(self, timeout: float) -> Message | None:
        """The next message; see :class:`~agentpipe.serving.agent.types.LineAdapter`.

        Raises:
            NonsenseError: the line said something that makes no sense; it is told so, and the connection goes on.
            ForeignLineError: it is not the line of this policy.
            DisplacedError: another agent has connected to it; the next calls wait before they connect anew.
            LineError: the line is lost; the next call connects anew.
        """
        end = time.monotonic() + timeout
        if self._socket is None and not self._connect(end):
            return None
        while True:
            line = self._line(end)
            if line is None:
                return None
            if not line.strip():
                continue
            try:
                content = load(line)
                if content.get("type") == "beat":
                    continue
                if content.get("type") == "displaced":
                    self._give_way(content)
                return self._reader.message(content, since=self._since, doubtful=self._doubtful)
            except NonsenseError as error:
                self.refuse(error.decision_id, error.message)
                raise

    def refuse(self, decision_id: str, reason: str) -> None:
        """Tells the line that a message of it makes no sense; need not arrive."""
        with contextlib.suppress(LineError):
            self._send(encode({"type": "refused", "decision_id": decision_id, "reason": reason}))

    def act(self, frame: Frame, answer: Answer) -> None:
        """Sends an action, or the wish for a person.

        Raises:
            LineError: the line is lost; the answer may or may not have arrived.
        """
        if answer.action < 0:
            reason = "; ".join(answer.notes)[: LONGEST_LINE // 1_024]
            message: dict[str, object] = {"type": "ask", "decision_id": frame.decision_id, "reason": reason}
        else:
            message = {"type": "answer", "decision_id": frame.decision_id, "action": answer.action}
        self._send(encode(message))

    def close(self) -> None:
        """Ends the connection for good."""
        self._closed = True
        self._drop()

    # ------------------------------------------------------------------------------------------- connecting

    def _connect(self, end: float) -> bool:
        """Connects if it is time to; False where it is not time yet."""
        now = time.monotonic()
        if self._closed:
            raise LineError("the connection was closed", url=self.url)
        if now < self._next_try:
            time.sleep(max(0.0, min(end, self._next_try) - now))
            if time.monotonic() < self._next_try:
                return False
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._next_try = time.monotonic() + self._pause
        try:
            self._socket = socket.create_connection(self._address, CONNECT_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setblocking(False)
        except OSError as error:
            self._drop()
            raise LineError(f"no line there: {error}", url=self.url, remedy="start it: agentpipe line") from error
        self._buffer.clear()
        self._heard, self._silence = time.monotonic(), None
        self._connected_at = self._empty = self._since = self._heard
        self._send(encode({"type": "hello", "protocol": PROTOCOL, "role": "agent", "name": self.agent}))
        hello = self._line(time.monotonic() + CONNECT_SECONDS)
        if hello is None:
            self._drop()
            raise LineError("the line does not introduce itself", url=self.url, remedy="is it an agentpipe line?")
        try:
            found = self._reader.hello(hello)
        except LineError:
            self._drop()
            raise
        self.lines = found.lines
        self._silence = None if found.beat is None else BEATS * found.beat
        self._pause = FIRST_PAUSE
        return True

    def _line(self, end: float) -> bytes | None:
        """The next line; None at ``end``."""
        while True:
            at = self._buffer.find(b"\n")
            if at >= 0:
                line = bytes(self._buffer[:at])
                del self._buffer[: at + 1]
                return line
            if len(self._buffer) > LONGEST_LINE:
                self._drop()
                raise LineError(f"a message of more than {LONGEST_LINE:,} bytes", url=self.url)
            if not self._more(end):
                return None

    def _more(self, end: float) -> bool:
        """Reads what has come; False where nothing came until ``end``."""
        connection = self._socket
        if connection is None:
            raise LineError("the line is lost", url=self.url)
        now = time.monotonic()
        quiet = None if self._silence is None else self._heard + self._silence
        until = end if quiet is None else min(end, quiet)
        try:
            ready, _, _ = select.select([connection], [], [], max(0.0, until - now))
            looked = time.monotonic()
            data = connection.recv(_READ) if ready else None
        except BlockingIOError:
            return True
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            self._drop()
            raise LineError(f"the line is lost: {error}", url=self.url) from error
        if data:
            self._heard = time.monotonic()
            self._buffer += data
            self._note_age(now, max(0.0, until - now), looked, whole=len(data) < _READ)
            return True
        if data is None:
            self._empty = min(looked, max(now, until))  # stopped right after it: known until then only
        if data is not None:
            self._drop()
            raise LineError("the line has ended the connection", url=self.url)
        if quiet is not None and time.monotonic() >= quiet:
            self._drop()
            raise LineError(f"the line has said nothing for {self._silence:g} s", url=self.url)
        return time.monotonic() < end

    def _note_age(self, asked: float, patience: float, looked: float, *, whole: bool) -> None:
        """Notes how long what was read may have waited: nobody may have looked, or this process stood still."""
        not_looked = max(0.0, asked - self._empty) + max(0.0, looked - asked - patience)
        self._doubtful = not_looked > STOOD_STILL
        self._since = self._empty if self._doubtful else looked
        if whole:
            self._empty = looked

    def _give_way(self, content: Mapping[str, object]) -> NoReturn:
        """Another agent has connected: two that come back at once would displace each other for ever."""
        _ = self.displaced  # forgets what is long ago
        by = content.get("by")
        name = by if isinstance(by, str) and 0 < len(by) <= LONGEST_NAME and by.isprintable() else "without a name"
        self._displaced = name
        self._drop()
        away, self._away = self._away, min(2 * self._away, LONGEST_DISPLACED)
        self._next_try = time.monotonic() + away
        text = f"the agent {name} has taken this one's place; the next try is in {away:g} s"
        raise DisplacedError(text, url=self.url, remedy="end one of them: a line works with one agent")

    def _send(self, data: bytes) -> None:
        connection = self._socket
        if connection is None:
            raise LineError("the line is lost", url=self.url)
        with self._sending:
            try:
                _send_whole(connection, data)
            except (OSError, ValueError) as error:
                _shut(connection)  # half a message may have gone out
                raise LineError(f"the line is lost: {error}", url=self.url) from error

    def _drop(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            _shut(connection)
            connection.close()


def _shut(connection: socket.socket) -> None:
    """Ends a connection so that the thread that reads notices; only that one closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _send_whole(connection: socket.socket, data: bytes) -> None:
    end = time.monotonic() + SEND_SECONDS
    view = memoryview(data)
    while view:
        _, ready, _ = select.select([], [connection], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError("it takes nothing")
        with contextlib.suppress(BlockingIOError):
            view = view[connection.send(view) :]
