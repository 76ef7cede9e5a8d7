"""The counter of an open shard: what it says is there, is there; whatever lies behind it does not exist.

Two slots of 64 bytes are written in turn. A write that is cut short tears one slot, whose checksum then does not fit,
and the other one still says what was true before.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from agentpipe.errors import CorruptError
from agentpipe.experience.store.checksum import xxh64
from agentpipe.experience.store.remedies import mend
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from pathlib import Path

COUNTER: Final = "counter.bin"
SLOT_BYTES: Final = 64
_BODY: Final = SLOT_BYTES - 8
_SLOT: Final = struct.Struct("<5Q16x")
_ATTEMPTS: Final = 100


@dataclass(frozen=True)
class Counts:
    """How much of an open shard counts.

    Args:
        sequence: Number of this count; a higher one is newer.
        steps: Step records.
        episodes: Episode rows.
        finals: Final records.
        words: Words of the graph file.
    """

    sequence: int = 0
    steps: int = 0
    episodes: int = 0
    finals: int = 0
    words: int = 0


def encode(counts: Counts) -> bytes:
    """One slot: five little-endian words, two of zeros, the XXH64 of those 56 bytes."""
    body = _SLOT.pack(counts.sequence, counts.steps, counts.episodes, counts.finals, counts.words)
    return body + xxh64(body).to_bytes(8, "little")


def decode(slot: bytes) -> Counts | None:
    """The counts in a slot, or None where its checksum does not fit."""
    if len(slot) != SLOT_BYTES or xxh64(slot[:_BODY]) != int.from_bytes(slot[_BODY:], "little"):
        return None
    return Counts(*_SLOT.unpack(slot[:_BODY]))


def newest(data: bytes) -> Counts | None:
    """The newest counts of the two slots in ``data``; None where neither is whole."""
    slots = [decode(data[:SLOT_BYTES]), decode(data[SLOT_BYTES : 2 * SLOT_BYTES])]
    whole = [counts for counts in slots if counts is not None]
    return max(whole, key=lambda counts: counts.sequence, default=None)


def read_counts(descriptor: int, path: Path) -> Counts:
    """What counts now, read from an open ``counter.bin``; for readers beside a writer.

    Raises:
        CorruptError: neither slot is whole.
    """
    for _ in range(_ATTEMPTS):
        # A writer may be between the two; it never writes both at once for long.
        try:
            counts = newest(os.pread(descriptor, 2 * SLOT_BYTES, 0))
        except OSError as error:
            raise CorruptError(f"cannot be read: {error.strerror}", file=path, remedy=mend(path)) from error
        if counts is not None:
            return counts
    raise CorruptError("neither slot of the counter is whole", file=path, remedy=mend(path))


class Counter:
    """The writer's side.

    Args:
        path: ``counter.bin``; made where it is missing.

    Raises:
        CorruptError: it is there, and neither slot is whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with typed_os_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with typed_os_errors(path):
                if not os.fstat(self._descriptor).st_size:
                    os.posix_fallocate(self._descriptor, 0, 2 * SLOT_BYTES)
                    self._write(Counts())
            self.counts = read_counts(self._descriptor, path)
        except BaseException:
            self.close()
            raise

    def _write(self, counts: Counts) -> None:
        os.pwrite(self._descriptor, encode(counts), counts.sequence % 2 * SLOT_BYTES)

    def move(self, counts: Counts, *, sync: bool) -> None:
        """Makes ``counts`` the truth (its sequence is set here); on disk when this returns, if ``sync``."""
        following = replace(counts, sequence=self.counts.sequence + 1)
        try:
            with typed_os_errors(self.path):
                self._write(following)
                if sync:
                    os.fdatasync(self._descriptor)
        except BaseException:
            # Readers may have seen it: the old counts become the newest ones again.
            self.counts = replace(self.counts, sequence=following.sequence + 1)
            with contextlib.suppress(OSError):
                self._write(self.counts)
            raise
        self.counts = following

    def close(self) -> None:
        """Gives the file back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
