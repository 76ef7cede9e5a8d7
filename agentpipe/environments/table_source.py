"""The source of the disturbance table, which a person may save from an editor while it is rewritten."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from agentpipe.environments.table import DisturbanceTable, load_table
from agentpipe.errors import TableError
from agentpipe.storage import digest_bytes, digest_file, exchange, sync, typed_os_errors, write_bytes

if TYPE_CHECKING:
    from pathlib import Path

_READS = 3
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV)


class SourceEditedError(TableError):
    """Raised when the source was saved by somebody else while a change was made; neither content is lost."""


def digest_of(path: Path) -> str | None:
    """SHA-256 of a source's bytes; ``None`` where there is none."""
    try:
        return digest_file(path)
    except FileNotFoundError:
        return None


def read_source(path: Path) -> tuple[DisturbanceTable, str]:
    """A source's table, and the digest of the bytes that it was read from.

    Raises:
        TableError: anything wrong with the file, see :func:`~agentpipe.environments.table.load_table`.
        SourceEditedError: it was saved anew at each of three looks.
    """
    for _ in range(_READS):
        before = digest_of(path)
        table = load_table(path)
        if before is not None and digest_of(path) == before:
            return table, before
    raise SourceEditedError("the source changes while it is read", file=path, remedy="save it, then try again")


def replace_source(path: Path, data: bytes, expected: str | None) -> None:
    """Puts ``data`` in place of a source whose content still is what was read.

    The new content is written aside and flushed. Then the source is compared and, in the next instant, exchanged with
    it in one step; what came out is compared once more, and put back where it is something else. So whoever saves in
    between, by a rename or into the file, has the own content in the source, and the caller an error. Of two saves
    within the exchange the earlier stays the source, and the later is kept beside it.

    What remains, for microseconds: an editor that opened the file before the exchange and writes into it after the
    second comparison writes into a file without a name. A process killed between exchange and second comparison leaves
    what came out as ``.staging-...`` beside the source. Where the system cannot exchange two names (other systems than
    Linux, some network file systems), whoever saves between the comparison and the rename behind it is overwritten: no
    file system has a rename that depends on content.

    Args:
        path: The source.
        data: Its new content.
        expected: SHA-256 of what was read; ``None``: there was no file.

    Raises:
        SourceEditedError: the source is another one by now; it stays. ``kept`` names the later of two saves.
        DiskFullError, HomeError: it cannot be written; what was there stays.
    """
    aside = _aside(path)
    with typed_os_errors(path):
        write_bytes(aside, data)
        try:
            if digest_of(path) != expected:
                raise _edited(path)
            if expected is None:
                _appear(aside, path)
            else:
                _exchange(aside, path, data, expected)
        finally:
            aside.unlink(missing_ok=True)
            sync(path.parent)


def set_aside(path: Path, folder: Path) -> None:
    """Moves a source into ``folder``, under the digest of its bytes; what is saved in between goes there as well.

    Raises:
        DiskFullError, HomeError: it cannot be moved; it stays.
    """
    with typed_os_errors(path):
        _keep(path.read_bytes(), folder)
        aside = path.rename(_aside(path))
        _keep(aside.read_bytes(), folder)
        aside.unlink()


def _keep(data: bytes, folder: Path) -> None:
    path = folder / f"{digest_bytes(data)[:12]}.csv"
    if not path.exists():
        write_bytes(path, data)


def _aside(path: Path) -> Path:
    return path.with_name(f".staging-{path.name}-{os.getpid()}")


def _appear(aside: Path, path: Path) -> None:
    """Gives a file the name ``path`` where nothing has it."""
    try:
        path.hardlink_to(aside)
    except FileExistsError as error:
        raise _edited(path) from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        aside.rename(path)


def _exchange(aside: Path, path: Path, data: bytes, expected: str) -> None:
    try:
        if not exchange(aside, path):
            aside.replace(path)
            return
        if digest_of(aside) == expected:
            return
        exchange(aside, path)
    except FileNotFoundError as error:  # somebody removed it
        raise _edited(path) from error
    later = digest_of(aside)
    if later is None or later == digest_bytes(data):
        raise _edited(path)
    raise _edited(path, aside.rename(path.with_name(f"{path.name}.{later[:12]}")))


def _edited(path: Path, kept: Path | None = None) -> SourceEditedError:
    return SourceEditedError("the source was edited at this moment", file=path, kept=kept, remedy="try again")
