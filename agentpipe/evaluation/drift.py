"""Policy drift: how far a candidate's choices moved away from the champion's on the same situations (S24, simple form).

For each reference row i with m legal actions, both distributions are mixed with the uniform one over the legal actions,

    p'_i = (1 - s) p_i + s / m,      q'_i = (1 - s) q_i + s / m,      s fixed beforehand,

and the figure is the mean over rows of KL(p'_i || q'_i) = sum_a p'_i(a) ln(p'_i(a) / q'_i(a)) in nats, p being the
candidate's and q the champion's. The smoothing depends on nothing but the reference's masks, so it is the same for
every pair of policies, and no empty bin makes the figure infinite. All sums are float64.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from agentpipe.environments.layout import SEGMENTS
from agentpipe.errors import EvaluationError
from agentpipe.evaluation.statistics import group_by, mean_interval, rounded
from agentpipe.evaluation.tables import markdown_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from agentpipe.evaluation.reference import ReferenceObservations

    Floats = npt.NDArray[np.float64]

OK, REVIEW, NO_CHAMPION, INSUFFICIENT_DATA = "OK", "REVIEW", "NO_CHAMPION", "INSUFFICIENT_DATA"


class _Output(Protocol):
    @property
    def probabilities(self) -> npt.NDArray[np.float32]: ...


class Policy(Protocol):
    """What :class:`~agentpipe.learning.package.PolicyPackage` offers."""

    def act(
        self,
        observation: npt.NDArray[np.float32],
        last_action: npt.NDArray[np.int64],
        time: npt.NDArray[np.float32],
        mask: npt.NDArray[np.bool_],
    ) -> _Output:
        """Action probabilities f32[n, A], zero where not allowed."""
        ...


@dataclass(frozen=True)
class DriftResult:
    """One comparison. ``kl`` is ``None`` unless the status is ``OK`` or ``REVIEW``."""

    status: str
    rows: int
    reference_digest: str
    limit: float
    kl: float | None = None
    ci95: list[float | None] = field(default_factory=lambda: [None, None])
    by_cell: dict[str, dict[str, Any]] = field(default_factory=dict)
    by_segment: dict[str, dict[str, Any]] = field(default_factory=dict)

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
            return cls(**content)
        except TypeError as error:
            raise EvaluationError(f"not a drift result: {error}") from error

    def markdown(self) -> str:
        """Overall and by segment and cell, for people."""
        if self.status == NO_CHAMPION:
            return f"**{NO_CHAMPION}**: there is nothing to compare with yet."
        if self.status == INSUFFICIENT_DATA:
            return f"**{INSUFFICIENT_DATA}**: {self.rows:,} reference rows are too few to say anything."
        head = f"**{self.status}**: KL(candidate ‖ champion) = {self.kl:.4f} nats, review above {self.limit}.\n\n"
        groups = [*self.by_segment.items(), *self.by_cell.items()]
        rows = [
            [name, item["status"], "–" if item["kl"] is None else f"{item['kl']:.4f}", f"{item['rows']:,}"]
            for name, item in groups
        ]
        return head + markdown_table(["where", "status", "KL (nats)", "rows"], rows)


def _distribution(policy: Policy, reference: ReferenceObservations, who: str) -> Floats:
    """Probabilities f64[n, A], checked against the mask."""
    output = policy.act(reference.observation, reference.last_action, reference.time, reference.mask)
    probabilities = np.asarray(output.probabilities, dtype=np.float64)
    if probabilities.shape != reference.mask.shape:
        raise EvaluationError(
            f"the {who} gives probabilities of shape {probabilities.shape}", expected=reference.mask.shape
        )
    bad = ~np.isfinite(probabilities) | (probabilities < 0) | ((probabilities > 0) & ~reference.mask)
    if bad.any():
        row, action = (int(index[0]) for index in np.nonzero(bad))
        raise EvaluationError(f"the {who}'s probability is negative, not finite or not allowed", row=row, action=action)
    off = np.abs(probabilities.sum(axis=1) - 1) > 1e-3
    if off.any():
        raise EvaluationError(f"the {who}'s probabilities do not sum to one", row=int(np.flatnonzero(off)[0]))
    return probabilities


def smoothed_kl(
    candidate: npt.ArrayLike, champion: npt.ArrayLike, mask: npt.NDArray[np.bool_], smoothing: float = 1e-6
) -> Floats:
    """KL(candidate || champion) of each row: f64[n] from [n, A] probabilities and a mask bool[n, A]; see the module.

    Raises:
        EvaluationError: ``smoothing`` is not in (0, 1), or a row allows no action.
    """
    if not 0 < smoothing < 1:
        raise EvaluationError(f"smoothing must be in (0, 1), got {smoothing}")
    legal = mask.sum(axis=1, keepdims=True)
    if not legal.all():
        raise EvaluationError("no action is allowed", row=int(np.flatnonzero(legal == 0)[0]))
    floor = smoothing / legal
    p = np.where(mask, (1 - smoothing) * np.asarray(candidate, dtype=np.float64) + floor, 1.0)
    q = np.where(mask, (1 - smoothing) * np.asarray(champion, dtype=np.float64) + floor, 1.0)
    result: Floats = np.sum(p * np.log(p / q), axis=1)
    return np.maximum(result, 0.0)


def _groups(labels: npt.NDArray[Any], rows_kl: Floats, minimum: int, limit: float) -> dict[str, dict[str, Any]]:
    result = {}
    for name, part in group_by(labels).items():
        enough = part.size >= minimum
        mean = float(np.mean(rows_kl[part])) if enough else None
        status = INSUFFICIENT_DATA if mean is None else REVIEW if mean > limit else OK
        result[name] = {"status": status, "kl": mean, "rows": int(part.size)}
    return result


def policy_drift(
    candidate: Policy,
    champion: Policy | None,
    reference: ReferenceObservations,
    *,
    limit: float = 0.15,
    minimum_rows: int = 1000,
    minimum_group_rows: int = 200,
    smoothing: float = 1e-6,
) -> DriftResult:
    """Mean KL over ``reference``, overall (interval clustered by environment), by cell and by segment.

    Args:
        candidate: The new policy.
        champion: The one it is compared with, or ``None`` before there is one.
        reference: Fixed situations; see :func:`~agentpipe.evaluation.reference.collect_reference`.
        limit: Nats above which a person should look.
        minimum_rows: Fewer rows overall are ``INSUFFICIENT_DATA``, never "no drift".
        minimum_group_rows: The same for one cell or segment.
        smoothing: s of the module's formula.

    Raises:
        EvaluationError: probabilities that are not finite, not allowed or do not sum to one.
    """
    digest, rows = reference.digest, reference.rows
    if champion is None:
        return DriftResult(NO_CHAMPION, rows, digest, limit)
    if rows < minimum_rows:
        return DriftResult(INSUFFICIENT_DATA, rows, digest, limit)
    new = _distribution(candidate, reference, "candidate")
    values = smoothed_kl(new, _distribution(champion, reference, "champion"), reference.mask, smoothing)
    overall = mean_interval(values, reference.environment)
    segments = np.array(SEGMENTS)[reference.segment]
    return DriftResult(
        REVIEW if overall.value > limit else OK,
        rows,
        digest,
        limit,
        kl=overall.value,
        ci95=[value if np.isfinite(value) else None for value in (max(0.0, overall.low), overall.high)],
        by_cell=_groups(reference.cell, values, minimum_group_rows, limit),
        by_segment=_groups(segments, values, minimum_group_rows, limit),
    )
