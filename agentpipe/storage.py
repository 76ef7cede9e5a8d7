"""Durable writes and content digests, shared by every store.

A file or directory appears under its final name whole or not at all: written aside, flushed to disk, renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentpipe.errors import CorruptError, DiskFullError, HomeError, LockHeldError, VersionError

if TYPE_CHECKING:
    from collections.abc import Iterator

HOME_FORMAT = 1
_STAGING = ".staging-"
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # of characters that JSON writes as two escapes
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


def canonical_json(obj: Any) -> bytes:
    """JSON with sorted keys, no spaces, no NaN: equal objects give equal bytes.

    Raises:
        ValueError: ``obj`` holds a NaN or an infinity.
    """
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_bytes(data: bytes | memoryview) -> str:
    """SHA-256 of ``data`` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def typed_os_errors(path: Path) -> Iterator[None]:
    """Turns the operating system's errors on ``path`` into typed ones.

    Raises:
        DiskFullError: no space or quota left, or a file beyond the limit of its size.
        HomeError: read-only, permission denied, a parent that is not a directory, or a folder in place of a file.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError("the disk is full", file=path, remedy="free space and run again") from error
        if error.errno == errno.EFBIG:
            remedy = "raise the limit (ulimit -f) and run again"
            raise DiskFullError("a file would exceed the largest size allowed", file=path, remedy=remedy) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            remedy = "choose a writable folder with --home"
            raise HomeError(f"cannot write: {error.strerror}", file=path, remedy=remedy) from error
        if error.errno in (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG):
            own = isinstance(error.filename, str) and _STAGING not in error.filename
            remedy = "move it away, or choose another folder with --home"
            message = f"something else lies where agentpipe writes: {error.strerror}"
            raise HomeError(message, file=error.filename if own else path, remedy=remedy) from error
        raise


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes ``data`` to ``path`` durably and atomically; the old content stays until the new is on disk.

    Raises:
        DiskFullError, HomeError: see :func:`typed_os_errors`.
    """
    with typed_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=_STAGING, dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        sync(path.parent)


def write_json(path: Path, obj: Any) -> None:
    """Writes ``obj`` as indented JSON with sorted keys, durably and atomically."""
    text = json.dumps(obj, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, text.encode() + b"\n")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        CorruptError: the file is missing, no file, not UTF-8 or not JSON, or holds what is never written: a NaN, an
            infinity, half a character, a number of thousands of digits.
    """
    try:
        text = path.read_bytes().decode()
        content = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if _HALVES.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except FileNotFoundError as error:
        raise CorruptError("file is missing", file=path, remedy="restore it or build it again") from error
    except OSError as error:
        raise CorruptError(f"cannot be read: {error.strerror}", file=path, remedy="restore it") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not valid JSON: {error}", file=path, remedy="restore it or build it again") from error
    return content


@contextlib.contextmanager
def publish_directory(final: Path) -> Iterator[Path]:
    """Yields a staging directory beside ``final``; on success it is flushed and renamed to ``final``.

    An existing ``final`` is replaced (:func:`replace_directory`); on an error the staging directory is removed and
    ``final`` stays as it was.
    """
    with typed_os_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{final.name}-", dir=final.parent))
        os.chmod(staging, 0o755)
        try:
            yield staging
            for path in sorted(staging.rglob("*"), reverse=True):
                sync(path)
            sync(staging)
            replace_directory(staging, final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        sync(final.parent)


def replace_directory(source: Path, final: Path, *, swap: bool = True) -> None:
    """Renames the directory ``source`` to ``final``, where another one may lie: that one is removed then.

    Linux exchanges the two names in one step, so that at no instant is ``final`` missing; a process that is killed then
    leaves the old one under the name of ``source``. Where it cannot (another system, some network file systems), or
    without ``swap``, the old one is moved aside first.
    """
    if not final.exists():
        os.rename(source, final)
    elif not final.is_dir():
        os.unlink(final)
        os.rename(source, final)
    elif swap and exchange(source, final):
        shutil.rmtree(source, ignore_errors=True)
    else:
        _move_aside(source, final)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two files or directories in one step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _move_aside(source: Path, final: Path) -> None:
    retired = Path(tempfile.mkdtemp(prefix=f"{_STAGING}old-", dir=final.parent))
    os.rename(final, retired / "old")
    try:
        os.rename(source, final)
    except BaseException:
        os.rename(retired / "old", final)
        raise
    finally:
        shutil.rmtree(retired, ignore_errors=True)


def remove_staging(root: Path) -> int:
    """Removes what interrupted writers left below ``root`` (call under the home's lock); returns how many."""
    leftovers = [path for path in root.rglob(f"{_STAGING}*") if path.exists()]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return len(leftovers)


def prepare_home(home: Path) -> None:
    """Creates ``home`` if need be and checks its format version.

    Raises:
        HomeError: not a directory, or not writable.
        VersionError: written by a newer agentpipe.
    """
    marker = home / "format.json"
    with typed_os_errors(home):
        if home.exists() and not home.is_dir():
            raise HomeError("the home is a file, not a directory", file=home, remedy="choose another with --home")
        home.mkdir(parents=True, exist_ok=True)
    if not marker.exists():
        write_json(marker, {"format": HOME_FORMAT})
        return
    check_home_format(home)
    if not os.access(home, os.W_OK):
        raise HomeError("the home is not writable", file=home, remedy="choose a writable folder with --home")


def check_home_format(home: Path) -> None:
    """Says whether this program can read ``home``; one without a marker is too young to have another format.

    Raises:
        VersionError: written by a newer agentpipe.
        CorruptError: the marker is damaged.
    """
    marker = home / "format.json"
    if not marker.exists():
        return
    content = read_json(marker)
    found = content.get("format") if isinstance(content, dict) else None
    if found != HOME_FORMAT:
        remedy = "use the agentpipe that wrote it, or another --home"
        raise VersionError(f"home format {found!r}, this program reads {HOME_FORMAT}", file=marker, remedy=remedy)


@contextlib.contextmanager
def _room_for_nothing() -> Iterator[None]:
    """A full disk is no error here: whoever holds the lock may be about to make room."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


@contextlib.contextmanager
def home_lock(home: Path, holder: str) -> Iterator[None]:
    """Holds the home's one writer lock while the body runs; the lock dies with the process.

    Raises:
        LockHeldError: another process holds it; the message names what it runs and its process id.
        HomeError: something else lies in its place: a link, a pipe, a folder.
    """
    prepare_home(home)
    with writer_lock(home, holder, what="home", instead="use another --home"):
        yield


@contextlib.contextmanager
def writer_lock(
    directory: Path, holder: str, *, what: str = "directory", instead: str = "use another directory"
) -> Iterator[None]:
    """As :func:`home_lock`, for any directory with one writer; it is made if need be.

    Args:
        directory: holds the file ``lock``.
        holder: what runs; the next one reads it.
        what: the directory in a word.
        instead: what else one can do but wait.

    Raises:
        LockHeldError, HomeError: as there.
    """
    path = directory / "lock"
    with typed_os_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise HomeError("not a plain file where the lock should be", file=path, remedy="move it away")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "unknown"
            remedy = f"wait until it ends, or {instead}"
            raise LockHeldError(f"the {what} is held by {other}", file=path, remedy=remedy) from error
        with typed_os_errors(path), _room_for_nothing():
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{holder} (process {os.getpid()})".encode(), 0)
        yield
    finally:
        os.close(descriptor)
