"""Input drift: production's observations of a period against those that the policy was trained on (S24).

Every feature by itself (:mod:`~agentpipe.evaluation.drift_features`), all together by a classifier
(:mod:`~agentpipe.evaluation.drift_classifier`). Limits are on the size of a difference, not on its significance: with
many rows every difference is significant. All three mean about the same: a normal feature that moves by half its
standard deviation has PSI 0.25, a Kolmogorov-Smirnov distance of 0.20 and is told apart in 60 % of cases.

Too few rows on either side are ``INSUFFICIENT_DATA``, never "no drift".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.drift import INSUFFICIENT_DATA, OK, REVIEW
from agentpipe.evaluation.drift_classifier import LEAST_GROUPS, JointDrift, joint_drift
from agentpipe.evaluation.drift_features import KS_ROWS, FeatureDrift, compare_features, distances
from agentpipe.evaluation.drift_text import one_line, safe_table
from agentpipe.evaluation.statistics import rounded
from agentpipe.evaluation.tables import interval, percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

SHOWN = 12
"""Features in the table for people, the worst first."""


@dataclass(frozen=True)
class InputLimits:
    """Above which a person should look, and how many rows it takes to say anything."""

    psi: float = 0.25
    ks: float = 0.2
    accuracy: float = 0.6
    """Of the classifier: the lower end of its interval."""
    alpha: float = 0.05
    """Largest adjusted p-value at which a Kolmogorov-Smirnov distance counts."""
    minimum_rows: int = 1_000
    """On either side."""

    def __post_init__(self) -> None:
        if not (self.psi > 0 and 0 < self.ks < 1 and 0.5 <= self.accuracy < 1 and 0 < self.alpha < 1):
            raise EvaluationError(f"impossible limits of input drift: {self}")
        if self.minimum_rows < 200:
            raise EvaluationError("input drift needs at least 200 rows on either side", minimum_rows=self.minimum_rows)


@dataclass(frozen=True)
class InputDriftResult:
    """One comparison. ``features`` is empty and ``joint`` is ``None`` where there were too few rows."""

    status: str
    reference_rows: int
    production_rows: int
    limits: InputLimits
    features: list[FeatureDrift] = field(default_factory=list)
    """In the order of the names given."""
    joint: JointDrift | None = None

    @property
    def moved(self) -> list[FeatureDrift]:
        """Features to review, the worst first."""
        return [item for item in self.worst(len(self.features)) if item.status == REVIEW]

    def worst(self, count: int = SHOWN) -> list[FeatureDrift]:
        """The ``count`` features that moved most: those to review first, then by PSI."""
        return sorted(self.features, key=lambda item: (item.status != REVIEW, -item.psi, item.name))[:count]

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        result: dict[str, Any] = rounded(asdict(self))
        return result

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`.

        Raises:
            EvaluationError: fields are missing or unknown.
        """
        try:
            joint = content["joint"]
            return cls(
                **{
                    **content,
                    "limits": InputLimits(**content["limits"]),
                    "features": [FeatureDrift(**item) for item in content["features"]],
                    "joint": None if joint is None else JointDrift(**joint),
                }
            )
        except (TypeError, KeyError) as error:
            raise EvaluationError(f"not a result of input drift: {error}") from error

    def reason(self) -> str:
        """The status in one sentence."""
        if self.joint is None:
            return (
                f"{self.production_rows:,} production and {self.reference_rows:,} training observations, "
                f"{self.limits.minimum_rows:,} of each are needed"
            )
        told = f"a classifier tells the two samples apart in {percent(self.joint.accuracy)} of cases"
        if self.joint.accuracy is None:
            told = "too few lines for the test of all features together"
        return f"{len(self.moved)} of {len(self.features)} features moved beyond a limit; {told}"

    def joint_text(self) -> str:
        """What the classifier achieved, in one sentence; empty where it was not asked."""
        if self.joint is None:
            return ""
        if self.joint.accuracy is None:
            return (
                f"Classifier: {INSUFFICIENT_DATA}, fewer than {LEAST_GROUPS} lines on one side, or too few rows in "
                "half of them; it would learn to recognise lines."
            )
        split = "no line in both halves" if self.joint.split == "groups" else "split at random"
        accuracy = f"{percent(self.joint.accuracy)} ({interval(self.joint.ci95)})"
        return (
            f"Classifier: accuracy {accuracy}, AUC {self.joint.auc:.3f}, on {self.joint.rows:,} held-out rows, "
            f"{split}; review where the interval begins above {percent(self.limits.accuracy)}."
        )

    def markdown(self) -> str:
        """The joint test and the features that moved most, for people."""
        head = f"**{self.status}**: {self.reason()}."
        if self.joint is None:
            return head
        return f"{head}\n\n{self.joint_text()}\n\n{safe_table(FEATURE_HEADER, feature_rows(self))}"


