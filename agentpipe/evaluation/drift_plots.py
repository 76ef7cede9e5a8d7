"""Plots of the weekly drift report: PNG bytes that fit into an event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.evaluation.canvas import (
    BLUE,
    GREY,
    GRID,
    INK,
    LIGHT,
    MUTED,
    ORANGE,
    RED,
    TEAL,
    legend,
    new_figure,
    percent_axis,
    png,
    title,
)
from agentpipe.evaluation.drift_text import one_line
from agentpipe.evaluation.label_mix import NO_TYPE, VERDICTS
from agentpipe.evaluation.tables import percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.evaluation.drift_features import FeatureDrift
    from agentpipe.evaluation.input_drift import InputDriftResult
    from agentpipe.evaluation.label_mix import ProductionWeek

WORST = 10
"""Features in the bars; of the first three the distribution is drawn."""
_DASHED = (0, (4, 3))


def label(text: object, most: int = 26) -> str:
    """Text from outside as matplotlib writes it: on one line, nothing of it a formula."""
    return one_line(text, most).replace("$", r"\$")


def candidates(days: Sequence[Mapping[str, Any]], limit: float) -> bytes:
    """KL of every candidate that was compared, in nats, with its interval; ``days`` as in the report's JSON."""
    figure, (ax,) = new_figure(7.4, 2.6)
    for column, item in enumerate(days):
        if item["kl"] is None:
            ax.text(column, 0, "not\nmeasured", ha="center", va="bottom", fontsize=7, color=MUTED)
            continue
        low, high = (item["kl"] if bound is None else bound for bound in item["ci95"])
        colour = RED if item["kl"] > limit else TEAL
        spread = [[max(0.0, item["kl"] - low)], [max(0.0, high - item["kl"])]]
        ax.errorbar(column, item["kl"], yerr=spread, fmt="o", ms=5, lw=1.4, color=colour)
    ax.axhline(limit, color=RED, lw=1, ls=_DASHED)
    names = [f"{item['day'][5:]}\n{label(item['trigger'], 10)}" for item in days]
    ax.set_xticks(range(len(days)), names, fontsize=7)
    ax.set_xlim(-0.6, max(len(days), 1) - 0.4)
    ax.set_ylim(0, 1.25 * max([limit, *(max(item["kl"] or 0.0, item["ci95"][1] or 0.0) for item in days)]))
    ax.grid(axis="y", color=GRID)
    title(
        ax, "The week's candidates, nats", f"KL(candidate ‖ champion), 95 % intervals · review above {limit:g} (dashed)"
    )
    return png(figure)


def features(result: InputDriftResult) -> bytes:
    """PSI of the features that moved most, with the limit, and their Kolmogorov-Smirnov distances."""
    worst = result.worst(WORST)
    figure, (left, right) = new_figure(7.4, 1.2 + 0.26 * len(worst), columns=2)
    for ax, values, limit in (
        (left, [item.psi for item in worst], result.limits.psi),
        (right, [item.ks for item in worst], result.limits.ks),
    ):
        colours = [RED if value > limit else BLUE for value in values]
        ax.barh(range(len(worst)), values, color=colours, height=0.62)
        for row, value in enumerate(values):
            ax.text(value, row, f" {value:.2f}", va="center", fontsize=7.5, color=INK)
        ax.axvline(limit, color=RED, lw=1, ls=_DASHED)
        ax.set_xlim(0, 1.2 * max([limit, *values]))
        ax.set_ylim(max(len(worst), 3) - 0.4, -0.6)
        ax.set_yticks([])
    left.set_yticks(range(len(worst)), [label(item.name) for item in worst], fontsize=8, color=INK)
    title(
        left, "Inputs that moved most: PSI", f"of {len(result.features)} features · review above {result.limits.psi:g}"
    )
    title(right, "… and KS distance", f"review above {result.limits.ks:g}")
    return png(figure)


