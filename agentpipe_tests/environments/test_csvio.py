"""Whatever is wrong with a CSV file is a typed error that names file, row and field."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.environments.csvio import parse_number, read_csv
from agentpipe.errors import InputError, TableError

COLUMNS = ("name", "value")


def write(path, data):
    file = path / "input.csv"
    file.write_bytes(data)
    return file


def fails(path, data, **options):
    with pytest.raises(InputError) as caught:
        read_csv(write(path, data), columns=COLUMNS, **options)
    assert caught.value.where["file"] == path / "input.csv"
    assert caught.value.remedy
    return caught.value


def test_plain_file(tmp_path):
    content = read_csv(write(tmp_path, b"name,value\na,1\nb, 2 \n"), columns=COLUMNS)
    assert [(row.number, row.cells) for row in content.rows] == [
        (2, {"name": "a", "value": "1"}),
        (3, {"name": "b", "value": "2"}),
    ]
    assert content.notes == ()


def test_byte_order_mark_and_crlf_are_accepted_and_noted(tmp_path):
    content = read_csv(write(tmp_path, b"\xef\xbb\xbfname,value\r\na,1\r\n"), columns=COLUMNS)
    assert content.columns == COLUMNS
    assert content.rows[0].cells == {"name": "a", "value": "1"}
    assert content.notes == ("byte-order mark removed", "CRLF line ends")


def test_columns_may_stand_in_any_order(tmp_path):
    content = read_csv(write(tmp_path, b"value,name\n1,a\n"), columns=COLUMNS)
    assert content.rows[0].cells == {"name": "a", "value": "1"}


def test_quoted_line_breaks_keep_line_numbers_right(tmp_path):
    content = read_csv(write(tmp_path, b'name,value\n"a\nb",1\n\nc,2\n'), columns=COLUMNS)
    assert [(row.number, row.cells["name"]) for row in content.rows] == [(2, "a\nb"), (5, "c")]


@pytest.mark.parametrize(
    ("data", "message", "row", "field"),
    [
        (b"", "empty", None, None),
        (b" \n\n", "empty", None, None),
        (b"\xef\xbb\xbf", "empty", None, None),
        (b"name,value\n", "no rows", 1, None),
        (b"name\na\n", "'value' is missing", 1, "value"),
        (b"name,value,colour\na,1,red\n", "unknown column 'colour'", 1, "colour"),
        (b"name,value,name\na,1,b\n", "occurs twice", 1, "name"),
        (b"name,,value\na,b,1\n", "no name", 1, None),
        (b"name,value\na,1\nb\n", "1 fields, the header 2", 3, "value"),
        (b"name,value\na,1,2\n", "3 fields, the header 2", 2, None),
        (b"name,value\n,\n", "every field", 2, None),
        (b"name,value\na,1\nb,2", "no line break", 3, None),
        (b'name,value\na,1\n"b,2\n', "quoting", 3, None),
        (b'name,value\n"a"x,1\n', "quoting", 2, None),
        (b"name,value\na,1\nb,\x002\n", "NUL", 3, None),
        (b"name,value\na,1\n\xff,2\n", "not UTF-8", 3, None),
        ("name,value\na,1\n".encode("utf-16"), "UTF-16", None, None),
        ("name,value\na,1\n".encode("utf-16-le"), "NUL", 1, None),
        ("name,value\nä,1\n".encode("latin-1"), "not UTF-8", 2, None),
    ],
)
def test_broken_file_names_row_and_field(tmp_path, data, message, row, field):
    error = fails(tmp_path, data)
    assert message in error.message
    assert (error.where.get("row"), error.where.get("field")) == (row, field)


def test_missing_file_folder_and_error_type(tmp_path):
    with pytest.raises(TableError, match="does not exist"):
        read_csv(tmp_path / "none.csv", error=TableError)
    with pytest.raises(TableError, match="folder"):
        read_csv(tmp_path, error=TableError)


def test_missing_last_line_break_can_be_tolerated_and_is_noted(tmp_path):
    content = read_csv(write(tmp_path, b"name,value\na,1"), final_line_break=False)
    assert content.notes == ("the last line has no line break",)


@pytest.mark.parametrize(
    "text", ["NaN", "nan", "inf", "-Infinity", "1e400", "-1e999", "1_000", "0x10", "1,5", "", "٣", "1e", "--1", "1 2"]
)
def test_not_a_finite_number(text):
    assert parse_number(text) is None


def test_numbers_and_ranges(tmp_path):
    row = read_csv(write(tmp_path, b"name,value\n7,1e-3\n"), columns=COLUMNS).rows[0]
    assert row.finite("value") == 0.001
    assert row.whole("name", 0, 9) == 7
    with pytest.raises(InputError, match="whole number") as caught:
        row.whole("value", 0, 9)
    assert caught.value.where == {"file": tmp_path / "input.csv", "row": 2, "field": "value"}
    with pytest.raises(InputError, match="out of range"):
        row.number_in("name", 0, 1)
    with pytest.raises(InputError, match="unknown name '7'"):
        row.choice("name", ("a", "b"))


def test_minus_zero_reads_as_zero():
    assert str(parse_number("-0.0")) == "0.0"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_reads_back(value):
    assert parse_number(repr(value)) == value


@given(st.binary(max_size=200))
def test_any_bytes_give_rows_or_a_typed_error(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("any") / "input.csv"
    file.write_bytes(data)
    try:
        content = read_csv(file)
    except InputError as error:
        place = error.where["file"]
    else:
        place = content.path
        assert content.rows
        assert all(tuple(row.cells) == content.columns for row in content.rows)
    assert place == file


def test_a_file_cut_at_any_byte_never_reads_as_something_else(tmp_path):
    """Cut anywhere but between two rows, the file is refused; there, the rows before the cut are read unchanged."""
    data = b"name,value\r\nalpha,0.125\r\nbeta,17\r\n"
    whole = [row.cells for row in read_csv(write(tmp_path, data)).rows]
    for length in range(len(data)):
        try:
            rows = [row.cells for row in read_csv(write(tmp_path, data[:length]), columns=COLUMNS).rows]
        except InputError:
            continue
        assert rows == whole[: len(rows)]
        assert data[length - 1 : length] in (b"\r", b"\n")


@pytest.mark.parametrize("mark", [b";", b"\t", b"|"])
def test_another_separator_is_named_instead_of_called_an_unknown_column(tmp_path, mark):
    error = fails(tmp_path, b"name,value\na,1\n".replace(b",", mark))
    assert "separated by" in error.message
    assert "commas" in error.remedy


@pytest.mark.parametrize("data", [b'""\n', b'" "\n""\n'])
def test_quoted_emptiness_ended_in_a_stop_iteration(tmp_path, data):
    assert "empty" in fails(tmp_path, data).message


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/null"])
def test_a_device_was_read_until_memory_ended(path):
    with pytest.raises(TableError, match="not a plain file"):
        read_csv(Path(path), error=TableError)


def test_a_pipe_was_waited_for_without_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TableError, match="not a plain file"):
        read_csv(tmp_path / "pipe", error=TableError)
