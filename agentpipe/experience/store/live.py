"""Reading a shard while another process writes it: what counts, and nothing else.

Needs no lock and never opens LevelDB. The view keeps its mappings, so it stays readable when the writer grows its
files, seals or renames them; open it again to see more.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agentpipe.errors import CorruptError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.counter import COUNTER, Counts, read_counts
from agentpipe.experience.store.header import read_header
from agentpipe.experience.store.index import sealed_rows
from agentpipe.experience.store.manifest import MANIFEST
from agentpipe.experience.store.mapped import MappedRecords, map_records
from agentpipe.experience.store.remedies import mend
from agentpipe.experience.store.shard import WORD, Shard, open_shard

if TYPE_CHECKING:
    from pathlib import Path

    from agentpipe.experience.store.header import Header


def open_live(path: Path) -> Shard:
    """A read-only view of what counts in an open shard now; of a sealed one, the shard itself.

    Args:
        path: Its directory.

    Raises:
        CorruptError: there is no shard, or a file is missing or shorter than what counts.
        VersionError: of another format.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CorruptError(f"no open shard: {error.strerror}", file=path, remedy="check the path") from error
    try:
        if (path / MANIFEST).is_file():
            return open_shard(path, check=False)
        counts = _counts(path, folder)
        header = read_header(path)  # afterwards, so that it lists every policy of what counts
        files = _map(path, folder, header, counts)
    finally:
        os.close(folder)
    records, episodes, finals, graph = (file.records for file in files)
    manifest = {
        **header.manifest(),
        "format": rec.format_of(episodes),
        "steps": counts.steps,
        "episodes": counts.episodes,
    }
    index = sealed_rows(episodes)
    return Shard(path, manifest, records, episodes, finals, graph, index, {}, None, {}, files)


def _counts(path: Path, folder: int) -> Counts:
    try:
        descriptor = os.open(COUNTER, os.O_RDONLY, dir_fd=folder)
    except OSError as error:
        raise CorruptError(f"cannot be read: {error.strerror}", file=path / COUNTER, remedy=mend(path)) from error
    try:
        return read_counts(descriptor, path / COUNTER)
    finally:
        os.close(descriptor)


def _map(path: Path, folder: int, header: Header, counts: Counts) -> tuple[MappedRecords, ...]:
    sizes = header.content["observation_size"], header.content["action_count"]
    layout = (
        (rec.RECORDS, rec.step_dtype(*sizes), counts.steps),
        (rec.EPISODES, rec.EPISODE, counts.episodes),
        (rec.FINALS, rec.final_dtype(*sizes), counts.finals),
        (rec.GRAPH, WORD, counts.words),
    )
    return tuple(map_records(path / name, dtype, count, exact=False, folder=folder) for name, dtype, count in layout)
