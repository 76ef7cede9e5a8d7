"""What is asked of episodes before they count: shape, order, finite numbers. The answers are typed errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry
from agentpipe.errors import AgentpipeError, NonFiniteError, RecordError
from agentpipe.experience.store import checksum
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.content import word_counts
from agentpipe.experience.store.keys import episode_keys

_REMEDY: Final = "report the recorder of these episodes"
_ROW_FLOATS: Final = ("return", "elapsed_seconds", "decision_seconds")


@dataclass(frozen=True)
class Layout:
    """Sizes that an append is held against.

    Args:
        steps: Step record.
        finals: Final record.
        size: Numbers in an observation.
        actions: How many actions there are.
    """

    steps: np.dtype[Any]
    finals: np.dtype[Any]
    size: int
    actions: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Words of a record, place of the observation in units of four bytes, its numbers, actions: for the kernels."""
        assert self.steps.fields is not None
        return self.steps.itemsize // 8, self.steps.fields["observation"][1] // 4, self.size, self.actions

    @classmethod
    def of(cls, observation_size: int, action_count: int) -> Layout:
        """The layout for observations of ``observation_size`` numbers and ``action_count`` actions."""
        steps = rec.step_dtype(observation_size, action_count)
        return cls(steps, rec.final_dtype(observation_size, action_count), observation_size, action_count)


@dataclass(frozen=True)
class Batch:
    """Episodes of the right shape, contiguous in memory; ``rows`` is a copy that the writer fills in.

    Args:
        steps: Step records.
        rows: Episode rows.
        finals: Final records.
        final_rows: Which of ``rows`` each final record belongs to, int64.
        parents: Words of the graphs, or None for chains in time.
        lengths: Steps of each episode, int64.
        words: Words in the graph of each, int64.
    """

    steps: npt.NDArray[Any]
    rows: npt.NDArray[Any]
    finals: npt.NDArray[Any]
    final_rows: npt.NDArray[np.int64]
    parents: npt.NDArray[np.uint64] | None
    lengths: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        """Environment and episode of each row as one number."""
        return episode_keys(self.rows)


def prepare(
    layout: Layout,
    steps: npt.NDArray[Any],
    episodes: npt.NDArray[Any],
    finals: npt.NDArray[Any] | None,
    parents: npt.NDArray[np.uint64] | None,
) -> Batch:
    """Looks at all but the contents of the step records.

    Raises:
        RecordError: of another dtype, too long, or lengths that do not add up.
        NonFiniteError: a row or final record holds a NaN or an infinity.
    """
    cut = np.zeros(0, layout.finals) if finals is None else finals
    for name, array, dtype in (("steps", steps, layout.steps), ("episodes", episodes, rec.EPISODE)):
        _fits(name, array, dtype)
    _fits("finals", cut, layout.finals)
    rows = episodes.copy()
    lengths = rows["steps"].astype(np.int64)
    for wrong, text in ((lengths < 1, "an episode without steps"), (lengths > rec.MAX_EPISODE_STEPS, "too long")):
        if wrong.any():
            remedy = f"an episode has 1 to {rec.MAX_EPISODE_STEPS} steps: cut it into several"
            raise _error(RecordError, f"{text}: {lengths[wrong][0]} steps", rows[wrong][0], remedy=remedy)
    if lengths.sum() != len(steps):
        raise RecordError(f"{len(steps)} records for {lengths.sum()} steps", field="steps", remedy=_REMEDY)
    words = word_counts(lengths)
    if parents is not None:
        _fits("parents", parents, np.dtype("<u8"))
        if words.sum() != len(parents):
            raise RecordError(f"{len(parents)} words instead of {words.sum()}", field="parents", remedy=_REMEDY)
        parents = np.ascontiguousarray(parents)
    for name in _ROW_FLOATS:
        if not np.isfinite(rows[name]).all():
            row = rows[~np.isfinite(rows[name])][0]
            raise _error(NonFiniteError, f"{row[name]} in the row of an episode", row, field=name, remedy=_REMEDY)
    final_rows = _match(steps, rows, cut, np.cumsum(lengths) - 1)
    return Batch(np.ascontiguousarray(steps), rows, np.ascontiguousarray(cut), final_rows, parents, lengths, words)


