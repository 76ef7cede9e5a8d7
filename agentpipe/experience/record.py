"""Playing a cell's environments and keeping every step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import (
    ACTION_COUNT,
    ACTION_NAMES,
    MAX_STEPS,
    OBSERVATION_NAMES,
    OBSERVATION_SIZE,
    REASONS,
    SIMULATOR_VERSION,
)
from agentpipe.errors import NonFiniteError, SimulationError
from agentpipe.experience import records as rec
from agentpipe.experience.shard import Shard, open_shard
from agentpipe.experience.writer import ShardWriter
from agentpipe.progress import Progress, silent
from agentpipe.storage import canonical_json, digest_bytes, publish_directory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool
    from agentpipe.environments.table import DisturbanceTable


def record_trajectories(  # noqa: PLR0913 - each says something else of the shard
    pool: LinePool,
    player: Player,
    *,
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    episodes_per_env: int,
    out_dir: Path,
    cell: str,
    policy_version: str,
    progress: Progress = silent,
) -> Shard:
    """Plays the first ``episodes_per_env`` episodes of every environment and seals them as the shard ``out_dir``.

    Args:
        pool: Freshly built over exactly ``environments``, in that order.
        player: Chooses the actions; its probabilities are recorded as the behaviour's.
        environments: Whose episodes these are.
        table: The version that the pool has pinned; its fingerprints are recorded.
        episodes_per_env: Every environment gives exactly so many, so that short episodes are not over-represented.
        out_dir: The shard's directory; appears whole or not at all and replaces one that is there.
        cell: Kind and intensity of the environments.
        policy_version: What the player is: a package digest, or name and version of a built-in player.
        progress: Told of finished episodes.

    Raises:
        SimulationError: the pool does not fit ``environments``, or an episode outlasts the maximum.
        NonFiniteError: an observation, reward or probability is not finite; names environment, field and step.
        DiskFullError, HomeError: the shard cannot be written.
    """
    if pool.size != len(environments) or not environments or episodes_per_env < 1:
        text = f"a pool of {pool.size} over {len(environments)} environments, {episodes_per_env} episodes each"
        raise SimulationError(text, remedy="build the pool over the environments whose episodes are recorded")
    header = {
        "cell": cell,
        "environments": len(environments),
        "episodes_per_environment": episodes_per_env,
        "observation_size": OBSERVATION_SIZE,
        "action_count": ACTION_COUNT,
        "observation_digest": digest_bytes(canonical_json(list(OBSERVATION_NAMES))),
        "action_digest": digest_bytes(canonical_json(list(ACTION_NAMES))),
        "simulator_version": SIMULATOR_VERSION,
        "table_version": table.version,
        "policies": [{"player": player.name, "version": policy_version}],
    }
    start = time.perf_counter()
    with publish_directory(out_dir) as staging, ShardWriter(staging, header) as writer:
        recorder = _Recorder(pool, environments, table, episodes_per_env, writer)
        total = len(environments) * episodes_per_env
        while recorder.written < total:
            recorder.step(player)
            progress(f"trajectories {cell}", recorder.written, total)
        writer.seal(REASONS, recording_seconds=time.perf_counter() - start)
    return open_shard(out_dir, check=False)


class _Recorder:
    """Gathers the steps of running episodes and hands over those that ended."""

    def __init__(
        self,
        pool: LinePool,
        environments: Sequence[EnvironmentSpec],
        table: DisturbanceTable,
        episodes_per_env: int,
        writer: ShardWriter,
    ) -> None:
        size = pool.size
        self.pool = pool
        self.writer = writer
        self.written = 0
        self.remaining = np.full(size, episodes_per_env)
        self.length = np.zeros(size, dtype=np.int64)
        self.buffer = np.zeros((size, MAX_STEPS), dtype=writer.dtype)
        self.index = np.array([environment.index for environment in environments], dtype=np.uint32)
        self.buffer["environment"] = self.index[:, None]
        crc = [int(table.fingerprint(environment.environment_id).crc32, 16) for environment in environments]
        self.buffer["fingerprint"] = np.array(crc, dtype=np.uint32)[:, None]

    def step(self, player: Player) -> None:
        """One step of the whole pool."""
        pool, at = self.pool, (np.arange(self.pool.size), self.length)
        if self.length.max() >= MAX_STEPS:
            remedy = "report this simulator: it must truncate"
            raise SimulationError(
                f"an episode outlasts {MAX_STEPS} steps", environment=int(self.length.argmax()), remedy=remedy
            )
        self.buffer["episode"][at] = pool.episode
        self.buffer["step"][at] = self.length
        self.buffer["segment"][at] = pool.segment
        self.buffer["last_action"][at] = pool.last_action
        self.buffer["time"][at] = pool.time
        self.buffer["mask"][at] = rec.pack_masks(pool.mask)
        self.buffer["observation"][at] = pool.observation
        decision = player.act(pool)
        with np.errstate(divide="ignore"):
            self.buffer["log_probability"][at] = np.log(decision.probabilities)
        self.buffer["action"][at] = decision.actions
        pool.step(decision.actions)
        self.buffer["reward"][at] = pool.reward
        self.buffer["terminated"][at] = pool.terminated
        self.buffer["truncated"][at] = pool.truncated
        self.length += 1
        self._finish(np.flatnonzero(pool.terminated | pool.truncated))

    def _finish(self, done: npt.NDArray[np.int64]) -> None:
        kept = done[self.remaining[done] > 0]
        if len(kept):
            steps = np.concatenate([self.buffer[row, : self.length[row]] for row in kept])
            _check_finite(steps)
            self.writer.append(steps, self._episodes(kept))
            self.written += len(kept)
            self.remaining[kept] -= 1
        self.length[done] = 0

    def _episodes(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        pool = self.pool
        episodes = np.zeros(len(rows), dtype=rec.EPISODE)
        episodes["environment"] = self.index[rows]
        episodes["episode"] = self.buffer["episode"][rows, 0]
        episodes["steps"] = self.length[rows]
        for field in ("success", "reason", "mode", "machine", "return", "elapsed_seconds", "decision_seconds"):
            episodes[field] = getattr(pool, f"result_{field}")[rows]
        return episodes


def _check_finite(steps: npt.NDArray[Any]) -> None:
    for field in ("observation", "reward", "log_probability", "time"):
        bad = ~np.isfinite(steps[field]).reshape(len(steps), -1).all(axis=1)
        if bad.any():
            row = steps[bad.argmax()]
            where = {"environment": int(row["environment"]), "episode": int(row["episode"]), "step": int(row["step"])}
            raise NonFiniteError(f"{field} is not finite", field=field, **where, remedy="nothing was recorded")
