"""Can a classifier tell production from training? A two-sample test of all features together.

A gradient-boosted classifier (scikit-learn) learns on one half which sample a row is from; its accuracy on the other
half is 1/2 where both samples have one distribution, and (1 + TV) / 2 at most, TV being their total variation distance
(Lopez-Paz and Oquab, Revisiting Classifier Two-Sample Tests, ICLR 2017). Both halves hold as many rows of either.

Rows of one line resemble each other. Where lines are given, no line stands in both halves, so that recognising a line
is of no use, and the interval is clustered by line; otherwise rows are split and taken as independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from agentpipe.evaluation.statistics import DIGITS, success_interval

if TYPE_CHECKING:
    import numpy.typing as npt

    Rows = npt.NDArray[np.int64]

MOST_ROWS = 10_000
"""Most rows of either sample that take part, drawn by seed."""
LEAST_GROUPS = 10
LEAST_ROWS = 100
_ROUNDS, _LEAVES, _RATE = 60, 15, 0.15


@dataclass(frozen=True)
class JointDrift:
    """What the classifier achieved on rows that it had not learnt from."""

    status: str
    """``REVIEW`` where the lower end of the accuracy's interval is above the limit."""
    accuracy: float
    ci95: list[float]
    auc: float
    rows: int
    """Held-out rows, half of either sample."""
    split: str
    """``groups``: no line in both halves; ``rows``: rows split at random."""


class _Half(NamedTuple):
    rows: Rows
    """Row numbers in the sample."""
    groups: npt.NDArray[Any] | None


def joint_drift(
    reference: npt.NDArray[np.float32],
    production: npt.NDArray[np.float32],
    *,
    reference_groups: npt.NDArray[Any] | None = None,
    production_groups: npt.NDArray[Any] | None = None,
    seed: int,
    limit: float,
) -> JointDrift:
    """The test on f32[n, F] and f32[m, F], n and m at least 200, with labels [n] and [m] of lines where known.

    With fewer than ten lines on a side, or too few rows in the half of its lines, rows are split instead.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped] # comes with scikit-learn

    generator = np.random.default_rng(seed)
    size = min(MOST_ROWS, len(reference), len(production))
    chosen = [np.sort(generator.choice(len(sample), size, replace=False)) for sample in (reference, production)]
    labels = [reference_groups, production_groups]
    halves = _by_group(chosen, labels, generator)
    split = "groups" if halves else "rows"
    train, test = halves or _by_row(chosen, generator)

    def table(half: list[_Half]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        parts = [reference[half[0].rows], production[half[1].rows]]
        return np.concatenate(parts), np.repeat([0, 1], [len(part) for part in parts])

    model = HistGradientBoostingClassifier(
        max_iter=_ROUNDS, max_leaf_nodes=_LEAVES, learning_rate=_RATE, early_stopping=False, random_state=seed % 2**32
    )
    held_out, truth = table(test)
    # One thread: on a busy machine scikit-learn's threads wait for each other longer than they work.
    with threadpool_limits(1):
        model.fit(*table(train))
        probability = model.predict_proba(held_out)[:, 1]
    right = (probability > 0.5) == truth
    estimate = success_interval(right, _clusters(test) if split == "groups" else None)
    return JointDrift(
        status="REVIEW" if estimate.low > limit else "OK",
        accuracy=round(estimate.value, DIGITS),
        ci95=estimate.ci95(),
        auc=round(float(roc_auc_score(truth, probability)), DIGITS),
        rows=len(truth),
        split=split,
    )


def _clusters(half: list[_Half]) -> npt.NDArray[np.str_]:
    """Labels of lines [k], those of the two samples kept apart."""
    parts = [[f"{side} {label}" for label in part.groups] for side, part in enumerate(half) if part.groups is not None]
    return np.array([label for part in parts for label in part])


def _by_row(chosen: list[Rows], generator: np.random.Generator) -> tuple[list[_Half], list[_Half]]:
    train, test = [], []
    for rows in chosen:
        order = generator.permutation(rows)
        half = rows.size // 2
        train.append(_Half(order[:half], None))
        test.append(_Half(order[half : 2 * half], None))
    return train, test


def _by_group(
    chosen: list[Rows], labels: list[npt.NDArray[Any] | None], generator: np.random.Generator
) -> tuple[list[_Half], list[_Half]] | None:
    """Halves with no group in common, or None where there are too few groups or rows for that."""
    sides: list[list[_Half]] = []
    for rows, all_labels in zip(chosen, labels, strict=True):
        if all_labels is None:
            return None
        own = all_labels[rows]
        names, index = np.unique(own, return_inverse=True)
        if names.size < LEAST_GROUPS:
            return None
        first = generator.permutation(names.size)[index] < names.size // 2
        sides.append([_Half(rows[part], own[part]) for part in (first, ~first)])
    halves: list[list[_Half]] = []
    for pair in zip(*sides, strict=True):
        size = min(part.rows.size for part in pair)
        if size < LEAST_ROWS:
            return None
        kept = [np.sort(generator.permutation(part.rows.size)[:size]) for part in pair]
        halves.append([_Half(part.rows[keep], part.groups[keep]) for part, keep in zip(pair, kept, strict=True)])
    return halves[0], halves[1]
