"""The weekly drift report: what the week's candidates, the champion, inputs and production say together (S24, S31).

The report's status is that of its worst part: REVIEW, then INSUFFICIENT_DATA, then NO_CHAMPION, then OK. A part that
was not measured is INSUFFICIENT_DATA, so that OK means that everything was looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import EvaluationError
from agentpipe.evaluation import weekly_page
from agentpipe.evaluation.drift import INSUFFICIENT_DATA, NO_CHAMPION, OK, REVIEW, DriftResult
from agentpipe.evaluation.label_mix import compare_weeks, share
from agentpipe.evaluation.statistics import rounded
from agentpipe.evaluation.weekly_page import Part
from agentpipe.evaluation.weekly_sections import sections_of
from agentpipe.storage import canonical_json, digest_bytes, publish_directory, write_bytes, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agentpipe.evaluation.input_drift import InputDriftResult
    from agentpipe.evaluation.label_mix import ProductionWeek, WeekChange
    from agentpipe.evaluation.weekly_page import Section

FORMAT: Final = 2
SEVERITY: Final = {OK: 0, NO_CHAMPION: 1, INSUFFICIENT_DATA: 2, REVIEW: 3}


@dataclass(frozen=True)
class DriftDay:
    """One candidate's drift result."""

    day: date
    trigger: str
    result: DriftResult


@dataclass(frozen=True)
class FeedbackDay:
    """Counts of one day of production."""

    day: date
    decisions: int
    labels: Mapping[str, int]
    """Labels by verdict: ``correct``, ``wrong``, ``needs_improvement``."""
    quarantined: int = 0


@dataclass(frozen=True)
class ChampionWeek:
    """The champion at the end of the week beside the one at the end of the week before, by version."""

    before: str | None
    now: str | None
    result: DriftResult | None = None
    """KL(now || before) on the reference observations; not needed where both are the same."""


@dataclass(frozen=True)
class Measured:
    """What was measured besides the candidates. What is ``None`` was not, and the report says so."""

    champion: ChampionWeek | None = None
    inputs: InputDriftResult | None = None
    """Production's observations of the week against training's."""
    inputs_since: InputDriftResult | None = None
    """The same against production's of the week before; optional, judged where it is given."""
    production: ProductionWeek | None = None
    production_before: ProductionWeek | None = None
    """Figures of the week before."""

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        result = self.champion.result if self.champion else None
        parts = (self.inputs, self.inputs_since, self.production, self.production_before)
        names = ("inputs", "inputs_since", "production", "production_before")
        champion = self.champion and {
            "before": self.champion.before,
            "now": self.champion.now,
            "result": result and result.to_dict(),
        }
        return {"champion": champion} | {name: part and part.to_dict() for name, part in zip(names, parts, strict=True)}


@dataclass(frozen=True)
class WeeklyReport:
    """Figures as JSON, and pages made from them."""

    summary: dict[str, Any]
    sections: list[Section]
    drawings: Mapping[str, Callable[[], bytes]]
    """Plots by name; drawn when they are first asked for."""

    @property
    def digest(self) -> str:
        """Content digest of the figures."""
        return digest_bytes(canonical_json(self.summary))

    @cached_property
    def plots(self) -> dict[str, bytes]:
        """PNG bytes by name, each small enough for an event."""
        return {name: draw() for name, draw in self.drawings.items()}

    @cached_property
    def html(self) -> str:
        """A page with its plots inside: it asks for nothing from outside."""
        return weekly_page.page(self.summary, self.sections, self.plots)

    def save(self, path: Path) -> Path:
        """Publishes ``report.json``, ``.html`` and ``.md`` in the directory ``path``, whole or not at all."""
        page = self.html.encode()
        with publish_directory(path) as staging:
            write_json(staging / "report.json", self.summary)
            write_bytes(staging / "report.html", page)
            write_bytes(staging / "report.md", self.markdown().encode())
        return path

    def markdown(self) -> str:
        """The report for the UI, without plots, at most 16,000 bytes."""
        return weekly_page.markdown(self.summary, self.sections)


def _check_week(week: date, days: Sequence[date]) -> None:
    if week.weekday() != 0:
        raise EvaluationError(f"a week starts on a Monday, {week} is not one")
    outside = [day for day in days if not week <= day < week + timedelta(days=7)]
    if outside:
        raise EvaluationError(f"{outside[0]} is not in the week of {week}", remedy="pass the days of this week only")


