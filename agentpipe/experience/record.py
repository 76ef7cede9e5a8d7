"""Playing a cell's environments and keeping every step, whatever becomes of the process that does it."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import (
    ACCUMULATING,
    ACTION_COUNT,
    ACTION_NAMES,
    OBSERVATION_NAMES,
    OBSERVATION_SIZE,
    REASONS,
    SIMULATOR_VERSION,
)
from agentpipe.errors import CorruptError, RecordError, SimulationError, VersionError
from agentpipe.experience.origin import ORIGIN
from agentpipe.experience.recorder import Recorder
from agentpipe.experience.store.writer import ShardWriter
from agentpipe.progress import Progress, silent
from agentpipe.storage import canonical_json, digest_bytes, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool
    from agentpipe.environments.table import DisturbanceTable
    from agentpipe.experience.store.shard import Shard
    from agentpipe.experience.store.writer import Durability

    BuildPool = Callable[[Sequence[EnvironmentSpec]], LinePool]
    Figures = Callable[[Shard], Mapping[str, Any]]

OPEN: Final = ".open"
"""what the name of the directory ends in where a shard is being recorded"""


def record_trajectories(  # noqa: PLR0913 - each says something else of the shard
    build: BuildPool,
    player: Player,
    *,
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    episodes_per_env: int,
    out_dir: Path,
    cell: str,
    policy_version: str,
    policy_ordinal: int = 0,
    first_episode: int = 0,
    origin: Mapping[str, Any] | None = None,
    durability: Durability = "power",
    quality: Figures | None = None,
    progress: Progress = silent,
) -> Shard:
    """Plays ``episodes_per_env`` episodes of every environment and seals them as the shard ``out_dir``.

    Until then they stand in the open shard beside it, ``<out_dir>.open``. A recording that was ended by force is taken
    up again there by the next call: it plays only what did not count yet, and what it seals has the same digest. That
    takes a ``player`` whose choices follow from environment, episode and step (one that draws from ``pool.uniforms``).
    What another recording left there is discarded.

    Args:
        build: Makes the pool of some of ``environments``, in their order, at the start of ``first_episode``.
        player: Chooses the actions; its probabilities are recorded as the behaviour's, and its values where it has any.
        environments: Whose episodes these are.
        table: The version that the pool has pinned; its fingerprints are recorded.
        episodes_per_env: Every environment gives exactly so many, so that short episodes are not over-represented.
        out_dir: The shard's directory; appears whole or not at all and replaces one that is there.
        cell: Kind and intensity of the environments.
        policy_version: What the player is: a package digest, or name and version of a built-in player.
        policy_ordinal: Its place in the order of policies; samplers count freshness in these.
        first_episode: Number of the first episode of each environment.
        origin: What playing the episodes again needs (:func:`~agentpipe.experience.origin.origin`); None for
            environments that this program cannot build.
        durability: See :class:`~agentpipe.experience.store.writer.ShardWriter`.
        quality: Makes the figures of the content; None: :func:`~agentpipe.experience.quality.measure_quality`.
        progress: Told of finished episodes.

    Raises:
        SimulationError: the pool does not fit the environments, or an episode outlasts the maximum.
        NonFiniteError: an observation, reward or probability is not finite; names environment, field and step. What
            was recorded before stays in the open shard.
        LockHeldError: another process records there.
        DiskFullError, HomeError: the shard cannot be written.
    """
    if not environments or episodes_per_env < 1:
        text = f"{episodes_per_env} episodes of each of {len(environments)} environments"
        raise SimulationError(text, remedy="record at least one episode of one environment")
    behaviour = {"player": player.name, "version": policy_version, "ordinal": policy_ordinal}
    header = {
        "cell": cell,
        "environments": len(environments),
        "episodes_per_environment": episodes_per_env,
        "first_episode": first_episode,
        "observation_size": OBSERVATION_SIZE,
        "action_count": ACTION_COUNT,
        "observation_digest": digest_bytes(canonical_json(list(OBSERVATION_NAMES))),
        "action_digest": digest_bytes(canonical_json(list(ACTION_NAMES))),
        "simulator_version": SIMULATOR_VERSION,
        "table_version": table.version,
        "accumulating": ACCUMULATING,
        "behaviour": behaviour,  # unlike the list of policies a part of what makes two recordings the same
        "policies": [behaviour],
        **({} if origin is None else {ORIGIN: dict(origin)}),
    }
    total = len(environments) * episodes_per_env
    with _open(out_dir.with_name(out_dir.name + OPEN), header, durability, f"trajectories {cell}") as writer:
        policy = writer.policy(player.name, policy_version, policy_ordinal)
        recording = _Recording(writer, build, environments, table, (first_episode, episodes_per_env))
        start = time.perf_counter()
        recording.play(player, policy, lambda done: progress(f"trajectories {cell}", done, total))
        return writer.seal(
            out_dir,
            names={environment.index: environment.environment_id for environment in environments},
            reasons=REASONS,
            quality=quality or _figures,
            measurements=recording.measurements(time.perf_counter() - start),
        )


def _figures(shard: Shard) -> Mapping[str, Any]:
    from agentpipe.experience.quality import measure_quality

    return measure_quality(shard).to_json()


def _open(directory: Path, header: Mapping[str, Any], durability: Durability, holder: str) -> ShardWriter:
    """Takes up the recording that was left in ``directory``; what is another one's, or damaged, makes room."""
    try:
        return ShardWriter.open(directory, header, durability=durability, holder=holder)
    except (RecordError, CorruptError, VersionError):
        with typed_os_errors(directory):
            shutil.rmtree(directory)
        return ShardWriter.open(directory, header, durability=durability, holder=holder)


