"""Writing a shard: whole episodes are appended, then everything is sealed at once."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from agentpipe.experience import records as rec
from agentpipe.experience.quality import measure_quality
from agentpipe.experience.shard import MANIFEST, MEASUREMENTS, manifest_digest
from agentpipe.storage import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType


class ShardWriter:
    """Appends episodes to the files of one shard in ``directory``, which a caller publishes by rename.

    Args:
        directory: An empty staging directory.
        header: What the manifest says besides counts and hashes; must hold ``observation_size`` and ``action_count``.
    """

    def __init__(self, directory: Path, header: Mapping[str, Any]) -> None:
        self.directory = directory
        self.header = dict(header)
        self.dtype = rec.step_dtype(header["observation_size"], header["action_count"])
        self.seconds = 0.0
        self._steps = 0
        self._episodes: list[npt.NDArray[Any]] = []
        self._rewards: list[npt.NDArray[np.float32]] = []
        self._hash = hashlib.sha256()
        self._file: BinaryIO = (directory / rec.RECORDS).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, steps: npt.NDArray[Any], episodes: npt.NDArray[Any]) -> None:
        """Appends whole episodes: ``episodes`` (``records.EPISODE``), ``steps`` their records one after another.

        Checksums and ``first`` are filled in here.
        """
        start = time.perf_counter()
        lengths = episodes["steps"].astype(np.int64)
        assert lengths.sum() == len(steps), "an episode's steps must be complete"
        episodes["first"] = self._steps + np.concatenate([[0], np.cumsum(lengths)[:-1]])
        rec.seal(steps)
        rec.seal(episodes)
        data = steps.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._steps += len(steps)
        self._episodes.append(episodes)
        self._rewards.append(steps["reward"].copy())
        self.seconds += time.perf_counter() - start

    def seal(self, reasons: tuple[str, ...], *, recording_seconds: float) -> None:
        """Writes the episode table, the manifest and the measurements.

        Args:
            reasons: Names of the episode outcomes, by ``episodes["reason"]``.
            recording_seconds: Wall time of playing and writing together, for the throughput.
        """
        self._file.flush()
        episodes = np.concatenate(self._episodes)
        (self.directory / rec.EPISODES).write_bytes(episodes.tobytes())
        size = self._steps * self.dtype.itemsize + episodes.nbytes
        quality = measure_quality(np.concatenate(self._rewards), episodes, size, reasons)
        hashes = {rec.RECORDS: self._hash.hexdigest(), rec.EPISODES: hashlib.sha256(episodes.tobytes()).hexdigest()}
        manifest = {
            **self.header,
            "format": rec.FORMAT,
            "steps": self._steps,
            "episodes": len(episodes),
            "record_bytes": self.dtype.itemsize,
            "fields": rec.describe(self.dtype),
            "files": hashes,
            "quality": quality.to_json(),
        }
        write_json(self.directory / MANIFEST, {**manifest, "digest": manifest_digest(manifest)})
        measurements = {
            "seconds": recording_seconds,
            "steps_per_second": self._steps / recording_seconds,
            "episodes_per_second": len(episodes) / recording_seconds,
            "write_seconds": self.seconds,
            "write_bytes_per_second": size / self.seconds,
        }
        write_json(self.directory / MEASUREMENTS, measurements)
