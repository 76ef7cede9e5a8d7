"""Memory-mapped files of fixed-size records: growing ones of a writer, whole ones of readers.

A writer's file is grown by allocating blocks before they are mapped, so that a full disk is an error of that call and
never a signal at a later store. A reader keeps its mapping, and the descriptor under it, however the file is renamed
or unlinked; :meth:`MappedRecords.still_whole` asks whether someone has cut it short.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CorruptError, DiskFullError
from agentpipe.experience.store.remedies import mend
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_STEP: Final = 256 << 20
"""bytes by which a file grows at most at once: it doubles until then"""


class GrowingFile:
    """A writer's file.

    Args:
        path: The file; made where it is missing.
        dtype: Its records, a multiple of eight bytes each.
        capacity: Records to make room for at once.
        counted: Records that must be there.

    Raises:
        CorruptError: the file holds fewer than ``counted`` records.
        DiskFullError, HomeError: no room, or not writable.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], capacity: int, counted: int = 0) -> None:
        self.path = path
        self.dtype = dtype
        with typed_os_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            size = os.fstat(self._descriptor).st_size
            _require(path, size, dtype.itemsize, counted)
            there = max(counted, size // dtype.itemsize, 1)
            try:
                self._allocate(max(capacity, there))
            except DiskFullError:
                # No room for plenty; perhaps for what is there.
                self._allocate(there)
        except BaseException:
            self.close()
            raise

    def _allocate(self, capacity: int) -> None:
        size = -(-capacity * self.dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        before = os.fstat(self._descriptor).st_size
        with typed_os_errors(self.path):
            try:
                os.posix_fallocate(self._descriptor, 0, size)
            except OSError:
                # Blocks that were had before the disk was full are no use to anyone.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, before)
                raise
            self._map = mmap.mmap(self._descriptor, size)
        self.capacity = size // self.dtype.itemsize
        self.records: npt.NDArray[Any] = np.frombuffer(self._map, self.dtype, self.capacity)
        self.words: npt.NDArray[np.uint64] = self.records.view(np.uint64).reshape(-1)

    def reserve(self, count: int) -> None:
        """Makes room for ``count`` records in all; :attr:`records` and :attr:`words` are new arrays after growing.

        Raises:
            CorruptError: someone has cut the file short.
            DiskFullError: no room; what was there stays.
        """
        self.still_whole()
        if count <= self.capacity:
            return
        step = max(LARGEST_STEP // self.dtype.itemsize, 1)
        try:
            self._allocate(max(count, min(2 * self.capacity, self.capacity + step)))
        except DiskFullError:
            # No room for plenty; perhaps for what is needed now.
            self._allocate(count)

    def still_whole(self) -> None:
        """Asks the system for the file's size; call it before touching what was mapped.

        Raises:
            CorruptError: someone has cut the file short.
        """
        if self._descriptor >= 0 and os.fstat(self._descriptor).st_size < len(self._map):
            raise CorruptError("someone has cut the file short", file=self.path, remedy=mend(self.path))

    def sync(self) -> None:
        """Returns when all that was written is on disk."""
        with typed_os_errors(self.path):
            os.fdatasync(self._descriptor)

    def cut(self, count: int, *, sync: bool) -> None:
        """Shortens the file to ``count`` records and closes it; on disk when this returns, if ``sync``."""
        with typed_os_errors(self.path):
            os.ftruncate(self._descriptor, count * self.dtype.itemsize)
            if sync:
                os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Gives the file back; arrays that others still hold stay readable."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.records = np.zeros(0, self.dtype)
            self.words = np.zeros(0, np.uint64)


@dataclass(frozen=True)
class MappedRecords:
    """A reader's file: ``records`` are read-only, and stay readable after the file is renamed or unlinked."""

    path: Path
    records: npt.NDArray[Any]
    _map: mmap.mmap | None

    def still_whole(self) -> None:
        """Asks the system for the file's size: cheap, about a microsecond.

        Raises:
            CorruptError: someone has cut the file short; touching what is gone would end the process.
        """
        if self._map is not None and self._map.size() < self.records.nbytes:
            raise shortened(self.path, self._map.size(), self.records.itemsize, len(self.records))


def map_records(
    path: Path, dtype: np.dtype[Any], count: int, *, exact: bool = True, folder: int | None = None
) -> MappedRecords:
    """Maps the first ``count`` records of a file.

    Args:
        path: The file.
        dtype: Its records.
        count: How many there must be.
        exact: The file must hold nothing else.
        folder: Descriptor of the file's folder, which may have been renamed since.

    Raises:
        CorruptError: the file is missing, shorter, or (``exact``) longer.
    """
    try:
        name = path if folder is None else path.name
        descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
    except FileNotFoundError as error:
        raise CorruptError("file is missing", file=path, remedy=mend(path)) from error
    except OSError as error:
        raise CorruptError(f"cannot be read: {error.strerror}", file=path, remedy=mend(path)) from error
    try:
        size, wanted = os.fstat(descriptor).st_size, count * dtype.itemsize
        if size < wanted or (exact and size != wanted):
            raise shortened(path, size, dtype.itemsize, count)
        if not wanted:
            return MappedRecords(path, np.zeros(0, dtype), None)
        try:
            mapping = mmap.mmap(descriptor, wanted, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CorruptError(f"cannot be mapped: {error}", file=path, remedy=mend(path)) from error
    finally:
        os.close(descriptor)
    return MappedRecords(path, np.frombuffer(mapping, dtype, count), mapping)


def _require(path: Path, size: int, itemsize: int, count: int) -> None:
    if size < count * itemsize:
        raise shortened(path, size, itemsize, count)


def shortened(path: Path, size: int, itemsize: int, count: int) -> CorruptError:
    """The error for a file of ``size`` bytes, to hold ``count`` records: it names the first that is not whole."""
    record = min(size // itemsize, count)
    return CorruptError(f"{size} bytes instead of {count * itemsize}", file=path, record=record, remedy=mend(path))
