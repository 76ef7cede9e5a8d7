"""The disturbance table: content digests, stable row choice, and everything that is refused."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.parameters import CELLS, PARAMETER_NAMES, PARAMETERS
from agentpipe.environments.table import (
    COLUMNS,
    TableRow,
    choose_variant,
    diff_tables,
    load_table,
    table_from_rows,
    table_to_csv,
)
from agentpipe.errors import TableError
from agentpipe_tests.strategies import environment_ids, project_table, tables

DATA = data_dir() / "disturbances.csv"


def lines():
    return DATA.read_text().splitlines()


def written(path, content):
    file = path / "table.csv"
    file.write_text("\n".join(content) + "\n")
    return file


def with_value(column, value, line=1):
    content = lines()
    fields = content[line].split(",")
    fields[COLUMNS.index(column)] = value
    content[line] = ",".join(fields)
    return content


def changed(table, cell, column, value):
    rows = [
        row._replace(
            values=tuple(value if n == column else v for n, v in zip(PARAMETER_NAMES, row.values, strict=True))
        )
        if row.cell == cell
        else row
        for row in table.rows
    ]
    return table_from_rows(rows)


# ------------------------------------------------------------------------------------------------ the project's table


def test_project_table_has_fifteen_cells_of_at_least_four_variants():
    counts = Counter(row.cell for row in project_table().rows)
    assert list(counts) == list(CELLS)
    assert min(counts.values()) >= 4


def test_reference_intensity_holds_the_published_figures():
    table = project_table()
    sensor = dict(zip(PARAMETER_NAMES, table.rows[table.cell_rows("sensor-3")[0]].values, strict=True))
    load = dict(zip(PARAMETER_NAMES, table.rows[table.cell_rows("load-3")[0]].values, strict=True))
    assert (sensor["sensor_cycle_amplitude"], sensor["sensor_cycle_period_s"]) == (0.02, 60.0)
    assert (sensor["sensor_step_amplitude"], sensor["sensor_step_probability"]) == (0.01, 0.05)
    assert load["load_sigma"] == 0.05


def test_last_variant_of_each_cell_is_compound():
    table = project_table()
    for cell in CELLS:
        row = dict(zip(PARAMETER_NAMES, table.rows[table.cell_rows(cell)[-1]].values, strict=True))
        assert row["sensor_sigma"] > 0
        assert row["network_loss_bad"] > 0
        assert row["load_sigma"] > 0


def test_parameters_array_is_float32_in_documented_order_and_read_only():
    table = project_table()
    assert table.parameters.dtype == np.float32
    assert table.parameters.shape == (len(table), 23)
    assert table.column("sensor_sigma")[0] == np.float32(table.rows[0].values[0])
    with pytest.raises(ValueError, match="read-only"):
        table.parameters[0, 0] = 1


# ------------------------------------------------------------------------------------------------------------ digests


def test_digest_ignores_layout_of_the_file(tmp_path):
    header, *rows = [line.split(",") for line in lines()]
    order = sorted(range(len(header)), key=lambda i: header[i])
    shuffled = [",".join(line[i] for i in order) for line in [header, *reversed(rows)]]
    file = tmp_path / "t.csv"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(shuffled).encode() + b"\r\n")
    assert load_table(file).version == project_table().version


def test_number_spelling_does_not_change_the_digest(tmp_path):
    spelled = written(tmp_path, with_value("sensor_sigma", "1.5e-1"))
    plain = project_table()
    assert plain.rows[0].values[0] == 0.15
    assert load_table(spelled).version == plain.version


@pytest.mark.parametrize("cell", ["sensor-1", "network-4", "load-5"])
def test_changed_value_changes_exactly_its_cell(cell):
    before = project_table()
    after = changed(before, cell, "sensor_sigma", 0.777)
    assert [c for c in CELLS if before.cell_digests[c] != after.cell_digests[c]] == [cell]
    difference = diff_tables(before, after)
    assert difference.cells == (cell,)
    assert {(f"{c.kind}-{c.intensity}", c.column, c.after) for c in difference.changed} == {
        (cell, "sensor_sigma", 0.777)
    }
    assert not diff_tables(before, before)


def test_added_and_removed_rows_are_told_apart():
    before = project_table()
    extra = before.rows[0]._replace(variant=77)
    after = table_from_rows([*before.rows[1:], extra])
    difference = diff_tables(before, after)
    assert difference.added == (("sensor", 1, 77),)
    assert difference.removed == (("sensor", 1, 0),)
    assert difference.cells == ("sensor-1",)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tables())
def test_any_table_survives_a_csv_round_trip(tmp_path_factory, table):
    file = tmp_path_factory.mktemp("round") / "t.csv"
    file.write_bytes(table_to_csv(table))
    again = load_table(file)
    assert again.version == table.version
    assert again.rows == table.rows


# --------------------------------------------------------------------------------------------------------- row choice


def test_row_choice_is_the_documented_hash():
    environment_id = "t0001.sensor-3"
    expected = int(hashlib.sha256(environment_id.encode()).hexdigest()[:16], 16) % 5
    table = project_table()
    assert choose_variant(environment_id, 5) == expected
    assert table.row_for(environment_id) == table.cell_rows("sensor-3")[expected]


def test_row_choice_survives_another_process_and_hash_seed():
    ids = [f"t{n:04d}.load-2" for n in range(20)]
    code = f"from agentpipe.environments.table import choose_variant\nprint([choose_variant(i, 5) for i in {ids}])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str([choose_variant(i, 5) for i in ids])


def test_every_variant_is_used_about_equally():
    counts = Counter(choose_variant(f"t{n:04d}.sensor-1", 5) for n in range(5000))
    assert set(counts) == set(range(5))
    assert max(counts.values()) < 1.15 * min(counts.values())


@given(environment_ids())
def test_row_belongs_to_the_cell_of_the_id(environment_id):
    table = project_table()
    row = table.row_for(environment_id)
    assert environment_id.endswith(f".{table.rows[row].cell}")
    assert table.rows_for([environment_id]).tolist() == [row]
    assert table.fingerprint(environment_id) == table.row_fingerprint(row)


@pytest.mark.parametrize("environment_id", ["t0001", "t0001.sensor-6", "t0001.heat-1", ""])
def test_id_without_a_cell_is_refused(environment_id):
    with pytest.raises(TableError, match="unknown cell"):
        project_table().row_for(environment_id)


def test_fingerprint_is_that_of_the_physical_disturbance():
    """Two rows with the same parameters share it, whatever cell and variant; another value gives another."""
    table = project_table()
    twin = table.rows[0]._replace(kind="load", intensity=5, variant=50)
    both = table_from_rows([*table.rows, twin])
    first, last = both.row_fingerprint(0), both.row_fingerprint(len(both) - 1)
    assert first == last
    assert (len(first.sha256), len(first.crc32)) == (64, 8)
    assert first != both.row_fingerprint(1)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("kind", "heat", "unknown kind 'heat'"),
        ("intensity", "6", "out of range"),
        ("intensity", "2.0", "not a whole number"),
        ("variant", "-1", "out of range"),
        ("sensor_sigma", "NaN", "not a finite number"),
        ("sensor_sigma", "inf", "not a finite number"),
        ("sensor_sigma", "1e400", "not a finite number"),
        ("sensor_sigma", "", "empty"),
        ("sensor_sigma", "-0.1", "out of range"),
        ("sensor_cycle_period_s", "0", "out of range"),
        ("network_loss_bad", "1.01", "out of range"),
        ("load_sigma", "0,1", "fields"),
        ("load_sigma", "much", "not a finite number"),
        ("network_loss_good", "0.5", "exceeds network_loss_bad"),
    ],
)
def test_bad_value_names_file_row_and_field(tmp_path, column, value, message):
    file = written(tmp_path, with_value(column, value, line=3))
    with pytest.raises(TableError, match=message) as caught:
        load_table(file)
    assert caught.value.where["file"] == file
    assert str(caught.value.where["row"]) == "4"
    if message != "fields":
        assert caught.value.where["field"] == column
    assert caught.value.remedy


def test_double_row_names_both_places(tmp_path):
    content = lines()
    with pytest.raises(TableError, match="occurs twice") as caught:
        load_table(written(tmp_path, [*content, content[1]]))
    assert caught.value.where["row"] == len(content) + 1
    assert "row 2" in caught.value.remedy


@pytest.mark.parametrize("cell", ["sensor-1", "network-3", "load-5"])
def test_missing_intensity_is_refused(tmp_path, cell):
    kind, intensity = cell.split("-")
    content = [line for line in lines() if not line.startswith(f"{kind},{intensity},")]
    with pytest.raises(TableError, match=f"intensity {intensity} is missing from {kind}"):
        load_table(written(tmp_path, content))


def test_unknown_and_missing_columns(tmp_path):
    header, *rows = lines()
    with pytest.raises(TableError, match="unknown column 'sensor_sgima'"):
        load_table(written(tmp_path, [header.replace("sensor_sigma", "sensor_sgima"), *rows]))
    with pytest.raises(TableError, match="'load_cycle_period_s' is missing"):
        load_table(written(tmp_path, [line.rpartition(",")[0] for line in [header, *rows]]))


def test_table_cut_at_any_byte_is_refused_or_a_table_with_fewer_variants(tmp_path):
    data = DATA.read_bytes()
    whole = set(project_table().rows)
    file = tmp_path / "t.csv"
    for length in [*range(0, len(data), 97), *range(len(data) - 400, len(data))]:
        file.write_bytes(data[:length])
        try:
            table = load_table(file)
        except TableError:
            continue
        assert set(table.rows) < whole
        assert data[length - 1 : length] == b"\n"


@given(st.sampled_from(PARAMETERS), st.floats())
def test_no_value_outside_its_range_gets_into_a_table(parameter, value):
    table = project_table()
    try:
        after = changed(table, "sensor-1", parameter.name, value)
    except TableError:
        assert not parameter.low <= value <= parameter.high or "loss" in parameter.name
    else:
        assert parameter.low <= value <= parameter.high
        assert np.isfinite(after.parameters).all()


def test_rows_made_by_hand_are_checked_too():
    with pytest.raises(TableError, match="not a row"):
        table_from_rows([TableRow("sensor", 9, 0, (0.0,) * 23)])
    with pytest.raises(TableError, match="not a row"):
        table_from_rows([TableRow("sensor", 1, 0, (0.0,))])
