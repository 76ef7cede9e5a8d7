"""The graph of an episode: which step used what which earlier step made, as bit sets.

An episode of n steps has a row a step, of W = ceil(n / 64) words: bit i % 64 of word i // 64 in row j is set where step
j used what step i < j made. Step i is then a *parent* of j; j, and all that in turn depend on j, are *dependents* of i.
Edges go forward in time only, so a cycle cannot be stored. The graphs of several episodes lie one behind the other.

    influence(i) = |D(i)| Var{r_j : j in D(i)}        D(i): dependents of i, Var: population variance

The variance of no value and of one value is 0: a step influences where what comes of it varies.

Everything heavy is compiled and allocates nothing; the tests hold it against sets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry, inlined
from agentpipe.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Sequence

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[Any]
TOKEN_BITS = 32

_ONE, _ZERO = np.uint64(1), np.uint64(0)
_S1, _S2, _S4, _S56 = np.uint64(1), np.uint64(2), np.uint64(4), np.uint64(56)
_M1, _M2 = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333)
_M4, _H01 = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x0101010101010101)


def words_of(lengths: Integers) -> npt.NDArray[np.int64]:
    """i64[n]: words in the graph of each of the episodes of ``lengths`` steps."""
    steps = np.asarray(lengths).astype(np.int64)
    return steps * -(-steps // 64)


def temporal_parents(lengths: Integers) -> Words:
    """The graph that supposes nothing but time: every step depends on the one before it.

    Args:
        lengths: steps of each episode.

    Returns:
        u64[words of all episodes].
    """
    steps = np.ascontiguousarray(lengths, dtype=np.int64)
    words = np.zeros(int(words_of(steps).sum()), np.uint64)
    _temporal(steps, words)
    return words


def parents_from_pairs(lengths: Integers, pairs: Integers) -> Words:
    """The graph of edges that an environment of the user's own supplies.

    Args:
        lengths: steps of each episode.
        pairs: i64[k, 3] of episode (0 is the first of ``lengths``), parent step and child step; may repeat an edge.

    Raises:
        RecordError: an edge that does not go forward in time (as in every cycle), or leaves its episode.
    """
    steps = np.ascontiguousarray(lengths, dtype=np.int64)
    edges = np.asarray(pairs).reshape(-1, 3).astype(np.int64)
    row, parent, child = edges.T
    inside = (row >= 0) & (row < len(steps))
    length = steps[np.where(inside, row, 0)] if len(steps) else np.zeros(len(row), np.int64)
    good = inside & (parent >= 0) & (parent < child) & (child < length)
    if not good.all():
        first = int(np.argmin(good))
        remedy = "a step can only depend on an earlier one of its episode"
        text = f"edge {int(parent[first])} -> {int(child[first])}"
        raise RecordError(text, episode=int(row[first]), record=first, remedy=remedy)
    sizes = words_of(steps)
    starts = np.cumsum(sizes) - sizes
    words = np.zeros(int(sizes.sum()), np.uint64)
    at = starts[row] + child * -(-length // 64) + parent // 64
    np.bitwise_or.at(words, at, _ONE << (parent % 64).astype(np.uint64))
    return words


def require_forward(words: Words, lengths: Integers) -> None:
    """Makes sure that ``words`` are graphs of episodes of ``lengths`` steps.

    Raises:
        RecordError: too many or too few words, or an edge that does not go forward in time.
    """
    steps = np.ascontiguousarray(lengths, dtype=np.int64)
    sizes = words_of(steps)
    if len(words) != sizes.sum():
        text = f"a graph of {len(words)} words instead of {int(sizes.sum())}"
        raise RecordError(text, remedy="give a row of ceil(steps / 64) words for each step")
    bad = int(_first_backward(np.ascontiguousarray(words, dtype=np.uint64), steps))
    if bad >= 0:
        episode = int(np.searchsorted(np.cumsum(steps), bad, side="right"))
        step = bad - int(steps[:episode].sum())
        remedy = "a step can only depend on an earlier one of its episode"
        raise RecordError("an edge does not go forward", episode=episode, step=step, remedy=remedy)


def derive_parents(produced: Integers, used: Integers, lengths: Integers, accumulating: int) -> Words:
    """The graph that follows from what each step made and needed.

    A step depends on whoever made the tokens it needs: the newest maker, or every maker so far where the token is in
    ``accumulating``. What a step makes itself it does not depend on; a token that nobody made is no edge.

    Args:
        produced: u32[steps] bit sets of tokens, episode after episode.
        used: u32[steps] likewise.
        lengths: steps of each episode, their sum is ``steps``.
        accumulating: bit set of the tokens of which every maker counts.
    """
    steps = np.ascontiguousarray(lengths, dtype=np.int64)
    words = np.zeros(int(words_of(steps).sum()), np.uint64)
    makers = np.zeros((TOKEN_BITS, _width(steps)), np.uint64)
    made, needed = (np.ascontiguousarray(tokens, dtype=np.uint32) for tokens in (produced, used))
    assert len(made) == len(needed) == steps.sum(), "tokens of every step"
    _derive(made, needed, steps, accumulating, makers, words)
    return words


def influence(
    words: Words, lengths: Integers, rewards: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """How much depends on each step, see the module.

    Args:
        words: u64, the episodes' graphs.
        lengths: steps of each episode.
        rewards: f32[steps].

    Returns:
        Number of dependents u32[steps], and influence f32[steps].
    """
    steps = np.ascontiguousarray(lengths, dtype=np.int64)
    values = np.ascontiguousarray(rewards, dtype=np.float32)
    assert len(words) == words_of(steps).sum(), "the graph of every episode"
    assert len(values) == steps.sum(), "the reward of every step"
    dependents, influences = np.zeros(len(values), np.uint32), np.zeros(len(values), np.float32)
    closure = np.zeros((int(steps.max(initial=0)), _width(steps)), np.uint64)
    _influence(np.ascontiguousarray(words, dtype=np.uint64), steps, values, closure, dependents, influences)
    return dependents, influences


def unexplained_spikes(
    words: Words, lengths: Integers, rewards: npt.NDArray[np.float32], threshold: float
) -> npt.NDArray[np.bool_]:
    """bool[steps]: the reward is ``threshold`` or more in size, yet the step depends on none before it."""
    steps = np.ascontiguousarray(lengths, dtype=np.int64)
    rootless = np.zeros(len(rewards), np.bool_)
    _roots(np.ascontiguousarray(words, dtype=np.uint64), steps, rootless)
    spikes: npt.NDArray[np.bool_] = rootless & (np.abs(rewards) >= threshold)
    return spikes


def edges(parents: Words) -> list[tuple[int, int]]:
    """The edges (parent, child) of one episode, by child and then by parent; ``parents`` is u64[n, W]."""
    bits = np.unpackbits(np.ascontiguousarray(parents, dtype="<u8").view(np.uint8), axis=1, bitorder="little")
    return [(int(parent), int(child)) for child, parent in np.argwhere(bits)]


def neighbours(parents: Words) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    """The direct parents of each step of one episode, and its direct children; ``parents`` is u64[n, W]."""
    above: list[list[int]] = [[] for _ in range(len(parents))]
    below: list[list[int]] = [[] for _ in range(len(parents))]
    for parent, child in edges(parents):
        above[child].append(parent)
        below[parent].append(child)
    return above, below


def _width(steps: npt.NDArray[np.int64]) -> int:
    return max(1, -(-int(steps.max(initial=0)) // 64))


@inlined
def _count(word: np.uint64) -> int:
    """Bits set in ``word``; LLVM makes one instruction of it."""
    word -= (word >> _S1) & _M1
    word = (word & _M2) + ((word >> _S2) & _M2)
    word = (word + (word >> _S4)) & _M4
    return np.int64((word * _H01) >> _S56)  # type: ignore[return-value]


@inlined
def _lowest(word: np.uint64) -> int:
    """Number of the lowest bit set in ``word``, which is not 0."""
    return _count(~word & (word - _ONE))  # type: ignore[no-any-return]


@entry
def _temporal(lengths: npt.NDArray[np.int64], words: Words) -> None:
    first = 0
    for episode in range(len(lengths)):
        steps = lengths[episode]
        width = (steps + 63) // 64
        for step in range(1, steps):
            words[first + step * width + (step - 1) // 64] = _ONE << np.uint64((step - 1) % 64)
        first += steps * width


@entry
def _derive(
    produced: Integers, used: Integers, lengths: npt.NDArray[np.int64], accumulating: int, makers: Words, words: Words
) -> None:
    first, record = 0, 0
    for episode in range(len(lengths)):
        steps = lengths[episode]
        width = (steps + 63) // 64
        for token in range(TOKEN_BITS):
            for word in range(width):
                makers[token, word] = _ZERO
        for step in range(steps):
            at = first + step * width
            left = np.uint64(used[record])
            while left != _ZERO:
                token = _lowest(left)
                left &= left - _ONE
                for word in range(width):
                    words[at + word] |= makers[token, word]
            left = np.uint64(produced[record])
            while left != _ZERO:
                token = _lowest(left)
                left &= left - _ONE
                if (accumulating >> token) & 1 == 0:
                    for word in range(width):
                        makers[token, word] = _ZERO
                makers[token, step // 64] |= _ONE << np.uint64(step % 64)
            record += 1
        first += steps * width


@inlined
def _spread(own: float, closure: Words, width: int, rewards: Any, record: int) -> float:  # noqa: ANN401
    """Sum of squared deviations of the dependents' rewards: the mean first, for the sake of accuracy."""
    total = 0.0
    for word in range(width):
        left = closure[word]
        while left != _ZERO:
            total += np.float64(rewards[record + word * 64 + _lowest(left)])
            left &= left - _ONE
    mean, squares = total / own, 0.0
    for word in range(width):
        left = closure[word]
        while left != _ZERO:
            difference = np.float64(rewards[record + word * 64 + _lowest(left)]) - mean
            squares += difference * difference
            left &= left - _ONE
    return squares


