"""Probabilities as integers, and the two ways to draw by them: an alias table and stratified epochs.

The *mass* of step i is a whole number q_i, and its probability q_i / (n 2**32): the masses of n steps sum to n 2**32
exactly, and a uniform distribution gives each 2**32 (:data:`UNIT`). With whole numbers both ways of drawing are exact:
what the alias table gives a step is its mass, not nearly its mass.

*Alias table* (Walker 1977; Vose, "A linear algorithm for generating random numbers with a given distribution", IEEE
Transactions on Software Engineering 17, 1991): n columns of one UNIT each, shared by two steps at most. A draw takes a
column and one of its two steps: one random access however many steps there are. Draws are independent.

*Stratified epoch*: n draws at once at the points j UNIT + offset, j = 0 .. n - 1, of the cumulated masses, with one
random offset (systematic resampling), then put in random order. Each step comes floor or ceiling of its expected n p_i
times, and n p_i times on average: no step whose expectation is one or more is missed. One pass an epoch, then O(1) a
draw.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry
from agentpipe.environments.rng import bits, uniform
from agentpipe.experience.sampling.draw import SamplingError, check_priorities, check_size

UNIT: Final = 1 << 32
_UNIT: Final = np.uint64(UNIT)
_LOW: Final = np.uint64(UNIT - 1)
_HALF: Final = np.uint64(32)
_COLUMN, _SHARE, _OFFSET, _ORDER = 0, 1, 2, 3
"""channels of random numbers"""

Masses = npt.NDArray[np.uint64]


def integer_masses(weights: npt.ArrayLike) -> Masses:
    """Masses in proportion to ``weights`` f64[n], rounded to 1 / 2**32 of the mean mass; zero stays zero.

    The error does not build up: cumulated masses are rounded, and a mass is the difference of two.

    Raises:
        SamplingError: no weights, a weight that is negative or not finite, or all are zero.
    """
    checked = check_priorities(weights, "weight")
    size = check_size(len(checked))
    largest = float(checked.max())
    if not largest > 0:
        raise SamplingError("every weight is zero", remedy="give some step a weight above zero")
    cumulated = np.cumsum(checked / largest)
    cumulated *= size * float(UNIT) / cumulated[-1]
    bounds = np.zeros(size + 1, np.uint64)
    np.rint(cumulated, out=cumulated)
    bounds[1:] = cumulated
    last = int(np.flatnonzero(checked)[-1])
    np.minimum(bounds, np.uint64(size * UNIT), out=bounds)
    bounds[last + 1 :] = size * UNIT
    return np.diff(bounds)


def alias_table(masses: Masses) -> Masses:
    """One column a step, u64[n]: upper half the other step, lower half how much of the column is not that other's."""
    table, rest = np.empty_like(masses), masses.copy()
    _fill_alias(rest, np.empty(len(masses), np.uint32), table)
    return table


@entry
def _fill_alias(rest: Masses, stack: npt.NDArray[np.uint32], table: Masses) -> None:
    """Vose's construction; ``rest`` holds the masses and is used up.

    Small steps (less than a column left) stack up from the left, large ones from the right. Masses are whole numbers
    with an exact sum: when no small one is left, every remaining large one fills its column.
    """
    small, large = 0, len(rest)
    for step in range(len(rest)):
        if rest[step] < _UNIT:
            stack[small] = step
            small += 1
        else:
            large -= 1
            stack[large] = step
    while small > 0:
        small -= 1
        little, big = stack[small], stack[large]
        table[little] = (np.uint64(big) << _HALF) | rest[little]
        rest[big] = rest[big] - (_UNIT - rest[little])
        if rest[big] < _UNIT:
            large += 1
            stack[small] = big
            small += 1
    for place in range(large, len(rest)):
        table[stack[place]] = (np.uint64(stack[place]) << _HALF) | _LOW


@entry
def draw_alias(table: Masses, key: np.uint64, first: int, ids: npt.NDArray[np.int64]) -> None:
    """Independent draws number ``first`` and on, one for each place of ``ids``."""
    for place in range(len(ids)):
        column = np.int64(uniform(bits(key, first + place, _COLUMN)) * len(table))
        entry_ = table[column]
        if (bits(key, first + place, _SHARE) >> _HALF) < (entry_ & _LOW):
            ids[place] = column
        else:
            ids[place] = np.int64(entry_ >> _HALF)


@entry
def draw_uniform(size: int, key: np.uint64, first: int, ids: npt.NDArray[np.int64]) -> None:
    """Independent draws number ``first`` and on of steps that are equally likely."""
    for place in range(len(ids)):
        ids[place] = np.int64(uniform(bits(key, first + place, _COLUMN)) * size)


@entry
def fill_epoch(masses: Masses, key: np.uint64, epoch: int, order: npt.NDArray[np.uint32]) -> None:
    """All draws of one stratified epoch into ``order`` u32[n]; no ``masses`` (length 0) means equally likely."""
    if len(masses) == 0:
        for step in range(len(order)):
            order[step] = step
    else:
        point = bits(key, epoch, _OFFSET) >> _HALF
        cumulated = np.uint64(0)
        place = 0
        for step in range(len(masses)):
            cumulated += masses[step]
            while place < len(order) and point < cumulated:
                order[place] = step
                place += 1
                point += _UNIT
    shuffling = bits(key, epoch, _ORDER)
    for place in range(len(order) - 1, 0, -1):
        other = np.int64(uniform(bits(shuffling, place, 0)) * (place + 1))
        order[place], order[other] = order[other], order[place]


def expected_cover(masses: Masses, *, stratified: bool) -> npt.NDArray[np.float64]:
    """Probability of each step to come at least once in an epoch of n draws, f64[n].

    With x = n p the expected number: min(1, x) when stratified, 1 - (1 - p)**n when independent.
    """
    expected = masses.astype(np.float64) / UNIT
    if stratified:
        return np.minimum(1.0, expected)
    size = len(masses)
    with np.errstate(divide="ignore"):  # a single step has p = 1: log 0 = -inf gives certainty
        cover: npt.NDArray[np.float64] = -np.expm1(size * np.log1p(-expected / size))
    return cover
