"""Observation statistics, global to the pool: gathered once, frozen, and saved with every policy (S10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import OBSERVATION_NAMES
from agentpipe.errors import CheckpointError, LearningError, NonFiniteError
from agentpipe.learning.tensors import open_sealed, pack, required, seal, sealed_manifest, unpack
from agentpipe.progress import silent
from agentpipe.storage import canonical_json, digest_bytes, publish_directory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool
    from agentpipe.progress import Progress

Floats = npt.NDArray[np.float64]
_KIND, _FORMAT, _MANIFEST, _FILE = "agentpipe.observation-statistics", 1, "statistics.json", "statistics.safetensors"


@dataclass
class ObservationStatistics:
    """Count, mean and sum of squared deviations of every observation feature, in float64.

    Merged as in Chan, Golub and LeVeque (1979), so that neither a large offset nor the order of merging costs digits.

    Args:
        names: of the D features.
        count: observations seen.
        mean: f64[D].
        m2: f64[D], sum of squared deviations from the mean.
    """

    names: tuple[str, ...]
    count: float
    mean: Floats
    m2: Floats

    @classmethod
    def empty(cls, names: Sequence[str]) -> ObservationStatistics:
        """Statistics of nothing: normalisation by them changes nothing."""
        return cls(tuple(names), 0.0, np.zeros(len(names)), np.zeros(len(names)))

    @property
    def variance(self) -> Floats:
        """Population variance f64[D]; never negative; 1 before anything was seen."""
        return self.m2 / self.count if self.count > 0 else np.ones_like(self.m2)

    @property
    def standard_deviation(self) -> Floats:
        """Square root of :attr:`variance`."""
        deviation: Floats = np.sqrt(self.variance)
        return deviation

    @property
    def scale(self) -> npt.NDArray[np.float32]:
        """One over the standard deviation, f32[D]; 1 for a column that never moved (beyond rounding)."""
        deviation = self.standard_deviation
        constant = deviation <= 1e-6 * np.maximum(1.0, np.abs(self.mean))
        return np.where(constant, 1.0, 1.0 / np.where(constant, 1.0, deviation)).astype(np.float32)

    def update(self, observation: npt.NDArray[np.floating]) -> None:
        """Adds observations f[N, D].

        Raises:
            LearningError: the width is not D.
            NonFiniteError: a value is not finite; names row and field. Nothing is added then.
        """
        if observation.ndim != 2 or observation.shape[1] != len(self.names):
            raise LearningError(
                f"observations are {observation.shape}, expected (N, {len(self.names)})", field="observation"
            )
        if len(observation) == 0:
            return
        batch = observation.astype(np.float64)
        mean = batch.mean(axis=0)
        if not np.isfinite(mean).all():
            row, column = np.argwhere(~np.isfinite(batch))[0]
            raise NonFiniteError("an observation is not finite", environment=int(row), field=self.names[column])
        batch -= mean
        self.merge(ObservationStatistics(self.names, float(len(batch)), mean, np.einsum("nd,nd->d", batch, batch)))

    def merge(self, other: ObservationStatistics) -> None:
        """Adds what ``other`` has seen: M2 = M2_a + M2_b + d^2 n_a n_b / (n_a + n_b)."""
        if other.names != self.names:
            raise LearningError("statistics of different observations cannot be merged", field="names")
        total = self.count + other.count
        if total == 0:
            return
        difference = other.mean - self.mean
        self.mean = self.mean + difference * (other.count / total)
        self.m2 = self.m2 + other.m2 + difference**2 * (self.count * other.count / total)
        self.count = total

    def digest(self) -> str:
        """Digest of names and numbers."""
        return digest_bytes(canonical_json(list(self.names)) + self.to_bytes())

    def to_bytes(self) -> bytes:
        """The numbers as safetensors bytes."""
        return pack({"count": np.array(self.count), "mean": self.mean, "m2": self.m2})

    @classmethod
    def from_bytes(cls, data: bytes, names: Sequence[str], file: Path) -> ObservationStatistics:
        """The inverse of :meth:`to_bytes`.

        Raises:
            CheckpointError: the numbers are missing, of the wrong shape or not finite.
        """
        arrays = unpack(data, file)
        count, mean, m2 = (required(arrays, key, file) for key in ("count", "mean", "m2"))
        expected = (len(names),)
        if count.shape != () or mean.shape != expected or m2.shape != expected:
            raise CheckpointError(f"statistics of {mean.shape}, expected {expected}", file=file, field="mean")
        if not all(np.isfinite(part).all() for part in (count, mean, m2)) or (m2 < 0).any() or count < 0:
            raise CheckpointError("statistics are not finite", file=file, field="m2")
        return cls(tuple(names), float(count), mean.astype(np.float64), m2.astype(np.float64))

    def save(self, path: Path) -> None:
        """Publishes the statistics as the directory ``path``."""
        with publish_directory(path) as staging:
            manifest = {"kind": _KIND, "format": _FORMAT, "names": list(self.names)}
            files = {_FILE: self.to_bytes()}
            seal(staging, _MANIFEST, sealed_manifest(manifest, files), files)

    @classmethod
    def load(cls, path: Path) -> ObservationStatistics:
        """Reads what :meth:`save` wrote.

        Raises:
            CheckpointError, VersionError: damaged, or of another version.
        """
        manifest, files = open_sealed(path, _MANIFEST, _KIND, _FORMAT)
        data = required(files, _FILE, path)
        return cls.from_bytes(data, required(manifest, "names", path / _MANIFEST), path / _FILE)


def gather_statistics(
    pool: LinePool,
    player: Player,
    steps: int = 1_000,
    progress: Progress = silent,
    *,
    random_share: float = 0.5,
    seed: int = 0,
    names: Sequence[str] = OBSERVATION_NAMES,
) -> ObservationStatistics:
    """Statistics of the first ``steps`` steps of every environment of ``pool``.

    Args:
        pool: all training environments, with purpose STATISTICS; it is reset first.
        player: decides in the other environments.
        steps: pool steps; each adds ``pool.size`` observations.
        progress: told now and then.
        random_share: share of the environments that a random legal player steers, so that states which ``player``
            avoids are seen too; spread evenly over the pool.
        seed: of the random player.
        names: of the observation features.
    """
    statistics = ObservationStatistics.empty(names)
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0x57A7]))
    position = np.arange(pool.size, dtype=np.float64)
    randomised = np.floor((position + 1) * random_share) > np.floor(position * random_share)
    pool.reset()
    for step in range(steps):
        statistics.update(pool.observation)
        actions = player.act(pool).actions
        draws = generator.random(pool.mask.shape, dtype=np.float32)
        pool.step(np.where(randomised, np.where(pool.mask, draws, -1.0).argmax(axis=1), actions))
        if step % max(1, steps // 50) == 0:
            progress("observation statistics", step, steps)
    progress("observation statistics", steps, steps)
    return statistics
