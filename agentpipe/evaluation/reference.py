"""Reference observations: a fixed sample of situations that two policies are compared on."""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from agentpipe.environments.layout import Purpose
from agentpipe.errors import CorruptError, EvaluationError
from agentpipe.evaluation.rollout import default_builder
from agentpipe.storage import canonical_json, digest_bytes, write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.players import Player
    from agentpipe.environments.table import DisturbanceTable
    from agentpipe.evaluation.rollout import PoolBuilder

_TYPES = {
    "observation": "<f4",
    "last_action": "<i8",
    "time": "<f4",
    "mask": "|b1",
    "segment": "|i1",
    "cell": None,  # text of any width
    "environment": "<i8",
}


_UNREADABLE = (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, EvaluationError)


class Watcher(Protocol):
    """A policy with a memory, which has to watch an episode from its start; see :class:`PolicyPackage`."""

    @property
    def digest(self) -> str:
        """What it is."""
        ...

    def fresh_memory(self, rows: int) -> npt.NDArray[np.float32]:
        """The memory f32[rows, M] before the first step."""
        ...

    def remember(
        self,
        observation: npt.NDArray[np.float32],
        last_action: npt.NDArray[np.int64],
        time: npt.NDArray[np.float32],
        memory: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """The memory f32[n, M] after a step that someone else decides."""
        ...


@dataclass(frozen=True)
class ReferenceObservations:
    """n situations, each with at least one allowed action."""

    observation: npt.NDArray[np.float32]
    """f32[n, D], raw."""
    last_action: npt.NDArray[np.int64]
    """i64[n]; the number of actions where there was none yet."""
    time: npt.NDArray[np.float32]
    """f32[n], elapsed simulated minutes."""
    mask: npt.NDArray[np.bool_]
    """bool[n, A], True where allowed."""
    segment: npt.NDArray[np.int8]
    """i8[n]."""
    cell: npt.NDArray[np.str_]
    """Text [n]."""
    environment: npt.NDArray[np.int64]
    """i64[n]; rows of one environment are not independent."""
    memories: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """f32[n, M], by the digest of a policy: what it remembers there if it has watched; neither digested nor saved."""

    def __post_init__(self) -> None:
        rows = self.observation.shape[0]
        for name, values in [*((name, getattr(self, name)) for name in _TYPES), *self.memories.items()]:
            if values.shape[0] != rows:
                raise EvaluationError(f"{name} has {values.shape[0]} rows, the observation {rows}")
        if not np.isfinite(self.observation).all() or not np.isfinite(self.time).all():
            raise EvaluationError("a reference observation is not finite", remedy="collect the reference again")
        empty = np.flatnonzero(~self.mask.any(axis=1))
        if empty.size:
            raise EvaluationError("a reference observation allows no action", row=int(empty[0]))

    @property
    def rows(self) -> int:
        """How many situations."""
        return int(self.observation.shape[0])

    @property
    def digest(self) -> str:
        """Content digest of all arrays."""
        parts = []
        for name, kind in _TYPES.items():
            values = np.ascontiguousarray(getattr(self, name))
            data = canonical_json(values.tolist()) if kind is None else values.astype(kind).tobytes()
            parts.append([name, list(values.shape), digest_bytes(data)])
        return digest_bytes(canonical_json(parts))

    def save(self, path: Path) -> Path:
        """Writes a compressed ``.npz`` file, whole or not at all."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **{name: getattr(self, name) for name in _TYPES}, digest=np.array(self.digest))
        write_bytes(path, buffer.getvalue())
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a saved reference without pickle.

        Raises:
            CorruptError: missing, damaged, or changed since it was written.
        """
        try:
            with np.load(path, allow_pickle=False) as content:
                arrays: dict[str, Any] = {name: content[name] for name in _TYPES}
                digest = str(content["digest"])
            reference = cls(**arrays)
        except _UNREADABLE as error:
            raise CorruptError(f"not a reference: {error}", file=path, remedy="collect it again") from error
        if reference.digest != digest:
            raise CorruptError("the reference does not match its digest", file=path, remedy="collect it again")
        return reference


def collect_reference(  # noqa: PLR0913 - keyword-only, each a part of what the sample depends on
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    profile: LineProfile,
    player: Player,
    *,
    seed: int,
    rows: int = 20_000,
    steps: int = 64,
    purpose: Purpose = Purpose.STATISTICS,
    threads: int = 1,
    build: PoolBuilder | None = None,
    watching: Sequence[Watcher] = (),
) -> ReferenceObservations:
    """Situations that ``player`` meets in ``environments``: ``rows`` of them, drawn by ``seed``.

    Every environment is played for ``steps`` steps; each row is drawn from all of them with equal probability, without
    repetition. The rule-based player makes a reference that belongs to no policy. Policies with a memory are given as
    ``watching``: at each row the reference then holds what they remember of the episode so far.

    Raises:
        EvaluationError: no environment, or fewer than one row asked for.
    """
    if not environments or rows < 1:
        raise EvaluationError(f"cannot collect {rows} reference rows from {len(environments)} environments")
    builder = build or default_builder()
    pool = builder(environments, table, profile, seed=seed, purpose=purpose, threads=threads)
    total = pool.size * steps
    keep = np.sort(np.random.default_rng(seed).choice(total, size=min(rows, total), replace=False))
    at_step, which = np.divmod(keep, pool.size)
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _TYPES if name not in ("cell", "environment")}
    states = {policy.digest: policy.fresh_memory(pool.size) for policy in watching}
    remembered: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in states}
    restart = getattr(player, "reset", None)
    if restart is not None:
        restart()
    try:
        for step in range(steps):
            chosen = which[at_step == step]
            for name, part in parts.items():
                part.append(getattr(pool, name)[chosen].copy())
            for policy in watching:
                state = states[policy.digest]
                remembered[policy.digest].append(state[chosen])
                states[policy.digest] = policy.remember(pool.observation, pool.last_action, pool.time, state)
            pool.step(player.act(pool).actions)
    finally:
        pool.close()
    arrays: dict[str, Any] = {name: np.concatenate(part) for name, part in parts.items()}
    cells = np.array([spec.cell for spec in environments])
    index = np.array([spec.index for spec in environments], dtype=np.int64)
    memories = {name: np.concatenate(part) for name, part in remembered.items()}
    return ReferenceObservations(**arrays, cell=cells[which], environment=index[which], memories=memories)