def _drift_figures(drift: Sequence[DriftDay]) -> dict[str, Any]:
    ordered = sorted(drift, key=lambda item: (item.day, item.trigger))
    measured = [item for item in ordered if item.result.kl is not None]
    worst = max(measured, key=lambda item: item.result.kl or 0.0, default=None)

    def above(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
        return sorted(name for name, figures in groups.items() if figures["status"] == REVIEW)

    return {
        "candidates": len(drift),
        "measured": len(measured),
        "no_champion": sum(item.result.status == NO_CHAMPION for item in drift),
        "insufficient": sum(item.result.status == INSUFFICIENT_DATA for item in drift),
        "review": sum(item.result.status == REVIEW for item in drift),
        "worst_kl": worst.result.kl if worst else None,
        "worst_day": worst.day.isoformat() if worst else None,
        "days": [
            {
                "day": item.day.isoformat(),
                "trigger": item.trigger,
                "status": item.result.status,
                "kl": item.result.kl,
                "ci95": list(item.result.ci95),
                "rows": item.result.rows,
                "cells_to_review": above(item.result.by_cell),
                "segments_to_review": above(item.result.by_segment),
            }
            for item in ordered
        ],
    }


def _feedback_figures(feedback: Sequence[FeedbackDay], minimum_labels: int) -> dict[str, Any]:
    verdicts = sorted({verdict for item in feedback for verdict in item.labels})
    labels = {verdict: sum(item.labels.get(verdict, 0) for item in feedback) for verdict in verdicts}
    labelled = sum(labels.values())
    correct = share(labels.get("correct", 0), labelled, minimum_labels)
    return {
        "status": INSUFFICIENT_DATA if correct.value is None else OK,
        "decisions": sum(item.decisions for item in feedback),
        "labelled": labelled,
        "labels": labels,
        "quarantined": sum(item.quarantined for item in feedback),
        "share_correct": correct.value,
        "share_correct_ci95": correct.ci95,
        "days": [
            {
                "day": item.day.isoformat(),
                "decisions": item.decisions,
                "labels": dict(sorted(item.labels.items())),
                "quarantined": item.quarantined,
            }
            for item in sorted(feedback, key=lambda item: item.day)
        ],
    }


def _candidates(drift: Mapping[str, Any]) -> tuple[str, str]:
    if not drift["candidates"]:
        return INSUFFICIENT_DATA, "no candidate was compared with the champion this week"
    if drift["review"]:
        return (
            REVIEW,
            f"{drift['review']} of {drift['measured']} candidates drifted above the limit: a person should look",
        )
    if not drift["measured"]:
        if drift["no_champion"]:
            return NO_CHAMPION, "there was no champion to compare with"
        return INSUFFICIENT_DATA, "no comparison rested on enough reference observations"
    unknown = drift["candidates"] - drift["measured"]
    rest = f"; {unknown} could not be measured" if unknown else ""
    return OK, f"all {drift['measured']} measured candidates stayed within the limit{rest}"


def _champion(champion: ChampionWeek | None) -> tuple[str, str]:
    if champion is None:
        return INSUFFICIENT_DATA, "the champion was not compared with last week's"
    if champion.now is None:
        return NO_CHAMPION, "there is no champion yet"
    if champion.before is None:
        return NO_CHAMPION, "there was no champion at the end of the week before"
    if champion.before == champion.now:
        return OK, "the champion is that of the week before"
    if champion.result is None or champion.result.kl is None:
        return INSUFFICIENT_DATA, "the two champions were not compared on enough reference observations"
    return champion.result.status, f"another champion, {champion.result.kl:.4f} nats from that of the week before"


def _inputs(inputs: InputDriftResult | None) -> tuple[str, str]:
    if inputs is None:
        return INSUFFICIENT_DATA, "production's observations were not compared with training's"
    return inputs.status, inputs.reason()


def _production(
    production: ProductionWeek | None, change: WeekChange | None, feedback: Mapping[str, Any]
) -> tuple[str, str]:
    labelled = feedback["labelled"] if production is None else production.labels
    status = feedback["status"] if production is None else production.status
    if status != OK:
        return INSUFFICIENT_DATA, f"{labelled:,} decisions were labelled, too few for a first-time-right rate"
    if production is None:
        return OK, f"{labelled:,} decisions were labelled"
    rate = f"first-time-right {production.first_time_right.text()}"
    if change is None:
        return OK, rate
    return (REVIEW if change.status == REVIEW else OK), f"{rate}; {change.reason()}"


def _overall(parts: Sequence[Part]) -> tuple[str, str]:
    for part in parts:
        if part.status not in SEVERITY:
            raise EvaluationError(f"{part.status!r} is no status", part=part.name, remedy="compute the result again")
    status = max((part.status for part in parts), key=SEVERITY.__getitem__)
    reasons = [f"{part.name}: {part.reason}" for part in parts if part.status == status]
    return status, "; ".join(reasons)


def weekly_report(
    week: date,
    drift: Sequence[DriftDay],
    feedback: Sequence[FeedbackDay] = (),
    *,
    limit: float = 0.15,
    minimum_labels: int = 50,
    measured: Measured | None = None,
) -> WeeklyReport:
    """Puts together what the week showed.

    Args:
        week: The Monday (UTC) that the week starts on.
        drift: Drift results of candidates trained in the week; may be empty.
        feedback: Production counts of days of the week; may be empty. Used where ``measured`` has no production.
        limit: Nats above which a candidate counts as drifted (for the text; each result carries its own judgement).
        minimum_labels: Fewer labels give no share of correct decisions.
        measured: The champion's drift, input drift and production's figures.

    Raises:
        EvaluationError: ``week`` is not a Monday, a day or week does not belong to it, or a status does not exist.
    """
    _check_week(week, [item.day for item in drift] + [item.day for item in feedback])
    measured = measured or Measured()
    production, before = measured.production, measured.production_before
    _check_production(week, production, before)
    figures, counts = _drift_figures(drift), _feedback_figures(feedback, minimum_labels)
    change = compare_weeks(production, before) if production and before else None
    parts = [
        Part("Candidates", *_candidates(figures)),
        Part("Champion", *_champion(measured.champion)),
        Part("Inputs", *_inputs(measured.inputs)),
        *([Part("Inputs since last week", *_inputs(measured.inputs_since))] if measured.inputs_since else []),
        Part("Production", *_production(production, change, counts)),
    ]
    status, reason = _overall(parts)
    summary: dict[str, Any] = rounded(
        {
            "format": FORMAT,
            "week": week.isoformat(),
            "last_day": (week + timedelta(days=6)).isoformat(),
            "status": status,
            "reason": reason,
            "limit": limit,
            "minimum_labels": minimum_labels,
            "parts": [vars(part) for part in parts],
            "drift": figures,
            "feedback": counts,
            "change": change and change.to_dict(),
            **measured.to_dict(),
        }
    )
    return WeeklyReport(summary, sections_of(summary, parts, measured), _drawings(summary, measured))


def _check_production(week: date, production: ProductionWeek | None, before: ProductionWeek | None) -> None:
    for given, wanted in ((production, week), (before, week - timedelta(days=7))):
        if given is not None and given.week != wanted.isoformat():
            raise EvaluationError(f"production of the week of {given.week} was given for that of {wanted}")


def _drawings(summary: Mapping[str, Any], measured: Measured) -> dict[str, Callable[[], bytes]]:
    from agentpipe.evaluation import drift_plots, plots

    champion, inputs, production = measured.champion, measured.inputs, measured.production
    result: dict[str, Callable[[], bytes]] = {}
    days, limit = summary["drift"]["days"], summary["limit"]
    if summary["drift"]["measured"]:
        result["candidates"] = lambda: drift_plots.candidates(days, limit)
    between = champion.result if champion else None
    if between is not None and between.kl is not None and between.by_cell:
        result["champion_by_cell"] = lambda: plots.drift_by_cell(between)
    if inputs is not None and inputs.features:
        result["input_features"] = lambda: drift_plots.features(inputs)
        result["input_distributions"] = lambda: drift_plots.distributions(inputs)
    if production is not None and production.labels:
        result["label_mix"] = lambda: drift_plots.label_mix(production)
        result["first_time_right"] = lambda: drift_plots.first_time_right(production, measured.production_before)
    return result
