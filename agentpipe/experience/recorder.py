"""From the steps of a pool to whole episodes, ready for a shard.

One slot of records an environment: what the player saw and did is written straight into the record, and an episode that
ended leaves its slot as one block. Used by whoever plays: the recording of trajectories, the training, the evaluation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments.compound import NONE
from agentpipe.environments.jit import entry, inlined
from agentpipe.environments.layout import ACCUMULATING, MAX_STEPS
from agentpipe.errors import CorruptError, SimulationError
from agentpipe.experience.graph import derive_parents, parents_from_pairs, temporal_parents
from agentpipe.experience.store import records as rec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentpipe.environments.pool import LinePool

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

_COMPACT = ("action", "log_probability", "value", "policy", "time_ns")
_REMEDY = "go on from another checkpoint"


class Recorded(NamedTuple):
    """Whole episodes, as :meth:`~agentpipe.experience.store.writer.ShardWriter.append` takes them."""

    steps: Array
    """records of all steps, episode after episode"""
    episodes: Array
    """``records.EPISODE``; ``final`` is the position in ``finals``, the store's own fields are not filled in yet"""
    finals: Array | None
    """what would have been seen next, of each episode that was truncated or cut, in order; None: there is none"""
    parents: npt.NDArray[np.uint64]
    """the graphs' words"""


class _Slots(NamedTuple):
    """The fields of the slots that are filled at every step: views [N, S] (mask [N, S, bytes])."""

    time_ns: Array
    environment: Array
    episode: Array
    policy: Array
    fingerprint: Array
    produced: Array
    used: Array
    time: Array
    log_probability: Array
    value: Array
    reward: Array
    action: Array
    last_action: Array
    step: Array
    segment: Array
    terminated: Array
    truncated: Array
    earned: Array
    mask: Array


