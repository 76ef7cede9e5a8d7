# ruff: noqa: INP001 - a script, not a module of a package
"""Makes templates.csv, splits.csv and disturbances.csv; running it again gives the same bytes.

    python data/make_data.py                 # all three; splits.csv only gains rows, nobody moves
    python data/make_data.py disturbances    # one of: templates, splits, disturbances

Choices are drawn from SHA-256 of what they are about, so they depend on no random-number generator.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from agentpipe.environments.catalog import (
    FAULT_MODES,
    SHARED,
    SPLIT_COLUMNS,
    TEMPLATE_COLUMNS,
    Template,
    load_splits,
    load_templates,
)
from agentpipe.environments.layout import PROTOCOLS, SENSOR_TYPES, TOPOLOGIES
from agentpipe.environments.parameters import INTENSITIES, KINDS, PARAMETER_NAMES, PARAMETERS
from agentpipe.environments.table import TableRow, table_from_rows, table_to_csv
from agentpipe.storage import write_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parent
LINES, TEMPLATES = 127, 683
HOLDOUT, VALIDATION = 200, 17  # templates; the last of the 17 is shared between training and validation
SHARED_CELLS = "sensor-1;network-2;load-3;sensor-4;network-5"
SIZES = (2, 3, 4, 4, 5, 5, 5, 6, 6, 7, 8, 9)  # fault modes a line is known for; corrected to TEMPLATES in all


def draw(*what: object) -> int:
    """A number in [0, 2^64) that depends on ``what`` only."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big")


# ------------------------------------------------------------------------------------------------ templates


def make_templates() -> list[Template]:
    """127 distinct lines with 683 distinct (line, fault mode)."""
    combinations = itertools.product(TOPOLOGIES, SENSOR_TYPES, PROTOCOLS)
    surveyed = sorted(combinations, key=lambda features: draw("line", features))[:LINES]
    sizes = [SIZES[draw("size", features) % len(SIZES)] for features in surveyed]
    for index in itertools.cycle(range(LINES)):
        if sum(sizes) == TEMPLATES:
            break
        step = 1 if sum(sizes) < TEMPLATES else -1
        if SIZES[0] < sizes[index] + step <= SIZES[-1]:
            sizes[index] += step
    used: Counter[tuple[str, str]] = Counter()  # (topology, mode) and ("", mode)
    templates: list[Template] = []
    for number, (features, size) in enumerate(zip(surveyed, sizes, strict=True), 1):
        topology = features[0]
        rarest = sorted(FAULT_MODES, key=lambda m: (used["", m] + 3 * used[topology, m], draw("mode", features, m)))
        for mode in sorted(rarest[:size], key=FAULT_MODES.index):
            used["", mode] += 1
            used[topology, mode] += 1
            machines = 7 + draw("machines", features) % 2
            templates.append(Template(f"t{len(templates) + 1:04d}", f"l{number:03d}", *features, mode, machines))
    return templates


# --------------------------------------------------------------------------------------------------- splits


def make_splits(templates: list[Template], kept: dict[str, list[str]]) -> dict[str, list[str]]:
    """Split rows by template id: those ``kept``, then those of new templates."""
    rows = dict(kept)
    if not rows:
        rows = first_splits(templates)
    line_split = {t.line_id: rows[t.template_id][1] for t in templates if t.template_id in rows}
    for template in templates:
        if template.template_id in rows:
            continue
        split = line_split.get(template.line_id, "")
        if not split or split == SHARED:  # a new line: hold-out or training, in the proportion of the first split
            split = "holdout" if draw("split", template.line_id) % TEMPLATES < HOLDOUT else "train"
        rows[template.template_id] = [template.template_id, split, ""]
    return rows


def first_splits(templates: list[Template]) -> dict[str, list[str]]:
    """Whole lines to hold-out (200 templates) and validation (17), spread over topology and fault mode."""
    lines: dict[str, list[Template]] = {}
    for template in templates:
        lines.setdefault(template.line_id, []).append(template)
    holdout = choose_lines(lines, HOLDOUT, "holdout")
    rest = {line: members for line, members in lines.items() if line not in holdout}
    validation = choose_lines(rest, VALIDATION, "validation")
    rows = {t.template_id: [t.template_id, "train", ""] for t in templates}
    for chosen, split in ((holdout, "holdout"), (validation, "validation")):
        for template in (t for line in sorted(chosen) for t in lines[line]):
            rows[template.template_id][1] = split
    last = max(t.template_id for line in validation for t in lines[line])
    rows[last] = [last, SHARED, SHARED_CELLS]
    return rows


