"""Can a classifier tell production from training? A two-sample test of all features together.

A gradient-boosted classifier (scikit-learn) learns on one half which sample a row is from; its accuracy on the other
half is 1/2 where both samples have one distribution, and (1 + TV) / 2 at most, TV being their total variation distance
(Lopez-Paz and Oquab, Revisiting Classifier Two-Sample Tests, ICLR 2017). Both halves hold as many rows of either.

Rows of one line resemble each other. Where lines are given, no line stands in both halves, whichever sample its rows
are from, so that recognising a line is of no use, and the interval is clustered by line. With too few lines for that,
only samples of the very same lines are compared, row by row; otherwise a classifier would tell lines apart and call it
drift, and the answer is INSUFFICIENT_DATA.
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
    """What the classifier achieved on rows that it had not learnt from; figures rounded to six digits."""

    status: str
    """``REVIEW`` where the lower end of the accuracy's interval is above the limit, ``INSUFFICIENT_DATA`` where there
    are too few lines; the figures are ``None`` then."""
    accuracy: float | None
    ci95: list[float | None]
    auc: float | None
    rows: int
    """Held-out rows, half of either sample."""
    split: str
    """``groups``: no line in both halves; ``rows``: rows split at random."""


class _Half(NamedTuple):
    """Rows to learn from, or held out: as many of either sample."""

    reference: Rows
    production: Rows


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

    Equal labels mean the same line. ``limit`` is the accuracy above which a person should look.
    """
    generator = np.random.default_rng(seed)
    size = min(MOST_ROWS, len(reference), len(production))
    first, second = (np.sort(generator.choice(len(part), size, replace=False)) for part in (reference, production))
    labels = None
    halves: tuple[_Half, _Half] | None = None
    if reference_groups is not None and production_groups is not None:
        labels = _Labels(reference_groups.astype(np.str_), production_groups.astype(np.str_))
        halves = _by_line(first, second, labels, generator)
        if halves is None and set(labels.reference[first]) != set(labels.production[second]):
            return JointDrift("INSUFFICIENT_DATA", None, [None, None], None, 0, "groups")
    split = "rows" if halves is None else "groups"
    train, test = halves or _by_row(first, second, generator)
    right, auc = _learn((reference, production), train, test, seed)
    clusters = None
    if labels is not None and split == "groups":
        clusters = np.concatenate([labels.reference[test.reference], labels.production[test.production]])
    estimate = success_interval(right, clusters)
    return JointDrift(
        status="REVIEW" if estimate.low > limit else "OK",
        accuracy=round(estimate.value, DIGITS),
        ci95=[*estimate.ci95()],
        auc=round(auc, DIGITS),
        rows=right.size,
        split=split,
    )


class _Labels(NamedTuple):
    reference: npt.NDArray[np.str_]
    production: npt.NDArray[np.str_]


def _learn(
    samples: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]], train: _Half, test: _Half, seed: int
) -> tuple[npt.NDArray[np.bool_], float]:
    """Which held-out rows were told right, reference first, and the area under the ROC curve."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped] # comes with scikit-learn

    def table(half: _Half) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        parts = [sample[rows] for sample, rows in zip(samples, half, strict=True)]
        return np.concatenate(parts), np.repeat([0, 1], [len(part) for part in parts])

    model = HistGradientBoostingClassifier(
        max_iter=_ROUNDS, max_leaf_nodes=_LEAVES, learning_rate=_RATE, early_stopping=False, random_state=seed % 2**32
    )
    held_out, truth = table(test)
    # One thread: on a busy machine scikit-learn's threads wait for each other longer than they work.
    with threadpool_limits(1):
        model.fit(*table(train))
        probability = model.predict_proba(held_out)[:, 1]
    return (probability > 0.5) == truth, float(roc_auc_score(truth, probability))


def _by_row(first: Rows, second: Rows, generator: np.random.Generator) -> tuple[_Half, _Half]:
    half = first.size // 2
    one, two = generator.permutation(first), generator.permutation(second)
    return _Half(one[:half], two[:half]), _Half(one[half : 2 * half], two[half : 2 * half])


def _by_line(first: Rows, second: Rows, labels: _Labels, generator: np.random.Generator) -> tuple[_Half, _Half] | None:
    """Halves with no line in common, or ``None`` where there are too few lines or rows for that."""
    one, two = labels.reference[first], labels.production[second]
    own, others = set(one.tolist()), set(two.tolist())
    if min(len(own), len(others)) < LEAST_GROUPS:
        return None
    learnt: set[str] = set()
    for kind in (own - others, others - own, own & others):  # half of each
        names = sorted(kind)
        learnt.update(names[place] for place in generator.permutation(len(names))[: len(names) // 2])
    halves = []
    for wanted in (True, False):
        rows = [
            generator.permutation(sample[[(name in learnt) == wanted for name in names.tolist()]])
            for sample, names in ((first, one), (second, two))
        ]
        size = min(part.size for part in rows)
        if size < LEAST_ROWS:
            return None
        halves.append(_Half(np.sort(rows[0][:size]), np.sort(rows[1][:size])))
    return halves[0], halves[1]
