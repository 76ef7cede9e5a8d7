"""What production did in a week, and what people said of it: figures with intervals, against the week before (S24).

*First-time-right rate*: of the decisions labelled in the week, the share whose newest label says ``correct``. Every
labelled decision counts once and equally; confidence does not weigh.

*Human interventions*: decisions of the week that a person took over or corrected, that is, whose ``result`` holds a
word like *takeover*, *taken over*, *override* or *overridden*, or whose newest label names a corrected action. Nobody
looks at unlabelled decisions, so corrections are a lower bound.

*A later label supersedes* an earlier one of the same decision. Labels belong to the UTC day of their own time,
decisions to theirs. Shares have Wilson intervals, which take decisions as independent; the difference between two weeks
has Newcombe's (Statistics in Medicine 17, 1998, method 10).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.drift import INSUFFICIENT_DATA, OK, REVIEW
from agentpipe.evaluation.statistics import DIGITS, rounded, wilson
from agentpipe.evaluation.tables import interval, percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    import pyarrow as pa

    Days = npt.NDArray[np.datetime64]

VERDICTS: Final = ("correct", "needs_improvement", "wrong")
NO_TYPE: Final = "none"
"""Error type of a label that names none."""
INTERVENTION: Final = r"(?i)(^|[^a-z])(take[-_ ]?over|taken[-_ ]?over|took[-_ ]?over|overrid(e|den)|overrode)([^a-z]|$)"
"""What the ``result`` of a decision that a person took out of the policy's hands matches."""
MARGIN: Final = 0.01
"""Least change against the week before, in either share, that a person should look at, if its interval excludes 0."""


@dataclass(frozen=True)
class Share:
    """``count`` of ``of``, with a 95 % Wilson interval. ``value`` is ``None`` where ``of`` is too small."""

    count: int
    of: int
    value: float | None
    ci95: list[float | None]

    def text(self) -> str:
        """For people."""
        counted = f"{self.count:,} of {self.of:,}"
        return f"{INSUFFICIENT_DATA}, {counted}" if self.value is None else (
            f"{percent(self.value)} ({interval(self.ci95)}), {counted}"
        )  # fmt: skip


def share(count: int, of: int, minimum: int = 1) -> Share:
    """The share ``count`` / ``of``, without a value where ``of`` is below ``minimum``."""
    if of < max(1, minimum):
        return Share(count, of, None, [None, None])
    bounds = wilson(count, of)
    return Share(count, of, round(count / of, DIGITS), [round(bounds.low, DIGITS), round(bounds.high, DIGITS)])


@dataclass(frozen=True)
class ProductionDay:
    """One UTC day."""

    day: str
    decisions: int
    mix: dict[str, dict[str, int]]
    """Labels given on the day, by verdict and error type."""
    first_time_right: Share


@dataclass(frozen=True)
class ProductionWeek:
    """One week of production."""

    week: str
    """Its Monday."""
    status: str
    """``INSUFFICIENT_DATA`` where too few decisions were labelled."""
    decisions: int
    lines: int
    labels: int
    """Decisions labelled in the week."""
    mix: dict[str, dict[str, int]]
    """Their newest labels by verdict and error type."""
    first_time_right: Share
    interventions: Share
    taken_over: int
    """Decisions whose result says so."""
    corrected: int
    """Decisions whose newest label names a corrected action."""
    unlabelled: Share
    """Of the week's decisions, those without a label, whenever it was given."""
    quarantine: dict[str, int]
    """Rows that could not be taken, by reason."""
    days: list[ProductionDay]

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
            shares = {name: Share(**content[name]) for name in ("first_time_right", "interventions", "unlabelled")}
            days = [
                ProductionDay(**{**item, "first_time_right": Share(**item["first_time_right"])})
                for item in content["days"]
            ]
            return cls(**{**content, **shares, "days": days})
        except (TypeError, KeyError) as error:
            raise EvaluationError(f"not the figures of a week of production: {error}") from error


