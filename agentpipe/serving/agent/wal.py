"""An append-only log that survives a killed process, a torn write, a full and a failing disk.

A folder of segments ``journal-<number>.log``; a record is one line: CRC-32 of what follows in eight hexadecimal digits,
a blank, a JSON object. A record is *written* once the system has it (it survives SIGKILL then), and *safe* once it is
flushed to disk (it survives power loss). A thread flushes, for as many records at once as there are. What cannot be
written or flushed waits in memory, up to a limit; beyond it nothing more is taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import CorruptError, StoreError, VersionError
from agentpipe.storage import digest_bytes, sync, typed_os_errors, write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORMAT: Final = 1
_NAME: Final = re.compile(r"journal-(\d{8})\.log")
_START: Final = re.compile(rb'[0-9a-f]{8} \{"k"')
_HEAD: Final = 9
"""bytes before the JSON of a record"""
_RETRY_SECONDS: Final = 1.0
_MOST_ASIDE: Final = 1_000
"""pieces of damage that are kept"""
_UNFLUSHED: Final = 16
"""times as many may be written and not flushed: they survive the process"""


class LogFullError(StoreError):
    """Raised when neither the disk nor the memory set aside takes another record; nothing was recorded."""


class DamagedRecordError(CorruptError):
    """Raised when a record is not on the disk as it was written, and never will be."""


class Entry:
    """One record: in memory until it is safe, then where it lies."""

    __slots__ = ("data", "length", "offset", "segment", "sequence")

    def __init__(self, sequence: int, data: bytes | None, segment: int = -1, offset: int = -1, length: int = 0) -> None:
        self.sequence, self.data = sequence, data
        self.segment, self.offset, self.length = segment, offset, length


def encode(record: dict[str, Any]) -> bytes:
    """The line of a record."""
    body = json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(line: bytes) -> dict[str, Any] | None:
    """The record of a whole line with its line end; None where checksum or form are wrong."""
    if len(line) <= _HEAD or line[_HEAD - 1 : _HEAD] != b" " or not line.endswith(b"\n"):
        return None
    body = line[_HEAD:-1]
    if line[: _HEAD - 1] != b"%08x" % zlib.crc32(body):
        return None
    try:
        record = json.loads(body)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Log:
    """The log in ``folder``, which one process uses; safe to use from several threads.

    Args:
        folder: made where it is missing.
        segment_bytes: size from which the next segment begins.
        most_waiting: records that wait in memory to be written, at most.
        aside: folder where damaged bytes are kept; None: nowhere.

    Attributes:
        recovered: what :meth:`recover` found, in order: entry and record; emptied by the caller.
        damaged: lines that were passed over because a later one was whole.
        torn_bytes: what was cut off the end of the last segment.

    Raises:
        CorruptError, VersionError: a segment cannot be read, or is of another format.
        DiskFullError, HomeError: the folder cannot be made.
    """

    def __init__(
        self, folder: Path, *, segment_bytes: int = 4 << 20, most_waiting: int = 512, aside: Path | None = None
    ) -> None:
        self.folder, self._aside = folder, aside
        self.damaged = self.torn_bytes = 0
        self.recovered: list[tuple[Entry, dict[str, Any]]] = []
        self._segment_bytes, self._most = segment_bytes, most_waiting
        self._changed = threading.Condition()
        self._pending: deque[Entry] = deque()
        """in order; those written come before those that are not"""
        self._unwritten: deque[Entry] = deque()
        self._descriptor, self._segment, self._offset = -1, 0, 0
        self._stale: list[int] = []
        """descriptors of earlier segments that must still be flushed"""
        self._unlisted = True
        """whether the folder itself must be flushed: it has a new segment"""
        self._sequence = self._safe = 0
        self._trouble = ""
        self._stopping = False
        with typed_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._recover()
        self._flusher = threading.Thread(target=self._flush_for_ever, name="journal-flush", daemon=True)
        self._flusher.start()

    # ------------------------------------------------------------------------------------------------ writing

    def append(self, record: dict[str, Any]) -> Entry:
        """Records something; :meth:`flushed` waits until it is safe.

        Raises:
            LogFullError: nothing more can be kept.
        """
        data = encode(record)
        with self._changed:
            if self._unwritten:
                self._write()
            if len(self._unwritten) >= self._most or len(self._pending) >= _UNFLUSHED * self._most:
                text = f"{len(self._pending)} records wait for the disk: {self._trouble or 'it is slow'}"
                raise LogFullError(text, file=self.folder, remedy="free space; a person decides until then")
            self._sequence += 1
            entry = Entry(self._sequence, data)
            self._pending.append(entry)
            self._unwritten.append(entry)
            self._write()
            self._changed.notify_all()
            return entry

    def flushed(self, entry: Entry, until: float) -> bool:
        """Waits for a record to be safe, until ``until`` (monotonic) or the disk is in trouble; whether it is."""
        with self._changed:
            while self._safe < entry.sequence and not self._stopping and not self._trouble:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._safe >= entry.sequence

    def append_safely(self, record: dict[str, Any], timeout: float = 10.0) -> Entry | None:
        """Records something only if it can be made safe now; None where it cannot, and then nothing is recorded.

        A record that was written but not flushed in time counts: it is there after a restart unless power is lost.
        """
        with self._changed:
            if self._pending and (self._trouble or self._unwritten):
                return None
        try:
            entry = self.append(record)
        except LogFullError:
            return None
        self.flushed(entry, time.monotonic() + timeout)
        with self._changed:
            if entry.segment >= 0:
                return entry
            self._pending.remove(entry)
            self._unwritten.remove(entry)
            return None

    def _write(self) -> None:
        """Writes what is not written yet, as far as the disk lets us. Under the lock."""
        try:
            while self._unwritten:
                entry = self._unwritten[0]
                assert entry.data is not None
                self._roll(len(entry.data))
                _write_whole(self._descriptor, entry.data, self._offset)
                entry.segment, entry.offset, entry.length = self._segment, self._offset, len(entry.data)
                self._offset += len(entry.data)
                self._unwritten.popleft()
            self._trouble = ""
        except OSError as error:
            self._trouble = error.strerror or str(error)
            if self._descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._offset)

    def _roll(self, coming: int) -> None:
        if self._descriptor >= 0 and self._offset + coming <= self._segment_bytes:
            return
        head = encode({"k": "log", "format": FORMAT})
        number = self._segment + 1
        path = self.path(number)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_whole(descriptor, head, 0)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        if self._descriptor >= 0:
            self._stale.append(self._descriptor)
        self._descriptor, self._segment, self._offset = descriptor, number, len(head)
        self._unlisted = True

    def _flush_for_ever(self) -> None:
        while True:
            with self._changed:
                written = self._written()
                while written <= self._safe and not self._stopping:
                    self._changed.wait(_RETRY_SECONDS if self._unwritten else None)
                    if self._unwritten:
                        self._write()
                    written = self._written()
                if written <= self._safe:
                    return
                descriptors, unlisted = [*self._stale, self._descriptor], self._unlisted
                self._unlisted = False
            try:
                for descriptor in descriptors:
                    os.fsync(descriptor)
                if unlisted:
                    sync(self.folder)
            except OSError as error:
                self._write_again(error)
                if self._stopping:
                    return
                continue
            with self._changed:
                self._settle(written, descriptors[:-1])

    def _written(self) -> int:
        return self._unwritten[0].sequence - 1 if self._unwritten else self._sequence

    def _settle(self, written: int, flushed: list[int]) -> None:
        self._safe = max(self._safe, written)
        while self._pending and self._pending[0].sequence <= self._safe:
            self._pending.popleft().data = None
        for descriptor in flushed:
            self._stale.remove(descriptor)
            os.close(descriptor)
        self._changed.notify_all()

    def _write_again(self, error: OSError) -> None:
        """A failed flush says nothing of what is on disk: all that is not safe goes to a new segment."""
        with self._changed:
            for descriptor in (*self._stale, self._descriptor):
                os.close(descriptor)
            self._stale.clear()
            self._descriptor, self._unlisted = -1, True
            self._unwritten = deque(self._pending)
            self._trouble = error.strerror or str(error)
            self._changed.notify_all()
            if not self._stopping:
                self._changed.wait(_RETRY_SECONDS)
            self._write()

    # ------------------------------------------------------------------------------------------------ reading

    def read(self, entry: Entry) -> dict[str, Any]:
        """The record of an entry.

        Raises:
            DamagedRecordError: its segment is gone, or the record is damaged.
            CorruptError: it cannot be read now.
        """
        data = entry.data
        path = self.path(entry.segment)
        if data is None:
            try:
                with path.open("rb") as file:
                    file.seek(entry.offset)
                    data = file.read(entry.length)
            except FileNotFoundError as error:
                raise DamagedRecordError("the segment is gone", file=path, remedy="restore it") from error
            except OSError as error:
                raise CorruptError(f"cannot be read: {error.strerror}", file=path, remedy="restore it") from error
        record = decode(data)
        if record is None:
            raise DamagedRecordError("a record is damaged", file=path, offset=entry.offset, remedy="restore the file")
        return record

    def keep_aside(self, entry: Entry) -> None:
        """Keeps the bytes of a record that is damaged."""
        with contextlib.suppress(OSError), self.path(entry.segment).open("rb") as file:
            file.seek(entry.offset)
            self._keep(entry.segment, entry.offset, file.read(entry.length))

    @property
    def trouble(self) -> str:
        """Why the disk does not take what it is given; empty while it does."""
        return self._trouble

    @property
    def waiting(self) -> int:
        """Records that are only in memory."""
        return len(self._unwritten)

    @property
    def segment(self) -> int:
        """Number of the segment that is being written."""
        return self._segment

    def tend(self) -> None:
        """Tries to write what waits."""
        with self._changed:
            if self._unwritten:
                self._write()
                self._changed.notify_all()

    def path(self, segment: int) -> Path:
        """Where a segment lies."""
        return self.folder / f"journal-{segment:08d}.log"

    def segments(self) -> list[int]:
        """Numbers of the segments that are there, ascending."""
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)))

    def remove(self, segment: int) -> None:
        """Removes a segment that nobody needs any more."""
        if segment < self._segment:
            self.path(segment).unlink(missing_ok=True)

    def close(self) -> None:
        """Flushes what can be flushed, and lets go."""
        with self._changed:
            self._write()
            self._stopping = True
            self._changed.notify_all()
        self._flusher.join(10.0)
        with self._changed:
            for descriptor in (*self._stale, self._descriptor):
                if descriptor >= 0:
                    os.close(descriptor)
            self._stale, self._descriptor = [], -1

    def _recover(self) -> None:
        numbers = self.segments()
        for number in numbers:
            end = self._recover_segment(number, last=number == numbers[-1])
            self._segment = number
        if not numbers:
            return
        with typed_os_errors(self.path(self._segment)):
            self._descriptor = os.open(self.path(self._segment), os.O_RDWR)
            size = os.fstat(self._descriptor).st_size
            if size > end:
                os.ftruncate(self._descriptor, end)
                self.torn_bytes = size - end
        self._offset = end
        if not end:  # not even the head was whole
            head = encode({"k": "log", "format": FORMAT})
            with contextlib.suppress(OSError):
                _write_whole(self._descriptor, head, 0)
                self._offset = len(head)

    def _recover_segment(self, number: int, *, last: bool) -> int:
        """Reads a segment; returns where its last whole record ends. Damage before that is counted, not hidden."""
        path = self.path(number)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CorruptError(f"cannot be read: {error.strerror}", file=path, remedy="restore it") from error
        end = offset = bad = 0
        for line, record in _records(data):
            if record is None:
                bad += 1
            else:
                self._keep(number, end, data[end:offset])
                self._check(record, path)
                if record.get("k") != "log":
                    self.recovered.append((Entry(0, None, number, offset, len(line)), record))
                self.damaged, bad, end = self.damaged + bad, 0, offset + len(line)
            offset += len(line)
        self._keep(number, end, data[end:])
        if not last:
            self.damaged += bad
        return end

    def _keep(self, segment: int, offset: int, data: bytes) -> None:
        """Keeps damaged bytes for a person, under a name that says where they were; the same ones once."""
        if not data or self._aside is None:
            return
        path = self._aside / f"{self.path(segment).stem}-{offset}-{digest_bytes(data)[:8]}.bin"
        with contextlib.suppress(StoreError, OSError):  # on a full disk what is whole matters more
            if not path.exists() and (not self._aside.is_dir() or len(list(self._aside.iterdir())) < _MOST_ASIDE):
                write_bytes(path, data)

    def _check(self, record: dict[str, Any], path: Path) -> None:
        if record.get("k") == "log" and record.get("format") != FORMAT:
            text = f"journal format {record.get('format')!r}, this program reads {FORMAT}"
            raise VersionError(text, file=path, remedy="use the agentpipe that wrote it, or another --name")


def _records(data: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line with its record, None where it is damaged; a whole record behind damage without line end is found."""
    for line in _lines(data):
        start, record = 0, decode(line)
        if record is None:
            for match in _START.finditer(line, 1):
                record = decode(line[match.start() :])
                if record is not None:
                    start = match.start()
                    yield line[:start], None
                    break
        yield line[start:], record


def _lines(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def _write_whole(descriptor: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
