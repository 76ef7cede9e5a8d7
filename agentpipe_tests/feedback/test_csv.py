"""Feedback as CSV: lists as JSON arrays in a cell, lines as an editor counts them, odd files as people have them."""

from __future__ import annotations

import csv
import io
import json
import tracemalloc
from unittest import mock

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.feedback import csvfile
from agentpipe.feedback.store import quarantined, read_day
from agentpipe_tests.feedback.examples import DAY, Home, decision, label
from agentpipe_tests.strategies import shared_data

COLUMNS = list({**decision(), **label()})


def cells(row):
    return {
        name: json.dumps(value) if isinstance(value, list) else "" if value is None else str(value)
        for name, value in row.items()
    }


def text(*rows, columns=COLUMNS, end="\r\n"):
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, restval="", lineterminator=end)
    writer.writeheader()
    writer.writerows([cells(row) for row in rows])
    return file.getvalue()


def test_both_kinds_of_a_csv_file_are_what_json_lines_give(home, tmp_path):
    rows = [decision(), label(), decision("d2", result='a, "b"\nc'), label("l2", corrected_action=None)]
    home.put("a.csv", text(*rows).encode())
    other = Home(tmp_path / "other")
    other.drop("a.jsonl", *rows)
    report = home()
    assert (report["quarantined"], report["decisions"], report["labels"]) == ({}, 2, 2)
    assert report["digest"] == other()["digest"]
    assert read_day(home.store, DAY)[0].column("line").to_pylist() == ["2", "4"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_byte_order_marks_and_line_ends_of_all_kinds_are_fine(home, end):
    home.put("a.csv", b"\xef\xbb\xbf" + text(decision(), decision("d2"), end=end).encode())
    assert home()["decisions"] == 2


def test_columns_come_in_any_order_and_blank_lines_do_not_count(home):
    data = text(decision(), columns=sorted(COLUMNS)).replace("\r\n", "\r\n\r\n")
    home.put("a.csv", data.encode())
    assert home()["decisions"] == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"observation": "[1, 2"}, "not_json"),
        ({"observation": "[NaN, 1, 2]"}, "number_out_of_range"),
        ({"observation": "[1e400, 1, 2]"}, "number_out_of_range"),
        ({"observation": "[[1, 2], [3]]"}, "nested_list"),
        ({"observation": "1;2;3"}, "not_json"),
        ({"observation": "[" * 100}, "too_deep"),
        ({"observation": ""}, "missing_field"),
        ({"mask": "[1, 1]"}, "invalid_field"),
        ({"mask": "[true]"}, "does_not_fit_policy"),
        ({"action": "1.5"}, "invalid_field"),
        ({"action": "1.0.0"}, "invalid_field"),
        ({"action": ".0"}, "invalid_field"),
        ({"action": "9" * 30 + ".0"}, "number_out_of_range"),
        ({"action": "9" * 30}, "number_out_of_range"),
        ({"elapsed_minutes": "1e400"}, "number_out_of_range"),
        ({"elapsed_minutes": "nan"}, "number_out_of_range"),
        ({"elapsed_minutes": "1,5"}, "invalid_field"),
        ({"time": "29.03.2026 01:30"}, "invalid_time"),
        ({"time": "2026-03-29T01:30:00"}, "invalid_time"),
        ({"annotator": "kim"}, "unknown_field"),
        ({"kind": "Decision"}, "unknown_kind"),
        ({"kind": ""}, "unknown_kind"),
        ({"line_id": "L\udce91"}, "not_utf8"),
    ],
)
def test_each_malformed_row_is_quarantined_with_its_line_and_its_cells(home, change, reason):
    wrong = {**cells(decision()), **change}
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, restval="")
    writer.writeheader()
    writer.writerows([cells(decision("good")), wrong])
    home.put("a.csv", file.getvalue().encode(errors="surrogateescape"))
    report = home()
    assert (report["quarantined"], report["decisions"]) == ({reason: 1}, 1)
    (refused,) = quarantined(home.store)
    assert (refused.line, refused.file) == (3, "a.csv")
    raw = json.loads(refused.raw.decode(errors="surrogateescape"))
    assert raw["decision_id"] == "d1"
    assert all(raw[name] == value for name, value in change.items())


