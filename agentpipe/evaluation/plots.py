"""Plots of an evaluation, an attribution and a drift comparison: PNG bytes that fit into an event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.environments.layout import DISTURBANCE_KINDS, MODES, SEGMENTS
from agentpipe.evaluation.canvas import (
    BLUE,
    GREY,
    GRID,
    INK,
    LIGHT,
    MUTED,
    ORANGE,
    RED,
    SERIES,
    TEAL,
    legend,
    markdown_image,
    new_figure,
    percent_axis,
    player_colour,
    png,
    title,
)
from agentpipe.evaluation.tables import percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentpipe.evaluation.drift import DriftResult

__all__ = [
    "causes",
    "decision_time",
    "drift_by_cell",
    "failures",
    "markdown_image",
    "success_by_cell",
    "success_by_mode",
]


def _ranked(summary: Mapping[str, Any]) -> list[str]:
    """Players, best first."""
    players: dict[str, Any] = summary["players"]
    return sorted(players, key=lambda name: -players[name]["success"])


def _cells(summary: Mapping[str, Any]) -> list[str]:
    """Cells that occur, by kind and intensity."""
    found = {cell for figures in summary["players"].values() for cell in figures["by_cell"]}
    order = [f"{kind}-{intensity}" for kind in DISTURBANCE_KINDS for intensity in range(1, 6)]
    return [cell for cell in order if cell in found] + sorted(found - set(order))


def _label_cells(ax: Any, cells: list[str]) -> None:  # noqa: ANN401 - matplotlib publishes no types
    """Intensities as ticks, the kind once below each group, white gaps between groups."""
    ax.set_xticks(range(len(cells)), [cell.rsplit("-", 1)[-1] for cell in cells])
    kinds = [cell.rsplit("-", 1)[0] for cell in cells]
    for kind in dict.fromkeys(kinds):
        members = [index for index, name in enumerate(kinds) if name == kind]
        middle = (members[0] + members[-1]) / 2
        ax.annotate(
            kind,
            (middle, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -18),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8.5,
            color=INK,
        )
        if members[0]:
            ax.axvline(members[0] - 0.5, color="white", lw=4)


def success_by_cell(summary: Mapping[str, Any]) -> bytes:
    """Heat map of success: players (rows, best first) by cell (columns), in percent."""
    from matplotlib.colors import LinearSegmentedColormap

    players, cells = _ranked(summary), _cells(summary)
    nothing: dict[str, Any] = {"success": np.nan}
    values = np.array([[summary["players"][p]["by_cell"].get(c, nothing)["success"] for c in cells] for p in players])
    figure, (ax,) = new_figure(7.4, 1.35 + 0.36 * len(players))
    shades = LinearSegmentedColormap.from_list("success", ["#b5452c", "#f3e3c3", "#1d5fa8"])
    ax.imshow(values, cmap=shades, vmin=0, vmax=1, aspect="auto")
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        dark = not 0.2 < value < 0.75
        text = "–" if np.isnan(value) else f"{100 * value:.0f}"
        ax.text(column, row, text, ha="center", va="center", fontsize=8.5, color="white" if dark else INK)
    ax.set_yticks(range(len(players)), players, color=INK, fontsize=9)
    ax.set_yticks(np.arange(len(players) - 1) + 0.5, minor=True)
    ax.grid(which="minor", axis="y", color="white", lw=2)
    ax.tick_params(which="minor", length=0)
    ax.spines[:].set_visible(False)
    _label_cells(ax, cells)
    first = summary["players"][players[0]]
    per_cell = first["episodes"] // max(1, len(cells))
    title(
        ax,
        "Success by cell, %",
        f"disturbance kind and intensity (1 mild … 5 harsh) · about {per_cell:,} episodes each",
    )
    return png(figure)


def success_by_mode(summary: Mapping[str, Any]) -> bytes:
    """Success of every player (points with 95 % intervals) for each fault mode."""
    players = _ranked(summary)
    found = {mode for name in players for mode in summary["players"][name]["by_mode"]}
    modes = [mode for mode in MODES if mode in found] + sorted(found - set(MODES))
    figure, (ax,) = new_figure(7.4, 1.3 + 0.3 * len(modes))
    offsets = np.linspace(-0.26, 0.26, len(players)) if len(players) > 1 else np.zeros(1)
    for offset, name in zip(offsets, players, strict=True):
        slices = summary["players"][name]["by_mode"]
        rows = [index for index, mode in enumerate(modes) if mode in slices]
        value = np.array([slices[modes[row]]["success"] for row in rows])
        bounds = np.array([slices[modes[row]]["ci95"] for row in rows], dtype=float)
        spread = np.abs(np.stack([value - bounds[:, 0], bounds[:, 1] - value]))
        position = np.array(rows) + offset
        colour = player_colour(name)
        ax.errorbar(value, position, xerr=spread, fmt="o", ms=4, lw=1.2, color=colour, label=name)
    ax.set_yticks(range(len(modes)), [mode.replace("_", " ") for mode in modes], color=INK, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(-0.02, 1.02)
    percent_axis(ax.xaxis)
    ax.grid(axis="x", color=GRID)
    ax.spines["left"].set_visible(False)
    title(ax, "Success by fault mode", "95 % intervals, clustered by environment")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8.5, labelcolor=INK)
    return png(figure)


def _bars(ax: Any, counts: Mapping[str, int], total: int, colour: str) -> None:  # noqa: ANN401 - no types published
    names = list(counts)
    shares = [counts[name] / total for name in names]
    ax.barh(range(len(names)), shares, color=colour, height=0.62)
    for row, share in enumerate(shares):
        ax.text(share, row, f" {percent(share)}", va="center", fontsize=8, color=INK)
    ax.set_yticks(range(len(names)), [name.replace("_", " ") for name in names], color=INK, fontsize=9)
    ax.set_ylim(max(len(names), 4) - 0.4, -0.6)
    ax.set_xlim(0, max(shares, default=1.0) * 1.22 or 1.0)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)


def failures(summary: Mapping[str, Any], player: str = "policy") -> bytes:
    """Where and why one player fails: share of its failures by segment and by reason."""
    figures = summary["players"][player]
    figure, (left, right) = new_figure(7.4, 2.7, columns=2)
    total = figures["failures"]
    by_segment = {segment: figures["failures_by_segment"].get(segment, 0) for segment in SEGMENTS}
    by_reason = dict(sorted(figures["failures_by_reason"].items(), key=lambda item: -item[1]))
    _bars(left, by_segment, max(total, 1), BLUE)
    _bars(right, by_reason, max(total, 1), ORANGE)
    note = f"{total:,} of {figures['episodes']:,} episodes"
    title(left, f"Failures of {player}, by segment", note)
    title(right, "… and by reason", "share of the failures")
    return png(figure)


def decision_time(summary: Mapping[str, Any]) -> bytes:
    """Mean simulated seconds a decision for every player, with 95 % intervals."""
    players = sorted(summary["players"], key=lambda name: summary["players"][name]["decision_seconds"])
    values = np.array([summary["players"][name]["decision_seconds"] for name in players])
    bounds = [summary["players"][name]["decision_seconds_ci95"] for name in players]
    known = [[v if b is None else b for b in pair] for v, pair in zip(values, bounds, strict=True)]
    spread = np.abs(np.array(known).T - values)
    figure, (ax,) = new_figure(7.4, 1.0 + 0.36 * len(players))
    ax.barh(
        range(len(players)), values, xerr=spread, height=0.62, color=[player_colour(n) for n in players], ecolor=INK
    )
    for row, (value, pair) in enumerate(zip(values, known, strict=True)):
        ax.text(max(value, pair[1]), row, f"  {value:.2f} s", va="center", fontsize=8.5, color=INK)
    ax.set_yticks(range(len(players)), players, color=INK, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(0, max(float(values.max()), *(pair[1] for pair in known)) * 1.14)
    ax.grid(axis="x", color=GRID)
    ax.spines["bottom"].set_visible(False)
    title(ax, "Simulated time of a decision, s", "poll, network and action; 95 % intervals clustered by environment")
    return png(figure)


_CAUSE_COLOURS = dict(
    zip((*DISTURBANCE_KINDS, "compound", "policy_or_information"), (*SERIES[:3], RED, LIGHT), strict=True)
)


def causes(attribution: Mapping[str, Any]) -> bytes:
    """What failures are due to: one bar for all, and one for each segment of failure."""
    figure, (ax,) = new_figure(7.4, 2.9)
    everything = {name: item["count"] for name, item in attribution["causes"].items()}
    rows = {"all": everything, **{s: attribution.get("by_segment", {}).get(s, {}) for s in SEGMENTS}}
    rows = {name: counts for name, counts in rows.items() if sum(counts.values())}
    for position, counts in enumerate(rows.values()):
        left, total = 0.0, sum(counts.values())
        for cause, colour in _CAUSE_COLOURS.items():
            share = counts.get(cause, 0) / total
            ax.barh(
                position,
                share,
                left=left,
                color=colour,
                height=0.62,
                label=cause.replace("_", " ") if not position else None,
            )
            if share > 0.07:
                ink = INK if colour == LIGHT else "white"
                ax.text(
                    left + share / 2, position, f"{100 * share:.0f} %", ha="center", va="center", fontsize=8, color=ink
                )
            left += share
    ax.set_yticks(
        range(len(rows)), [f"{name}  ({sum(c.values()):,})" for name, c in rows.items()], color=INK, fontsize=9
    )
    ax.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    ax.set_xlim(0, 1)
    percent_axis(ax.xaxis)
    ax.spines["left"].set_visible(False)
    share = percent(attribution["attributed"])
    title(
        ax, "What failures are due to", f"{attribution['replayed']:,} replayed failures, {share} due to a disturbance"
    )
    if rows:
        legend(ax, columns=5)
    return png(figure)


def drift_by_cell(result: DriftResult) -> bytes:
    """KL(candidate ‖ champion) in nats for each cell, with the review limit."""
    figure, (ax,) = new_figure(7.4, 2.7)
    cells = list(_cells({"players": {"": {"by_cell": result.by_cell}}}))
    values = [result.by_cell[cell]["kl"] for cell in cells]
    colours = [GREY if v is None else RED if v > result.limit else TEAL for v in values]
    ax.bar(range(len(cells)), [v or 0.0 for v in values], color=colours, width=0.7)
    for column, value in enumerate(values):
        text = "too few\nrows" if value is None else f"{value:.3f}"
        ax.text(column, value or 0.0, text, ha="center", va="bottom", fontsize=7, color=MUTED)
    ax.axhline(result.limit, color=RED, lw=1, ls=(0, (4, 3)))
    ax.set_ylim(0, 1.25 * max([result.limit, *(v or 0.0 for v in values)]))
    ax.set_xlim(-0.6, max(len(cells), 1) - 0.4)
    ax.grid(axis="y", color=GRID)
    _label_cells(ax, cells)
    overall = result.status if result.kl is None else f"{result.status}, overall {result.kl:.4f}"
    note = f"KL(candidate ‖ champion), {result.rows:,} situations · {overall} · review above {result.limit:g} (dashed)"
    title(ax, "Policy drift by cell, nats", note)
    return png(figure)