class Recorder:
    """Keeps the running episodes of one pool, and hands out those that ended.

    Call :meth:`before` and :meth:`after` around every ``pool.step``, then :meth:`take` for the environments that ended;
    what ended and is not taken by the next :meth:`before` is forgotten. A pool that does not say what its steps
    ``produced`` and ``used`` gets the graph of ``edges``, or a temporal one.

    Args:
        pool: N environments, each at the start of an episode.
        dtype: of a step record, :func:`records.step_dtype`.
        index: u32[N], what the records call the environments.
        fingerprints: u32[N], CRC-32 of each environment's disturbance; None: as the pool says, else 0.
        max_steps: longest episode.
        edges: for the rows i64[k] that are taken, their edges i64[e, 3]: position in the rows, parent step, child step.

    Attributes:
        recording: bool[N]; where it is False, nothing is kept of the environment (set it between episodes only).
        length: i64[N], steps of the running episode so far.
    """

    def __init__(
        self,
        pool: LinePool,
        dtype: np.dtype[Any],
        index: npt.NDArray[np.uint32],
        fingerprints: npt.NDArray[np.uint32] | None = None,
        *,
        max_steps: int = MAX_STEPS,
        edges: Callable[[Rows], Array] | None = None,
    ) -> None:
        self.pool, self.dtype, self.max_steps = pool, dtype, max_steps
        self.recording = np.ones(pool.size, np.bool_)
        self.length = np.zeros(pool.size, np.int64)
        self._ended = np.zeros(pool.size, np.bool_)
        self._edges = edges
        self._index = np.ascontiguousarray(index, dtype=np.uint32)
        self._now = getattr(pool, "compound", np.zeros((pool.size, len(NONE)), np.uint8))
        self._compound = np.zeros_like(self._now)  # of the episode in each slot
        said = getattr(pool, "fingerprints", np.zeros(pool.size)) if fingerprints is None else fingerprints
        self._fingerprints = np.ascontiguousarray(said, dtype=np.uint32)
        self._buffer = np.zeros((pool.size, max_steps), dtype)  # pages come into being as they are written
        self._slots = _Slots(*(self._buffer[name] for name in _Slots._fields))
        assert dtype.fields is not None
        self._floats = self._buffer.view(np.float32).reshape(pool.size, max_steps, dtype.itemsize // 4)
        self._observation = dtype.fields["observation"][1] // 4
        self._says_tokens = hasattr(pool, "produced")

    @property
    def episode(self) -> npt.NDArray[np.uint32]:
        """u32[N]: number of the running episode, or of the one that ended and can be taken."""
        numbers: npt.NDArray[np.uint32] = self._slots.episode[:, 0]
        return numbers

    def before(self) -> None:
        """Copies what the player sees; call it before ``pool.step``.

        Raises:
            SimulationError: an episode outlasts the longest allowed.
        """
        pool = self.pool
        self.length[self._ended] = 0
        self._ended[:] = False
        longest = int(np.argmax(self.length))
        if self.length[longest] >= self.max_steps:
            remedy = "report this simulator: it must truncate"
            environment = int(self._index[longest])
            raise SimulationError(f"an episode outlasts {self.max_steps} steps", environment=environment, remedy=remedy)
        observation = np.ascontiguousarray(pool.observation, dtype=np.float32)
        seen = (observation, pool.mask, pool.segment, pool.last_action, pool.time, pool.episode)
        named = (self._index, self._fingerprints, self._now, self._compound)
        _see(self.recording, self.length, named, seen, self._slots, self._floats, self._observation)

    def after(
        self,
        actions: npt.NDArray[np.int64],
        log_probabilities: npt.NDArray[np.float32],
        values: npt.NDArray[np.float32] | None,
        policy: int | npt.NDArray[np.uint32],
        time_ns: int | npt.NDArray[np.int64],
    ) -> Rows:
        """Adds what was done and what came of it; call it after ``pool.step``.

        Args:
            actions: i64[N].
            log_probabilities: f32[N], of the actions under the player.
            values: f32[N], of the observations under the player; None: it has no critic.
            policy: index in the shard's list of policies, one for all or u32[N].
            time_ns: UTC, one for all or i64[N].

        Returns:
            i64[k]: the environments in which an episode ended.
        """
        pool, size = self.pool, self.pool.size
        nothing = np.zeros(size, np.uint32)
        produced, used = (pool.produced, pool.used) if self._says_tokens else (nothing, nothing)
        decided = (
            np.ascontiguousarray(actions, dtype=np.int64),
            np.ascontiguousarray(log_probabilities, dtype=np.float32),
            np.zeros(size, np.float32) if values is None else np.ascontiguousarray(values, dtype=np.float32),
            np.full(size, policy, np.uint32) if np.ndim(policy) == 0 else np.asarray(policy, np.uint32),
            np.full(size, time_ns, np.int64) if np.ndim(time_ns) == 0 else np.asarray(time_ns, np.int64),
        )
        earned = pool.earned if self._says_tokens else pool.reward != 0
        came = (pool.reward, pool.terminated, pool.truncated, produced, used, earned)
        _do(self.recording, self.length, decided, came, self._slots, self._ended)
        return np.flatnonzero(self._ended)

    def take(self, rows: Rows, room: Array | None = None) -> Recorded:
        """The episodes that the last :meth:`after` said had ended in ``rows``; their slots are free then.

        Args:
            rows: i64[k], environments.
            room: as many records as these episodes have steps, to be filled; None: made anew.
        """
        assert self._ended[rows].all(), "only what ended in the last step can be taken"
        self._ended[rows] = False
        return self._pack(rows, ended=True, room=room)

    def cut(self, rows: Rows | None = None) -> Recorded:
        """Every episode that is running, ended by the recording: their last steps are marked as truncated.

        Args:
            rows: only of these environments, each of which has an episode running.

        What the pool shows now is their final observation. The pool is not touched, and ``recording`` is switched off
        for them: the rest of these episodes is nobody's.
        """
        running = (self.length > 0) & ~self._ended
        rows = np.flatnonzero(running) if rows is None else rows
        assert running[rows].all(), "only what is running can be cut"
        self._slots.truncated[rows, self.length[rows] - 1] = 1
        recorded = self._pack(rows, ended=False)
        self.recording[rows] = False
        return recorded

    def _pack(self, rows: Rows, *, ended: bool, room: Array | None = None) -> Recorded:
        lengths = self.length[rows]
        steps = np.empty(int(lengths.sum()), self.dtype) if room is None else room
        words = self.dtype.itemsize // 8
        source = self._buffer.view(np.uint64).reshape(*self._buffer.shape, words)
        _copy_out(source, rows, lengths, steps.view(np.uint64).reshape(len(steps), words))
        episodes, last = self._episodes(rows, ended=ended), self._buffer[rows, lengths - 1]
        unfinished = np.flatnonzero((last["truncated"] == 1) & (last["terminated"] == 0))
        finals = None
        if len(unfinished):
            finals = self._finals(rows[unfinished], last[unfinished], "final_" if ended else "")
            episodes["final"][unfinished] = np.arange(len(unfinished))
        self.length[rows] = 0
        return Recorded(steps, episodes, finals, self._parents(rows, lengths, steps))

    def _episodes(self, rows: Rows, *, ended: bool) -> Array:
        episodes = np.zeros(len(rows), rec.EPISODE)
        first = self._buffer[rows, 0]
        for name in ("time_ns", "environment", "episode"):
            episodes[name] = first[name]
        episodes["steps"], episodes["compound"] = self.length[rows], self._compound[rows]
        episodes["final"] = rec.NO_FINAL
        if ended:
            for name in ("return", "decision_seconds", "success", "reason"):
                episodes[name] = getattr(self.pool, f"result_{name}")[rows]
            for name, unknown in (("elapsed_seconds", 0.0), ("mode", -1), ("machine", -1)):  # what only the line tells
                told = getattr(self.pool, f"result_{name}", None)
                episodes[name] = unknown if told is None else told[rows]
        else:
            self._describe_cut(rows, episodes)
        return episodes

    def _describe_cut(self, rows: Rows, episodes: Array) -> None:
        """An unfinished episode so far; the built-in line also tells the truth about it."""
        pool = self.pool
        episodes["cut"], episodes["reason"] = 1, -1
        episodes["mode"] = episodes["machine"] = -1
        episodes["elapsed_seconds"] = pool.time[rows] * np.float32(60)
        episodes["return"] = [self._buffer["reward"][row, : self.length[row]].sum(dtype=np.float64) for row in rows]
        if hasattr(pool, "hidden"):
            episodes["mode"], episodes["machine"] = pool.hidden().mode[rows], pool.hidden().machine[rows]
            episodes["decision_seconds"] = pool.plant().decision_seconds[rows]

    def _finals(self, rows: Rows, last: Array, prefix: str) -> Array:
        """What the pool shows of ``rows``, under ``prefix``."""
        pool = self.pool
        size, actions = pool.observation.shape[1], pool.mask.shape[1]
        finals = np.zeros(len(rows), rec.final_dtype(size, actions))
        for name in ("time_ns", "environment", "episode"):
            finals[name] = last[name]
        for name in ("time", "last_action", "observation"):
            finals[name] = getattr(pool, prefix + name)[rows]
        segment = getattr(pool, f"{prefix}segment", None)
        finals["segment"] = last["segment"] if segment is None else segment[rows]
        finals["mask"] = rec.pack_masks(getattr(pool, f"{prefix}mask")[rows])
        return finals

    def _parents(self, rows: Rows, lengths: Rows, steps: Array) -> npt.NDArray[np.uint64]:
        if self._edges is not None:
            return parents_from_pairs(lengths, self._edges(rows))
        if self._says_tokens:
            return derive_parents(steps["produced"], steps["used"], lengths, ACCUMULATING)
        return temporal_parents(lengths)

    def partial(self) -> dict[str, Array]:
        """The running episodes in compact form, for a checkpoint.

        Returns:
            ``length`` and ``episode`` i64[N], ``recording`` bool[N] and ``compound`` u8[N, 3]; and of all their steps,
            row after row, ``action``, ``log_probability``, ``value``, ``policy``, ``time_ns``.
        """
        length = np.where(self._ended, 0, self.length)
        kept = np.arange(self.max_steps) < length[:, None]
        steps = {name: self._buffer[name][kept] for name in _COMPACT}
        episode = np.where(length > 0, self._buffer["episode"][:, 0].astype(np.int64), self.pool.episode)
        compound = np.where(length[:, None] > 0, self._compound, 0)
        return {"length": length, "episode": episode, "recording": self.recording.copy(), "compound": compound, **steps}

    def restore(self, partial: Mapping[str, Array]) -> None:
        """Brings the running episodes back by playing them again; the pool must be built as it was.

        The pool stands at the end of the longest of them afterwards: the caller restores its snapshot.

        Raises:
            CorruptError: ``partial`` does not fit, or the pool plays other episodes.
        """
        lengths, pool = partial["length"], self.pool
        starts = np.cumsum(lengths) - lengths
        whole = all(len(partial[name]) == lengths.sum() for name in _COMPACT)
        if lengths.shape != (pool.size,) or not whole or lengths.max(initial=0) > self.max_steps:
            raise CorruptError("running episodes do not fit the pool", field="length", remedy=_REMEDY)
        self._override(partial["compound"])
        pool.reset(partial["episode"])
        self.length[:] = 0
        self._ended[:] = False
        for step in range(int(lengths.max(initial=0))):
            self.recording[:] = lengths > step
            at = np.where(self.recording, starts + step, 0)
            given = {name: partial[name][at] for name in _COMPACT}
            self.before()
            actions = np.where(self.recording, given["action"].astype(np.int64), pool.mask.argmax(axis=1))
            legal = pool.mask[np.arange(pool.size), np.clip(actions, 0, pool.mask.shape[1] - 1)]
            if not legal.all():
                self._refuse(int(legal.argmin()), step)
            pool.step(actions)
            ended = self.after(actions, given["log_probability"], given["value"], given["policy"], given["time_ns"])
            if len(ended):
                self._refuse(int(ended[0]), step)
        self.recording[:] = partial["recording"]

    def _override(self, compound: npt.NDArray[np.uint8]) -> None:
        """Lets the next episode of every environment begin under the compound of the one that ran."""
        known = getattr(self.pool, "compounds", None)
        if known is not None:
            self.pool.override(np.flatnonzero(known.allowed), compound[known.allowed])
        elif compound.any():
            raise CorruptError("running episodes do not fit the pool", field="compound", remedy=_REMEDY)

    def _refuse(self, row: int, step: int) -> None:
        where = {"environment": int(self._index[row]), "step": step}
        raise CorruptError("a running episode plays otherwise than it did", **where, remedy=_REMEDY)


@inlined
def _pack_mask(mask: Array, packed: Array) -> None:
    for byte in range(len(packed)):
        bits = 0
        for bit in range(min(8, len(mask) - 8 * byte)):
            if mask[8 * byte + bit]:
                bits |= 1 << bit
        packed[byte] = bits


@entry
def _see(
    recording: Array, length: Array, named: Any, seen: Any, slots: Any, floats: Array, first: int  # noqa: ANN401
) -> None:  # fmt: skip
    """What the players see goes into the next record of each slot."""
    index, fingerprints, compound, kept = named
    observation, mask, segment, last_action, time, episode = seen
    for n in range(len(length)):
        if not recording[n]:
            continue
        at = length[n]
        if at == 0:
            for kind in range(kept.shape[1]):
                kept[n, kind] = compound[n, kind]
        slots.environment[n, at] = index[n]
        slots.fingerprint[n, at] = fingerprints[n]
        slots.episode[n, at] = episode[n]
        slots.step[n, at] = at
        slots.segment[n, at] = segment[n]
        slots.last_action[n, at] = last_action[n]
        slots.time[n, at] = time[n]
        _pack_mask(mask[n], slots.mask[n, at])
        for feature in range(observation.shape[1]):
            floats[n, at, first + feature] = observation[n, feature]


@entry
def _do(
    recording: Array, length: Array, decided: Any, came: Any, slots: Any, ended: Array  # noqa: ANN401
) -> None:  # fmt: skip
    """What was done and what came of it goes into the same record."""
    action, log_probability, value, policy, time_ns = decided
    reward, terminated, truncated, produced, used, earned = came
    for n in range(len(length)):
        if not recording[n]:
            continue
        at = length[n]
        slots.action[n, at] = action[n]
        slots.log_probability[n, at] = log_probability[n]
        slots.value[n, at] = value[n]
        slots.policy[n, at] = policy[n]
        slots.time_ns[n, at] = time_ns[n]
        slots.reward[n, at] = reward[n]
        slots.terminated[n, at] = terminated[n]
        slots.truncated[n, at] = truncated[n]
        slots.produced[n, at] = produced[n]
        slots.used[n, at] = used[n]
        slots.earned[n, at] = earned[n]
        length[n] = at + 1
        ended[n] = terminated[n] or truncated[n]


@entry
def _copy_out(source: Array, rows: Rows, lengths: Rows, out: Array) -> None:
    """One block an episode."""
    record = 0
    for position in range(len(rows)):
        row = rows[position]
        for step in range(lengths[position]):
            for word in range(out.shape[1]):
                out[record, word] = source[row, step, word]
            record += 1
