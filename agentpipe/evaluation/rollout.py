"""Plays a pool until every environment has finished its first K episodes, and keeps exactly those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.environments.layout import MAX_STEPS
from agentpipe.errors import EvaluationError
from agentpipe.progress import silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool
    from agentpipe.progress import Progress

    PoolBuilder = Callable[..., LinePool]

RESULT_TYPES: dict[str, type[np.generic]] = {
    "success": np.bool_,
    "reason": np.int8,
    "segment": np.int8,
    "decisions": np.int32,
    "decision_seconds": np.float32,
    "elapsed_seconds": np.float32,
    "mode": np.int8,
    "machine": np.int8,
    "return": np.float32,
    "steps": np.int32,
}
"""Name and type of each per-episode result; the pool's attribute is ``result_<name>``."""


def default_builder() -> PoolBuilder:
    """The vectorised pool of the built-in line (imported late: it compiles kernels)."""
    from agentpipe.environments.pool import build_pool

    return build_pool


def _check_finite(name: str, values: npt.NDArray[Any], rows: npt.NDArray[np.int64], ids: Sequence[str]) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise EvaluationError("a result is not finite", environment=ids[int(rows[bad[0]])], field=name)


def _collect(
    pool: LinePool,
    columns: dict[str, npt.NDArray[Any]],
    finished: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    ids: Sequence[str],
) -> None:
    """Copies the results of the environments ``finished`` into their next free slot."""
    for name, target in columns.items():
        values = np.asarray(getattr(pool, f"result_{name}"))[finished]
        if values.dtype.kind == "f":
            _check_finite(name, values, finished, ids)
        target[finished, counts[finished]] = values


def play_first_episodes(
    pool: LinePool,
    player: Player,
    episodes_per_env: int,
    *,
    environment_ids: Sequence[str],
    first_episode: int | npt.NDArray[np.int64] = 0,
    progress: Progress = silent,
) -> dict[str, npt.NDArray[Any]]:
    """Results of the first ``episodes_per_env`` = K episodes of each of the pool's N environments.

    Which episodes are kept does not depend on how fast a player finishes them: later ones are played and dropped, so
    short episodes are not over-represented.

    Args:
        pool: Freshly built or used; it is reset first.
        player: One with a method ``reset()`` has it called first.
        episodes_per_env: K.
        environment_ids: Names [N], for errors.
        first_episode: Number of the first episode, for all or for each environment i64[N].
        progress: Told of finished episodes.

    Returns:
        For each name of :data:`RESULT_TYPES` an array [N, K] in the pool's order.

    Raises:
        EvaluationError: K < 1; an episode that does not end, comes out of order, or has a result that is not finite.
        ActionError: the player chose an action that its mask forbids (raised by the pool).
    """
    size = pool.size
    if episodes_per_env < 1 or size < 1 or len(environment_ids) != size:
        raise EvaluationError(
            f"cannot play {episodes_per_env} episodes of {size} environments ({len(environment_ids)} ids)"
        )
    columns = {name: np.zeros((size, episodes_per_env), dtype=kind) for name, kind in RESULT_TYPES.items()}
    counts = np.zeros(size, dtype=np.int64)
    total = size * episodes_per_env
    restart = getattr(player, "reset", None)
    if restart is not None:
        restart()
    first = np.broadcast_to(np.asarray(first_episode, dtype=np.int64), (size,))
    pool.reset(first)
    stage = f"play {player.name}"
    for step in range(episodes_per_env * MAX_STEPS):
        pool.step(player.act(pool).actions)
        finished = np.flatnonzero((pool.terminated | pool.truncated) & (counts < episodes_per_env))
        if not finished.size:
            continue
        if not np.array_equal(pool.result_episode[finished] - first[finished], counts[finished]):
            raise EvaluationError(
                "episodes came out of order", environment=environment_ids[int(finished[0])], step=step
            )
        _collect(pool, columns, finished, counts, environment_ids)
        counts[finished] += 1
        done = int(counts.sum())
        progress(stage, done, total)
        if done == total:
            return columns
    late = int(np.argmin(counts))
    raise EvaluationError(
        f"only {counts[late]} of {episodes_per_env} episodes ended",
        environment=environment_ids[late],
        player=player.name,
    )