class _Recording:
    """The episodes of some environments that do not count yet.

    ``wanted`` is the number of the first episode, and how many there shall be.
    """

    def __init__(
        self,
        writer: ShardWriter,
        build: BuildPool,
        environments: Sequence[EnvironmentSpec],
        table: DisturbanceTable,
        wanted: tuple[int, int],
    ) -> None:
        self.writer, self.build, self.table = writer, build, table
        self.first, self.count = wanted
        self.steps, self.episodes = writer.steps, writer.episodes
        counted = dict(zip(*np.unique(writer.recorded["environment"], return_counts=True), strict=True))
        self.environments = [one for one in environments if counted.get(one.index, 0) < self.count]
        # An environment's episodes come one after another, so those that count are its first ones.
        self.next = np.array([self.first + counted.get(one.index, 0) for one in self.environments], np.int64)

    def play(self, player: Player, policy: int, progress: Callable[[int], None]) -> None:
        """Plays until every environment has its episodes."""
        progress(self.writer.episodes)
        if not self.environments:
            return
        recorder = self._recorder()
        pool, end = recorder.pool, self.first + self.count
        while recorder.recording.any():
            recorder.before()
            decision = player.act(pool)
            pool.step(decision.actions)
            with np.errstate(divide="ignore"):  # the writer refuses what is not finite
                log_probabilities = np.log(decision.probabilities)
            ended = recorder.after(decision.actions, log_probabilities, decision.values, policy, time.time_ns())
            if not len(ended):
                continue
            recorded = recorder.take(ended[recorder.episode[ended] >= self.next[ended]])
            if len(recorded.episodes):
                self.writer.append(*recorded)
            self.next[ended] = np.maximum(self.next[ended], recorder.episode[ended] + 1)
            recorder.recording[ended] = self.next[ended] < end
            progress(self.writer.episodes)
        self.writer.flush()
        progress(self.writer.episodes)

    def _recorder(self) -> Recorder:
        pool = self.build(self.environments)
        if pool.size != len(self.environments) or (pool.episode != self.first).any():
            text = f"a pool of {pool.size} over {len(self.environments)} environments"
            remedy = f"build it over the environments given, at the start of episode {self.first}"
            raise SimulationError(text, remedy=remedy)
        index = np.array([environment.index for environment in self.environments], np.uint32)
        return Recorder(pool, self.writer.dtype, index, self._fingerprints())

    def _fingerprints(self) -> npt.NDArray[np.uint32]:
        crc = [self.table.fingerprint(environment.environment_id).crc32 for environment in self.environments]
        return np.array([int(digits, 16) for digits in crc], np.uint32)

    def measurements(self, seconds: float) -> dict[str, float]:
        """How fast this process was; what an earlier one recorded does not count here."""
        steps, episodes = self.writer.steps - self.steps, self.writer.episodes - self.episodes
        measured = {
            "seconds": seconds,
            "steps_per_second": steps / seconds,
            "episodes_per_second": episodes / seconds,
            "steps_taken_up": float(self.steps),
            "write_seconds": self.writer.seconds,
        }
        if steps:
            measured["write_bytes_per_second"] = steps * self.writer.dtype.itemsize / self.writer.seconds
        return measured