def test_whole_numbers_are_read_as_pandas_writes_columns_with_gaps(home):
    frame = pd.DataFrame([cells(decision()), cells(label("l1", corrected_action=None)), cells(label("l2"))])
    whole = ["action", "last_action", "corrected_action"]
    frame[whole] = frame[whole].apply(pd.to_numeric)
    data = frame.to_csv(index=False)
    assert ",1.0," in data
    assert data.rstrip().endswith(",0.0")
    home.put("a.csv", data.encode())
    assert home()["quarantined"] == {}
    decisions, labels = read_day(home.store, DAY)
    assert (decisions["action"].to_pylist(), decisions["last_action"].to_pylist()) == ([1], [2])
    assert labels["corrected_action"].to_pylist() == [None, 0]


def test_a_row_with_too_few_or_too_many_cells_is_refused_and_the_next_one_taken(home):
    whole = text(decision("d1"), decision("d2"))
    home.put("a.csv", (whole + "decision,d3\r\n" + "x," * 40 + "\r\n").encode())
    report = home()
    assert (report["decisions"], report["quarantined"]) == (2, {"malformed_row": 2})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("\n\n", "no_header"),
        ("decision_id,time\nd1,2026\n", "no_header"),
        ("kind;decision_id;time\ndecision;d1;2026\n", "no_header"),
        ("kind,time,decision_id,time\n", "duplicate_column"),
        ('kind,decision_id\ndecision,"a"b\n', "not_csv"),
        ("kind,decision_id,time" + "x" * 2_000_000 + "\n", "not_csv"),
        ('kind,decision_id\ndecision,"' + "x" * 2_000_000 + '"b\n', "not_csv"),
        ("kind,d\udce9\n", "not_utf8"),
        ("\ufeffkind,decision_id\r\n".encode("utf-16-le").decode(errors="surrogateescape") + "\n", "not_utf8"),
    ],
)
def test_a_file_that_is_no_such_table_is_refused_whole(home, data, reason):
    home.put("a.csv", data.encode(errors="surrogateescape"))
    report = home()
    assert report["quarantined"] == {reason: 1}
    assert (report["rows_taken"], home.names()) == (0, ["refused"])
    (refused,) = quarantined(home.store)
    assert (refused.line, refused.reason) == (0, reason)


LONG = {
    "one cell above the limit of the csv module": "x" * 200_000,
    "one line": "x" * 2_000_000,
    "many cells": "x," * 600_000,
    "many lines": '"' + ("x" * 50 + "\n") * 25_000 + '"',
    "many quotes": '"' + '""' * 700_000 + '"',
    "many long cells": ",".join('"' + ("x" * 50 + "\n") * 2_500 + '"' for _ in range(20)),
    "quotes that are none": 'a"' * 700_000,
}


@pytest.mark.parametrize("long", LONG)
def test_a_row_that_is_too_long_is_quarantined_with_its_line_and_the_others_are_taken(home, long):
    first, second = text(decision("d1")), text(decision("d2"), end="\n").partition("\n")[2]
    row = f"decision,{LONG[long]}\n"
    home.put("a.csv", (first + row + second + row + second.replace("d2", "d3")).encode())
    report = home()
    assert report["decisions"] == 3
    assert sum(report["quarantined"].values()) == 2
    reasons = {"one cell above the limit of the csv module": "malformed_row"}
    found = quarantined(home.store)
    assert {entry.reason for entry in found} == {reasons.get(long, "too_long")}
    lines = row.count("\n")
    assert [entry.line for entry in found] == [3, 3 + lines + 1]
    if long in reasons:
        assert all(json.loads(entry.raw) == ["decision", LONG[long]] for entry in found)
    else:
        assert all(entry.raw == row[:4096].encode() for entry in found)
    taken = read_day(home.store, DAY)[0]
    assert taken.column("line").to_pylist() == ["2", str(3 + lines), str(3 + 2 * lines + 1)]


def test_a_long_cell_is_read_whole_where_its_row_is_not_too_long(home):
    home.put(
        "a.csv", text(decision("d1"), decision("d2", result="x" * 900_000), label(annotator="y" * 300_000)).encode()
    )
    report = home()
    assert (report["decisions"], report["quarantined"]) == (1, {"invalid_field": 2})
    assert [len(entry.raw) > 300_000 for entry in quarantined(home.store)] == [True, True]


