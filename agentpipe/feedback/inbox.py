"""The inbox: a folder that files of feedback are dropped into. What may be read, what waits, what is refused."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Protocol

from agentpipe.errors import FeedbackError
from agentpipe.feedback import jsonl
from agentpipe.feedback.jsonl import UnfinishedError
from agentpipe.feedback.rows import FaultError
from agentpipe.storage import digest_bytes, sync, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agentpipe.feedback.block import Block, Refused, Row

TAKEN: Final = "taken"
REFUSED: Final = "refused"
_IN_MEMORY: Final = 1 << 26
"""bytes up to which a file is read at once"""
_STAGING: Final = ".staging-"
"""beginning of the names under which :func:`submit` copies"""
_LONGEST_NAME: Final = 255
_NO_LINKS: Final = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""what file systems without hard links say"""


class Format(Protocol):
    """How files with one suffix are read."""

    def check(self, file: IO[bytes]) -> None:
        """Goes through the file as far as is needed to know that it can be read whole.

        Raises:
            UnfinishedError: it is still being written.
            FaultError: it cannot be read, whatever its rows are.
        """

    def read(self, file: IO[bytes]) -> Iterator[Row | Refused | Block]:
        """Its rows, after :meth:`check` found nothing."""


def formats() -> Mapping[str, Format]:
    """The readers by suffix."""
    from agentpipe.feedback import csvfile, parquetfile

    return {".jsonl": jsonl, ".ndjson": jsonl, ".csv": csvfile, ".parquet": parquetfile}


@dataclass(frozen=True)
class Dropped:
    """A file that was opened and checked: its content does not change any more for us."""

    path: Path
    digest: str
    file: IO[bytes]
    size: int


def listing(inbox: Path) -> list[Path]:
    """What lies in the inbox under one of the suffixes, by name; hidden names are somebody's temporary files.

    Raises:
        HomeError: the inbox cannot be read.
    """
    known = formats()
    return [path for path in _names(inbox) if path.suffix.lower() in known and not path.name.startswith(".")]


def ignored(inbox: Path) -> dict[str, str]:
    """What lies in the inbox and is not looked at, by name, each with the reason; it stays where it is.

    Raises:
        HomeError: the inbox cannot be read.
    """
    *known, last = formats()
    read = f"{', '.join(known)} and {last} are read"
    found = {}
    for path in _names(inbox):
        if path.name in (TAKEN, REFUSED) or path.name.startswith(_STAGING):
            continue
        if path.name.startswith("."):
            why = "a hidden name, as of a file that is still being written; rename it if it is whole"
        elif path.suffix.lower() in (*known, last):
            continue
        else:
            what = "a folder" if path.is_dir() else f"ending {path.suffix}" if path.suffix else "no ending"
            why = f"{what}; {read}"
        found[shown(path.name)] = why
    return found


def digests(inbox: Path) -> list[str]:
    """Digests of the content of what an intake would look at, by name; of what is no readable file, of its name."""
    found = []
    for path in listing(inbox):
        try:
            with _plain(path) as file:
                found.append(_digest(file))
        except FaultError as fault:
            if os.path.lexists(path):  # else an intake has just taken it
                found.append(refused_digest(path, fault))
    return found


def shown(name: str) -> str:
    """The name of a file as it may be printed and stored."""
    return name.encode(errors="backslashreplace").decode()


def _names(inbox: Path) -> list[Path]:
    """Everything in the inbox, sorted by name; nothing where there is none yet."""
    with typed_os_errors(inbox), contextlib.suppress(FileNotFoundError), os.scandir(inbox) as entries:
        return [inbox / name for name in sorted(entry.name for entry in entries)]
    return []


def reader(path: Path) -> Format:
    """How a file with this name is read."""
    return formats()[path.suffix.lower()]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Dropped]:
    """Opens and checks a file.

    Raises:
        UnfinishedError: it is still being written.
        FaultError: it is no plain file, may not be read, or cannot be read whole.
    """
    with _plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise UnfinishedError("empty: nothing was written yet")
        content: IO[bytes] = file
        if size <= _IN_MEMORY:
            content = io.BytesIO(file.read(_IN_MEMORY))
        digest = _digest(content)
        try:
            reader(path).check(content)
        except FaultError as fault:
            fault.digest = digest
            raise
        content.seek(0)
        yield Dropped(path, digest, content, size)


