"""Live rollouts as shards: every update names the samples that it used, and they outlive the run.

``<directory>/experience/updates-<first update>`` holds the episodes that ended from that update on, until the shard is
full or a checkpoint falls due. An episode that is still running goes on in the next shard. Each record names its
update: the shard's list of policies has one entry an update, whose ordinal is the update's number. Nothing here changes
what is learned.

The shards of a resumed run equal those of an uninterrupted one. A checkpoint that was due seals the shard; one that was
forced by an interruption leaves it open and says how much of it counted, and resuming goes on with that much. Whatever
the checkpoint does not name is of updates that will be made again, and is removed.

Writing goes on beside the training, in one thread of its own and in order, once a rollout is collected: while the
policy learns from it. :meth:`Stream.end` waits for that, and whatever went wrong is raised there.

Not recorded: the warm-up, and the rest of the episodes that run when recording begins. That is also so after resuming
in a pool whose episodes do not follow from number and actions (any but the built-in line): what ran then is left out.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import ACCUMULATING, MAX_STEPS, REASONS, SIMULATOR_VERSION
from agentpipe.errors import AgentpipeError, CheckpointError, LearningError
from agentpipe.experience.recorder import Recorded, Recorder
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.manifest import MANIFEST, read_manifest
from agentpipe.experience.store.shard import is_open, open_shard
from agentpipe.experience.store.writer import ShardWriter
from agentpipe.storage import replace_directory, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.pool import LinePool
    from agentpipe.experience.origin import PoolFor
    from agentpipe.experience.store.shard import Shard
    from agentpipe.learning.options import StreamOptions

FOLDER: Final = "experience"
PLAYER: Final = "training"
"""who plays, in a shard's list of policies; the version is the digest of the weights"""
_AGAIN: Final = ".again"
_REMEDY: Final = "resume from another checkpoint, or start anew"

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class LiveSource:
    """What the shards say of where live episodes come from."""

    index: npt.NDArray[np.uint32]
    """u32[N], what the records call the pool's environments"""
    header: Mapping[str, Any] = field(default_factory=dict)
    """for the manifest: table version, origin"""
    max_steps: int = MAX_STEPS
    """longest episode"""
    pool_for: PoolFor | None = None
    """makes the pool that plays a shard's episodes again; none = shards stay as they are"""


def line_source(
    environments: Sequence[EnvironmentSpec],
    table_version: str,
    origin: Mapping[str, Any],
    pool_for: PoolFor | None = None,
) -> LiveSource:
    """The source of episodes of the built-in line.

    Args:
        environments: of the pool, in its order.
        table_version: that the pool has pinned.
        origin: of :func:`agentpipe.experience.origin.origin`.
        pool_for: such as :func:`agentpipe.experience.origin.home_pools`.
    """
    index = np.array([environment.index for environment in environments], np.uint32)
    return LiveSource(index, {"table_version": table_version, "origin": dict(origin)}, pool_for=pool_for)


def unknown_source(size: int) -> LiveSource:
    """The source of ``size`` environments of which nothing but their names is known."""
    return LiveSource(np.arange(size, dtype=np.uint32))