def production_week(
    week: date,
    decisions: pa.Table,
    labels: pa.Table,
    *,
    quarantine: Mapping[str, int] | None = None,
    minimum_labels: int = 50,
) -> ProductionWeek:
    """The figures of the week from ``week``, a Monday (UTC).

    Args:
        week: Its first day.
        decisions: Rows of the week: ``decision_id``, ``time``, ``line_id``, ``result``; each id once.
        labels: Labels of any time, those of the week among them: ``label_id``, ``decision_id``, ``time``, ``verdict``,
            ``error_type``, ``corrected_action``. Labels given before the week tell which are superseded, later ones
            only whether a decision is still without one.
        quarantine: Rows refused in the week, by reason.
        minimum_labels: Fewer labelled decisions give no first-time-right rate.

    Raises:
        EvaluationError: not a Monday, a decision outside the week, a verdict that does not exist.
    """
    if week.weekday() != 0:
        raise EvaluationError(f"a week starts on a Monday, {week} is not one")
    end = week + timedelta(days=7)
    made = _days(decisions)
    outside = np.flatnonzero((made < np.datetime64(week)) | (made >= np.datetime64(end)))
    if outside.size:
        message = f"a decision of {made[outside[0]]} is not in the week of {week}"
        raise EvaluationError(message, row=int(outside[0]), remedy="pass the days of this week only")
    known = newest_labels(labels.filter(_days(labels) < np.datetime64(end)))
    given = known.filter(_days(known) >= np.datetime64(week))
    of_day = _days(given)
    right = _texts(given, "verdict") == "correct"
    taken, corrected = _taken_over(decisions), _with_a_label(decisions, known, corrected=True)
    labelled = _with_a_label(decisions, labels)
    rate = share(int(right.sum()), given.num_rows, minimum_labels)
    days = [np.datetime64(week) + offset for offset in range(7)]
    return ProductionWeek(
        week=week.isoformat(),
        status=INSUFFICIENT_DATA if rate.value is None else OK,
        decisions=decisions.num_rows,
        lines=len(decisions.column("line_id").unique()),
        labels=given.num_rows,
        mix=_mix(given),
        first_time_right=rate,
        interventions=share(int((taken | corrected).sum()), decisions.num_rows),
        taken_over=int(taken.sum()),
        corrected=int(corrected.sum()),
        unlabelled=share(int((~labelled).sum()), decisions.num_rows),
        quarantine={str(reason): int(count) for reason, count in sorted((quarantine or {}).items())},
        days=[
            ProductionDay(
                str(day),
                int((made == day).sum()),
                _mix(given.filter(of_day == day)),
                share(int(right[of_day == day].sum()), int((of_day == day).sum())),
            )
            for day in days
        ],
    )


def newest_labels(labels: pa.Table) -> pa.Table:
    """The newest label of each decision: by time, at equal times the one whose id sorts last."""
    import pyarrow.compute as pc

    keys = [("decision_id", "ascending"), ("time", "ascending"), ("label_id", "ascending")]
    ordered = labels.take(pc.sort_indices(labels, sort_keys=keys))
    last = np.ones(ordered.num_rows, np.bool_)
    if ordered.num_rows > 1:
        ids = ordered.column("decision_id").combine_chunks()
        last[:-1] = pc.not_equal(ids[:-1], ids[1:]).to_numpy(zero_copy_only=False)
    return ordered.filter(last)


def _days(table: pa.Table) -> Days:
    """UTC days datetime64[D][n] of the column ``time``."""
    days: Days = table.column("time").to_numpy().astype("datetime64[D]")
    return days


def _texts(table: pa.Table, name: str) -> npt.NDArray[np.object_]:
    texts: npt.NDArray[np.object_] = table.column(name).to_numpy()
    return texts


def _mix(labels: pa.Table) -> dict[str, dict[str, int]]:
    """Counts by verdict and error type; every verdict is named, error types only where they occur."""
    counts: dict[str, dict[str, int]] = {verdict: {} for verdict in VERDICTS}
    for verdict, error in zip(_texts(labels, "verdict"), _texts(labels, "error_type"), strict=True):
        if verdict not in counts:
            raise EvaluationError(f"{verdict!r} is no verdict", remedy=f"known are {', '.join(VERDICTS)}")
        kind = error or NO_TYPE
        counts[verdict][kind] = counts[verdict].get(kind, 0) + 1
    return {verdict: dict(sorted(kinds.items())) for verdict, kinds in counts.items()}


