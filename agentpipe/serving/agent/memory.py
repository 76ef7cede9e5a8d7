"""Long-term memory: embeddings of recorded steps and what came of them, looked up by similarity.

A folder that is published whole and never changed: ``manifest.json``, ``statistics.npy`` (mean and scale of every
feature), and for each segment ``embeddings-<segment>.npy`` f32[n, 32] and ``cases-<segment>.npy``. Partitions are
memory-mapped when they are first looked into. An embedding is the standardised observation under a fixed random
projection (Johnson and Lindenstrauss 1984: distances survive it), scaled to length 1; similarity is the cosine.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CorruptError, VersionError
from agentpipe.storage import digest_file, read_json

if TYPE_CHECKING:
    from pathlib import Path

    from agentpipe.serving.signature import Signature

FORMAT: Final = 1
SIZE: Final = 32
"""numbers of an embedding"""
CLIP: Final = 5.0
"""standard deviations"""
MANIFEST: Final = "manifest.json"
STATISTICS: Final = "statistics.npy"
CASE: Final = np.dtype(
    [
        ("environment", "<u4"),  # index in the catalogue
        ("episode", "<u4"),
        ("step", "<u2"),
        ("action", "<i2"),
        ("success", "u1"),  # of its episode
        ("segment", "i1"),
        ("padding", "u1", (2,)),
        ("reward", "<f4"),
        ("time", "<f4"),  # minutes
    ]
)
_REMEDY: Final = "make it again: agentpipe agent remember"

Vectors = npt.NDArray[np.float32]


class Case(NamedTuple):
    """One recorded step that resembles what is asked for."""

    similarity: float
    """cosine, −1 to 1"""
    environment: int
    episode: int
    step: int
    action: int
    success: bool
    """of its episode"""
    reward: float

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, rounded to what a person reads."""
        content = self._asdict()
        return {**content, "similarity": round(self.similarity, 4), "reward": round(self.reward, 4)}


class Embedding:
    """From observations to vectors.

    Args:
        statistics: f64[2, D], mean and standard deviation of every feature.
    """

    def __init__(self, statistics: npt.NDArray[np.float64]) -> None:
        self._mean = statistics[0].astype(np.float32)
        spread = statistics[1]
        self._scale = np.where(spread > 1e-6, 1.0 / np.maximum(spread, 1e-6), 0.0).astype(np.float32)
        size = statistics.shape[1]
        generator = np.random.Generator(np.random.Philox(key=size))  # a projection for each size, always the same
        self._matrix = (generator.standard_normal((size, SIZE)) / np.sqrt(SIZE)).astype(np.float32)

    def __call__(self, observations: npt.NDArray[np.float32]) -> Vectors:
        """f32[N, 32] of length 1 (or 0) for f32[N, D]; what is not finite counts as usual."""
        standard = np.clip((observations - self._mean) * self._scale, -CLIP, CLIP)
        return unit(np.nan_to_num(standard, nan=0.0) @ self._matrix)


def unit(vectors: Vectors) -> Vectors:
    """Each row divided by its length; rows of zeros stay."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.where(length > 0, length, 1.0)).astype(np.float32)


class Memory:
    """What :func:`~agentpipe.serving.agent.remember.remember` published in ``folder``; read only, any thread.

    Args:
        folder: of the memory.
        signature: of the line that it must be of.

    Raises:
        CorruptError, VersionError: damaged, or of another format or line.
    """

    def __init__(self, folder: Path, signature: Signature) -> None:
        self.folder = folder
        content = read_json(folder / MANIFEST)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else None
            raise VersionError(f"memory format {found!r}, this program reads {FORMAT}", file=folder, remedy=_REMEDY)
        if content.get("observation_digest") != signature.observation_digest:
            raise CorruptError("a memory of another line", file=folder / MANIFEST, remedy=_REMEDY)
        try:
            self._partitions: dict[int, dict[str, Any]] = {int(p["segment"]): p for p in content["partitions"]}
            self.rows = sum(int(partition["rows"]) for partition in self._partitions.values())
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"malformed: {error!r}", file=folder / MANIFEST, remedy=_REMEDY) from error
        self.embedding = Embedding(self._array(STATISTICS, content.get("statistics"), np.float64, None))
        self._lock = threading.Lock()
        self._loaded: dict[int, tuple[Vectors, npt.NDArray[Any]]] = {}

    @property
    def loaded(self) -> tuple[int, ...]:
        """Segments that have been looked into."""
        return tuple(sorted(self._loaded))

    def search(self, segment: int, query: Vectors, count: int) -> list[Case]:
        """The ``count`` cases of a segment whose embeddings f32[32] are most similar, the best first.

        Raises:
            CorruptError: the partition is damaged.
        """
        if segment not in self._partitions or count < 1:
            return []
        embeddings, cases = self._partition(segment)
        similarity = embeddings @ query
        best = np.argpartition(-similarity, min(count, len(similarity)) - 1)[:count]
        best = best[np.lexsort((best, -similarity[best]))]
        return [
            Case(
                float(similarity[row]),
                int(cases[row]["environment"]),
                int(cases[row]["episode"]),
                int(cases[row]["step"]),
                int(cases[row]["action"]),
                bool(cases[row]["success"]),
                float(cases[row]["reward"]),
            )
            for row in best.tolist()
        ]

    def _partition(self, segment: int) -> tuple[Vectors, npt.NDArray[Any]]:
        with self._lock:
            if segment not in self._loaded:
                said = self._partitions[segment]
                rows = int(said["rows"])
                names = (f"embeddings-{segment}.npy", f"cases-{segment}.npy")
                embeddings = self._array(names[0], said.get("embeddings"), np.float32, (rows, SIZE))
                self._loaded[segment] = (embeddings, self._array(names[1], said.get("cases"), CASE, (rows,)))
            return self._loaded[segment]

    def _array(self, name: str, digest: object, dtype: npt.DTypeLike, shape: tuple[int, ...] | None) -> Any:  # noqa: ANN401 - of any dtype
        path = self.folder / name
        try:
            if digest_file(path) != digest:
                raise CorruptError("content is not what the manifest says", file=path, remedy=_REMEDY)
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise CorruptError(f"cannot be read: {error}", file=path, remedy=_REMEDY) from error
        if array.dtype != dtype or (shape is not None and array.shape != shape):
            raise CorruptError(f"holds {array.dtype}{list(array.shape)}", file=path, remedy=_REMEDY)
        return array
