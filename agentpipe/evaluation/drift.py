"""Policy drift: how far a candidate's choices moved away from the champion's on the same situations (S24).

The figure is the mean over reference observations of KL(candidate || champion) in nats, both smoothed alike (see
:mod:`~agentpipe.evaluation.drift_rows`), with a bootstrap interval over environments (see
:mod:`~agentpipe.evaluation.drift_bootstrap`). The smoothing depends on nothing but the reference's masks, so it is the
same for every pair of policies, and no empty bin makes the figure infinite.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from agentpipe.environments.layout import SEGMENTS
from agentpipe.errors import EvaluationError
from agentpipe.evaluation.drift_bootstrap import DRAWS, bootstrap_mean
from agentpipe.evaluation.drift_rows import check_probabilities, smoothed_kl
from agentpipe.evaluation.statistics import group_by, rounded
from agentpipe.evaluation.tables import markdown_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from agentpipe.evaluation.reference import ReferenceObservations

    Floats = npt.NDArray[np.float64]

_FEW = 64  # labels
OK, REVIEW, NO_CHAMPION, INSUFFICIENT_DATA = "OK", "REVIEW", "NO_CHAMPION", "INSUFFICIENT_DATA"


class _Output(Protocol):
    @property
    def probabilities(self) -> npt.NDArray[np.float32]: ...


class Policy(Protocol):
    """What :class:`~agentpipe.learning.policy.package.PolicyPackage` offers."""

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
        head = (
            f"**{self.status}**: KL(candidate ‖ champion) = {self.kl:.4f} nats ({nats_interval(self.ci95)}), "
            f"review above {self.limit}.\n\n"
        )
        groups = [*self.by_segment.items(), *self.by_cell.items()]
        rows = [
            [
                name,
                item["status"],
                "–" if item["kl"] is None else f"{item['kl']:.4f}",
                nats_interval(item.get("ci95", [None, None])),
                f"{item['rows']:,}",
            ]
            for name, item in groups
        ]
        return head + markdown_table(["where", "status", "KL (nats)", "95 % interval", "rows"], rows)


def nats_interval(ci95: Sequence[float | None]) -> str:
    """An interval in nats; a dash where there is none."""
    low, high = ci95
    return "–" if low is None or high is None else f"{low:.4f} – {high:.4f}"


def _distribution(policy: Policy, reference: ReferenceObservations, who: str) -> npt.NDArray[Any]:
    """Probabilities [n, A], checked against the mask."""
    situations = (reference.observation, reference.last_action, reference.time, reference.mask)
    if getattr(policy, "memory_size", 0):
        remembering: Any = policy
        memory = reference.memories.get(remembering.digest)
        if memory is None:
            remedy = "collect the reference with this policy watching"
            raise EvaluationError(f"the reference holds nothing of what the {who} remembers", remedy=remedy)
        output = remembering.act(*situations, memory=memory)
    else:
        output = policy.act(*situations)
    probabilities = np.asarray(output.probabilities)
    check_probabilities(probabilities, reference.mask, who)
    return probabilities


@dataclass(frozen=True)
class _Rows:
    """What every group is judged by: KL f64[n] and environment [n] of each row, and how."""

    kl: Floats
    environment: npt.NDArray[np.int64]
    limit: float
    seed: int
    draws: int

    def figures(self, key: str, part: npt.NDArray[np.int64], minimum: int) -> dict[str, Any]:
        """Status, mean, interval and size of the rows ``part``."""
        size = int(part.size)
        if size < minimum:
            return {"status": INSUFFICIENT_DATA, "kl": None, "ci95": [None, None], "rows": size}
        values = self.kl[part]
        mean = float(np.mean(values))
        interval = bootstrap_mean(values, self.environment[part], seed=self.seed, key=key, draws=self.draws)
        return {"status": REVIEW if mean > self.limit else OK, "kl": mean, "ci95": interval, "rows": size}


def policy_drift(  # noqa: PLR0913 - keyword-only, each a part of the judgement
    candidate: Policy,
    champion: Policy | None,
    reference: ReferenceObservations,
    *,
    limit: float = 0.15,
    minimum_rows: int = 1000,
    minimum_group_rows: int = 200,
    smoothing: float = 1e-6,
    seed: int = 0,
    draws: int = DRAWS,
) -> DriftResult:
    """Mean KL over ``reference``: overall, by cell and by segment, each with an interval clustered by environment.

    The status is that of the overall mean. A cell or segment above the limit says so in its own status only.

    Args:
        candidate: The new policy.
        champion: The one it is compared with, or ``None`` before there is one.
        reference: Fixed situations; see :func:`~agentpipe.evaluation.reference.collect_reference`.
        limit: Nats above which a person should look.
        minimum_rows: Fewer rows overall are ``INSUFFICIENT_DATA``, never "no drift".
        minimum_group_rows: The same for one cell or segment.
        smoothing: s of :mod:`~agentpipe.evaluation.drift_rows`.
        seed: Of the bootstrap.
        draws: Resamples of the bootstrap.

    Raises:
        EvaluationError: probabilities that are not finite, not allowed or do not sum to one; a policy with a memory did
            not watch the reference.
    """
    digest, rows = reference.digest, reference.rows
    if champion is None:
        return DriftResult(NO_CHAMPION, rows, digest, limit)
    if rows < minimum_rows:
        return DriftResult(INSUFFICIENT_DATA, rows, digest, limit)
    new = _distribution(candidate, reference, "candidate")
    values = smoothed_kl(new, _distribution(champion, reference, "champion"), reference.mask, smoothing)
    judged = _Rows(values, reference.environment, limit, seed, draws)
    overall = judged.figures("overall", np.arange(rows), 1)
    return DriftResult(
        overall["status"],
        rows,
        digest,
        limit,
        kl=overall["kl"],
        ci95=overall["ci95"],
        by_cell={
            cell: judged.figures(f"cell {cell}", part, minimum_group_rows)
            for cell, part in _parts(reference.cell).items()
        },
        by_segment={
            name: judged.figures(f"segment {name}", part, minimum_group_rows)
            for number, name in enumerate(SEGMENTS)
            if (part := np.flatnonzero(reference.segment == number)).size
        },
    )


def _parts(labels: npt.NDArray[np.str_]) -> dict[str, npt.NDArray[np.int64]]:
    """Row numbers of each label, labels sorted: one look at all rows for each label, quicker than sorting a few."""
    found: dict[str, npt.NDArray[np.int64]] = {}
    left = np.ones(labels.size, np.bool_)
    while left.any():
        if len(found) == _FEW:
            return group_by(labels)
        name = labels[int(left.argmax())]
        members = labels == name
        found[str(name)] = np.flatnonzero(members)
        left &= ~members
    return dict(sorted(found.items()))
