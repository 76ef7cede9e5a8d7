"""Episodes of the built-in simulator, played again from their actions: byte for byte, checksums included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import SIMULATOR_VERSION
from agentpipe.errors import CorruptError, SimulationError, VersionError
from agentpipe.experience.graph import words_of
from agentpipe.experience.recorder import Recorded, Recorder
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import fill, range_checksums

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]

COMPACT_FIELDS: Final = ("time_ns", "log_probability", "value", "policy", "action")
_CONTENT: Final = (
    "environment",
    "episode",
    "steps",
    "return",
    "elapsed_seconds",
    "decision_seconds",
    "success",
    "reason",
    "mode",
    "machine",
    "cut",
    "compound",
)
_REMEDY: Final = "use the agentpipe, the table and the line profile that it was recorded with"


def compact_of(steps: Array) -> Array:
    """What the simulator cannot say again of each of the records ``steps``: ``records.COMPACT``, with checksums."""
    compact = np.zeros(len(steps), rec.COMPACT)
    for name in COMPACT_FIELDS:
        compact[name] = steps[name]
    fill(compact)
    return compact


def regenerate(
    pool: LinePool,
    index: npt.NDArray[np.uint32],
    episodes: Array,
    compact: Array,
    *,
    simulator_version: str = SIMULATOR_VERSION,
) -> Recorded:
    """Plays recorded episodes again.

    Args:
        pool: built over the environments, table, line profile, seed and purpose of the recording; other environments
            among them do no harm. It stands anywhere afterwards.
        index: u32[N], what the records call the pool's environments.
        episodes: their rows (``records.EPISODE``), in any order, as stored.
        compact: ``records.COMPACT`` of their steps, one episode after another.
        simulator_version: of the recording.

    Returns:
        Steps, rows, finals and graphs in the order of ``episodes``, with all checksums.

    Raises:
        VersionError: recorded by another version of the simulator.
        CorruptError: the pool plays otherwise than it was recorded; names environment and episode.
    """
    if simulator_version != SIMULATOR_VERSION:
        text = f"recorded by simulator {simulator_version}, this is {SIMULATOR_VERSION}"
        raise VersionError(text, remedy=f"use the agentpipe with simulator {simulator_version}")
    lengths = episodes["steps"].astype(np.int64)
    if lengths.sum() != len(compact):
        raise CorruptError(f"{len(compact)} actions for {lengths.sum()} steps", field="steps", remedy=_REMEDY)
    playback = _Playback(pool, index, episodes, compact)
    playback.play()
    return playback.finish()


class _Playback:
    """Plays what is queued for each environment, all of them side by side.

    In numerical order, an episode that follows the one before needs no reset: the pool begins it by itself. Where
    nothing is left to do an environment takes any legal action, which nobody looks at, until all are there.
    """

    def __init__(self, pool: LinePool, index: npt.NDArray[np.uint32], episodes: Array, compact: Array) -> None:
        self.pool, self.episodes, self.compact = pool, episodes, compact
        self.dtype = rec.step_dtype(pool.observation.shape[1], pool.mask.shape[1])
        self.recorder = Recorder(pool, self.dtype, index)
        self.lengths = episodes["steps"].astype(np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        sizes = words_of(self.lengths)
        self.words = np.cumsum(sizes) - sizes
        self.steps = np.zeros(len(compact), self.dtype)
        self.parents = np.zeros(int(sizes.sum()), np.uint64)
        self.finals: dict[int, Array] = {}
        rows = self._rows(index)
        self.order = np.lexsort((episodes["episode"], rows))
        self.next = np.searchsorted(rows[self.order], np.arange(pool.size))
        self.end = np.searchsorted(rows[self.order], np.arange(pool.size), side="right")
        self.current = np.full(pool.size, -1, np.int64)
        """i64[N]: the episode that is playing, -1 for none"""
        self.steered = bool(episodes["compound"].any()) or pool.next_compound().any()
        """whether the pool has to be told under which disturbance each episode is played"""

    def _rows(self, index: npt.NDArray[np.uint32]) -> Integers:
        """i64[episodes]: row of the pool."""
        row_of = {int(environment): row for row, environment in enumerate(index)}
        rows = np.array([row_of.get(int(environment), -1) for environment in self.episodes["environment"]], np.int64)
        if (rows < 0).any():
            self._refuse(int(rows.argmin()), "its environment is not in the pool")
        return rows

    def play(self) -> None:
        """Plays everything."""
        while (waiting := self.next < self.end).any():
            upcoming = self.order[np.where(waiting, self.next, 0)]
            self._announce()
            self.pool.reset(np.where(waiting, self.episodes["episode"][upcoming].astype(np.int64), 0))
            self.current[:] = np.where(waiting, upcoming, -1)
            self.next[waiting] += 1
            self._announce()
            while (self.current >= 0).any():
                self._step()

    def _announce(self, rows: Integers | None = None) -> None:
        """Tells the pool under which disturbance the next episode of each environment (of ``rows``) is played."""
        if not self.steered:
            return
        pool, rows = self.pool, np.arange(self.pool.size) if rows is None else rows
        rows = rows[self.next[rows] < self.end[rows]]
        wanted = self.episodes["compound"][self.order[self.next[rows]]]
        differs = (wanted != pool.next_compound()[rows]).any(axis=1)
        rows, wanted = rows[differs], wanted[differs]
        if not len(rows):
            return
        try:
            pool.override(rows, wanted)
        except SimulationError as error:
            row = pool.names.index(str(error.where.get("environment", pool.names[int(rows[0])])))
            self._refuse(self.order[self.next[row]], error.message, field="compound")

    def _step(self) -> None:
        recorder, pool, active = self.recorder, self.pool, self.current >= 0
        recorder.recording[:] = active
        given = self.compact[np.where(active, self.starts[self.current] + recorder.length, 0)]
        recorder.before()
        actions = np.where(active, given["action"].astype(np.int64), pool.mask.argmax(axis=1))
        inside = (actions >= 0) & (actions < pool.mask.shape[1])
        legal = inside & pool.mask[np.arange(pool.size), np.where(inside, actions, 0)]
        if not legal.all():
            row = int(legal.argmin())
            self._refuse(self.current[row], "an action was not allowed", step=int(recorder.length[row]))
        pool.step(actions)
        over = recorder.after(actions, *(given[name] for name in ("log_probability", "value", "policy", "time_ns")))
        self._finish_some(over)

    def _finish_some(self, over: Integers) -> None:
        """Takes what ended; what should have, or should not have, is refused."""
        length, current = self.recorder.length, self.current
        due = np.flatnonzero((current >= 0) & (length == self.lengths[current]))
        early = np.setdiff1d(over, due)
        if len(early):
            self._refuse(current[early[0]], "it ended earlier", step=int(length[early[0]]))
        rest = np.setdiff1d(due, over)
        late = rest[self.episodes["cut"][current[rest]] == 0]
        if len(late):
            self._refuse(current[late[0]], "it did not end", step=int(length[late[0]]))
        if len(over):
            self._place(over, self.recorder.take(over))
            follows = over[self.next[over] < self.end[over]]
            upcoming = self.order[self.next[follows]]
            at_once = self.episodes["episode"][upcoming] == self.pool.episode[follows]
            current[over] = -1
            current[follows[at_once]] = upcoming[at_once]
            self.next[follows[at_once]] += 1
            self._announce(follows[at_once])
        if len(rest):
            self._place(rest, self.recorder.cut(rest))
            current[rest] = -1

    def _place(self, rows: Integers, recorded: Recorded) -> None:
        """Holds episodes against what is known of them, and puts them where they belong."""
        numbers, episodes = self.current[rows], recorded.episodes
        for name in _CONTENT:
            known = self.episodes[name][numbers]
            differs = (episodes[name] != known).reshape(len(rows), -1).any(axis=1)
            if differs.any():
                at = int(differs.argmax())
                self._refuse(numbers[at], f"{name} is {episodes[name][at]}, not {known[at]}", field=name)
        self.steps[_ranges(self.starts[numbers], self.lengths[numbers])] = recorded.steps
        sizes = words_of(self.lengths[numbers])
        self.parents[_ranges(self.words[numbers], sizes)] = recorded.parents
        for number, final in zip(numbers.tolist(), episodes["final"].tolist(), strict=True):
            if final != rec.NO_FINAL:
                assert recorded.finals is not None
                self.finals[number] = recorded.finals[final]

    def finish(self) -> Recorded:
        """Everything with its checksums."""
        found = range_checksums(self.parents, self.words, words_of(self.lengths))
        differs = found != self.episodes["graph_checksum"]
        if differs.any():
            self._refuse(int(differs.argmax()), "its graph is another", field="graph_checksum")
        fill(self.steps)
        finals = None
        if self.finals:
            sizes = self.pool.observation.shape[1], self.pool.mask.shape[1]
            finals = np.array([self.finals[number] for number in sorted(self.finals)], rec.final_dtype(*sizes))
            fill(finals)
        return Recorded(self.steps, self.episodes.copy(), finals, self.parents)

    def _refuse(self, number: int | np.integer[Any], text: str, **where: object) -> NoReturn:
        row = self.episodes[number]
        place = {"environment": int(row["environment"]), "episode": int(row["episode"])}
        raise CorruptError(f"an episode plays otherwise than it was recorded: {text}", **place, **where, remedy=_REMEDY)


def _ranges(first: Integers, count: Integers) -> Integers:
    """The numbers first[i], first[i] + 1, ... of every range, one after another."""
    ends = np.cumsum(count)
    numbers: Integers = np.arange(int(count.sum())) + np.repeat(first - (ends - count), count)
    return numbers
