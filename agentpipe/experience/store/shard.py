"""A shard as its readers see it: immutable step records, episodes, graphs, and a manifest that says what they are.

Any number of processes may read one at once. The files are memory-mapped; nothing is copied until it is used, and a
mapping outlives the file's name. A sealed file is never changed in place by agentpipe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CorruptError, ShrunkError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.index import SEALED, SEALED_INDEX, STEP_BITS, find_row
from agentpipe.experience.store.manifest import MANIFEST, MEASUREMENTS, NAMES, read_manifest
from agentpipe.experience.store.mapped import GrowingFile, MappedRecords, map_records
from agentpipe.experience.store.remedies import mend, read_part, restore_command

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HEADER: Final = "header.json"
WORD: Final = np.dtype("<u8")


@dataclass(frozen=True, eq=False)
class Shard:
    """One shard, sealed or as much of an open one as counted when it was looked at.

    Args:
        path: Its directory.
        manifest: What is in it and where it came from.
        records: One structured row a step (:func:`~agentpipe.experience.store.records.step_dtype`), read-only.
        episodes: One structured row an episode (``records.EPISODE``); its steps are contiguous in ``records``.
        finals: One structured row (:func:`~agentpipe.experience.store.records.final_dtype`) for each cut episode.
        graph: The words of all graphs, uint64; see :meth:`parents`.
        index: Sorted rows (``index.SEALED``).
        names: Id of each environment inside, by its index in the catalogue; empty for an open shard.
        quality: Figures of the content, None where none were made.
        measurements: How long recording took; not part of the digest.
        files: The mapped files behind the arrays.
    """

    path: Path
    manifest: Mapping[str, Any]
    records: npt.NDArray[Any]
    episodes: npt.NDArray[Any]
    finals: npt.NDArray[Any]
    graph: npt.NDArray[np.uint64]
    index: npt.NDArray[Any]
    names: Mapping[int, str]
    quality: Mapping[str, Any] | None
    measurements: Mapping[str, float]
    files: tuple[MappedRecords | GrowingFile, ...] = field(default=(), repr=False)

    @property
    def digest(self) -> str:
        """Digest of the content: equal episodes, equal digest. Empty for an open shard."""
        return str(self.manifest.get("digest", ""))

    @property
    def cell(self) -> str:
        """The cell whose disturbances the episodes were played under."""
        return str(self.manifest["cell"])

    @property
    def policies(self) -> list[dict[str, Any]]:
        """Who played: ``player``, ``version`` and ``ordinal`` of each policy, by ``records["policy"]``."""
        return list(self.manifest["policies"])

    def steps(self, row: int) -> npt.NDArray[Any]:
        """The records of the episode in ``row``, a view."""
        episode = self.episodes[row]
        first = int(episode["first"])
        return self.records[first : first + int(episode["steps"])]

    def parents(self, row: int) -> npt.NDArray[np.uint64]:
        """The graph of the episode in ``row``, uint64 ``[n, W]``, a view: bit i of row j = step j used what i made."""
        episode = self.episodes[row]
        first, steps = int(episode["graph"]), int(episode["steps"])
        return self.graph[first : first + rec.graph_words(steps)].reshape(steps, -1)

    def final(self, row: int) -> npt.NDArray[Any] | None:
        """What the player would have seen next where the episode in ``row`` was cut: one record, or None."""
        number = int(self.episodes["final"][row])
        return None if number == rec.NO_FINAL else self.finals[number]

    def find(self, environment: int, episode: int) -> int | None:
        """The row of an episode, or None."""
        return find_row(self.index, environment, episode)

    def find_step(self, environment: int, step_id: int, time_ns: int | None = None) -> int | None:
        """The number of a step's record, or None.

        Args:
            environment: Index in the catalogue.
            step_id: Episode × 2¹⁶ + step.
            time_ns: When it was taken; None = whenever.
        """
        row = self.find(environment, step_id >> STEP_BITS)
        step = step_id & ((1 << STEP_BITS) - 1)
        if row is None or step >= int(self.episodes["steps"][row]):
            return None
        number = int(self.episodes["first"][row]) + step
        return number if time_ns is None or int(self.records["time_ns"][number]) == time_ns else None

    def unpack_masks(self, packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Masks as bool ``[n, A]``."""
        return rec.unpack_masks(packed, int(self.manifest["action_count"]))

    def check(self) -> None:
        """Reads every byte: checksums, graphs, index, digest of the content, and whether they fit each other.

        Raises:
            CorruptError: names file, record and, where it can be told, field.
        """
        from agentpipe.experience.store.audit import audit

        for damage in audit(self):
            raise damage.error(self.path)

    def still_whole(self) -> None:
        """Asks whether the mapped files have kept their size; call it before touching what was mapped long ago.

        A file that someone cuts short between this call and the access still ends the process (SIGBUS): some
        microseconds that no check can close. agentpipe itself only ever unlinks sealed files, which harms no reader.

        Raises:
            CorruptError: a file was cut short.
        """
        for file in self.files:
            file.still_whole()


