"""AI4I 2020 and tables like it become a line profile; whatever is odd about them is reported or refused."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from agentpipe.environments.line_profile import LineProfile
from agentpipe.environments.machine_history import fit_profile, shrinkage
from agentpipe.errors import MachineHistoryError
from agentpipe_tests.strategies import shared_data

MODES = ("wear", "heat")
CHANNELS = ("Temperature [°C]", "Vibration (mm/s)", "Current", "Pressure", "Speed")


def history(seed=0, healthy=200, rows=(60, 12), channels=CHANNELS, shifts=(2.0, -3.0)):
    """Header and rows: healthy N(100, 5), mode i shifted by ``shifts[i]`` SD on channel i."""
    random = np.random.default_rng(seed)
    lines = [[f"{v:.3f}" for v in random.normal(100, 5, len(channels))] + ["0", "0", "0"] for _ in range(healthy)]
    for index, count in enumerate(rows):
        for _ in range(count):
            values = random.normal(100, 5, len(channels))
            values[index] += 5 * shifts[index]
            flags = ["1", *("1" if i == index else "0" for i in range(2))]
            lines.append([f"{v:.3f}" for v in values] + flags)
    numbered = [[str(i), *line] for i, line in enumerate(lines, 1)]
    return ["id", *channels, "failure", *MODES], numbered


def written(path, header, rows, end="\n"):
    file = path / "history.csv"
    with file.open("w", newline="") as handle:
        csv.writer(handle, lineterminator=end).writerows([header, *rows])
    return file


# -------------------------------------------------------------------------------------------------------------- AI4I


@pytest.fixture(scope="module")
def ai4i():
    path = shared_data("pdm/ai4i2020.csv")
    return path, fit_profile(path)


def test_ai4i_report_counts_every_row(ai4i):
    report = ai4i[1].report
    assert (report["rows"], report["rows_used"], report["healthy_rows"]) == (10_000, 9_949, 9_643)
    aside = {entry["reason"]: entry["rows"] for entry in report["rows_set_aside"]}
    assert aside == {"failure without a mode": 9, "mode without a failure": 18, "several modes at once": 24}
    assert report["rows_used"] + sum(aside.values()) == report["rows"]


def test_ai4i_quirks_are_reported(ai4i):
    assert ai4i[1].report["notes"] == [
        "byte-order mark removed",
        "CRLF line ends",
        "header 'Machine_failure' read as the failure flag",
    ]


def test_ai4i_modes(ai4i):
    profile = ai4i[1]
    assert [(mode.name, mode.rows) for mode in profile.modes] == [("TWF", 42), ("HDF", 106), ("PWF", 80), ("OSF", 78)]
    (missing,) = profile.report["modes_not_fitted"]
    assert missing["mode"] == "RNF"
    assert missing["reason"] == "0 clean rows of 19, 10 needed; 18 rows name it without a failure"


def test_ai4i_channels_leave_out_identifiers_and_text(ai4i):
    profile = ai4i[1]
    assert [(c.name, c.unit) for c in profile.channels] == [
        ("air_temperature", "K"),
        ("process_temperature", "K"),
        ("rotational_speed", "rpm"),
        ("torque", "Nm"),
        ("tool_wear", "min"),
    ]
    assert set(profile.report["columns_ignored"]) == {"UDI", "Product ID", "Type"}


def test_ai4i_figures_equal_a_naive_computation(ai4i):
    """Means, covariances and prevalences, from the file by the csv module and numpy alone."""
    path, profile = ai4i
    with path.open(encoding="utf-8-sig", newline="") as handle:
        rows = list(csv.DictReader(handle))
    names = ("TWF", "HDF", "PWF", "OSF", "RNF")
    data = np.array([[float(v) for v in list(row.values())[3:8]] for row in rows])
    flag = np.array([row["Machine_failure"] == "1" for row in rows])
    marks = np.array([[row[n] == "1" for n in names] for row in rows])
    healthy = data[~flag & ~marks.any(axis=1)]
    mean, sd = healthy.mean(axis=0), healthy.std(axis=0, ddof=1)
    assert [c.nominal for c in profile.channels] == pytest.approx(mean)
    assert [c.sd for c in profile.channels] == pytest.approx(sd)
    weights = dict.fromkeys(names, 0.0)
    for failed, mark in zip(flag, marks[:, :4], strict=True):
        for i in np.flatnonzero(mark) if failed else ():
            weights[names[i]] += 1 / mark.sum()
    for index, mode in enumerate(profile.modes):
        clean = (data[flag & marks[:, index] & (marks.sum(axis=1) == 1)] - mean) / sd
        assert mode.shift == pytest.approx(clean.mean(axis=0))
        if mode.rows >= 50:
            assert mode.covariance == pytest.approx(np.cov(clean, rowvar=False), abs=1e-5)
        physical = 1 - sum(profile.structural_prevalence.values())
        assert mode.prevalence == pytest.approx(physical * weights[mode.name] / sum(weights.values()))


def test_ai4i_profile_survives_json(ai4i):
    profile = ai4i[1]
    assert LineProfile.from_json(profile.to_json()) == profile


def test_ai4i_under_another_name_is_the_same_profile(ai4i, tmp_path):
    path, profile = ai4i
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    (tmp_path / "x.csv").write_bytes(text.replace(b"Machine_failure", b"Machine failure"))
    other = fit_profile(tmp_path / "x.csv")
    assert other.digest == profile.digest
    assert other.report["notes"] == []


@pytest.mark.parametrize("length", [0, 2, 100, 117, 118, 500_001])
def test_ai4i_cut_off_is_refused(ai4i, tmp_path, length):
    (tmp_path / "cut.csv").write_bytes(ai4i[0].read_bytes()[:length])
    with pytest.raises(MachineHistoryError) as caught:
        fit_profile(tmp_path / "cut.csv")
    assert caught.value.where["file"] == tmp_path / "cut.csv"


# ------------------------------------------------------------------------------------------------ tables of the family


def test_known_shifts_are_found(tmp_path):
    profile = fit_profile(written(tmp_path, *history(healthy=3_000, rows=(400, 300))))
    wear, heat = profile.modes
    assert wear.shift == pytest.approx([2, 0, 0, 0, 0], abs=0.2)
    assert heat.shift == pytest.approx([0, -3, 0, 0, 0], abs=0.2)
    assert wear.prevalence / heat.prevalence == pytest.approx(4 / 3)
    assert [(c.name, c.unit) for c in profile.channels][:2] == [("temperature", "°C"), ("vibration", "mm/s")]


def test_few_rows_shrink_towards_the_healthy_covariance(tmp_path):
    profile = fit_profile(written(tmp_path, *history(rows=(60, 12))))
    assert [shrinkage(n) for n in (10, 30, 50, 1000)] == [0.5, 0.25, 0.0, 0.0]
    assert profile.report["modes_fitted"][1]["covariance_shrinkage"] == shrinkage(12) == 0.475
    for mode in profile.modes:
        np.linalg.cholesky(mode.covariance)


def test_the_most_informative_five_channels_are_kept(tmp_path):
    header, rows = history(channels=("a", "b", "c", "d", "e", "f", "g"))
    profile = fit_profile(written(tmp_path, header, rows))
    kept = [c.name for c in profile.channels]
    assert len(kept) == 5
    assert {"a", "b"} <= set(kept)
    assert set(profile.report["channels_not_used"]) == {"a", "b", "c", "d", "e", "f", "g"} - set(kept)


def test_mode_with_too_few_rows_is_reported(tmp_path):
    profile = fit_profile(written(tmp_path, *history(rows=(60, 9))))
    assert [mode.name for mode in profile.modes] == ["wear"]
    assert profile.report["modes_not_fitted"][0]["reason"] == "9 clean rows of 9, 10 needed"


def test_empty_cells_and_repeated_rows_are_set_aside(tmp_path):
    header, rows = history()
    rows[0][1] = ""
    rows.append(rows[5])
    report = fit_profile(written(tmp_path, header, rows)).report
    aside = {entry["reason"]: entry["rows"] for entry in report["rows_set_aside"]}
    assert aside == {"a cell is empty": 1, "identical to an earlier row": 1}


def test_text_constant_clock_and_frequent_binary_columns_are_ignored(tmp_path):
    header, rows = history()
    more = [[*row, "M", "7.5", str(1000 + 3 * i), str(i % 2)] for i, row in enumerate(rows)]
    profile = fit_profile(written(tmp_path, [*header, "grade", "setting", "clock_s", "night"], more))
    assert profile.report["columns_ignored"] == {
        "id": "an identifier or a clock",
        "grade": "text",
        "setting": "constant",
        "clock_s": "an identifier or a clock",
        "night": "a 0/1 column with more ones than there are failures: not a fault mode",
    }


def test_failure_column_can_be_named(tmp_path):
    header, rows = history()
    header[header.index("failure")] = "stopped"
    file = written(tmp_path, header, rows)
    with pytest.raises(MachineHistoryError, match="no failure flag found"):
        fit_profile(file)
    assert len(fit_profile(file, failure_column="stopped").modes) == 2


def change(column, row, value):
    def apply(header, rows):
        rows[row][header.index(column)] = value

    return apply


def drop(*columns):
    def apply(header, rows):
        for column in columns:
            index = header.index(column)
            for line in (header, *rows):
                del line[index]

    return apply


@pytest.mark.parametrize(
    ("spoil", "message", "row", "field"),
    [
        (change("Current", 3, "NaN"), "'NaN' is not a finite number", 5, "Current"),
        (change("Current", 3, "1e400"), "not a finite number", 5, "Current"),
        (change("Current", 3, "1e300"), "1e300 is out of range", 5, "Current"),
        (change("Current", 3, "-1e31"), "-1e31 is out of range", 5, "Current"),
        (change("Current", 3, "fast"), "not a finite number", 5, "Current"),
        (change("failure", 7, "2"), "neither 0 nor 1", 9, "failure"),
        (change("wear", 7, "yes"), "neither 0 nor 1", 9, "wear"),
        (drop("failure"), "no failure flag found", 1, None),
        (drop(*MODES), "no fault-mode column found", 1, None),
        (drop("Current"), "4 numeric channel columns found", 1, None),
        (lambda header, rows: rows.__delitem__(slice(0, 160)), "40 healthy rows", None, "failure"),
        (lambda header, rows: rows.__delitem__(slice(205, None)), "no mode could be fitted", None, None),
        (lambda header, rows: rows[9].pop(), "fields, the header", 11, "heat"),
    ],
)
def test_table_that_cannot_be_used_says_why(tmp_path, spoil, message, row, field):
    header, rows = history()
    spoil(header, rows)
    with pytest.raises(MachineHistoryError, match=message) as caught:
        fit_profile(written(tmp_path, header, rows))
    assert (caught.value.where.get("row"), caught.value.where.get("field")) == (row, field)
    assert caught.value.remedy


def test_numbers_whose_squares_overflow_ended_in_eigenvalues_that_did_not_converge(tmp_path):
    header, rows = history()
    for row in rows[::3]:
        row[1] = "1e308"
    with pytest.raises(MachineHistoryError, match="out of range"):
        fit_profile(written(tmp_path, header, rows))


def test_missing_file(tmp_path):
    with pytest.raises(MachineHistoryError, match="does not exist"):
        fit_profile(tmp_path / "none.csv")


def test_another_real_table_without_a_failure_flag_is_refused_clearly():
    path = shared_data("pdm/nab/machine_temperature_system_failure.csv")
    with pytest.raises(MachineHistoryError, match="no failure flag found") as caught:
        fit_profile(path)
    assert caught.value.remedy
