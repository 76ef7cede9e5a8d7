"""What the weekly report says, as titles, notes and tables: text as it is, escaped by the page that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.evaluation.drift import nats_interval
from agentpipe.evaluation.input_drift import FEATURE_HEADER, feature_rows
from agentpipe.evaluation.label_mix import NO_TYPE, VERDICTS
from agentpipe.evaluation.tables import percent
from agentpipe.evaluation.weekly_page import Part, Section, counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.evaluation.input_drift import InputDriftResult
    from agentpipe.evaluation.label_mix import ProductionWeek, Share
    from agentpipe.evaluation.weekly import ChampionWeek, Measured


def sections_of(summary: Mapping[str, Any], parts: Sequence[Part], measured: Measured) -> list[Section]:
    """Every section of a report with this summary; see :func:`~agentpipe.evaluation.weekly.weekly_report`."""
    judged = {part.name: part for part in parts}
    found = [
        _candidates(summary, judged["Candidates"]),
        _champion(measured.champion, judged["Champion"]),
        _inputs("Inputs against training", measured.inputs, judged["Inputs"]),
    ]
    if measured.inputs_since is not None:
        since = judged["Inputs since last week"]
        found.append(_inputs("Inputs against the week before", measured.inputs_since, since))
    if measured.production is None:
        found.append(_feedback(summary, judged["Production"]))
    else:
        found += _production(measured.production, measured.production_before, judged["Production"])
    return found


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _candidates(summary: Mapping[str, Any], judged: Part) -> Section:
    rows = [
        [
            item["day"],
            item["trigger"],
            item["status"],
            _number(item["kl"]),
            nats_interval(item["ci95"]),
            f"{item['rows']:,}",
            ", ".join([*item["cells_to_review"], *item["segments_to_review"]]) or "–",
        ]
        for item in summary["drift"]["days"]
    ]
    return Section(
        "Policy drift of the week's candidates",
        judged,
        notes=[f"KL of each candidate against its champion; a person looks above {summary['limit']} nats."],
        header=["day", "trigger", "status", "KL (nats)", "95 % interval", "rows", "above the limit"],
        rows=rows,
        plots=["candidates"],
    )


def _champion(champion: ChampionWeek | None, judged: Part) -> Section:
    rows: list[list[str]] = []
    if champion is not None:
        result = champion.result
        versions = [(champion.before or "none")[:16], (champion.now or "none")[:16]]
        figures = ["–", "–"] if result is None else [_number(result.kl), nats_interval(result.ci95)]
        rows = [[*versions, *figures]]
    return Section(
        "The champion against last week's",
        judged,
        header=["end of last week", "now", "KL (nats)", "95 % interval"] if rows else [],
        rows=rows,
        plots=["champion_by_cell"],
    )


def _inputs(title: str, result: InputDriftResult | None, judged: Part) -> Section:
    if result is None or result.joint is None:
        return Section(title, judged)
    limits = result.limits
    note = (
        f"Shown are the features that moved most. One is to review above PSI {limits.psi:g}, or above a KS distance of "
        f"{limits.ks:g} with an adjusted p of at most {limits.alpha:g}; “outside” is the share of production "
        "beyond the range of what it is compared with."
    )
    plots = ["input_features", "input_distributions"] if judged.name == "Inputs" else []
    return Section(title, judged, [result.joint_text(), note], FEATURE_HEADER, feature_rows(result), plots)


def _feedback(summary: Mapping[str, Any], judged: Part) -> Section:
    feedback = summary["feedback"]
    notes = []
    if feedback["share_correct"] is not None:
        notes = [f"{percent(feedback['share_correct'])} of {feedback['labelled']:,} labelled decisions were correct."]
    rows = [
        [item["day"], f"{item['decisions']:,}", counted(item["labels"]), f"{item['quarantined']:,}"]
        for item in feedback["days"]
    ]
    header = ["day", "decisions", "labels", "quarantined"]
    return Section("Production", judged, notes=notes, header=header, rows=rows)


def _production(week: ProductionWeek, before: ProductionWeek | None, judged: Part) -> list[Section]:
    def figure(value: Share | None) -> str:
        return "–" if value is None or not value.of else value.text()

    shares = [("first-time-right rate", "first_time_right"), ("human interventions", "interventions")]
    shares.append(("decisions without a label", "unlabelled"))
    rows = [[name, figure(getattr(week, key)), figure(getattr(before, key, None))] for name, key in shares]
    counts = [("decisions", "decisions"), ("lines", "lines"), ("labelled decisions", "labels")]
    counts += [("… taken over, by their result", "taken_over"), ("… corrected, by a label", "corrected")]
    for name, key in counts:
        then = "–" if before is None else f"{getattr(before, key):,}"
        rows.append([name, f"{getattr(week, key):,}", then])
    rows.append(["rows in quarantine", counted(week.quarantine), "–" if before is None else counted(before.quarantine)])
    mix = [[day.day, f"{day.decisions:,}", *_mix(day.mix), figure(day.first_time_right)] for day in week.days]
    return [
        Section("Production", judged, header=["", "this week", "week before"], rows=rows, plots=["first_time_right"]),
        Section(
            "Labels by day",
            header=["day", "decisions", *(verdict.replace("_", " ") for verdict in VERDICTS), "first time right"],
            rows=mix,
            plots=["label_mix"],
        ),
    ]


def _mix(mix: Mapping[str, Mapping[str, int]]) -> Sequence[str]:
    """For each verdict how many, and of which type of error where it is said."""
    cells = []
    for verdict in VERDICTS:
        kinds = mix[verdict]
        named = {kind: count for kind, count in kinds.items() if kind != NO_TYPE}
        cells.append(f"{sum(kinds.values()):,}" + (f" ({counted(named)})" if named else ""))
    return cells