def _fits(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
    if array.dtype != dtype or array.ndim != 1:
        text = f"{name} of dtype {array.dtype} and {array.ndim} dimensions, this shard takes {dtype}"
        raise RecordError(text if len(text) < 300 else f"{name} of another dtype", field=name, remedy=_REMEDY)


def _match(
    steps: npt.NDArray[Any], rows: npt.NDArray[Any], finals: npt.NDArray[Any], last: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The row that each final record belongs to; ``last`` are the records that end the episodes."""
    found = np.zeros(0, np.int64)
    if len(finals):
        keys, wanted = episode_keys(rows), episode_keys(finals)
        order = np.argsort(keys)
        found = order[np.searchsorted(keys[order], wanted).clip(max=len(rows) - 1)] if len(rows) else found
        alien = keys[found] != wanted if len(rows) else np.ones(len(finals), np.bool_)
        if alien.any() or len(np.unique(found)) < len(found):
            wrong = finals[int(alien.argmax())]
            text = "a final record without its episode, or a second one of it"
            raise _error(RecordError, text, wrong, field="finals", remedy=_REMEDY)
    alone = (rows["cut"] != 0) | ((steps["truncated"][last] != 0) & (steps["terminated"][last] == 0))
    alone[found] = False
    if alone.any():
        text = "cut or truncated, but without a final record: its last step would count as worth nothing"
        raise _error(RecordError, text, rows[alone][0], field="finals", remedy=_REMEDY)
    if not len(finals):
        return found
    for name in ("time", "observation"):
        bad = ~np.isfinite(finals[name]).all(axis=tuple(range(1, finals[name].ndim)))
        if bad.any():
            raise _error(NonFiniteError, "not finite in a final record", finals[bad][0], field=name, remedy=_REMEDY)
    return found


def _error(kind: type[AgentpipeError], text: str, record: Any, **where: Any) -> AgentpipeError:  # noqa: ANN401 - a row
    return kind(text, environment=int(record["environment"]), episode=int(record["episode"]), **where)


def copy_steps(batch: Batch, target: npt.NDArray[np.uint64], layout: Layout, policies: int) -> None:
    """Copies the step records into ``target`` with their checksums, and looks at each.

    Raises:
        NonFiniteError, RecordError: something is wrong with one; ``target`` is then of no meaning.
    """
    where = np.zeros(3, np.int64)
    source = checksum.as_words(batch.steps)
    keys = np.stack([batch.rows["environment"], batch.rows["episode"]], axis=1)
    code = checksum.copy_steps(
        source, source.view(np.uint32), target, keys, batch.lengths, *layout.sizes, policies, where
    )
    if code:
        raise _step_error(batch, int(code), *(int(number) for number in where))


def _step_error(batch: Batch, code: int, episode: int, step: int, number: int) -> AgentpipeError:
    row = batch.rows[episode]
    record = batch.steps[int(batch.lengths[:episode].sum()) + step]
    if code == checksum.NOT_FINITE:
        names = checksum.FLOAT_FIELDS
        field = names[number] if number < len(names) else "observation"
        value = record[field] if number < len(names) else record[field][number - len(names)]
        place = {"element": number - len(names)} if number >= len(names) else {}
        remedy = "look at what the environment or the player gave at this step"
        return _error(NonFiniteError, f"{value} recorded", row, step=step, field=field, **place, remedy=remedy)
    field, text = {
        checksum.ENVIRONMENT: ("environment", "a step of another environment"),
        checksum.EPISODE: ("episode", "a step of another episode"),
        checksum.STEP: ("step", "steps out of order"),
        checksum.POLICY: ("policy", "a policy that the shard does not list"),
        checksum.ACTION: ("action", "no such action"),
    }[code]
    return _error(RecordError, f"{text}: {record[field]}", row, step=step, field=field, remedy=_REMEDY)


@entry
def _graphs(source: npt.NDArray[np.uint64], target: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]) -> int:
    """Copies graphs; returns the number of the step (over all episodes) that uses itself or a later one, or -1."""
    at, number = 0, 0
    for e in range(lengths.size):
        width = (lengths[e] + 63) // 64
        for step in range(lengths[e]):
            for word in range(width):
                bits = source[at]
                below = min(max(step - 64 * word, 0), 64)  # how many bits of this word may be set
                if below < 64 and bits >> np.uint64(below):
                    return number
                target[at] = bits
                at += 1
            number += 1
    return -1


@entry
def _chains(target: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64]) -> None:
    at = 0
    for e in range(lengths.size):
        width = (lengths[e] + 63) // 64
        for step in range(lengths[e]):
            for word in range(width):
                one = step > 0 and (step - 1) // 64 == word
                target[at] = np.uint64(1) << np.uint64((step - 1) % 64) if one else np.uint64(0)
                at += 1


def copy_graphs(batch: Batch, target: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Copies the graphs into ``target``, or makes chains in time; returns the checksum of each.

    Raises:
        RecordError: a step uses what only a later one makes.
    """
    if batch.parents is None:
        _chains(target, batch.lengths)
    else:
        wrong = int(_graphs(batch.parents, target, batch.lengths))
        if wrong >= 0:
            ends = np.cumsum(batch.lengths)
            episode = int(np.searchsorted(ends, wrong, side="right"))
            step = wrong - int(ends[episode] - batch.lengths[episode])
            text = "a step depends on itself or on a later one"
            raise _error(RecordError, text, batch.rows[episode], step=step, field="parents", remedy=_REMEDY)
    return checksum.range_checksums(target, np.cumsum(batch.words) - batch.words, batch.words)
