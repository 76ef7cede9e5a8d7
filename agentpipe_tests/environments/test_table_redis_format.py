"""The bytes of a published version: equal for equal content, and never read as another table."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.environments.table_redis_format import decode_table, encode_table
from agentpipe.errors import CorruptError, VersionError
from agentpipe_tests.strategies import project_table, tables

TABLE = project_table()
DATA = encode_table(TABLE)


def read(data):
    return decode_table(data, TABLE.version, "place")


@settings(max_examples=30, deadline=None)
@given(tables())
def test_what_is_written_reads_back_bit_for_bit(table):
    again = decode_table(encode_table(table), table.version, "place")
    assert again.rows == table.rows
    assert encode_table(again) == encode_table(table)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_damage_reads_as_another_table(data):
    start = data.draw(st.integers(0, len(DATA) - 1))
    end = data.draw(st.integers(start, len(DATA)))
    damaged = DATA[:start] + data.draw(st.binary(max_size=6)) + DATA[end:]
    with contextlib.suppress(CorruptError, VersionError):
        assert read(damaged) == TABLE


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"7",
        b"{}",
        b"[" * 100_000,
        DATA[:-1],
        DATA.replace(b'"sensor",1,0,', b'"sensor",1,true,', 1),
        DATA.replace(b'"sensor",1,0,', b'["sensor"],1,0,', 1),
        DATA.replace(b'"sensor",1,0,', b'"sensor",1,0,NaN,', 1),
        DATA.replace(b'"sensor",1,0,0', b'"sensor",1,0,1' + b"0" * 400, 1),
        DATA.replace(b'"sensor",1,0,', b'"sensor",1.0,0,', 1),
        json.dumps({**json.loads(DATA), "rows": 7}).encode(),
        json.dumps({**json.loads(DATA), "rows": json.loads(DATA)["rows"][:-1]}).encode(),
    ],
    ids=range(14),
)
def test_damaged_content_is_said(content):
    assert content != DATA
    with pytest.raises(CorruptError, match="published version"):
        read(content)


def test_other_columns_are_another_agentpipe():
    with pytest.raises(VersionError, match="other columns"):
        read(json.dumps({**json.loads(DATA), "format": 2}).encode())


def test_a_whole_table_under_the_name_of_another_is_damage():
    with pytest.raises(CorruptError, match="not that of its name"):
        decode_table(DATA, "f" * 64, "place")