def is_open(path: Path) -> bool:
    """True where a shard is being written, or was when its writer died."""
    return (path / HEADER).is_file() and not (path / MANIFEST).is_file()


def is_shrunk(path: Path) -> bool:
    """True where a sealed shard holds only seeds and actions.

    Raises:
        CorruptError, VersionError: see :func:`~agentpipe.experience.store.manifest.read_manifest`.
    """
    return bool(read_manifest(path / MANIFEST).get("shrunk", False))


def open_shard(path: Path, *, check: bool = True) -> Shard:
    """Opens a sealed shard.

    Args:
        path: Its directory.
        check: Also read every byte (:meth:`Shard.check`). Manifest and file sizes are checked in any case.

    Raises:
        CorruptError: a file is missing, truncated or altered; names the file, and record and field where it can be
            told. Also for a shard that is not sealed yet.
        VersionError: written in another format.
        ShrunkError: it holds only seeds and actions.
    """
    if is_open(path):
        remedy = "wait until its writer seals it, or look at what counts with open_live"
        raise CorruptError("this shard is not sealed", file=path, remedy=remedy)
    manifest = read_manifest(path / MANIFEST)
    if manifest.get("shrunk"):
        raise ShrunkError("the shard holds only seeds and actions", file=path, remedy=restore_command(path))
    shard = map_shard(path, manifest)
    if check:
        shard.check()
    return shard


def map_shard(path: Path, manifest: Mapping[str, Any]) -> Shard:
    """Maps the files of a sealed shard as ``manifest`` describes them.

    Raises:
        CorruptError: a file is missing or not as long as it should be.
    """
    size, actions = manifest["observation_size"], manifest["action_count"]
    layout = (
        (rec.RECORDS, rec.step_dtype(size, actions), manifest["steps"]),
        (rec.EPISODES, rec.EPISODE, manifest["episodes"]),
        (rec.FINALS, rec.final_dtype(size, actions), manifest["finals"]),
        (rec.GRAPH, WORD, manifest["graph_words"]),
        (SEALED_INDEX, SEALED, manifest["episodes"]),
    )
    files = tuple(map_records(path / name, dtype, count) for name, dtype, count in layout)
    records, episodes, finals, graph, index = (file.records for file in files)
    return Shard(
        path,
        manifest,
        records,
        episodes,
        finals,
        graph,
        index,
        names=read_names(path / NAMES),
        quality=manifest.get("quality"),
        measurements=read_part(path / MEASUREMENTS),
        files=files,
    )


def read_names(path: Path) -> dict[int, str]:
    """Reads ``names.json``.

    Raises:
        CorruptError: missing, or not an object of ids by index.
    """
    content = read_part(path)
    try:
        return {int(index): str(name) for index, name in content.items()}
    except (AttributeError, ValueError) as error:
        raise CorruptError("not the ids of environments", file=path, remedy=mend(path)) from error
