"""When a claim counts as reproduced: steps to a target, intervals over seeds, and the rule in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import f as fisher

from benchmarks.seeds import interval

if TYPE_CHECKING:
    from collections.abc import Sequence

REPRODUCED, PARTLY, NOT, UNMEASURED = "reproduced", "partly", "not", "not measured"
RULE = """**The rule.** Each seed gives one value, in which both arms share environments, weights to start from (where
the network is the same) and random numbers. Ratios are averaged as logarithms; intervals are 95 % t intervals over the
seeds. *Reproduced*: the interval excludes no effect, and it contains the field's figure or lies beyond it. *Partly*: it
excludes no effect in the right direction, but all of it falls short of the field's figure. *Not*: everything else, an
interval that is too wide to exclude no effect among it. Where the field gives no figure, to exclude no effect in the
right direction is to reproduce. Where no effect is not defined (a share that is to be reached), reaching is all."""

Kind = Literal["ratio", "difference", "level", "spread"]
"""spread: the ratio of two standard deviations over the seeds"""


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds with its 95 % t interval; the ends are NaN for fewer than two seeds."""

    mean: float
    low: float
    high: float
    values: tuple[float, ...]


def steps_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Steps at which success reaches ``target``, or ``None`` where it never does.

    Single looks are noisy and the curve is flat where it matters, so the looks are not taken one by one: the curve is
    the non-decreasing one that is nearest to all looks (least squares, isotonic regression), between them straight.

    Args:
        curve: steps and success of each look, in order.
        target: success.
    """
    steps = np.array([point[0] for point in curve], np.float64)
    fitted = isotonic_regression([point[1] for point in curve]).x
    above = np.flatnonzero(fitted >= target)
    if not above.size:
        return None
    first = int(above[0])
    if first == 0:
        return float(steps[0])
    share = (target - fitted[first - 1]) / (fitted[first] - fitted[first - 1])
    return float(steps[first - 1] + share * (steps[first] - steps[first - 1]))


def estimate(values: Sequence[float], kind: Kind) -> Estimate | None:
    """Mean and interval; of ratios by their logarithms. ``None`` of nothing, or of a ratio that is not positive."""
    if not values or (kind == "ratio" and min(values) <= 0):
        return None
    if kind == "ratio":
        mean, low, high = (math.exp(end) for end in interval([math.log(value) for value in values]))
    else:
        mean, low, high = interval(values)
    return Estimate(mean, low, high, tuple(values))


def spread(mine: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """Ratio of the standard deviations of two arms over their seeds, with its 95 % F interval.

    ``None`` for fewer than two seeds, or where the other arm does not vary.
    """
    if len(mine) < 2 or len(other) < 2 or np.std(other) <= 0:
        return None
    ratio = float(np.var(mine, ddof=1) / np.var(other, ddof=1))
    freedom = len(mine) - 1, len(other) - 1
    low, high = ratio / fisher.ppf(0.975, *freedom), ratio / fisher.ppf(0.025, *freedom)
    return Estimate(math.sqrt(ratio), math.sqrt(low), math.sqrt(high), ())


def verdict(found: Estimate | None, *, field: float | None, neutral: float | None, more_is_better: bool) -> str:
    """The word for what was found, by :data:`RULE`.

    Args:
        found: over the seeds.
        field: the field's figure.
        neutral: value of no effect; ``None`` where there is none.
        more_is_better: direction of the claim.
    """
    if found is None or math.isnan(found.low):
        return UNMEASURED
    worst, best = (found.low, found.high) if more_is_better else (-found.high, -found.low)
    sign = 1.0 if more_is_better else -1.0
    if neutral is not None and worst <= sign * neutral:
        return NOT
    if field is None or best >= sign * field:
        return REPRODUCED
    return PARTLY if neutral is not None else NOT
