"""Where the orchestrator went, over time: heat maps of its log as PNG bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.compound import LEVELS
from agentpipe.errors import EvaluationError
from agentpipe.evaluation.canvas import INK, LIMIT, MUTED, new_figure, png, title
from agentpipe.evaluation.tables import percent
from agentpipe.learning.aids.orchestrator_bandit import levels_of_arm
from agentpipe.learning.aids.orchestrator_log import (
    CLASSES,
    REASONS,
    chance_shares,
    class_of,
    coupling_shares,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS: Final = 60
"""decisions side by side; of more, so many spans of decisions"""
FULL: Final = 200_000
"""Most bytes of the large picture."""


def steering_over_time(rows: npt.NDArray[Any], limit: int = LIMIT) -> bytes:
    """Share of the moves, and the policy's mean entropy there, for each class of combinations over updates.

    Args:
        rows: of the log, :data:`~agentpipe.learning.aids.orchestrator_log.ROW`.
        limit: most bytes.

    Raises:
        EvaluationError: no decision yet.
    """
    updates, shares, entropy = _over_time(rows)
    figure, (left, right) = new_figure(8.6, 3.1, columns=2)
    both = "sensor × network or more"
    chosen = coupling_shares(rows, [reason for reason in REASONS if reason != "floor"])[both]
    share = percent(chosen if np.isfinite(chosen) else None)
    note = f"sensor and network disturbed: {share} · by chance {percent(chance_shares()[both])}"
    _heat(left, shares, updates, "Blues", "share of the moves")
    title(left, "Where training environments were steered", note)
    _heat(right, entropy, updates, "YlOrBr", "nats")
    title(right, "Entropy of the policy there", "mean over decisions with a choice · grey: nobody was there")
    right.set_yticks([])
    return png(figure, limit)


def steering_by_level(rows: npt.NDArray[Any], limit: int = LIMIT) -> bytes:
    """Share of the bandit's own moves (without the floor) by levels of each pair of kinds, over the whole log.

    Args:
        rows: of the log.
        limit: most bytes.

    Raises:
        EvaluationError: no decision yet.
    """
    moves = rows[rows["reason"] != REASONS.index("floor")]
    if not len(moves):
        raise EvaluationError("nothing to plot", remedy="train until the orchestrator has decided")
    levels, weights = levels_of_arm(moves["arm"].astype(np.int64)), moves["environments"]
    figure, axes = new_figure(8.6, 3.1, columns=3)
    pairs = ((0, 1, "sensor", "network"), (0, 2, "sensor", "load"), (1, 2, "network", "load"))
    tables = [_pair(levels[:, one], levels[:, other], weights) for one, other, *_ in pairs]
    highest = max(float(table.max()) for table in tables)
    for ax, table, (_, _, down, across) in zip(axes, tables, pairs, strict=True):
        ax.imshow(table, cmap="Blues", vmin=0, vmax=highest, origin="lower", aspect="auto")
        for row, column in np.ndindex(table.shape):
            ink = "white" if table[row, column] > 0.6 * highest else INK
            text = f"{100 * table[row, column]:.0f}" if table[row, column] >= 0.005 else ""
            ax.text(column, row, text, ha="center", va="center", fontsize=7.5, color=ink)
        ax.set_xticks(range(LEVELS))
        ax.set_yticks(range(LEVELS))
        ax.set_xlabel(f"{across} level", fontsize=8, color=MUTED)
        ax.set_ylabel(f"{down} level", fontsize=8, color=MUTED)
        ax.spines[:].set_visible(False)
        title(ax, f"{down} × {across}, %")
    return png(figure, limit)


def _pair(
    down: npt.NDArray[np.int8], across: npt.NDArray[np.int8], weights: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """f64[6, 6]: share of the moves at each pair of levels."""
    cells = np.bincount(down.astype(np.int64) * LEVELS + across, weights, LEVELS**2)
    table: npt.NDArray[np.float64] = cells.reshape(LEVELS, LEVELS) / cells.sum()
    return table


def _over_time(
    rows: npt.NDArray[Any],
) -> tuple[list[int], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """First update of each column, and f64[8, columns] each: shares of the moves and mean entropies, NaN = none."""
    if not len(rows):
        raise EvaluationError("nothing to plot", remedy="train until the orchestrator has decided")
    updates, number = np.unique(rows["update"], return_inverse=True)
    span = -(-len(updates) // COLUMNS)
    column, count = number.reshape(-1) // span, -(-len(updates) // span)
    cell = class_of(rows["arm"]) * count + column
    size = len(CLASSES) * count
    sums = [np.bincount(cell, rows[name], size) for name in ("environments", "entropy", "decisions")]
    moves, entropy, decisions = (each.astype(np.float64).reshape(len(CLASSES), count) for each in sums)
    means: npt.NDArray[np.float64] = np.full_like(entropy, np.nan)
    np.divide(entropy, decisions, out=means, where=decisions > 0)
    return updates[::span].tolist(), moves / np.maximum(moves.sum(axis=0), 1), means


def _heat(
    ax: Any,  # noqa: ANN401 - matplotlib publishes no types
    values: npt.NDArray[np.float64],
    updates: Sequence[int],
    colours: str,
    unit: str,
) -> None:
    """One heat map: classes down, updates across, with its scale beside it."""
    from matplotlib import colormaps

    shades = colormaps[colours].with_extremes(bad="#d5d9de")
    lowest = 0.0 if unit != "nats" or not np.isfinite(values).any() else float(np.nanmin(values))
    highest = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    image = ax.imshow(values, cmap=shades, vmin=lowest, vmax=max(highest, lowest + 1e-6), aspect="auto")
    ax.set_yticks(range(len(CLASSES)), CLASSES, color=INK, fontsize=8)
    ticks = sorted({round(place) for place in np.linspace(0, len(updates) - 1, min(5, len(updates)))})
    ax.set_xticks(ticks, [str(updates[tick]) for tick in ticks])
    ax.set_xlabel("update", fontsize=8, color=MUTED)
    ax.spines[:].set_visible(False)
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02, fraction=0.06)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=7, length=0)
    bar.set_label(unit, fontsize=7.5, color=MUTED)