def _taken_over(decisions: pa.Table) -> npt.NDArray[np.bool_]:
    """bool[n], True where the result says that a person intervened."""
    import pyarrow.compute as pc

    matches = pc.fill_null(pc.match_substring_regex(decisions.column("result"), INTERVENTION), fill_value=False)
    return np.asarray(matches.to_numpy(), dtype=np.bool_)


def _with_a_label(decisions: pa.Table, labels: pa.Table, *, corrected: bool = False) -> npt.NDArray[np.bool_]:
    """bool[n], True where one of ``labels`` (that names a corrected action) is on the decision."""
    import pyarrow.compute as pc

    chosen = labels.filter(pc.is_valid(labels.column("corrected_action"))) if corrected else labels
    found = pc.is_in(decisions.column("decision_id"), value_set=chosen.column("decision_id").combine_chunks())
    return np.asarray(found.to_numpy(), dtype=np.bool_)


@dataclass(frozen=True)
class WeekChange:
    """This week minus the week before. A figure is ``None`` where one of the weeks has too few rows for it."""

    status: str
    """``REVIEW`` where fewer were right or more taken over: by a point or more, and 0 lies outside the interval."""
    first_time_right: float | None
    first_time_right_ci95: list[float | None]
    interventions: float | None
    interventions_ci95: list[float | None]
    mix_distance: float | None
    """Total variation distance of the label mixes: the share of labels that would have to be others."""

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        result: dict[str, Any] = rounded(asdict(self))
        return result

    def reason(self) -> str:
        """In one sentence."""
        if self.first_time_right is None:
            return "one of the two weeks has too few labels to compare"
        low, high = self.first_time_right_ci95
        assert low is not None
        assert high is not None
        moved = f"first-time-right {100 * self.first_time_right:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
        more = "" if self.interventions is None else f", interventions {100 * self.interventions:+.1f} points"
        return f"against the week before: {moved}{more}"


def difference(now: Share, before: Share) -> tuple[float | None, list[float | None]]:
    """``now`` - ``before`` with Newcombe's 95 % interval (1998, method 10) from the two Wilson intervals."""
    if now.value is None or before.value is None:
        return None, [None, None]
    p, q = now.count / now.of, before.count / before.of
    first, second = wilson(now.count, now.of), wilson(before.count, before.of)
    low = p - q - math.hypot(p - first.low, second.high - q)
    high = p - q + math.hypot(first.high - p, q - second.low)
    return p - q, [low, high]


def compare_weeks(now: ProductionWeek, before: ProductionWeek) -> WeekChange:
    """What changed from one week to the next."""
    right, right_ci95 = difference(now.first_time_right, before.first_time_right)
    taken, taken_ci95 = difference(now.interventions, before.interventions)
    worse = right is not None and right_ci95[1] is not None and right <= -MARGIN and right_ci95[1] < 0
    more = taken is not None and taken_ci95[0] is not None and taken >= MARGIN and taken_ci95[0] > 0
    status = REVIEW if worse or more else INSUFFICIENT_DATA if right is None else OK
    distance = None if right is None else mix_distance(now.mix, before.mix)
    return WeekChange(status, right, right_ci95, taken, taken_ci95, distance)


def mix_distance(first: Mapping[str, Mapping[str, int]], second: Mapping[str, Mapping[str, int]]) -> float:
    """Half the sum of absolute differences of the shares of (verdict, error type), in [0, 1]; both must have labels."""
    tables = [{(v, e): n for v, kinds in mix.items() for e, n in kinds.items()} for mix in (first, second)]
    totals = [sum(table.values()) for table in tables]
    keys = {*tables[0], *tables[1]}
    return 0.5 * sum(abs(tables[0].get(key, 0) / totals[0] - tables[1].get(key, 0) / totals[1]) for key in keys)
