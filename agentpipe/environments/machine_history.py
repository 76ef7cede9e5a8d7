"""A machine-history table as a line profile (S6): class-conditional means, covariances and prevalences of its modes.

Made for UCI's AI4I 2020 and tables like it: numeric channel columns, a 0/1 failure flag and a 0/1 column for each mode.
A signature is fitted from the rows that fail in that mode alone. What is tolerated, set aside or not fitted is
reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.environments.csvio import CsvFile, read_csv
from agentpipe.environments.history_columns import Columns, classify, plain, unit_of
from agentpipe.environments.layout import CHANNELS, PHYSICAL_MODES
from agentpipe.environments.line_profile import DEFAULT_STRUCTURAL, Channel, LineProfile, Mode
from agentpipe.errors import MachineHistoryError

if TYPE_CHECKING:
    from pathlib import Path

MIN_HEALTHY = 50
MIN_MODE_ROWS = 2 * CHANNELS
FULL_ROWS = 10 * CHANNELS  # from here on a covariance is taken as it is
_EIGENVALUE_FLOOR = 1e-6

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Sorted:
    """Rows by what they can be used for; all masks bool[rows], disjoint but for ``by_mode``."""

    healthy: Mask
    single: Mask
    several: Mask
    unnamed: Mask
    contradictory: Mask
    incomplete: Mask
    repeated: Mask
    by_mode: dict[str, Mask]


def fit_profile(path: Path, *, failure_column: str | None = None) -> LineProfile:
    """Fits a line profile from a machine-history CSV.

    Healthy rows (no failure, no mode) give each channel's mean and standard deviation (n − 1). A mode's ``shift``
    is (mean of its clean rows − healthy mean) / healthy SD, its ``covariance`` the sample covariance in the same units,
    below 50 rows shrunk towards the healthy one. Prevalences count failing rows, those of several modes in equal parts.

    Args:
        path: The table.
        failure_column: The failure flag's header (``None``: found by its name).

    Raises:
        MachineHistoryError: an unreadable table, no failure flag, no mode, fewer than five channels, too few healthy
            rows, or no mode with enough clean rows.
    """
    content = read_csv(path, error=MachineHistoryError, final_line_break=False)
    columns = classify(content, failure_column)
    rows = _sort(content, columns)
    if rows.healthy.sum() < MIN_HEALTHY:
        message = f"{rows.healthy.sum()} healthy rows, at least {MIN_HEALTHY} needed"
        raise MachineHistoryError(message, file=path, field=columns.flag_name, remedy="give a longer history")
    clean = {name: rows.single & rows.by_mode[name] for name in columns.modes}
    fitted, unfitted = _choose_modes(columns, clean)
    if not fitted:
        reasons = "; ".join(f"{entry['mode']}: {entry['reason']}" for entry in unfitted)
        remedy = f"give a table with at least {MIN_MODE_ROWS} rows that fail in one mode alone"
        raise MachineHistoryError(f"no mode could be fitted ({reasons})", file=path, remedy=remedy)
    chosen, scores = _choose_channels(columns, rows.healthy, [clean[name] for name in fitted], path)
    data = np.column_stack([columns.channels[name] for name in chosen])
    mean, sd = data[rows.healthy].mean(axis=0), data[rows.healthy].std(axis=0, ddof=1)
    scaled = (data - mean) / sd
    healthy = _floored(np.cov(scaled[rows.healthy], rowvar=False))
    shares = _prevalences(fitted, rows)
    modes = tuple(
        Mode(name, *_signature(scaled[clean[name]], healthy), shares[name], int(clean[name].sum())) for name in fitted
    )
    channels = tuple(
        Channel(name, unit_of(header), float(m), float(s))
        for name, header, m, s in zip(_unique_names(chosen), chosen, mean, sd, strict=True)
    )
    report = _report(content, columns, rows, modes, unfitted, chosen, scores)
    return LineProfile(path.stem, channels, healthy, modes, dict(DEFAULT_STRUCTURAL), report)


def _sort(content: CsvFile, columns: Columns) -> _Sorted:
    modes = np.column_stack(list(columns.modes.values()))
    numbers = np.column_stack([columns.flag, modes, *columns.channels.values()])
    incomplete: Mask = np.asarray(np.isnan(numbers).any(axis=1))
    repeated = _repeated(content, columns) & ~incomplete
    usable = ~incomplete & ~repeated
    failed, count = columns.flag == 1, (modes == 1).sum(axis=1)
    return _Sorted(
        healthy=usable & ~failed & (count == 0),
        single=usable & failed & (count == 1),
        several=usable & failed & (count > 1),
        unnamed=usable & failed & (count == 0),
        contradictory=usable & ~failed & (count > 0),
        incomplete=incomplete,
        repeated=repeated,
        by_mode={name: usable & (values == 1) for name, values in columns.modes.items()},
    )


def _repeated(content: CsvFile, columns: Columns) -> Mask:
    """Rows equal to an earlier one in every cell; only where rows carry an identifier can that be told."""
    found = np.zeros(len(content.rows), dtype=np.bool_)
    if not columns.identifiers:
        return found
    seen: set[tuple[str, ...]] = set()
    for index, row in enumerate(content.rows):
        key = tuple(row.cells.values())
        found[index] = key in seen
        seen.add(key)
    return found


def _choose_modes(columns: Columns, clean: dict[str, Mask]) -> tuple[list[str], list[dict[str, Any]]]:
    """The modes to fit, in file order, and why the others are not."""
    enough = [name for name in columns.modes if clean[name].sum() >= MIN_MODE_ROWS]
    kept = sorted(enough, key=lambda name: -int(clean[name].sum()))[:PHYSICAL_MODES]
    unfitted = []
    for name, values in columns.modes.items():
        if name in kept:
            continue
        rows, named = int(clean[name].sum()), int(np.nansum(values))
        without = int(((values == 1) & (columns.flag == 0)).sum())
        reason = f"only {PHYSICAL_MODES} modes have a place, this one has the fewest rows"
        if name not in enough:
            reason = f"{rows} clean rows of {named}, {MIN_MODE_ROWS} needed"
            reason += f"; {without} rows name it without a failure" if without else ""
        unfitted.append({"mode": name, "rows": rows, "rows_named": named, "reason": reason})
    return [name for name in enough if name in kept], unfitted


def _choose_channels(
    columns: Columns, healthy: Mask, clean: list[Mask], path: Path
) -> tuple[list[str], dict[str, float]]:
    """The five channels that tell most, in file order, and every channel's score.

    The score of a channel is the Kullback-Leibler divergence of N(shift, variance) from N(0, 1), summed over modes.
    """
    scores: dict[str, float] = {}
    for name, values in columns.channels.items():
        mean, sd = values[healthy].mean(), values[healthy].std(ddof=1)
        if sd > 0:
            scaled = [(values[rows] - mean) / sd for rows in clean]
            scores[name] = sum(_divergence(float(x.mean()), max(float(x.var(ddof=1)), 1e-6)) for x in scaled)
    if len(scores) < CHANNELS:
        message = f"only {len(scores)} channel columns vary among healthy rows, {CHANNELS} needed"
        raise MachineHistoryError(message, file=path, remedy="give a table with more sensor columns")
    best = set(sorted(scores, key=lambda name: -scores[name])[:CHANNELS])
    return [name for name in scores if name in best], scores


def _divergence(shift: float, variance: float) -> float:
    return 0.5 * (shift**2 + variance - 1 - float(np.log(variance)))


def _signature(scaled: Floats, healthy: Floats) -> tuple[Floats, Floats]:
    """Mean f64[C] and covariance f64[C, C] of a mode's clean rows, in healthy standard deviations."""
    weight = shrinkage(len(scaled))
    covariance = (1 - weight) * np.cov(scaled, rowvar=False) + weight * healthy
    return scaled.mean(axis=0), _floored(covariance)


