"""The weekly drift report: what the week's candidates and production say together (S24, S31; simple form)."""

from __future__ import annotations

import html
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.drift import INSUFFICIENT_DATA, NO_CHAMPION, OK, REVIEW, DriftResult
from agentpipe.evaluation.tables import markdown_table, percent
from agentpipe.storage import canonical_json, digest_bytes, publish_directory, write_bytes, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FORMAT = 1


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
class WeeklyReport:
    """Figures as JSON and a page that needs nothing beside it."""

    summary: dict[str, Any]
    html: str

    @property
    def digest(self) -> str:
        """Content digest of the figures."""
        return digest_bytes(canonical_json(self.summary))

    def save(self, path: Path) -> Path:
        """Publishes ``report.json`` and ``report.html`` in the directory ``path``, whole or not at all."""
        with publish_directory(path) as staging:
            write_json(staging / "report.json", self.summary)
            write_bytes(staging / "report.html", self.html.encode())
        return path

    def markdown(self) -> str:
        """The report for the UI."""
        parts = [f"**{self.summary['status']}**: {self.summary['reason']}"]
        parts += [
            f"### {title}\n\n{markdown_table(header, rows)}" for title, header, rows in _tables(self.summary) if rows
        ]
        return "\n\n".join(parts)


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
                "rows": item.result.rows,
                "cells_to_review": sorted(
                    cell for cell, figures in item.result.by_cell.items() if figures["status"] == REVIEW
                ),
            }
            for item in ordered
        ],
    }


def _feedback_figures(feedback: Sequence[FeedbackDay], minimum_labels: int) -> dict[str, Any]:
    verdicts = sorted({verdict for item in feedback for verdict in item.labels})
    labels = {verdict: sum(item.labels.get(verdict, 0) for item in feedback) for verdict in verdicts}
    labelled = sum(labels.values())
    enough = labelled >= minimum_labels
    return {
        "status": OK if enough else INSUFFICIENT_DATA,
        "decisions": sum(item.decisions for item in feedback),
        "labelled": labelled,
        "labels": labels,
        "quarantined": sum(item.quarantined for item in feedback),
        "share_correct": labels.get("correct", 0) / labelled if enough else None,
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


def _status(drift: Mapping[str, Any]) -> tuple[str, str]:
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


def _tables(summary: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of the report's two tables."""
    drift = [
        [
            item["day"],
            item["trigger"],
            item["status"],
            "–" if item["kl"] is None else f"{item['kl']:.4f}",
            f"{item['rows']:,}",
            ", ".join(item["cells_to_review"]) or "–",
        ]
        for item in summary["drift"]["days"]
    ]
    feedback = [
        [
            item["day"],
            f"{item['decisions']:,}",
            ", ".join(f"{verdict} {count:,}" for verdict, count in item["labels"].items()) or "–",
            f"{item['quarantined']:,}",
        ]
        for item in summary["feedback"]["days"]
    ]
    return [
        ("Policy drift", ["day", "trigger", "status", "KL (nats)", "rows", "cells to review"], drift),
        ("Production feedback", ["day", "decisions", "labels", "quarantined"], feedback),
    ]


_STYLE = """
 body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:56rem;margin:2rem auto;padding:0 1rem}
 h1{font-size:1.5rem;margin:0} h2{font-size:1.1rem;margin:2rem 0 .5rem} .when{color:#616e7c;margin:.2rem 0 1.5rem}
 .status{border-left:.4rem solid var(--c);background:#f5f7fa;padding:.7rem 1rem} .status b{color:var(--c)}
 table{border-collapse:collapse;width:100%}
 th,td{text-align:left;padding:.35rem .8rem .35rem 0;border-bottom:1px solid #e4e7eb}
 th{color:#616e7c;font-weight:600;font-size:.85rem} td{font-variant-numeric:tabular-nums} .none{color:#616e7c}
""".strip()
_COLOURS = {OK: "#2f855a", REVIEW: "#c2410c", NO_CHAMPION: "#4a5568", INSUFFICIENT_DATA: "#4a5568"}


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return '<p class="none">Nothing this week.</p>'
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _page(summary: Mapping[str, Any]) -> str:
    feedback = summary["feedback"]
    correct = (
        f"{percent(feedback['share_correct'])} of {feedback['labelled']:,} labelled decisions were correct."
        if feedback["share_correct"] is not None
        else f"{INSUFFICIENT_DATA}: {feedback['labelled']:,} labels, at least {summary['minimum_labels']:,} are needed."
    )
    notes = {"Policy drift": f"A person looks above {summary['limit']} nats.", "Production feedback": correct}
    sections = "\n".join(
        f"<h2>{title}</h2>\n<p>{html.escape(notes[title])}</p>\n{_html_table(header, rows)}"
        for title, header, rows in _tables(summary)
    )
    status = summary["status"]
    week = summary["week"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>Weekly drift report {week}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n"
        f'<h1>Weekly drift report</h1><p class="when">Week of {week} to {summary["last_day"]}, UTC days</p>\n'
        f'<p class="status" style="--c:{_COLOURS[status]}"><b>{status}</b> – {html.escape(summary["reason"])}</p>\n'
        f"{sections}\n</body></html>\n"
    )


def weekly_report(
    week: date,
    drift: Sequence[DriftDay],
    feedback: Sequence[FeedbackDay],
    *,
    limit: float = 0.15,
    minimum_labels: int = 50,
) -> WeeklyReport:
    """Puts the week's drift results and production counts together.

    Args:
        week: The Monday (UTC) that the week starts on.
        drift: Drift results of candidates trained in the week; may be empty.
        feedback: Production counts of days of the week; may be empty.
        limit: Nats above which a candidate counts as drifted (for the text; each result carries its own judgement).
        minimum_labels: Fewer labels give no share of correct decisions.

    Raises:
        EvaluationError: ``week`` is not a Monday, or a day lies outside the week.
    """
    _check_week(week, [item.day for item in drift] + [item.day for item in feedback])
    figures = _drift_figures(drift)
    status, reason = _status(figures)
    summary = {
        "format": FORMAT,
        "week": week.isoformat(),
        "last_day": (week + timedelta(days=6)).isoformat(),
        "status": status,
        "reason": reason,
        "limit": limit,
        "minimum_labels": minimum_labels,
        "drift": figures,
        "feedback": _feedback_figures(feedback, minimum_labels),
    }
    return WeeklyReport(summary, _page(summary))