@inlined
def _pass_up(parents: Words, step: int, closure: Words) -> None:
    """What depends on ``step``, and itself, depends on each of its ``parents`` too."""
    width = len(parents)
    for word in range(width):
        left = parents[word]
        while left != _ZERO:
            parent = word * 64 + _lowest(left)
            if parent >= step:  # never written, see require_forward; a damaged word must not reach elsewhere
                break
            left &= left - _ONE
            closure[parent, step // 64] |= _ONE << np.uint64(step % 64)
            for other in range(step // 64, width):
                closure[parent, other] |= closure[step, other]


@entry
def _influence(
    words: Words, lengths: Any, rewards: Any, closure: Words, dependents: Any, influences: Any  # noqa: ANN401
) -> None:  # fmt: skip
    """From the last step to the first: when a step's turn comes, all that depends on it is known."""
    first, record = 0, 0
    for episode in range(len(lengths)):
        steps = lengths[episode]
        width = (steps + 63) // 64
        for step in range(steps):
            for word in range(width):
                closure[step, word] = _ZERO
        for step in range(steps - 1, -1, -1):
            count = 0
            for word in range(width):
                count += _count(closure[step, word])
            dependents[record + step] = count
            if count > 1:  # count * (squares / count)
                influences[record + step] = _spread(np.float64(count), closure[step], width, rewards, record)
            at = first + step * width
            _pass_up(words[at : at + width], step, closure)
        first += steps * width
        record += steps


@entry
def _roots(words: Words, lengths: npt.NDArray[np.int64], rootless: npt.NDArray[np.bool_]) -> None:
    first, record = 0, 0
    for episode in range(len(lengths)):
        steps = lengths[episode]
        width = (steps + 63) // 64
        for step in range(steps):
            any_parent = _ZERO
            for word in range(width):
                any_parent |= words[first + step * width + word]
            rootless[record] = any_parent == _ZERO
            record += 1
        first += steps * width


@entry
def _first_backward(words: Words, lengths: npt.NDArray[np.int64]) -> int:
    """The first record with a bit set for itself or for a later step; -1 where there is none."""
    first, record = 0, 0
    for episode in range(len(lengths)):
        steps = lengths[episode]
        width = (steps + 63) // 64
        for step in range(steps):
            for word in range(width):
                found = words[first + step * width + word]
                below = step - 64 * word  # so many bits of this word stand for earlier steps
                if below < 64 and (found if below <= 0 else found >> np.uint64(below)) != _ZERO:
                    return record
            record += 1
        first += steps * width
    return -1