def choose_lines(lines: dict[str, list[Template]], wanted: int, salt: str) -> set[str]:
    """Lines with ``wanted`` templates in all, spread evenly: the best of several starts, each improved by exchanges."""
    everyone = [template for members in lines.values() for template in members]
    target = {feature: count * wanted / len(everyone) for feature, count in features(everyone).items()}

    def unevenness(chosen: set[str]) -> float:
        have = features([template for line in chosen for template in lines[line]])
        return sum((have[feature] - share) ** 2 / share for feature, share in target.items())

    orders = [sorted(lines, key=lambda line, start=start: draw(salt, start, line)) for start in range(16)]
    starts = [chosen for order in orders if (chosen := fill(lines, order, wanted))]
    return min((improve(start, lines, unevenness) for start in starts), key=unevenness)


def improve(chosen: set[str], lines: dict[str, list[Template]], unevenness: Callable[[set[str]], float]) -> set[str]:
    """Exchanges lines of equal size and topology as long as that makes the choice more even."""
    while True:
        pairs = itertools.product(sorted(chosen), sorted(set(lines) - chosen))
        exchanges = [
            chosen - {a} | {b}
            for a, b in pairs
            if len(lines[a]) == len(lines[b]) and lines[a][0].topology == lines[b][0].topology
        ]
        best = min(exchanges, key=unevenness, default=chosen)
        if unevenness(best) >= unevenness(chosen) - 1e-9:
            return chosen
        chosen = best