@contextlib.contextmanager
def _plain(path: Path) -> Iterator[IO[bytes]]:
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise FaultError("not_a_file", "a symbolic link; drop the file itself")
        if not stat.S_ISREG(mode):
            raise FaultError("not_a_file", "a folder" if stat.S_ISDIR(mode) else "no plain file")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise FaultError("unreadable", f"cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        yield file


def _digest(file: IO[bytes]) -> str:
    import hashlib

    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # any binary file will do
    file.seek(0)
    return digest


def refused_digest(path: Path, fault: FaultError) -> str:
    """What a refused file counts as: another source than the same content, should that be readable one day."""
    return digest_bytes(b"refused:" + (fault.digest.encode() or os.fsencode(path.name)))


def put_away(path: Path, folder: Path, digest: str, size: int | None = None) -> bool:
    """Out of the inbox, named by content too, so that a later file of the same name does not replace it.

    Returns:
        False where the file has another size than ``size`` by now: somebody still wrote to it, and it stays.
    """
    with typed_os_errors(folder):
        folder.mkdir(exist_ok=True)
        ending = f"-{digest[:12]}{path.suffix}"
        stem = os.fsencode(path.stem)[: _LONGEST_NAME - len(os.fsencode(ending)) - 4]
        target = folder / (os.fsdecode(stem) + ending)
        if size is None:  # refused: what lies there under this name is something else
            count = 1
            while os.path.lexists(target):
                count += 1
                target = folder / (os.fsdecode(stem) + f".{count}{ending}")
        try:
            path.rename(target)
        except FileNotFoundError:  # somebody took it away meanwhile
            return True
        if size is not None and target.lstat().st_size != size:
            target.rename(path)
            return False
    return True


def submit(path: Path, inbox: Path | None) -> Path:
    """Copies a file into the inbox, where it appears whole or not at all, and returns where; None: only checks it.

    Raises:
        FeedbackError: it cannot be read, is not finished, or has a suffix that nothing reads.
    """
    if path.suffix.lower() not in formats():
        remedy = f"give a file that ends in {', '.join(formats())}"
        raise FeedbackError("nothing reads files of this kind", file=path, remedy=remedy)
    try:
        with opened(path.resolve() if path.is_symlink() else path) as dropped:
            return copy_in(dropped, inbox) if inbox else path
    except UnfinishedError as error:
        raise FeedbackError(f"not a finished file: {error}", file=path, remedy=error.remedy) from error
    except FaultError as error:
        raise FeedbackError(
            f"{error.reason}: {error.detail}", file=path, remedy="see docs/how-to/feedback.md"
        ) from error


def copy_in(dropped: Dropped, inbox: Path) -> Path:
    """The content of ``dropped`` as a new file of the inbox, durably; what lies there is never replaced."""
    import shutil

    name = dropped.path.name.lstrip(".")  # hidden names are not looked at
    target = inbox / (name if Path(name).suffix else f"feedback.{name}")
    with typed_os_errors(inbox):
        inbox.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=_STAGING, dir=inbox)
        try:
            with os.fdopen(descriptor, "wb") as copy:
                shutil.copyfileobj(dropped.file, copy)
                copy.flush()
                os.fsync(copy.fileno())
            Path(name).chmod(0o644)
            target = _placed(Path(name), target, dropped.digest)
        except FileNotFoundError as error:  # a run that began meanwhile has tidied up
            raise FeedbackError("the copy was removed", file=dropped.path, remedy="submit it again") from error
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        sync(inbox)
    return target


def _placed(staged: Path, target: Path, digest: str) -> Path:
    """Gives a staged file the first free name: its own, then with its digest, then with a number too."""
    stem = f"{target.stem}-{digest[:12]}"
    more = (target.with_name(f"{stem}-{number}{target.suffix}") for number in itertools.count(2))
    for path in itertools.chain((target, target.with_name(stem + target.suffix)), more):
        with contextlib.suppress(FileExistsError):
            _rename_to_new(staged, path)
            return path
    raise AssertionError("numbers do not end")


def _rename_to_new(staged: Path, path: Path) -> None:
    """Renames, and fails where the name is taken, in one step.

    Raises:
        FileExistsError: something lies there.
    """
    try:
        os.link(staged, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # empty: waits, should a run look at it
        try:
            staged.replace(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    else:
        staged.unlink(missing_ok=True)  # a run that began meanwhile may have tidied up