FEATURE_HEADER = ["feature", "status", "PSI", "KS", "adjusted p", "outside", "mean, training", "mean, production"]


def feature_rows(result: InputDriftResult, count: int = SHOWN) -> list[list[str]]:
    """The worst features as a table's cells, in the order of :data:`FEATURE_HEADER`; not escaped."""
    return [
        [
            one_line(item.name),
            item.status,
            f"{item.psi:.3f}",
            f"{item.ks:.3f}",
            "< 1e-06" if item.p_value < 1e-6 else f"{item.p_value:.2g}",
            percent(item.outside),
            f"{item.reference_mean:.4g}",
            f"{item.production_mean:.4g}",
        ]
        for item in result.worst(count)
    ]


def input_drift(
    reference: npt.ArrayLike,
    production: npt.ArrayLike,
    names: Sequence[str],
    *,
    seed: int,
    reference_groups: npt.ArrayLike | None = None,
    production_groups: npt.ArrayLike | None = None,
    limits: InputLimits | None = None,
) -> InputDriftResult:
    """Compares production's observations with training's.

    The cost is bounded: PSI uses every row, Kolmogorov-Smirnov 20,000 and the classifier 10,000 of each side, drawn
    by ``seed``.

    Args:
        reference: f32[n, F] observations that the policy was trained on, raw; see
            :func:`~agentpipe.evaluation.drift_sample.recorded_observations`.
        production: f32[m, F] observations of the period, raw.
        names: F names of the features.
        seed: Of the draws and of the classifier.
        reference_groups: Labels [n] of lines; rows of one are not independent. All environments of one line have its
            label: they share its topology, and a classifier that knows the line would know the sample.
        production_groups: The same [m]; equal labels are the same line.
        limits: Above which a person should look.

    Raises:
        EvaluationError: a number that is not finite, or shapes and names that do not fit.
    """
    limits = limits or InputLimits()
    first, second = _checked("reference", reference, len(names)), _checked("production", production, len(names))
    groups = [_labels(reference_groups, len(first)), _labels(production_groups, len(second))]
    if min(len(first), len(second)) < limits.minimum_rows:
        return InputDriftResult(INSUFFICIENT_DATA, len(first), len(second), limits)
    ks = distances(thinned(first, KS_ROWS, seed), thinned(second, KS_ROWS, seed + 1))
    features = compare_features(first, second, names, ks, psi_limit=limits.psi, ks_limit=limits.ks, alpha=limits.alpha)
    joint = joint_drift(
        first, second, reference_groups=groups[0], production_groups=groups[1], seed=seed, limit=limits.accuracy
    )
    found = {joint.status, *(item.status for item in features)}
    status = next(one for one in (REVIEW, INSUFFICIENT_DATA, OK) if one in found)
    return InputDriftResult(status, len(first), len(second), limits, features, joint)


def thinned(sample: npt.NDArray[np.float32], most: int, seed: int) -> npt.NDArray[np.float32]:
    """At most ``most`` rows of f32[n, F], drawn by ``seed`` without repetition, in their order."""
    if len(sample) <= most:
        return sample
    chosen: npt.NDArray[np.float32] = sample[
        np.sort(np.random.default_rng(seed).choice(len(sample), most, replace=False))
    ]
    return chosen


def _checked(name: str, sample: npt.ArrayLike, features: int) -> npt.NDArray[np.float32]:
    array = np.asarray(sample, dtype=np.float32)
    if array.ndim != 2 or array.shape[1] != features or not features:
        raise EvaluationError(f"the {name} has shape {array.shape}", expected=f"(rows, {features}), at least one name")
    bad = ~np.isfinite(array)
    if bad.any():
        row, column = (int(index[0]) for index in np.nonzero(bad))
        remedy = "take only decisions that the intake accepted"
        raise EvaluationError(f"the {name} is not finite", row=row, feature=column, remedy=remedy)
    return array


def _labels(groups: npt.ArrayLike | None, rows: int) -> npt.NDArray[Any] | None:
    if groups is None:
        return None
    labels = np.asarray(groups)
    if labels.shape != (rows,):
        raise EvaluationError(f"groups have shape {labels.shape}, expected {(rows,)}")
    return labels