def fill(lines: dict[str, list[Template]], order: list[str], wanted: int) -> set[str]:
    """Lines, early ones of ``order`` first, whose sizes add up to ``wanted`` exactly, even over topologies.

    As many lines as their share, but at least one a topology; empty when this order leads to none.
    """
    everyone = sum(len(members) for members in lines.values())
    number = max(len(TOPOLOGIES), round(len(lines) * wanted / everyone))
    most = -(-number // len(TOPOLOGIES))
    reached: dict[tuple[int, int], list[str]] = {(0, 0): []}
    for line in order:
        topology = lines[line][0].topology
        for (total, count), chosen in list(reached.items()):
            following = (total + len(lines[line]), count + 1)
            fits = following[0] <= wanted and following[1] <= number and following not in reached
            if fits and sum(lines[other][0].topology == topology for other in chosen) < most:
                reached[following] = [*chosen, line]
    return set(reached.get((wanted, number), ()))


def features(templates: list[Template]) -> Counter[str]:
    """How often each topology, fault mode, sensor type and protocol occurs."""
    return Counter(x for t in templates for x in (t.topology, t.fault_mode, t.sensor_type, t.protocol))


# --------------------------------------------------------------------------------------------- disturbances

# One value per intensity 1 … 5; intensity 3 holds the reference figures.
SCALES: dict[str, tuple[float, ...]] = {
    "sensor_sigma": (0.15, 0.3, 0.5, 0.75, 1.0),
    "sensor_cycle_amplitude": (0.005, 0.01, 0.02, 0.03, 0.05),
    "sensor_cycle_period_s": (60, 60, 60, 60, 60),
    "sensor_step_amplitude": (0.0025, 0.005, 0.01, 0.02, 0.04),
    "sensor_step_probability": (0.05, 0.05, 0.05, 0.05, 0.05),
    "sensor_impulse_sigma": (1.0, 2.0, 3.0, 4.0, 6.0),
    "sensor_impulse_probability": (0.002, 0.005, 0.01, 0.02, 0.04),
    "sensor_impulse_coupling": (0.005, 0.01, 0.02, 0.04, 0.08),
    "sensor_drift_sigma_per_min": (0.02, 0.05, 0.1, 0.2, 0.35),
    "sensor_stuck_probability": (0.001, 0.002, 0.005, 0.01, 0.02),
    "network_rtt_ms": (20, 60, 140, 280, 500),
    "network_jitter_ms": (5, 15, 40, 90, 180),
    "network_bandwidth_khz": (200, 100, 50, 25, 12),
    "network_snr_db": (25, 20, 15, 10, 6),
    "network_loss_good": (0.002, 0.005, 0.01, 0.02, 0.04),
    "network_loss_bad": (0.1, 0.2, 0.3, 0.45, 0.6),
    "network_to_bad_probability": (0.01, 0.02, 0.04, 0.06, 0.1),
    "network_to_good_probability": (0.5, 0.4, 0.3, 0.25, 0.2),
    "load_sigma": (0.0125, 0.025, 0.05, 0.08, 0.12),
    "load_spike_probability": (0.002, 0.005, 0.01, 0.02, 0.04),
    "load_spike_offset": (0.1, 0.2, 0.3, 0.5, 0.8),
    "load_cycle_amplitude": (0.01, 0.02, 0.05, 0.1, 0.15),
    "load_cycle_period_s": (120, 120, 120, 120, 120),
}
# A kind that is not at work: a quiet plant on a good network.
BACKGROUND = dict.fromkeys(PARAMETER_NAMES, 0.0) | {
    "sensor_cycle_period_s": 60.0,
    "network_rtt_ms": 5.0,
    "network_jitter_ms": 1.0,
    "network_bandwidth_khz": 1000.0,
    "network_snr_db": 30.0,
    "network_to_good_probability": 1.0,
    "load_cycle_period_s": 120.0,
}
# Variants 1 … 3 of a kind: what is stronger than in variant 0 (the plain scale) and what is weaker.
VARIANTS: dict[str, tuple[dict[str, float], ...]] = {
    "sensor": (
        {"sensor_sigma": 1.4, "sensor_impulse_probability": 0.5, "sensor_drift_sigma_per_min": 0.5},
        {"sensor_sigma": 0.7, "sensor_impulse_probability": 2.0, "sensor_impulse_coupling": 2.0},
        {"sensor_sigma": 0.7, "sensor_drift_sigma_per_min": 2.0, "sensor_stuck_probability": 2.0},
    ),
    "network": (
        {"network_rtt_ms": 1.4, "network_jitter_ms": 1.4, "network_loss_bad": 0.5},
        {"network_rtt_ms": 0.7, "network_to_bad_probability": 2.0, "network_to_good_probability": 0.7},
        {"network_bandwidth_khz": 0.5, "network_snr_db": 0.7, "network_loss_good": 0.5},
    ),
    "load": (
        {"load_sigma": 1.4, "load_spike_probability": 0.5, "load_cycle_amplitude": 0.5},
        {"load_sigma": 0.7, "load_spike_probability": 2.0, "load_spike_offset": 1.3},
        {"load_sigma": 0.7, "load_cycle_amplitude": 2.0, "load_cycle_period_s": 0.5},
    ),
}
MODERATE = 3  # compound rows: the other two kinds at the primary's intensity, this at most


def make_disturbances() -> list[TableRow]:
    """15 cells of five variants: the plain scale, three emphases, and one compound of all three kinds."""
    rows: list[TableRow] = []
    for kind, intensity in itertools.product(KINDS, INTENSITIES):
        emphases = ({}, *VARIANTS[kind])
        for variant, emphasis in enumerate(emphases):
            rows.append(row(kind, intensity, variant, {kind: intensity}, emphasis))
        levels = {other: min(intensity, MODERATE) for other in KINDS} | {kind: intensity}
        rows.append(row(kind, intensity, len(emphases), levels, {}))
    return rows


def row(kind: str, intensity: int, variant: int, levels: dict[str, int], emphasis: dict[str, float]) -> TableRow:
    """One row: each kind in ``levels`` at its level, scaled by ``emphasis``, the others at the background."""
    values = []
    for parameter in PARAMETERS:
        level = levels.get(parameter.name.partition("_")[0])
        value = BACKGROUND[parameter.name] if level is None else SCALES[parameter.name][level - 1]
        value = min(max(value * emphasis.get(parameter.name, 1.0), parameter.low), parameter.high)
        values.append(float(f"{value:.4g}"))
    return TableRow(kind, intensity, variant, tuple(values))


# ----------------------------------------------------------------------------------------------------- main


def csv_bytes(columns: tuple[str, ...], rows: list[list[str]]) -> bytes:
    """Comma-separated lines."""
    return "".join(",".join(line) + "\n" for line in [list(columns), *rows]).encode()


def main(folder: Path, which: set[str]) -> None:
    """Writes the files named in ``which`` (empty: all) into ``folder``."""
    if not which or "templates" in which:
        lines = [[str(getattr(template, name)) for name in TEMPLATE_COLUMNS] for template in make_templates()]
        write_bytes(folder / "templates.csv", csv_bytes(TEMPLATE_COLUMNS, lines))
    if not which or "splits" in which:
        path = folder / "splits.csv"
        found = load_splits(path) if path.exists() else {}
        kept = {name: [name, split.split, ";".join(split.validation_cells)] for name, split in found.items()}
        rows = make_splits(list(load_templates(folder / "templates.csv")), kept)
        write_bytes(path, csv_bytes(SPLIT_COLUMNS, list(rows.values())))
    if not which or "disturbances" in which:
        write_bytes(folder / "disturbances.csv", table_to_csv(table_from_rows(make_disturbances())))


if __name__ == "__main__":
    main(FOLDER, set(sys.argv[1:]))
