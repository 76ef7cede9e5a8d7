"""A sealed shard: immutable step records, an episode table, and a manifest that says what they are and hashes them.

Any number of processes may read one at once. ``records.bin`` is memory-mapped; nothing is copied until it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CorruptError, VersionError
from agentpipe.experience import records as rec
from agentpipe.experience.quality import Quality
from agentpipe.storage import canonical_json, digest_bytes, digest_file, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST: Final = "manifest.json"
MEASUREMENTS: Final = "measurements.json"
_REMEDY: Final = "materialise these trajectories again"


@dataclass(frozen=True)
class Shard:
    """One sealed shard.

    Args:
        path: Its directory.
        manifest: What is in it and where it came from.
        records: One structured row a step (:func:`~agentpipe.experience.records.step_dtype`), read-only.
        episodes: One structured row an episode (``records.EPISODE``); its steps are contiguous in ``records``.
        quality: Figures of the content.
        measurements: How long recording took; not part of the digest.
    """

    path: Path
    manifest: Mapping[str, Any]
    records: npt.NDArray[Any]
    episodes: npt.NDArray[Any]
    quality: Quality
    measurements: Mapping[str, float]

    @property
    def digest(self) -> str:
        """Digest of the content: equal episodes, equal digest."""
        return str(self.manifest["digest"])

    @property
    def cell(self) -> str:
        """The cell whose disturbances the episodes were played under."""
        return str(self.manifest["cell"])

    def steps(self, episode: int) -> npt.NDArray[Any]:
        """The records of the ``episode``-th episode of this shard."""
        row = self.episodes[episode]
        first = int(row["first"])
        return self.records[first : first + int(row["steps"])]

    def unpack_masks(self, packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Masks as bool ``[n, A]``."""
        return rec.unpack_masks(packed, int(self.manifest["action_count"]))

    def check(self) -> None:
        """Recomputes every checksum and follows the episode table.

        Raises:
            CorruptError: names file and record.
        """
        rec.check(self.records, self.path / rec.RECORDS)
        rec.check(self.episodes, self.path / rec.EPISODES)
        steps = self.episodes["steps"].astype(np.uint64)
        expected = np.concatenate([np.zeros(1, np.uint64), np.cumsum(steps)])
        wrong = self.episodes["first"] != expected[:-1]
        if wrong.any() or expected[-1] != len(self.records):
            record = int(wrong.argmax())
            raise CorruptError(
                "episodes and records do not match", file=self.path / rec.EPISODES, record=record, remedy=_REMEDY
            )


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Digest of everything that the manifest says, hashes of the files included."""
    return digest_bytes(canonical_json({key: value for key, value in manifest.items() if key != "digest"}))


def open_shard(path: Path, *, check: bool = True) -> Shard:
    """Opens a sealed shard.

    Args:
        path: Its directory.
        check: Also read every byte and compare digests. Manifest and file sizes are checked in any case.

    Raises:
        CorruptError: a file is missing, truncated or altered; names the file, and the record where it can be told.
        VersionError: written in a newer format.
    """
    manifest = _read_manifest(path / MANIFEST)
    dtype = rec.step_dtype(manifest["observation_size"], manifest["action_count"])
    if rec.describe(dtype) != manifest["fields"]:
        raise CorruptError(
            "the fields are not those of this format", file=path / MANIFEST, field="fields", remedy=_REMEDY
        )
    shard = Shard(
        path=path,
        manifest=manifest,
        records=_map(path / rec.RECORDS, dtype, manifest["steps"]),
        episodes=_map(path / rec.EPISODES, rec.EPISODE, manifest["episodes"]),
        quality=Quality.from_json(manifest["quality"]),
        measurements=read_json(path / MEASUREMENTS),
    )
    if check:
        _check_digests(shard)
    return shard


def _read_manifest(path: Path) -> Mapping[str, Any]:
    manifest = read_json(path)
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CorruptError("not a shard manifest", file=path, remedy=_REMEDY)
    if manifest["format"] != rec.FORMAT:
        remedy = f"this program reads {rec.FORMAT}"
        raise VersionError(f"shard format {manifest['format']!r}", file=path, remedy=remedy)
    if manifest.get("digest") != manifest_digest(manifest):
        raise CorruptError("content differs from its digest", file=path, field="digest", remedy=_REMEDY)
    return manifest


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    if not path.is_file():
        raise CorruptError("file is missing", file=path, remedy=_REMEDY)
    size = path.stat().st_size
    if size != count * dtype.itemsize:
        complete = size // dtype.itemsize
        text = f"{size} bytes instead of {count * dtype.itemsize}"
        raise CorruptError(text, file=path, record=min(complete, count), remedy=_REMEDY)
    if not count:
        return np.zeros(0, dtype)
    mapped: npt.NDArray[Any] = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    return mapped


def _check_digests(shard: Shard) -> None:
    for name, expected in shard.manifest["files"].items():
        if digest_file(shard.path / name) != expected:
            shard.check()  # names the record
            raise CorruptError("content differs from its digest", file=shard.path / name, remedy=_REMEDY)