def shrinkage(rows: int) -> float:
    """Weight of the healthy covariance in a mode's: 0 from 50 rows on, 0.5 at the 10 rows that are the least."""
    return 0.5 * max(0, FULL_ROWS - rows) / (FULL_ROWS - MIN_MODE_ROWS)


def _floored(covariance: Floats) -> Floats:
    """Symmetric, with no eigenvalue below 1e-6, so that a Cholesky factor exists."""
    symmetric = (covariance + covariance.T) / 2
    lowest = float(np.linalg.eigvalsh(symmetric)[0])
    lift = max(0.0, _EIGENVALUE_FLOOR - lowest)
    floored: Floats = symmetric + lift * np.eye(len(symmetric))
    return floored


def _prevalences(fitted: list[str], rows: _Sorted) -> dict[str, float]:
    """Each fitted mode's share of all faults and alarms; structural modes keep the project's shares."""
    failing = rows.single | rows.several
    marks = np.column_stack([rows.by_mode[name] & failing for name in fitted]).astype(np.float64)
    count = marks.sum(axis=1, keepdims=True)
    weights = np.divide(marks, count, out=np.zeros_like(marks), where=count > 0).sum(axis=0)
    physical = 1.0 - sum(DEFAULT_STRUCTURAL.values())
    return {name: float(physical * weight / weights.sum()) for name, weight in zip(fitted, weights, strict=True)}


def _unique_names(headers: list[str]) -> list[str]:
    names: list[str] = []
    for header in headers:
        name = plain(header) or "channel"
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def _report(
    content: CsvFile,
    columns: Columns,
    rows: _Sorted,
    modes: tuple[Mode, ...],
    unfitted: list[dict[str, Any]],
    chosen: list[str],
    scores: dict[str, float],
) -> dict[str, Any]:
    """What was fitted, from how many rows, what was set aside and why, what could not be fitted."""
    aside = [
        ("failure without a mode", rows.unnamed, "not used"),
        ("mode without a failure", rows.contradictory, "not used"),
        ("several modes at once", rows.several, "counted in equal parts for prevalences, not used for signatures"),
        ("a cell is empty", rows.incomplete, "not used"),
        ("identical to an earlier row", rows.repeated, "not used"),
    ]
    notes = list(content.notes)
    if columns.flag_name != "Machine failure":
        notes.append(f"header {columns.flag_name!r} read as the failure flag")
    return {
        "source": content.path.name,
        "source_sha256": content.sha256,
        "notes": notes,
        "rows": len(content.rows),
        "rows_used": int((rows.healthy | rows.single).sum()),
        "healthy_rows": int(rows.healthy.sum()),
        "failure_column": columns.flag_name,
        "modes_fitted": [
            {
                "mode": mode.name,
                "rows": mode.rows,
                "prevalence": mode.prevalence,
                "largest_shift": float(np.abs(mode.shift).max()),
                "covariance_shrinkage": shrinkage(mode.rows),
            }
            for mode in modes
        ],
        "modes_not_fitted": unfitted,
        "rows_set_aside": [
            {"reason": reason, "rows": int(mask.sum()), "use": use} for reason, mask, use in aside if mask.any()
        ],
        "channels": chosen,
        "channels_not_used": {
            name: f"less informative (score {scores[name]:.2f})"
            if name in scores
            else "does not vary among healthy rows"
            for name in columns.channels
            if name not in chosen
        },
        "columns_ignored": columns.ignored,
        "not_fitted_from_data": "prevalences of sensor_failure, plc_overload and false_alarm are the project's own",
    }
