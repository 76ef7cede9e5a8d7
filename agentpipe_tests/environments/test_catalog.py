"""The catalogue has the shape the design names, its split is fixed and disjoint, and bad files are refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.environments.catalog import (
    FAULT_MODES,
    SPLITS,
    Assignment,
    Template,
    build_catalog,
    load_catalog,
    load_splits,
    load_templates,
)
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import CatalogError, InputError
from agentpipe_tests.strategies import REPOSITORY

CATALOG = load_catalog()
DIGEST = "60ca1cf2"  # changes only when the catalogue is meant to change


@pytest.fixture
def folder(tmp_path):
    for name in ("templates.csv", "splits.csv"):
        shutil.copy(data_dir() / name, tmp_path / name)
    return tmp_path


def templates(*splits):
    """A catalogue of one template for each split given."""
    made = [Template(f"t{i}", f"l{i}", "serial", "smart_hart", "profinet", "p0", 7) for i in range(len(splits))]
    return made, {f"t{i}": Assignment(split) for i, split in enumerate(splits)}


# ------------------------------------------------------------------------------------------------------------- shape


def test_683_templates_of_127_lines_give_10245_environments():
    lines = {t.line_id for t in CATALOG.templates}
    features = {(t.topology, t.sensor_type, t.protocol) for t in CATALOG.templates}
    faults = {(t.topology, t.sensor_type, t.protocol, t.fault_mode) for t in CATALOG.templates}
    assert (len(CATALOG.templates), len(lines), len(features), len(faults)) == (683, 127, 127, 683)
    assert len(CATALOG) == 10_245
    assert {t.fault_mode for t in CATALOG.templates} == set(FAULT_MODES)
    assert {t.machines for t in CATALOG.templates} == {7, 8}


def test_split_sizes_are_exact():
    assert CATALOG.counts() == {"train": 7_000, "validation": 245, "holdout": 3_000}
    whole = Counter(assignment.split for assignment in load_splits(data_dir() / "splits.csv").values())
    assert whole == {"train": 466, "validation": 16, "holdout": 200, "shared": 1}


def test_split_is_stratified_by_cell():
    for cell in CELLS:
        sizes = {split: len(CATALOG.environments(split, cell)) for split in SPLITS}
        assert sizes["holdout"] == 200
        assert sizes["train"] in (466, 467)
        assert sizes["validation"] == 683 - 200 - sizes["train"]


def test_shared_template_gives_ten_to_training_and_five_to_validation():
    train = {e.template for e in CATALOG.environments("train")}
    (shared,) = train & {e.template for e in CATALOG.environments("validation")}
    counts = Counter(e.split for e in CATALOG.environments() if e.template == shared)
    assert counts == {"train": 10, "validation": 5}


def test_holdout_lines_are_never_trained_on_and_are_spread():
    assert CATALOG.disjointness["disjoint"] is True
    assert CATALOG.disjointness["holdout_lines_seen_in_training"] == 0
    held = {e.template for e in CATALOG.environments("holdout")}
    assert len(held) == 200
    for feature, values in (("topology", 6), ("fault_mode", 9), ("sensor_type", 5), ("protocol", 5)):
        counts = Counter(getattr(template, feature) for template in held)
        assert len(counts) == values
        assert min(counts.values()) > 0.6 * 200 / values


def test_validation_sees_every_topology_and_fault_mode():
    seen = {e.template for e in CATALOG.environments("validation")}
    assert {t.topology for t in seen} == {t.topology for t in CATALOG.templates}
    assert {t.fault_mode for t in seen} == set(FAULT_MODES)


def test_index_and_id_are_those_of_the_whole_catalogue():
    for position, environment in enumerate(CATALOG.environments()):
        assert environment.index == position
        assert environment.environment_id == f"{environment.template.template_id}.{environment.cell}"
    assert CATALOG.environment("t0001.sensor-1").index == 0
    assert CATALOG.environments()[17].cell == CELLS[2]


def test_digest_is_fixed():
    assert CATALOG.digest.startswith(DIGEST)


@pytest.mark.parametrize("ask", [{"split": "test"}, {"cell": "sensor-9"}])
def test_unknown_split_or_cell(ask):
    with pytest.raises(CatalogError, match="unknown"):
        CATALOG.environments(**ask)


def test_unknown_environment():
    with pytest.raises(CatalogError, match="unknown environment"):
        CATALOG.environment("t9999.sensor-1")


# -------------------------------------------------------------------------------------------------------------- thin


def test_thinned_catalogue_is_even_over_cells_and_spread_over_templates():
    thin = CATALOG.thin(360, 45, 150)
    assert thin.counts() == {"train": 360, "validation": 45, "holdout": 150}
    assert {len(thin.environments("train", cell)) for cell in CELLS} == {24}
    assert len({e.template for e in thin.environments("train")}) > 250
    for environment in thin.environments():
        assert environment == CATALOG.environment(environment.environment_id)
    assert CATALOG.thin(360, 45, 150).digest == thin.digest


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7_000), st.integers(1, 245), st.integers(1, 3_000))
def test_thinning_gives_exactly_what_is_asked(train, validation, holdout):
    thin = CATALOG.thin(train, validation, holdout)
    assert tuple(thin.counts().values()) == (train, validation, holdout)
    for split, count in thin.counts().items():
        sizes = [len(thin.environments(split, cell)) for cell in CELLS]
        assert sum(sizes) == count
        assert max(sizes) - min(sizes) <= 1 or count > 0.9 * CATALOG.counts()[split]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (7_001, 1, 1), (1, 246, 1), (1, 1, 3_001)])
def test_thinning_beyond_what_is_there(sizes):
    with pytest.raises(CatalogError, match="catalogue too small"):
        CATALOG.thin(*sizes)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("splits", [("train",), ("train", "train"), ("train", "holdout"), ("validation", "holdout")])
def test_catalogue_too_small_to_split(splits):
    with pytest.raises(CatalogError, match="too small to split"):
        build_catalog(*templates(*splits))


def test_smallest_catalogue_that_can_be_split():
    catalog = build_catalog(*templates("train", "validation", "holdout"))
    assert catalog.counts() == {"train": 15, "validation": 15, "holdout": 15}


def test_no_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTPIPE_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"no templates\.csv found"):
        load_catalog()


@pytest.mark.parametrize(
    ("file", "old", "new", "message", "field"),
    [
        ("templates.csv", "t0002,", "t0001,", "t0001 occurs twice", "template_id"),
        ("templates.csv", ",serial,", ",star,", "unknown topology 'star'", "topology"),
        ("templates.csv", ",p0,7", ",p0,9", "out of range", "machines"),
        ("templates.csv", "t0003,", "t 3,", "malformed", "template_id"),
        ("templates.csv", "t0002,l001,", "t0002,l999,", "same line as l001", "line_id"),
        ("templates.csv", "t0002,l001,", "t0002,l002,", "same line as l001", "line_id"),
        ("templates.csv", ",p0,", ",false_alarm,", "unknown fault_mode", "fault_mode"),
        ("splits.csv", ",train", ",test", "unknown split", "split"),
        ("templates.csv", "t0010,l002,serial", "t0010,l002,ring", "described in two ways", "line_id"),
        ("splits.csv", "t0002,", "t0001,", "occurs twice", "template_id"),
        ("splits.csv", "t0002,", "t9999,", "unknown template t9999", "template_id"),
        ("splits.csv", "sensor-1;", "heat-1;", "unknown cell", "validation_cells"),
        (
            "splits.csv",
            "shared,sensor-1;network-2;load-3;sensor-4;network-5",
            "shared,",
            "does not fit",
            "validation_cells",
        ),
    ],
)
def test_bad_file_names_what_is_wrong(folder, file, old, new, message, field):
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(CatalogError, match=message) as caught:
        load_catalog(folder)
    assert caught.value.where["file"].parent == folder
    assert caught.value.where["field"] == field
    assert caught.value.remedy


def test_template_without_a_split_says_how_to_add_it(folder):
    rows = (folder / "splits.csv").read_text().splitlines(keepends=True)
    (folder / "splits.csv").write_text("".join(rows[:-1]))
    with pytest.raises(CatalogError, match="t0683 has no split") as caught:
        load_catalog(folder)
    assert "make_data.py" in caught.value.remedy


def test_template_on_both_sides_is_refused():
    made, assignments = templates("train", "validation", "holdout")
    catalog = build_catalog(made, assignments)
    environments = list(catalog.environments())
    moved = [e if e.index else type(e)(**{**vars(e), "split": "holdout"}) for e in environments]
    with pytest.raises(CatalogError, match="overlap"):
        type(catalog)(moved)


# --------------------------------------------------------------------------------------------------------- make_data


def make_data(folder, *which):
    shutil.copy(REPOSITORY / "data" / "make_data.py", folder / "make_data.py")
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, str(folder / "make_data.py"), *which], check=True, env=environment)


def test_data_files_are_what_the_script_makes(tmp_path):
    if not (REPOSITORY / "data" / "make_data.py").exists():
        pytest.skip("not a checkout")
    make_data(tmp_path)
    for name in ("templates.csv", "splits.csv", "disturbances.csv"):
        assert (tmp_path / name).read_bytes() == (REPOSITORY / "data" / name).read_bytes(), name


def test_added_templates_move_nobody(folder):
    before = (folder / "splits.csv").read_text()
    known = load_templates(folder / "templates.csv")
    held = next(e.template for e in CATALOG.environments("holdout"))
    mode = next(m for m in FAULT_MODES if m not in {t.fault_mode for t in known if t.line_id == held.line_id})
    row = f"t0684,{held.line_id},{held.topology},{held.sensor_type},{held.protocol},{mode},{held.machines}\n"
    with (folder / "templates.csv").open("a") as file:
        file.write(row)
    make_data(folder, "splits")
    after = (folder / "splits.csv").read_text()
    assert after == before + "t0684,holdout,\n"  # a new template of a hold-out line is held out
    assert load_catalog(folder).counts()["train"] == 7_000


@pytest.mark.parametrize("most", [15, 350, 1_000, 1_400])  # every fifth or twentieth in order would be of one intensity
def test_a_part_of_a_split_is_even_over_cells(most):
    chosen = load_catalog().spread("train", most)
    counts = Counter(environment.cell for environment in chosen)
    assert len({environment.environment_id for environment in chosen}) == most
    assert set(counts) == set(CELLS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [environment.index for environment in chosen] == sorted(environment.index for environment in chosen)


def test_a_part_larger_than_the_split_is_the_split():
    catalog = load_catalog()
    assert catalog.spread("validation", 10_000) == tuple(catalog.environments("validation"))