class Stream:
    """Records one run; use as a context manager, which gives the files back.

    Args:
        pool: of N environments; where an episode is running, recording begins with the next one.
        source: of its episodes.
        directory: of the run.
        options: when a shard is full, and how many stay so.
        action_count: A.
        simulator_version: recorded in the shards.
    """

    def __init__(
        self,
        pool: LinePool,
        source: LiveSource,
        directory: Path,
        options: StreamOptions,
        action_count: int,
        simulator_version: str = SIMULATOR_VERSION,
    ) -> None:
        self.pool, self.source, self.options = pool, source, options
        self.folder = directory / FOLDER
        observation_size = int(pool.observation.shape[1])
        if len(source.index) != pool.size:
            text = f"a source of {len(source.index)} environments for a pool of {pool.size}"
            raise LearningError(text, field="index", remedy="describe the environments of the pool, in its order")
        self.header = {
            "cell": PLAYER,
            "observation_size": observation_size,
            "action_count": action_count,
            "simulator_version": simulator_version,
            "accumulating": ACCUMULATING if hasattr(pool, "produced") else 0,
            "policies": [],
            **source.header,
        }
        dtype = rec.step_dtype(observation_size, action_count)
        self.recorder = Recorder(pool, dtype, source.index, max_steps=source.max_steps)
        self.action_count = action_count
        self.sealed: list[dict[str, Any]] = []
        """name, digest, steps of each sealed shard, in order"""
        self.complaint = ""
        """why older shards could not be shrunk"""
        self._versions: dict[int, str] = {}
        self._update = 0
        self._writer: ShardWriter | None = None  # as all that follows: of the writing thread, once it runs
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._tasks: list[Future[Any]] = []
        self._shard = ""
        self._taken: list[Recorded] = []
        self._room, self._used = np.empty(0, dtype), 0  # for the records of one update; new memory would cost more
        self._began = time.monotonic()
        self._full: dict[str, int] = {}  # bytes of the shards that are not shrunk, in order
        self._verified = False
        self._whole = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._close()

    def _wait(self) -> None:
        """Until everything handed over is done; raises what went wrong with the first that failed."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()

    def _hand_over(self, function: Callable[..., object], *arguments: object) -> None:
        self._tasks.append(self._executor.submit(function, *arguments))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # -- recording ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins a run anew: shards of an earlier one go; episodes that are running now are left out."""
        self._remove_all_but(set())
        self._skip_running()

    def _skip_running(self) -> None:
        self.recorder.recording[:] = self.pool.last_action == self.action_count

    def begin(self, update: int, version: str) -> None:
        """Begins an update.

        Args:
            update: its number.
            version: digest of the weights that play.
        """
        self._update, self._versions[update] = update, version
        if self._used > len(self._room):
            self._room = np.empty(self._used + self._used // 8, self._room.dtype)
        self._used = 0
        self._hand_over(self._enter, update, version)

    def _enter(self, update: int, version: str) -> None:
        if self._writer is None:
            self._writer = self._open_writer(self.folder / f"updates-{update:06d}")
            self._began = time.monotonic()
        self._writer.policy(PLAYER, version, update)
        self._shard = self._writer.directory.name

    def _open_writer(self, path: Path) -> ShardWriter:
        capacity = self.options.shard_steps + self.pool.size * 8
        return ShardWriter.open(
            path,
            self.header,
            durability=self.options.durability,
            holder=f"training in {path.parent}",
            capacity=capacity,
        )

    def before(self) -> None:
        """Copies what the policy sees; before every step of the pool."""
        self.recorder.before()

    def after(
        self,
        actions: npt.NDArray[np.int64],
        log_probabilities: npt.NDArray[np.float32],
        values: npt.NDArray[np.float32],
    ) -> None:
        """Adds what was done and what came of it; episodes that ended count when :meth:`end` returns.

        Args:
            actions: i64[N].
            log_probabilities: f32[N], of the actions.
            values: f32[N], of the observations acted on, in scaled returns.
        """
        recorder, pool = self.recorder, self.pool
        rows = recorder.after(actions, log_probabilities, values, self._update, time.time_ns())
        if len(rows):
            first, self._used = self._used, self._used + int(recorder.length[rows].sum())
            fits = self._used <= len(self._room)
            self._taken.append(recorder.take(rows, self._room[first : self._used] if fits else None))
        if not recorder.recording.all():
            recorder.recording |= pool.terminated | pool.truncated

    def collected(self) -> None:
        """Ends the rollout of an update: its episodes are written from now on."""
        taken, self._taken = self._taken, []
        for recorded in taken:
            self._hand_over(self._append, recorded)

    def _append(self, recorded: Recorded) -> None:
        assert self._writer is not None
        policy = recorded.steps["policy"]
        ordinals, inverse = np.unique(policy, return_inverse=True)
        indices = [self._writer.policy(PLAYER, self._versions[int(ordinal)], int(ordinal)) for ordinal in ordinals]
        recorded.steps["policy"] = np.array(indices, np.uint32)[inverse]
        self._writer.append(recorded.steps, recorded.episodes, recorded.finals, recorded.parents)

    def end(self) -> str:
        """Ends an update: a full shard is sealed, and older ones shrink where there are too many.

        Returns:
            The name of the shard that took the episodes which ended in this update.

        Raises:
            NonFiniteError: an observation, a probability or a reward; names environment, episode, step and field.
            DiskFullError, HomeError: it cannot be written.
        """
        self._wait()
        self._hand_over(self._seal_full)
        return self._shard

    def _seal_full(self) -> None:
        if self._writer is not None and self._writer.appended >= self.options.shard_steps:
            self._seal()

    def _seal(self) -> None:
        """Seals what was appended; a shard without episodes stays open."""
        writer = self._writer
        if writer is not None:
            writer.flush()  # when a group counts decides nothing
        if writer is None or not writer.episodes:
            return
        steps, name = writer.steps, writer.directory.name
        known = zip(self.source.index.tolist(), self.pool.names, strict=True)
        measurements = {"recording_seconds": time.monotonic() - self._began}
        shard = writer.seal(writer.directory, names=dict(known), reasons=REASONS, measurements=measurements)
        self._writer = None
        self.sealed.append({"name": name, "digest": shard.digest, "steps": steps})
        self._full[name] = sum(file.stat().st_size for file in shard.path.iterdir())
        self._shrink()

    def _shrink(self) -> None:
        """Shrinks the oldest shards until the full ones fit; the newest stays, whatever its size."""
        if self.source.pool_for is None or self.complaint:
            return
        from agentpipe.experience.care.shrink import shrink

        while len(self._full) > 1 and sum(self._full.values()) > self.options.full_bytes:
            name = next(iter(self._full))
            try:
                # The first one is played again and compared: it shows that the source is the right one.
                shrink(self.folder / name, self.source.pool_for, verify=not self._verified)
            except AgentpipeError as error:  # housekeeping does not end a training; the full records stay
                self.complaint = str(error)
                return
            self._verified = True
            del self._full[name]

    def finish(self, *, ended: bool) -> tuple[Path, ...]:
        """The shards written, in order.

        Args:
            ended: the run is over: running episodes are cut, and become a last shard of their own. Else they wait in
                the checkpoint, and the open shard stays open.
        """
        self._wait()
        if ended:
            self._seal()
            if self._writer is not None:  # nothing ended since the last one was sealed
                empty = self._writer.directory
                self._close()
                shutil.rmtree(empty, ignore_errors=True)
            cut = self.recorder.cut()
            path = self._cut_path()
            if len(cut.episodes):
                self._writer = self._open_writer(path)
                self._append(cut)
                self._seal()
            elif path.exists():  # of an earlier finish of the same run
                manifest = read_manifest(path / MANIFEST)
                self.sealed.append({"name": path.name, "digest": manifest["digest"], "steps": manifest["steps"]})
        self._close()
        return tuple(self.folder / entry["name"] for entry in self.sealed)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def checkpoint(self, *, due: bool) -> tuple[list[dict[str, Any]], dict[str, Any], Arrays]:
        """What resuming needs: the index of shards, further content, and the running episodes.

        Args:
            due: the checkpoint falls where an uninterrupted run makes one too; the open shard is sealed then.
        """
        self._wait()
        if due:
            self._seal()
        index = [dict(entry) for entry in self.sealed]
        if self._writer is not None:
            self._writer.flush()
            name, steps, episodes = self._writer.directory.name, self._writer.steps, self._writer.episodes
            index.append({"name": name, "digest": None, "steps": steps, "episodes": episodes})
        versions = {str(ordinal): version for ordinal, version in self._versions.items()}
        return index, {"update": self._update, "versions": versions}, self.recorder.partial()

    def restore(self, index: Sequence[Mapping[str, Any]], content: Mapping[str, Any], running: Arrays) -> None:
        """Goes on from a checkpoint; the caller restores the pool's snapshot afterwards.

        Raises:
            CheckpointError: a shard that the checkpoint names is missing or another one.
            CorruptError, ShrunkError: a shard or the running episodes cannot be read.
        """
        self._update = int(content.get("update", 0))
        self._versions = {int(ordinal): version for ordinal, version in content.get("versions", {}).items()}
        self.sealed = [dict(entry) for entry in index if entry["digest"] is not None]
        for entry in self.sealed:
            path = self.folder / entry["name"]
            manifest = read_manifest(path / MANIFEST) if (path / MANIFEST).exists() else {}
            if manifest.get("digest") != entry["digest"]:
                raise CheckpointError("the checkpoint names another shard", file=path, field="digest", remedy=_REMEDY)
            if not manifest.get("shrunk"):
                self._full[entry["name"]] = sum(file.stat().st_size for file in path.iterdir())
        for unsealed in index:
            if unsealed["digest"] is None:
                self._take_up(self.folder / unsealed["name"], int(unsealed["episodes"]))
        self._whole = "origin" in self.source.header and bool(running)
        # What was cut at the end of a finished run can be made again only where the running episodes can.
        cut = set() if self._whole else {self._cut_path().name}
        self._remove_all_but({*(str(entry["name"]) for entry in index), *cut})
        if self._whole:
            self.recorder.restore(running)

    def _cut_path(self) -> Path:
        return self.folder / f"running-{self._update:06d}"

    def go_on(self) -> None:
        """Once the pool is as it was: leaves out what is running, where that could not be restored."""
        if not self._whole:
            self._skip_running()

    def _take_up(self, path: Path, episodes: int) -> None:
        """Opens the shard that was open at the checkpoint, with just the episodes that counted then."""
        again = path.with_name(path.name + _AGAIN)
        if not path.exists() and again.exists():  # an earlier attempt broke off between removing and renaming
            again.rename(path)
        if is_open(path) or not (episodes or path.exists()):
            self._writer = self._open_writer(path)
            if self._writer.episodes == episodes:
                return
            self._close()
        source = open_live(path) if is_open(path) else open_shard(path)
        if len(source.episodes) < episodes:
            text = f"{episodes} episodes counted at the checkpoint, {len(source.episodes)} are there"
            raise CheckpointError(text, file=path, field="episodes", remedy=_REMEDY)
        with typed_os_errors(again):
            shutil.rmtree(again, ignore_errors=True)
        with self._open_writer(again) as writer:
            for policy in source.policies:
                if int(policy["ordinal"]) <= self._update:
                    writer.policy(**policy)
            if episodes:
                writer.append(*_first_episodes(source, episodes))
        del source
        with typed_os_errors(path):
            replace_directory(again, path)
        self._writer = self._open_writer(path)

    def _remove_all_but(self, names: set[str]) -> None:
        if not self.folder.is_dir():
            return
        with typed_os_errors(self.folder):
            for path in sorted(self.folder.iterdir()):
                if path.name not in names and path.is_dir():
                    shutil.rmtree(path)


def _first_episodes(shard: Shard, count: int) -> Recorded:
    """Copies of the first ``count`` episodes, in the order in which they were appended."""
    episodes = shard.episodes[:count].copy()
    last = episodes[-1]
    words = int(last["graph"]) + rec.graph_words(int(last["steps"]))
    unfinished = episodes["final"] >= 0
    finals = int(unfinished.sum())
    episodes["final"][unfinished] = np.arange(finals)
    steps = shard.records[: int(episodes["steps"].sum())].copy()
    return Recorded(steps, episodes, shard.finals[:finals].copy(), shard.graph[:words].copy())
