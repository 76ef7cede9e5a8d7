"""Slow and obvious counterparts of what the samplers do."""

from __future__ import annotations

from fractions import Fraction

from agentpipe.experience.sampling.masses import UNIT


def table_masses(table):
    """What each step gets from all columns together, in whole numbers."""
    masses = [0] * len(table)
    for column, packed in enumerate(int(word) for word in table):
        other, share = packed >> 32, packed & (UNIT - 1)
        masses[column] += share
        masses[other] += UNIT - share
    return masses


def exact_causal(influence, floor):
    """Probabilities by the definition, as fractions."""
    given, floor = [Fraction(float(value)) for value in influence], Fraction(floor)
    size, total = len(given), sum(given)
    if not total:
        return [Fraction(1, size)] * size
    return [(1 - floor) * value / total + floor / size for value in given]


def step_at(priorities, point):
    """The step that covers ``point`` of the cumulated priorities."""
    cumulated = 0.0
    for step, priority in enumerate(priorities):
        cumulated += priority
        if point < cumulated:
            return step
    raise AssertionError("behind the end")
