"""Handing decisions on to the feedback intake: whole files into its inbox, or entries of its Redis stream.

Nothing is lost and nothing handed on twice, whenever the process is killed. A file is written aside in the outbox, then
noted in the journal, then renamed: what is aside after a restart and was not noted is thrown away, its decisions being
still in the journal; what was noted is sent. A stream has no such step: after a crash its newest entries are read back,
and what is there already is only noted.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import json
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol

from agentpipe.errors import AgentpipeError, StoreError
from agentpipe.storage import digest_bytes, sync, typed_os_errors, write_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from agentpipe.serving.agent.journal import Journal

STREAM_FIELD: Final = b"row"
"""as in ``agentpipe.feedback.stream``, which need not be imported to write"""
_ASIDE: Final = ".staged-"
_UNFINISHED: Final = ".staging-"
"""how ``agentpipe.storage`` calls what it has not written whole"""
_LONGEST_PAUSE: Final = 60.0
_LOOKED_BACK: Final = 4_000
"""entries of a stream among which those are looked for that were sent and not noted"""


class Sink(Protocol):
    """Where decisions go."""

    def recover(self, journal: Journal) -> Sequence[str]:
        """Finishes what was begun; returns what a person should know, one line each."""

    def hand_on(self, name: str, ids: Sequence[str], rows: Sequence[bytes], journal: Journal) -> bool:
        """Hands rows (JSON objects) on under ``name`` and notes it; False where they stay due.

        Raises:
            AgentpipeError, OSError: they stay due, or are noted and :meth:`recover` sends them.
        """

    def waiting(self, journal: Journal) -> int:
        """Decisions that the journal notes as handed on and that are not there yet."""

    def close(self) -> None:
        """Ends connections."""


class InboxSink:
    """The inbox of a home. ``outbox`` lies best on the same file system.

    Args:
        outbox: folder for what is under way.
        inbox: ``HOME/feedback/inbox``.
    """

    def __init__(self, outbox: Path, inbox: Path) -> None:
        self.outbox, self.inbox = outbox, inbox

    def recover(self, journal: Journal) -> list[str]:
        """Sends what was noted, throws away what was not, passes over what is somebody else's.

        Raises:
            StoreError, OSError: the inbox cannot be written; call it again.
        """
        if not self.outbox.is_dir():
            return []
        foreign: list[str] = []
        ready: list[Path] = []
        for path in sorted(self.outbox.iterdir()):
            if path.is_symlink() or not path.is_file():
                foreign.append(path.name)
            elif path.name.startswith(_ASIDE):
                name = path.name.removeprefix(_ASIDE)
                if journal.was_shipped(name):
                    ready.append(path.rename(self.outbox / name))
                else:
                    path.unlink()
            elif path.name.startswith(_UNFINISHED):
                path.unlink()  # not even written whole
            elif path.suffix == ".jsonl":
                ready.append(path)
            else:
                foreign.append(path.name)
        for path in ready:
            self._send(path)
        return [f"{self.outbox} holds {name!r}, which is not the agent's: it is passed over" for name in foreign]

    def hand_on(self, name: str, ids: Sequence[str], rows: Sequence[bytes], journal: Journal) -> bool:
        """See :class:`Sink`."""
        aside = self.outbox / f"{_ASIDE}{name}.jsonl"
        write_bytes(aside, b"".join(row + b"\n" for row in rows))
        if not journal.shipped(f"{name}.jsonl", ids):
            aside.unlink()
            return False
        ready = self.outbox / f"{name}.jsonl"
        aside.rename(ready)
        self._send(ready)
        return True

    def waiting(self, journal: Journal) -> int:
        """See :class:`Sink`: what lies in the outbox."""
        count = 0
        with contextlib.suppress(OSError):  # there is no outbox yet, or a file has just been sent
            for path in self.outbox.glob("*.jsonl"):
                staged = path.name.startswith(_ASIDE)
                if path.is_file() and (not staged or journal.was_shipped(path.name.removeprefix(_ASIDE))):
                    count += path.read_bytes().count(b"\n")
        return count

    def _send(self, path: Path) -> None:
        with typed_os_errors(self.inbox):
            self.inbox.mkdir(parents=True, exist_ok=True)
            target = self.inbox / path.name
            try:
                path.rename(target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                _copy(path, target)
                path.unlink()
            sync(self.inbox)

    def close(self) -> None:
        """Nothing is held."""


class StreamSink:
    """The Redis stream that the intake reads.

    Args:
        url: see ``agentpipe.environments.table_redis_client.connect``; never shown.
        stream: its key.
    """

    def __init__(self, url: str, stream: str) -> None:
        self._url, self._stream = url, stream
        self._client: Any = None
        self._certain = False
        """whether nothing is in the stream that the journal does not know of"""

    def recover(self, journal: Journal) -> list[str]:
        """What a process before this one sent and did not note is found by the next :meth:`hand_on`."""
        del journal
        self._certain = False
        return []

    def waiting(self, journal: Journal) -> int:
        """See :class:`Sink`: what a stream has taken is there."""
        del journal
        return 0

    def hand_on(self, name: str, ids: Sequence[str], rows: Sequence[bytes], journal: Journal) -> bool:
        """See :class:`Sink`; the server's answer is the acknowledgement."""
        from agentpipe.environments.table_redis_client import connect, redis_errors

        if self._client is None:
            self._client = connect(self._url)
        with redis_errors(self._client):
            there = frozenset() if self._certain else self._newest()
            self._certain = False
            pipeline = self._client.pipeline(transaction=True)  # all of them or none
            for identifier, row in zip(ids, rows, strict=True):
                if identifier not in there:
                    pipeline.xadd(self._stream, {STREAM_FIELD: row})
            pipeline.execute()
        self._certain = journal.shipped(name, ids)
        return self._certain

    def _newest(self) -> frozenset[str]:
        """The ids of the decisions that came last."""
        if not self._client.exists(self._stream):
            return frozenset()
        found = set()
        for _, fields in self._client.xrevrange(self._stream, count=_LOOKED_BACK):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # of somebody else
                found.add(str(json.loads(fields[STREAM_FIELD])["decision_id"]))
        return frozenset(found)

    def close(self) -> None:
        """Ends the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None


class Shipper:
    """Hands on what is due, in a thread of its own; tries again while it cannot, less and less often.

    Args:
        journal: what was decided.
        sink: where it goes.
        agent: name of the agent, part of the names of files.
        after: how long an order's result is waited for.
        every: seconds between two looks, and what is waited for more after an order is over: few files, not one each.
        now: UTC; None: the journal's clock.
        say: told what a person should know, one line.
        on_trouble: told why handing on fails when that begins, and "" when it goes again.
    """

    def __init__(
        self,
        journal: Journal,
        sink: Sink,
        *,
        agent: str,
        after: dt.timedelta = dt.timedelta(hours=1),
        every: float = 1.0,
        now: Callable[[], dt.datetime] | None = None,
        say: Callable[[str], object] = str,
        on_trouble: Callable[[str], object] = str,
    ) -> None:
        self.trouble = ""
        """why the last attempt failed; empty where it did not"""
        self._journal, self._sink, self._agent = journal, sink, agent
        self._after, self._every, self._now = after, every, now or journal.clock.now
        self._say, self._on_trouble = say, on_trouble
        self._said: set[str] = set()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._recovered = False
        self._thread = threading.Thread(target=self._work, name="outbox", daemon=True)

    @property
    def backlog(self) -> int:
        """Decisions that have not reached the intake: those of the journal, and those on their way."""
        return self._journal.backlog + self._sink.waiting(self._journal)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def wake(self) -> None:
        """An order is over: look soon."""
        self._wake.set()

    def close(self, timeout: float = 10.0) -> None:
        """Hands on what is due now if that can be done, and ends."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        self._sink.close()

    def ship(self) -> int:
        """Hands on everything that is due; returns how many decisions.

        Raises:
            AgentpipeError, OSError: see :class:`Sink`.
        """
        if not self._recovered:
            for text in self._sink.recover(self._journal):
                if text not in self._said:
                    self._said.add(text)
                    self._say(text)
            self._recovered = True
        count = 0
        while due := self._journal.due(self._now(), self._after):
            ids = [identifier for identifier, _ in due]
            rows = [json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode() for _, row in due]
            name = f"agent-{self._agent}-{digest_bytes(b''.join(rows))[:16]}"
            self._recovered = False  # should this fail half-way
            if not self._sink.hand_on(name, ids, rows, self._journal):
                raise StoreError("the journal takes nothing", remedy="see what the agent says of its disk")
            self._recovered = True
            count += len(ids)
        return count

    def _work(self) -> None:
        pause = self._every
        while True:
            self._wake.wait(pause)
            self._stopping.wait(min(pause, self._every))
            self._wake.clear()
            last = self._stopping.is_set()
            self._journal.log.tend()
            try:
                self.ship()
                self._note("")
                pause = self._every
            except Exception as error:  # noqa: BLE001 - a thread that dies of it would hand on nothing any more
                known = isinstance(error, AgentpipeError | OSError)
                self._note(str(error) if known and str(error) else f"{type(error).__name__}: {error}")
                pause = min(2 * pause, _LONGEST_PAUSE)
            if last:
                return

    def _note(self, trouble: str) -> None:
        before, self.trouble = self.trouble, trouble
        if bool(before) != bool(trouble):
            with contextlib.suppress(Exception):  # whoever is told may fail (a closed terminal)
                self._on_trouble(trouble)


def _copy(path: Path, target: Path) -> None:
    """Copies over to another file system, where it appears whole."""
    aside = target.with_name(f".staging-{target.name}")
    try:
        with path.open("rb") as source, aside.open("wb") as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
        aside.rename(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
        raise