def test_a_row_that_is_too_long_takes_little_memory():
    """Half a gigabyte of one row, read as it is made."""

    class Endless(io.RawIOBase):
        left = 500

        def readable(self):
            return True

        def readinto(self, buffer):
            self.left -= 1
            data = (
                b"kind,result\n"
                if self.left == 499
                else b"x" * 2**20
                if self.left > 0
                else b"\n"
                if not self.left
                else b""
            )
            data = data[: len(buffer)]
            buffer[: len(data)] = data
            return len(data)

    tracemalloc.start()
    found = list(csvfile.read(io.BufferedReader(Endless(), buffer_size=2**20)))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [refused.reason for refused in found] == ["too_long"]
    assert most < 32 * 2**20


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(['"', ",", "\n", "\r\n", "\r", "a", "é", '""', "aaaaaaaa", '","', ',"']), max_size=40),
    st.integers(5, 12),
)
def test_records_that_are_too_long_are_passed_over_as_the_csv_module_would_read_them(pieces, limit):
    """With a limit of a few characters, beside a reading of the whole text."""
    data = "kind\n" + "".join(pieces) + "\n"
    lines = data.splitlines(keepends=True) if "\r" not in data else io.StringIO(data, newline="").readlines()
    whole, reader, before = [], csv.reader(lines, strict=True), 0
    try:
        for cells in reader:
            size = sum(map(len, lines[before : reader.line_num]))
            if size > limit and before:
                whole.append((before + 1, None))
            elif any(cell.strip() for cell in cells):
                whole.append((before + 1, cells))
            before = reader.line_num
    except csv.Error:
        whole = []
    with mock.patch.object(csvfile, "LONGEST_LINE", limit):
        try:
            found = list(csvfile._records(io.BytesIO(data.encode())))
        except (csvfile.FaultError, csvfile.UnfinishedError):
            found = []
    assert [(line, None if isinstance(cells, str) else cells) for line, cells in found] == whole


@pytest.mark.parametrize("end", ["", '\r\ndecision,"a\r\n'])
def test_a_file_that_is_cut_off_waits(home, end):
    home.put("a.csv", (text(decision()).rstrip("\r\n") + end).encode())
    report = home()
    assert list(report["files_waiting"]) == ["a.csv"]
    assert home.names() == ["a.csv"]


def test_a_header_alone_is_a_table_without_rows(home):
    home.put("a.csv", text().encode())
    report = home()
    assert (report["files_taken"], report["rows_taken"], report["quarantined"]) == (["a.csv"], 0, {})


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([b'"', b",", b"\n", b"\r\n", b"\xff", b"a", b"decision", b"[1", b"\0", b" "]), max_size=12)
)
def test_any_bytes_are_refused_whole_wait_or_give_one_result_a_record(pieces):
    data = b"kind,decision_id\n" + b"".join(pieces)
    file = io.BytesIO(data)
    try:
        csvfile.check(file)
    except (csvfile.FaultError, csvfile.UnfinishedError):
        return
    file.seek(0)
    text = data.decode(errors="surrogateescape")
    records = [cells for cells in csv.reader(io.StringIO(text, newline=""), strict=True) if "".join(cells).strip()]
    assert len(list(csvfile.read(file))) == len(records) - 1


ODD = ["comma_in_quotes", "escaped_quotes", "json", "newlines_crlf", "quotes_and_newlines", "utf8", "empty"]


@pytest.mark.parametrize("name", ODD)
def test_odd_tables_of_the_csv_spectrum_are_read_as_meant(name):
    """What others agreed that such a file says, with a column ``kind`` before it."""
    data = shared_data(f"feedback/odd_csv/spectrum_{name}.csv").read_bytes()
    if name.endswith("crlf"):  # the copy has lost what it is named after
        data = data.replace(b"\n", b"\r\n")
    expected = json.loads(shared_data(f"feedback/odd_csv/spectrum_{name}.expected.json").read_bytes())
    records = [cells for _, cells in csvfile._records(io.BytesIO(b"kind," + data))]
    found = [dict(zip(records[0][1:], cells, strict=True)) for cells in records[1:]]
    assert found == expected


@pytest.mark.parametrize("name", ODD)
def test_a_table_of_something_else_is_refused_and_never_half_taken(home, name):
    home.put("a.csv", shared_data(f"feedback/odd_csv/spectrum_{name}.csv").read_bytes() + b"\n")
    assert home()["quarantined"] == {"no_header": 1}
