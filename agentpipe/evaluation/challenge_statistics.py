"""The statistics of a comparison on the same episodes: a bound on a paired difference, a test, Holm's correction.

Environment g of G gives one number, D_g = mean over its episodes of (candidate succeeded) - (champion succeeded), in
[-1, 1]. What is judged is the mean over these G environments as they are: chance is which episodes are drawn, and draws
of different environments are independent by construction. Environments also differ in their own expected D_g, so the
spread of the D_g holds more than chance and a bound from it errs on the wide side, however alike the environments of
one template are. (How sure the figure is for lines drawn anew is another question, with templates as the unit; a
comparison shows that interval beside the verdict.)

**Bound.** The usual one-sided bound is D - t s / sqrt(G), with the mean D, the deviation s of the D_g and the quantile
t of Student's t at 1 - alpha with G - 1 degrees of freedom. Two good policies differ in few episodes, and there it
fails: where none of 30 environments happens to differ, s = 0 and the bound claims D >= 0, though a candidate that loses
one environment in thirty shows such a sample a third of the time. The half-width h here solves

    (G h)**2 = t**2 G / (G - 1) * sum (D_g - D)**2 + r G h,        r = -ln(alpha),

that is, to the variance seen is added that of the loss which the hypothesis "the mean is D - h" adds to what was seen,
as in score tests (Tango 1998, Statistics in Medicine 17(8), for paired shares). Many differences: the second term
vanishes and h is Student's. No difference at all: h = r / G, the rule of three (Hanley and Lippman-Hand 1983, JAMA
249(13)), 3.0 / G for alpha = 0.05. Losses only: within 1 % of the exact Poisson bound. It is never narrower than
Student's.

**Test of a cell.** H0: the candidate lacks at most the margin m there. Student's t of (D + m) / (s / sqrt(G)), lower
tail. Its variance is that seen: a veto needs evidence, so the test may be weak but not rash.

**Holm** (1979, Scandinavian Journal of Statistics 6(2)): sorted p_(1) <= ... <= p_(k), adjusted
p~_(i) = max over j <= i of min(1, (k - j + 1) p_(j)). All those below alpha are rejected, with a chance of at most
alpha that any of them is true, whatever the dependence between cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentpipe.errors import EvaluationError

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

LARGEST_ALPHA = 0.5


@dataclass(frozen=True)
class Limits:
    """What a candidate may lack.

    Raises:
        EvaluationError: a margin outside [0, 1], or alpha outside (0, 0.5].
    """

    margin: float = 0.01
    """success that it may lack at most, overall"""
    cell_margin: float = 0.05
    """success that it may lack at most in one cell"""
    alpha: float = 0.05
    """error rate of the overall test, and of all cell tests together"""

    def __post_init__(self) -> None:
        for name, value in (("margin", self.margin), ("cell_margin", self.cell_margin)):
            if not 0 <= value <= 1:
                raise EvaluationError(f"{name} must be in [0, 1], got {value}", field=name)
        _check_alpha(self.alpha)


@dataclass(frozen=True)
class PairedBound:
    """A mean paired difference with its two one-sided bounds, each at 1 - alpha."""

    difference: float
    low: float
    high: float
    environments: int


def paired_bound(differences: npt.ArrayLike, alpha: float) -> PairedBound:
    """Mean of f64[G] differences with one-sided bounds; see the module. With one environment they are infinite.

    Raises:
        EvaluationError: empty, not finite, outside [-1, 1], or alpha not in (0, 0.5].
    """
    values = _checked(differences)
    _check_alpha(alpha)
    size, mean = values.size, float(np.mean(values))
    if size < 2:
        return PairedBound(mean, -math.inf, math.inf, size)
    from scipy.special import stdtrit

    quantile = float(stdtrit(size - 1, 1 - alpha))
    spread = quantile**2 * size / (size - 1) * float(np.sum((values - mean) ** 2))
    extra = -math.log(alpha)
    half = (extra + math.sqrt(extra**2 + 4 * spread)) / (2 * size)
    return PairedBound(mean, mean - half, mean + half, size)


def environments_needed(margin: float, alpha: float) -> int:
    """Least environments with which even a candidate that never differs is shown to lack less than ``margin``.

    300 for a margin of 0.01 at alpha = 0.05. Without a margin the candidate must be shown to be better, for which no
    number is enough beforehand; two are needed to know a spread.

    Raises:
        EvaluationError: a negative margin, or alpha not in (0, 0.5].
    """
    _check_alpha(alpha)
    if not (math.isfinite(margin) and margin >= 0):
        raise EvaluationError(f"a margin cannot be {margin}", field="margin")
    return 2 if margin == 0 else max(2, math.floor(-math.log(alpha) / margin) + 1)


def worse_p_value(differences: npt.ArrayLike, margin: float) -> float:
    """P value of "the mean of f64[G] differences is at least -margin": small where the candidate is worse than that.

    1 with one environment. Where all environments differ alike, 0 below -margin and 1 otherwise.

    Raises:
        EvaluationError: empty, not finite, or outside [-1, 1].
    """
    values = _checked(differences)
    if values.size < 2:
        return 1.0
    from scipy.special import stdtr

    shift = float(np.mean(values)) + margin
    error = float(np.std(values, ddof=1)) / math.sqrt(values.size)
    if error == 0:
        return float(shift >= 0)
    return float(stdtr(values.size - 1, shift / error))


def holm(p_values: npt.ArrayLike) -> Floats:
    """Holm's adjusted p values f64[k], in the order given; see the module.

    Raises:
        EvaluationError: one is not in [0, 1].
    """
    values = np.asarray(p_values, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise EvaluationError("p values must be a vector in [0, 1]", shape=values.shape)
    order = np.argsort(values, kind="stable")
    factors = np.arange(values.size, 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, factors * values[order]))
    return adjusted


def _checked(differences: npt.ArrayLike) -> Floats:
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise EvaluationError("differences must be a vector with at least one value", shape=values.shape)
    if not (np.abs(values) <= 1).all():
        row = int(np.argmin(np.abs(values) <= 1))
        raise EvaluationError("a difference of success shares is outside [-1, 1]", row=row)
    return values


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha <= LARGEST_ALPHA:
        raise EvaluationError(f"alpha must be in (0, {LARGEST_ALPHA}], got {alpha}", field="alpha")
