"""Plots of pool health and of training: PNG bytes that fit into an event."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.canvas import BLUE, GRID, INK, MUTED, RED, SERIES, legend, new_figure, png, thin, title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def reset_latency(latencies_ms: Mapping[str, npt.ArrayLike] | npt.ArrayLike, limit_ms: float) -> bytes:
    """Histogram of reset latencies in milliseconds on a logarithmic axis, with median, p99 and the limit.

    Raises:
        EvaluationError: no latency, or one that is not finite and positive.
    """
    parts = list(latencies_ms.values()) if hasattr(latencies_ms, "values") else [latencies_ms]
    values = np.array([value for part in parts for value in np.atleast_1d(part)], dtype=np.float64)
    if not values.size or not np.isfinite(values).all() or (values < 0).any():
        raise EvaluationError("reset latencies must be finite, at least one and none negative", count=values.size)
    values = np.maximum(values, 1e-6)
    middle, tail = float(np.median(values)), float(np.quantile(values, 0.99))
    figure, (ax,) = new_figure(7.4, 2.7)
    low, high = float(values.min()) / 1.5, max(float(values.max()), limit_ms) * 1.5
    ax.hist(values, bins=np.geomspace(low, high, 60).tolist(), color=BLUE)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlim(low, high)
    for at, name, colour in ((middle, "median", INK), (tail, "p99", INK), (limit_ms, "limit", RED)):
        ax.axvline(at, color=colour, lw=1, ls=(0, (4, 3)) if name == "limit" else "-")
    ax.text(
        limit_ms,
        0.97,
        f"limit {limit_ms:g} ",
        transform=ax.get_xaxis_transform(),
        ha="right",
        va="top",
        fontsize=8,
        color=RED,
    )
    ax.set_xlabel("milliseconds (logarithmic)", fontsize=8, color=MUTED)
    ax.grid(axis="y", color=GRID)
    note = f"{values.size:,} resets · median {_milliseconds(middle)} ms · p99 {_milliseconds(tail)} ms (thin lines)"
    title(ax, "Reset latency", note)
    return png(figure)


def steps_per_second(by_cell: Mapping[str, float]) -> bytes:
    """Environment steps a second in each cell.

    Raises:
        EvaluationError: no cell, or a figure that is not finite.
    """
    cells, values = list(by_cell), np.array(list(by_cell.values()), dtype=np.float64)
    if not cells or not np.isfinite(values).all():
        raise EvaluationError("steps a second must be finite, for at least one cell", cells=len(cells))
    millions = values.max() >= 1e6
    scaled = values / (1e6 if millions else 1e3)
    figure, (ax,) = new_figure(7.4, 2.5)
    ax.bar(range(len(cells)), scaled, color=BLUE, width=0.7)
    for column, value in enumerate(scaled):
        ax.text(
            column,
            value,
            f"{value:.2f}" if millions else f"{value:.0f}",
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=INK,
        )
    ax.set_xticks(range(len(cells)), [cell.replace("-", "\n") for cell in cells])
    ax.set_xlim(-0.6, len(cells) - 0.4)
    ax.set_ylim(0, float(scaled.max()) * 1.15 or 1.0)
    ax.grid(axis="y", color=GRID)
    title(ax, f"Environment steps a second, {'millions' if millions else 'thousands'}", "by cell, simulation alone")
    return png(figure)


def reward_histogram(edges: Sequence[float], counts: Sequence[int]) -> bytes:
    """Steps by reward, on a logarithmic axis of counts; the outermost bins hold what lies beyond.

    Raises:
        EvaluationError: the edges do not fit the counts, or no step.
    """
    if len(edges) != len(counts) + 1 or not sum(counts):
        raise EvaluationError("the edges do not fit the counts, or there is no step", edges=len(edges))
    figure, (ax,) = new_figure(7.4, 2.4)
    left, width = np.asarray(edges[:-1], dtype=np.float64), np.diff(edges)
    ax.bar(left + width / 2, counts, color=BLUE, width=width * 0.9)
    ax.set_yscale("symlog", linthresh=1)
    ax.set_xlabel("reward of a step", fontsize=8, color=MUTED)
    ax.grid(axis="y", color=GRID)
    title(ax, "Rewards", f"{sum(counts):,} steps")
    return png(figure)


def training_curve(
    steps: Sequence[float],
    series: Mapping[str, Sequence[float]],
    target: float | None = None,
    ylabel: str = "",
    unit: str = "environment steps",
) -> bytes:
    """One line a series over ``steps`` (counted in ``unit``), with an optional target; NaN leaves a gap.

    Raises:
        EvaluationError: no series, or one whose length differs from ``steps``.
    """
    if not series or not len(steps):
        raise EvaluationError("nothing to plot", remedy="train for at least one update")
    for name, values in series.items():
        if len(values) != len(steps):
            raise EvaluationError(f"series {name!r} has {len(values)} values for {len(steps)} steps")
    keep = thin(steps)
    scale, prefix = (
        (1e6, "millions of ") if max(steps) >= 2e6 else (1e3, "thousands of ") if max(steps) >= 2e3 else (1, "")
    )
    x = np.asarray(steps, dtype=np.float64)[keep] / scale
    figure, (ax,) = new_figure(7.4, 2.9)
    for colour, (name, values) in zip(SERIES * len(series), series.items(), strict=False):
        y = np.asarray(values, dtype=np.float64)[keep]
        ax.plot(x, y, color=colour, lw=1.6, label=_with_last(name, y), marker="o" if len(keep) < 30 else None, ms=3)
    if target is not None:
        ax.axhline(target, color=RED, lw=1, ls=(0, (4, 3)))
        ax.text(
            0.005, target, f"target {target:g}", transform=ax.get_yaxis_transform(), fontsize=8, color=RED, va="bottom"
        )
    ax.set_xlabel(f"{prefix}{unit}", fontsize=8, color=MUTED)
    ax.grid(axis="y", color=GRID)
    ax.margins(x=0.06)
    title(ax, ylabel or ", ".join(series))
    legend(ax, columns=min(len(series), 4))
    ax.get_legend().set_bbox_to_anchor((0.5, -0.2))
    return png(figure)


def _with_last(name: str, values: npt.NDArray[np.float64]) -> str:
    """The series' name with its last finite value."""
    finite = values[np.isfinite(values)]
    return f"{name}, last {finite[-1]:.3g}" if finite.size else name
