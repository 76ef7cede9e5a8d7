"""The environment catalogue: templates × disturbance kinds × intensities, split by whole templates (S1).

The split is read from an append-only file, so that adding templates moves nobody. Disjointness is asserted at load and
is recorded with every result that speaks of the hold-out.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from agentpipe.environments.csvio import CsvRow, read_csv
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import MACHINES, MODES, PROTOCOLS, SENSOR_TYPES, TOPOLOGIES
from agentpipe.environments.parameters import CELLS, INTENSITIES, KINDS, cell_name
from agentpipe.errors import CatalogError
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

SPLITS = ("train", "validation", "holdout")
SHARED = "shared"  # one template: the named cells validate, the others train
FAULT_MODES = tuple(mode for mode in MODES if mode != "false_alarm")
TEMPLATE_COLUMNS = ("template_id", "line_id", "topology", "sensor_type", "protocol", "fault_mode", "machines")
SPLIT_COLUMNS = ("template_id", "split", "validation_cells")
K = TypeVar("K")
MACHINES_LOW = 7  # with five channels each at least 35 sensor channels over the line


@dataclass(frozen=True)
class Template:
    """One surveyed line with the fault mode it is known for; ``machines`` counts its machines."""

    template_id: str
    line_id: str
    topology: str
    sensor_type: str
    protocol: str
    fault_mode: str
    machines: int


@dataclass(frozen=True)
class EnvironmentSpec:
    """One environment: a template under one disturbance kind and intensity.

    ``index`` is its place in the whole catalogue (template row × 15 + cell) and part of every random-number key, so it
    is the same in a thinned catalogue.
    """

    environment_id: str
    index: int
    template: Template
    kind: str
    intensity: int
    split: str

    @property
    def cell(self) -> str:
        """The partition key, such as ``sensor-3``."""
        return cell_name(self.kind, self.intensity)


@dataclass(frozen=True)
class Assignment:
    """Which split a template is in; ``validation_cells`` only where ``split`` is ``shared``."""

    split: str
    validation_cells: tuple[str, ...] = ()

    def of(self, cell: str) -> str:
        """The split of the template's environment in ``cell``."""
        if self.split != SHARED:
            return self.split
        return "validation" if cell in self.validation_cells else "train"


