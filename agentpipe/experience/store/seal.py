"""Sealing: an open shard becomes an immutable one, by one rename.

Everything that a sealed shard has is written beside what the open one has; the manifest comes last. Until the
directory is renamed a dead process leaves an open shard, whose next writer removes the manifest and goes on. From then
on it is sealed, and what only the open shard needed is removed.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agentpipe.errors import HomeError, RecordError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.content import content_digest
from agentpipe.experience.store.counter import COUNTER
from agentpipe.experience.store.index import OPEN_INDEX, SEALED_INDEX, sealed_rows
from agentpipe.experience.store.lock import LOCK
from agentpipe.experience.store.manifest import MANIFEST, MEASUREMENTS, NAMES, complete, file_facts
from agentpipe.experience.store.shard import HEADER, Shard, map_shard, open_shard
from agentpipe.storage import replace_directory, sync, typed_os_errors, write_bytes, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agentpipe.experience.store.writer import ShardWriter

TIMED_FILES: Final = (SEALED_INDEX, NAMES, MEASUREMENTS)
"""the small files of a sealed shard, whose checksums stand in the manifest"""


def seal(
    writer: ShardWriter,
    final: Path,
    names: Mapping[int, str],
    reasons: Sequence[str],
    quality: Callable[[Shard], Mapping[str, Any]] | None,
    measurements: Mapping[str, float],
) -> Shard:
    """Seals the open shard of ``writer``; see :meth:`~agentpipe.experience.store.writer.ShardWriter.seal`."""
    directory, view = writer.directory, writer.view()
    inside = np.unique(view.episodes["environment"]).tolist()
    unnamed = [index for index in inside if index not in names]
    if unnamed:
        text, remedy = "an environment without a name", "give the id of every environment inside"
        raise RecordError(text, environment=unnamed[0], field="names", remedy=remedy)
    size = sum(array.nbytes for array in (view.records, view.episodes, view.finals, view.graph))
    write_json(directory / NAMES, {str(index): names[index] for index in inside})
    write_bytes(directory / SEALED_INDEX, sealed_rows(view.episodes).tobytes())
    write_json(directory / MEASUREMENTS, {"write_bytes_per_second": _speed(size, measurements), **measurements})
    content = {
        **view.manifest,
        "finals": len(view.finals),
        "graph_words": len(view.graph),
        "record_bytes": view.records.itemsize,
        "fields": rec.describe(view.records.dtype),
        "reasons": list(reasons),
        "content": content_digest(view.records, view.episodes, view.finals, view.graph, before=view.still_whole),
        "bytes": size,
    }
    del view
    writer.cut()
    shard = map_shard(directory, content)
    if quality is not None and len(shard.episodes):
        content["quality"] = dict(quality(shard))
    write_json(directory / MANIFEST, complete(content, file_facts(directory, TIMED_FILES)))
    if final != directory:
        move(directory, final)
    _remove_leftovers(final)
    return open_shard(final, check=False)


def _speed(size: int, measurements: Mapping[str, float]) -> float:
    seconds = measurements["write_seconds"]
    return size / seconds if seconds > 0 else 0.0


def move(source: Path, final: Path) -> None:
    """Renames the directory ``source`` to ``final``, in place of what is there, which is removed afterwards.

    Raises:
        HomeError: they lie on different file systems, or a file is in the way.
    """
    with typed_os_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            source.rename(final)
        except OSError as error:
            if error.errno == errno.EXDEV:
                remedy = "let the open shard lie on the file system of its final place"
                raise HomeError("a shard cannot move to another file system", file=final, remedy=remedy) from error
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            replace_directory(source, final, swap=False)  # killed in between, the open shard is still there
        for folder in {source.parent, final.parent}:
            sync(folder)


def _remove_leftovers(directory: Path) -> None:
    """Removes what only an open shard has; the header first, without which it cannot be taken for one."""
    with typed_os_errors(directory):
        for name in (HEADER, COUNTER, LOCK):
            (directory / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory / OPEN_INDEX)
        sync(directory)