def distributions(result: InputDriftResult) -> bytes:
    """Shares of training and production in the bins of the three features that moved most."""
    worst = result.worst(3)
    figure, axes = new_figure(7.4, 2.4, columns=max(1, len(worst)))
    for ax, item in zip(axes, worst, strict=False):
        places = np.arange(len(item.reference_shares))
        ax.bar(places, item.reference_shares, width=0.8, color=LIGHT, label="training")
        ax.step(places, item.production_shares, where="mid", color=ORANGE, lw=1.5, label="production")
        ax.plot(places, item.production_shares, "o", ms=3, color=ORANGE)
        ax.set_xticks(places, _bins(item), fontsize=6, rotation=90)
        percent_axis(ax.yaxis)
        title(ax, label(item.name, 22), f"PSI {item.psi:.2f}")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=8, labelcolor=INK)
    return png(figure)


def _bins(item: FeatureDrift) -> list[str]:
    """Names of the bins: up to an edge, the last beyond it."""
    return [f"≤ {edge:.3g}" for edge in item.edges] + [f"> {item.edges[-1]:.3g}"]


_VERDICT_COLOURS = {"correct": TEAL, "needs_improvement": ORANGE}
_ERROR_COLOURS = {NO_TYPE: GREY, "execution": "#7b5ea7", "perception": BLUE, "planning": RED}


def label_mix(week: ProductionWeek) -> bytes:
    """Labels of each day by verdict; wrong ones by type of error."""
    figure, (ax,) = new_figure(7.4, 2.7)
    counts: dict[str, tuple[list[int], str]] = {}
    for verdict in VERDICTS[:2]:
        totals = [sum(day.mix[verdict].values()) for day in week.days]
        counts[verdict.replace("_", " ")] = (totals, _VERDICT_COLOURS[verdict])
    for error in sorted({error for day in week.days for error in day.mix["wrong"]}):
        name = "wrong" if error == NO_TYPE else f"wrong: {label(error, 12)}"
        counts[name] = ([day.mix["wrong"].get(error, 0) for day in week.days], _ERROR_COLOURS.get(error, GREY))
    bottom = np.zeros(len(week.days))
    for name, (values, colour) in counts.items():
        ax.bar(range(len(values)), values, bottom=bottom, color=colour, width=0.7, label=name)
        bottom += np.array(values)
    ax.set_xticks(range(len(week.days)), [day.day[5:] for day in week.days])
    ax.grid(axis="y", color=GRID)
    title(ax, "What people said", f"{week.labels:,} labelled decisions, by UTC day of the label")
    legend(ax, columns=6)
    return png(figure)


def first_time_right(week: ProductionWeek, before: ProductionWeek | None = None) -> bytes:
    """Share of labelled decisions that were right, each day with its interval; the weeks' rates as lines."""
    figure, (ax,) = new_figure(7.4, 2.5)
    for column, day in enumerate(week.days):
        value, (low, high) = day.first_time_right.value, day.first_time_right.ci95
        if value is None or low is None or high is None:
            continue
        ax.errorbar(column, value, yerr=[[value - low], [high - value]], fmt="o", ms=5, lw=1.4, color=BLUE)
        counted = f"n = {day.first_time_right.of:,}"
        ax.text(column, high + 0.015, counted, fontsize=7, color=MUTED, ha="center", va="bottom")
    rates = {"this week": (week, INK, "-")} | ({"week before": (before, MUTED, _DASHED)} if before else {})
    for name, (of, colour, style) in rates.items():
        rate = of.first_time_right.value
        if rate is not None:
            ax.axhline(rate, color=colour, lw=1, ls=style, label=f"{name} {percent(rate)}")
    ax.set_xticks(range(len(week.days)), [day.day[5:] for day in week.days])
    ax.set_xlim(-0.6, len(week.days) - 0.3)
    ax.set_ylim(0, 1.12)
    percent_axis(ax.yaxis)
    ax.grid(axis="y", color=GRID)
    title(ax, "First-time-right rate", "labelled decisions judged correct, 95 % Wilson intervals")
    if ax.get_legend_handles_labels()[0]:
        legend(ax)
    return png(figure)