class Catalog:
    """All environments, in order of ``index``; immutable.

    Args:
        environments: Checked and disjoint, see :func:`build_catalog`.
    """

    def __init__(self, environments: Sequence[EnvironmentSpec]) -> None:
        self._environments = tuple(environments)
        self._by_id = {environment.environment_id: environment for environment in self._environments}
        self.templates: tuple[Template, ...] = tuple(dict.fromkeys(e.template for e in self._environments))
        self.disjointness = _assert_disjoint(self._environments)

    def __len__(self) -> int:
        return len(self._environments)

    def environments(self, split: str | None = None, cell: str | None = None) -> tuple[EnvironmentSpec, ...]:
        """The environments of a split and a cell (``None``: all), in order of index.

        Raises:
            CatalogError: no such split or cell.
        """
        _known(split, SPLITS, "split")
        _known(cell, CELLS, "cell")
        return self._select(split, cell)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - catalogues are few and live as long as the process
    def _select(self, split: str | None, cell: str | None) -> tuple[EnvironmentSpec, ...]:
        chosen = (e for e in self._environments if split is None or e.split == split)
        return tuple(e for e in chosen if cell is None or e.cell == cell)

    def environment(self, environment_id: str) -> EnvironmentSpec:
        """One environment by id.

        Raises:
            CatalogError: no such environment.
        """
        try:
            return self._by_id[environment_id]
        except KeyError:
            remedy = "an id looks like t0001.sensor-3; see data/templates.csv"
            raise CatalogError(f"unknown environment {environment_id!r}", remedy=remedy) from None

    def counts(self) -> dict[str, int]:
        """Environments per split."""
        found = Counter(environment.split for environment in self._environments)
        return {split: found[split] for split in SPLITS}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of what every environment is and which split it is in."""
        content = [
            [e.environment_id, e.index, e.split, *(getattr(e.template, name) for name in TEMPLATE_COLUMNS)]
            for e in self._environments
        ]
        return digest_bytes(canonical_json(content))

    def thin(self, train: int, validation: int, holdout: int) -> Catalog:
        """A smaller catalogue: so many environments of each split, even over cells and spread over templates.

        Environments keep their ids and indexes. The choice is deterministic.

        Raises:
            CatalogError: a number is below 1 or above what the split has.
        """
        wanted = {"train": train, "validation": validation, "holdout": holdout}
        chosen: list[EnvironmentSpec] = []
        for split, count in wanted.items():
            have = len(self.environments(split))
            if not 1 <= count <= have:
                message = f"catalogue too small: {count} {split} environments wanted, {have} there"
                raise CatalogError(message, field=split, remedy=f"ask for 1 … {have}, or add templates")
            chosen += _spread(self, split, count)
        return Catalog(_by_index(chosen))

    def spread(self, split: str, most: int) -> tuple[EnvironmentSpec, ...]:
        """At most ``most`` environments of a split, even over cells and spread over templates, in order of index."""
        return tuple(_by_index(_spread(self, split, min(most, len(self.environments(split))))))


def load_catalog(folder: Path | None = None) -> Catalog:
    """Reads ``templates.csv`` and ``splits.csv`` from ``folder`` (``None``: the project's data files).

    Raises:
        CatalogError: anything wrong with them, naming file, row and field; a template without a split; a split without
            environments.
    """
    folder = data_dir() if folder is None else folder
    templates = load_templates(folder / "templates.csv")
    assignments = load_splits(folder / "splits.csv")
    return build_catalog(templates, assignments, source=folder / "splits.csv")


def load_templates(path: Path) -> tuple[Template, ...]:
    """Reads the templates, in file order; raises ``CatalogError``."""
    content = read_csv(path, columns=TEMPLATE_COLUMNS, error=CatalogError)
    ids: dict[str, int] = {}
    faults: dict[tuple[str, str], int] = {}
    lines: dict[str, tuple[object, ...]] = {}
    surveyed: dict[tuple[object, ...], str] = {}
    templates: list[Template] = []
    for row in content.rows:
        template = _parse_template(row)
        _refuse_double(row, ids, template.template_id, "template_id")
        _refuse_double(row, faults, (template.line_id, template.fault_mode), "fault_mode")
        features = (template.topology, template.sensor_type, template.protocol)
        if lines.setdefault(template.line_id, (*features, template.machines)) != (*features, template.machines):
            remedy = "topology, sensor type, protocol and machines belong to the line: make its rows agree"
            raise row.fail(f"line {template.line_id} is described in two ways", "line_id", remedy)
        if surveyed.setdefault(features, template.line_id) != template.line_id:
            remedy = "topology × sensor type × protocol names one line: use its line_id"
            raise row.fail(f"same line as {surveyed[features]}", "line_id", remedy)
        templates.append(template)
    return tuple(templates)


def _parse_template(row: CsvRow) -> Template:
    template_id = row.text("template_id")
    if not template_id.replace("-", "").replace("_", "").isalnum():
        raise row.fail(f"template_id {template_id!r} is malformed", "template_id", "use letters, digits, - and _")
    return Template(
        template_id,
        row.text("line_id"),
        row.choice("topology", TOPOLOGIES),
        row.choice("sensor_type", SENSOR_TYPES),
        row.choice("protocol", PROTOCOLS),
        row.choice("fault_mode", FAULT_MODES),
        row.whole("machines", MACHINES_LOW, MACHINES),
    )


def _refuse_double(row: CsvRow, seen: dict[K, int], key: K, field: str) -> None:
    if key in seen:
        raise row.fail(f"{field} {key} occurs twice", field, f"remove it here or in row {seen[key]}")
    seen[key] = row.number


def load_splits(path: Path) -> dict[str, Assignment]:
    """Reads the split file: assignment by template id; raises ``CatalogError``."""
    content = read_csv(path, columns=SPLIT_COLUMNS, error=CatalogError)
    assignments: dict[str, Assignment] = {}
    seen: dict[str, int] = {}
    for row in content.rows:
        template_id = row.text("template_id")
        _refuse_double(row, seen, template_id, "template_id")
        split = row.choice("split", (*SPLITS, SHARED))
        cells = tuple(cell for cell in row.cells["validation_cells"].split(";") if cell)
        for cell in cells:
            if cell not in CELLS:
                raise row.fail(f"unknown cell {cell!r}", "validation_cells", f"use some of: {', '.join(CELLS)}")
        if (split == SHARED) != (0 < len(set(cells)) < len(CELLS)):
            remedy = "name some cells, not all, where the split is shared, and none elsewhere"
            raise row.fail("validation_cells does not fit the split", "validation_cells", remedy)
        assignments[template_id] = Assignment(split, cells)
    return assignments


def build_catalog(
    templates: Iterable[Template], assignments: Mapping[str, Assignment], source: object = None
) -> Catalog:
    """Every template under every cell, with its split.

    Raises:
        CatalogError: a template without an assignment, an assignment without a template, a split without environments.
    """
    templates = tuple(templates)
    unknown = sorted(set(assignments) - {template.template_id for template in templates})
    if unknown:
        message = f"split file names unknown template {unknown[0]}"
        remedy = "restore the template: the split file is append-only and templates are never removed"
        raise CatalogError(message, file=source, field="template_id", remedy=remedy)
    environments: list[EnvironmentSpec] = []
    for template in templates:
        assignment = assignments.get(template.template_id)
        if assignment is None:
            message = f"template {template.template_id} has no split"
            remedy = "append it: python data/make_data.py splits"
            raise CatalogError(message, file=source, field="template_id", remedy=remedy)
        for kind in KINDS:
            for intensity in INTENSITIES:
                cell = cell_name(kind, intensity)
                name = f"{template.template_id}.{cell}"
                spec = EnvironmentSpec(name, len(environments), template, kind, intensity, assignment.of(cell))
                environments.append(spec)
    present = {environment.split for environment in environments}
    for split in SPLITS:
        if split not in present:
            message = f"catalogue too small to split: no {split} environment among {len(environments)}"
            raise CatalogError(message, file=source, field="split", remedy="add templates, then append their splits")
    return Catalog(environments)


def _assert_disjoint(environments: Sequence[EnvironmentSpec]) -> dict[str, int | bool]:
    """What is recorded with every result; raises ``CatalogError`` when something held out is seen elsewhere."""
    ids: dict[str, set[str]] = {split: set() for split in SPLITS}
    templates: dict[str, set[str]] = {split: set() for split in SPLITS}
    lines: dict[str, set[str]] = {split: set() for split in SPLITS}
    for environment in environments:
        ids[environment.split].add(environment.environment_id)
        templates[environment.split].add(environment.template.template_id)
        lines[environment.split].add(environment.template.line_id)
    seen = templates["train"] | templates["validation"]
    shared_ids = len(environments) - len(set().union(*ids.values()))
    overlap = sorted(templates["holdout"] & seen)
    if shared_ids or overlap:
        where = overlap[0] if overlap else "an environment id occurs twice"
        remedy = "restore the split file: hold-out templates are whole and never trained on"
        raise CatalogError(f"the splits overlap: {where}", field="split", remedy=remedy)
    return {
        "disjoint": True,
        "environments_in_two_splits": 0,
        "holdout_templates_seen_elsewhere": 0,
        "holdout_lines_seen_in_training": len(lines["holdout"] & lines["train"]),
        **{f"{split}_environments": len(ids[split]) for split in SPLITS},
        **{f"{split}_templates": len(templates[split]) for split in SPLITS},
    }


def _by_index(environments: list[EnvironmentSpec]) -> list[EnvironmentSpec]:
    return sorted(environments, key=lambda environment: environment.index)


def _spread(catalog: Catalog, split: str, count: int) -> list[EnvironmentSpec]:
    """``count`` environments of a split, even over cells; each cell starts at another template."""
    by_cell = {cell: catalog.environments(split, cell) for cell in CELLS}
    quota = dict.fromkeys(CELLS, 0)
    left = count
    while left:
        for cell in CELLS:
            if left and quota[cell] < len(by_cell[cell]):
                quota[cell] += 1
                left -= 1
    chosen: list[EnvironmentSpec] = []
    for position, cell in enumerate(CELLS):
        pool, share = by_cell[cell], quota[cell]
        shift = position * len(pool) // (share * len(CELLS)) if share else 0
        chosen += [pool[(k * len(pool) // share + shift) % len(pool)] for k in range(share)]
    return chosen


def _known(value: str | None, allowed: Sequence[str], field: str) -> None:
    if value is not None and value not in allowed:
        raise CatalogError(f"unknown {field} {value!r}", field=field, remedy=f"use one of: {', '.join(allowed)}")
