"""Feedback as Parquet: the same rows as JSON lines give, and files that claim, lack or break what they should not."""

from __future__ import annotations

import datetime as dt
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentpipe.feedback import parquetfile
from agentpipe.feedback.block import Block
from agentpipe.feedback.store import quarantined, read_day
from agentpipe_tests.feedback.examples import DAY, Home, decision, label
from agentpipe_tests.strategies import shared_data

TYPES = {
    "time": pa.timestamp("us", tz="UTC"),
    "observation": pa.list_(pa.float32()),
    "probabilities": pa.list_(pa.float32()),
    "mask": pa.list_(pa.bool_()),
    "last_action": pa.int32(),
    "action": pa.int32(),
    "corrected_action": pa.int64(),
    "elapsed_minutes": pa.float32(),
    "confidence": pa.float64(),
}


def table(*rows, **types):
    names = list(dict.fromkeys(name for row in rows for name in row))
    rows = [{**row, "time": dt.datetime.fromisoformat(row["time"])} if row.get("time") else row for row in rows]
    kinds = {**TYPES, **types}
    return pa.table({name: pa.array([row.get(name) for row in rows], kinds.get(name, pa.string())) for name in names})


def data(content, **options):
    file = io.BytesIO()
    pq.write_table(content, file, **{"write_page_checksum": True, **options})
    return file.getvalue()


def test_both_kinds_of_a_parquet_file_are_what_json_lines_give(home, tmp_path):
    rows = [decision(), label(), decision("d2", result=None), label("l2", corrected_action=None, error_type=None)]
    home.put("a.parquet", data(table(*rows), row_group_size=1))
    other = Home(tmp_path / "other")
    other.drop("a.jsonl", *rows)
    report = home()
    assert (report["quarantined"], report["decisions"], report["labels"]) == ({}, 2, 2)
    assert report["digest"] == other()["digest"]
    assert read_day(home.store, DAY)[0].column("line").to_pylist() == ["1", "3"]
    assert [row["line"] for row in read_day(home.store, DAY)[1].to_pylist()] == ["2", "4"]


def cast(content, name, kind):
    place = content.schema.get_field_index(name)
    return content.set_column(place, name, content.column(name).cast(kind))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("time", pa.timestamp("ns", tz="Europe/Berlin")),
        ("time", pa.timestamp("s", tz="Asia/Kolkata")),
        ("time", pa.timestamp("ms", tz="UTC")),
        ("observation", pa.large_list(pa.float64())),
        ("observation", pa.list_(pa.float32(), 3)),
        ("mask", pa.large_list(pa.bool_())),
        ("action", pa.float64()),
        ("action", pa.uint8()),
        ("last_action", pa.uint64()),
        ("elapsed_minutes", pa.float64()),
        ("decision_id", pa.large_string()),
        ("decision_id", pa.dictionary(pa.int8(), pa.string())),
        ("kind", pa.dictionary(pa.int32(), pa.string())),
        ("result", pa.large_string()),
    ],
)
def test_other_writers_types_of_the_same_content_give_the_same_rows(home, tmp_path, name, kind):
    other = Home(tmp_path / "other")
    content = table(decision(), decision("d2", time="2026-03-29T01:30:01Z"))
    home.put("a.parquet", data(content))
    other.put("a.parquet", data(cast(content, name, kind)))
    assert other()["digest"] == home()["digest"]


def test_a_frame_of_pandas_with_gaps_is_fine(home):
    import pandas as pd

    frame = pd.DataFrame([decision(), label(), label("l2", corrected_action=None)])
    frame["time"] = pd.to_datetime(frame["time"], utc=True)
    assert frame["action"].dtype == np.float64
    file = io.BytesIO()
    frame.to_parquet(file)
    home.put("a.parquet", file.getvalue())
    report = home()
    assert (report["decisions"], report["labels"], report["quarantined"]) == (1, 2, {})


@pytest.mark.parametrize(
    ("wrong", "types", "reason"),
    [
        ({"observation": [float("nan"), 1, 2]}, {}, "number_out_of_range"),
        ({"observation": [1e300, 1, 2]}, {"observation": pa.list_(pa.float64())}, "number_out_of_range"),
        ({"observation": [None, 1, 2]}, {}, "invalid_field"),
        ({"observation": [1, 2]}, {}, "does_not_fit_policy"),
        ({"observation": None}, {}, "missing_field"),
        ({"mask": [True]}, {}, "does_not_fit_policy"),
        ({"probabilities": [0.5, 0.4]}, {}, "probabilities"),
        ({"probabilities": [float("inf"), 0.4]}, {}, "number_out_of_range"),
        ({"elapsed_minutes": float("nan")}, {}, "number_out_of_range"),
        ({"elapsed_minutes": 3.4e38}, {}, "number_out_of_range"),
        ({"action": 0.5}, {"action": pa.float64()}, "invalid_field"),
        ({"action": 2**64 - 1}, {"action": pa.uint64()}, "number_out_of_range"),
        ({"action": -1}, {}, "invalid_field"),
        ({"decision_id": None}, {}, "missing_field"),
        ({"decision_id": "a b"}, {}, "invalid_field"),
        ({"decision_id": "x" * 100_000}, {}, "invalid_field"),
        ({"kind": "opinion"}, {}, "unknown_kind"),
        ({"kind": None}, {}, "unknown_kind"),
        ({"annotator": "kim"}, {}, "unknown_field"),
        ({"time": "2026-04-02T00:00:00Z"}, {}, "future_time"),
        ({"time": None}, {}, "missing_field"),
    ],
)
def test_each_malformed_row_is_quarantined_with_its_number_and_the_good_one_taken(home, wrong, types, reason):
    home.put("a.parquet", data(table(decision("good"), decision(**wrong), **types)))
    report = home()
    assert (report["quarantined"], report["decisions"]) == ({reason: 1}, 1)
    (refused,) = quarantined(home.store)
    assert (refused.line, refused.file) == (2, "a.parquet")
    content = json.loads(refused.raw)
    assert content["line_id"] == "L1"


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("time", pa.array([dt.datetime(2026, 3, 29, 1, 30)], pa.timestamp("us")), "invalid_time"),  # noqa: DTZ001
        ("time", pa.array([2**62], pa.timestamp("us", tz="UTC")), "invalid_time"),
        ("time", pa.array([-(2**62)], pa.timestamp("ms", tz="UTC")), "invalid_time"),
        ("time", pa.array(["2026-03-29T01:30:00"]), "invalid_time"),
        ("time", pa.array([17]), "invalid_time"),
        ("mask", pa.array([[1, 1]]), "invalid_field"),
        ("mask", pa.array(["[true, true]"]), "invalid_field"),
        ("observation", pa.array([[[1.0, 2.0], [3.0]]]), "nested_list"),
        ("observation", pa.array([["1", "2", "3"]]), "invalid_field"),
        ("action", pa.array(["1"]), "invalid_field"),
        ("action", pa.array([True]), "invalid_field"),
        ("decision_id", pa.array([1]), "invalid_field"),
        ("decision_id", pa.array([b"d1"]), "invalid_field"),
        ("kind", pa.array([1]), "unknown_kind"),
        ("extra", pa.array([{"a": 1}]), "unknown_field"),
    ],
)
def test_a_column_of_another_type_refuses_its_rows(home, name, values, reason):
    content = table(decision())
    place = content.schema.get_field_index(name)
    changed = content.append_column(name, values) if place < 0 else content.set_column(place, name, values)
    home.put("a.parquet", data(changed))
    assert home()["quarantined"] == {reason: 1}


def test_a_missing_column_refuses_its_rows(home):
    home.put("a.parquet", data(table(decision()).drop_columns(["action"])))
    home.put("b.parquet", data(table(decision()).drop_columns(["kind"])))
    assert home()["quarantined"] == {"missing_field": 1, "unknown_kind": 1}


def test_a_text_that_is_not_utf_8_refuses_its_row(home):
    content = data(table(decision("good\u00e9"), decision("d2")), use_dictionary=False, compression="none")
    home.put("a.parquet", content.replace("good\u00e9".encode(), b"good\xe9\xff"[:6].ljust(6, b"\xff")))
    report = home()
    assert "not_utf8" in report["quarantined"] or "corrupt" in report["quarantined"]
    assert report["decisions"] == 0


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "kind",
        "decision_id",
        "label_id",
        "verdict",
        "error_type",
        "annotator",
        "line_id",
        "policy_version",
        "result",
        "extra",
    ],
)
def test_a_file_with_a_text_that_is_not_utf_8_is_refused_and_the_others_are_taken(home, name, dictionary):
    content = table(decision(), label())
    if name == "extra":
        content = content.append_column(name, pa.array(["x", "y"]))
    texts = [(value or "").encode() for value in content.column(name).to_pylist()]
    wrong = pa.array([texts[0], b"\xff"]).view(pa.string())
    changed = content.set_column(content.schema.get_field_index(name), name, wrong)
    home.put("a.parquet", data(changed, use_dictionary=dictionary))
    home.put("b.parquet", data(table(decision("good"))))
    report = home()
    assert (report["decisions"], report["quarantined"]) == (1, {"not_utf8": 1})
    assert f"column '{name}'" in report["files_refused"]["a.parquet"]
    assert home()["files_taken"] == []


def test_codes_without_words_refuse_the_file():
    codes = pa.array([7], pa.int32())
    broken = pa.DictionaryArray.from_arrays(codes, pa.array(["decision"]), safe=False)
    batch = pa.RecordBatch.from_arrays([broken], names=["kind"])
    with pytest.raises(parquetfile.FaultError, match="out of bounds"):
        parquetfile._check_values(batch)


def test_whatever_reading_one_file_raises_is_a_fault_of_that_file(home, monkeypatch):
    home.put("a.parquet", data(table(decision())))
    home.drop("b.jsonl", decision("good"))

    def fail(*_):
        raise IndexError("no such place")

    monkeypatch.setattr(parquetfile, "block_of_batch", fail)
    report = home()
    assert (report["decisions"], report["quarantined"]) == (1, {"not_parquet": 1})
    assert report["files_refused"] == {"a.parquet": "not_parquet: no such place"}


def test_values_that_python_cannot_hold_are_named_by_their_type(home):
    values = pa.array([2**30], pa.int32()).view(pa.date32())
    home.put("a.parquet", data(table(decision()).append_column("extra", values)))
    assert home()["quarantined"] == {"unknown_field": 1}
    assert json.loads(quarantined(home.store)[0].raw)["extra"] == "a value of type date32[day]"


def test_one_long_text_that_many_rows_repeat_takes_the_room_of_one(home):
    """100,000 rows of 1 MB each once decoded: 100 GB in a file of kilobytes."""
    rows = 100_000
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 1_000_000]))
    columns = {"kind": pa.array(["decision"] * rows), "result": long}
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, compression="zstd")
    assert len(file.getvalue()) < 1_000_000
    parquetfile.check(io.BytesIO(file.getvalue()))
    (first, *_) = parquetfile.read(io.BytesIO(file.getvalue()))
    assert first.refused[0][0] in ("missing_field", "invalid_field")


@pytest.mark.parametrize("cut", [5, 8, 100, -1, -4, -8])
def test_a_file_without_its_footer_waits(home, cut):
    home.put("a.parquet", data(table(decision()))[:cut])
    report = home()
    assert list(report["files_waiting"]) == ["a.parquet"]
    assert home.names() == ["a.parquet"]


def test_a_corrupt_page_refuses_the_whole_file_and_nothing_of_it_is_taken(home):
    content = data(table(*(decision(f"d{number}") for number in range(50))), row_group_size=10, compression="none")
    place = content.index(b"d49")
    home.put("a.parquet", content[:place] + b"d48" + content[place + 3 :])
    home.drop("b.jsonl", decision("other"))
    report = home()
    assert report["quarantined"] == {"corrupt": 1}
    assert (report["decisions"], list(report["files_refused"])) == (1, ["a.parquet"])
    assert home.names("refused")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello, I am no Parquet file", "not_parquet"),
        (b"PARE" + b"\0" * 20 + b"PARE", "not_parquet"),
        (b"PAR1" + b"\0" * 20 + b"\x04\0\0\0PAR1", "not_parquet"),
        (b"PAR1" + b"\0" * 20 + b"\xff\xff\xff\x7fPAR1", "not_parquet"),
    ],
)
def test_what_is_not_parquet_is_refused_whole(home, content, reason):
    home.put("a.parquet", content)
    assert home()["quarantined"] == {reason: 1}


def test_columns_of_one_name_refuse_the_file(home):
    content = table(decision())
    home.put("a.parquet", data(content.append_column("time", content.column("time"))))
    assert home()["quarantined"] == {"duplicate_column": 1}


def test_any_changed_byte_is_found_or_harmless_and_never_anything_but_a_fault_of_the_file():
    content = data(table(*(decision(f"d{number}") for number in range(20)), label()), row_group_size=7)
    random = np.random.default_rng(0)
    found = set()
    for place in random.choice(len(content) - 8, 400, replace=False).tolist():
        changed = bytearray(content)
        changed[place] ^= int(random.integers(1, 256))
        file = io.BytesIO(bytes(changed))
        try:
            parquetfile.check(file)
            items = list(parquetfile.read(file))
            found.add("read")
            assert sum(len(item) if isinstance(item, Block) else 1 for item in items) == 21
        except (parquetfile.FaultError, parquetfile.UnfinishedError) as error:
            found.add(getattr(error, "reason", "unfinished"))
    assert {"read", "corrupt", "not_parquet"} <= found


class Claims:
    """A footer that says whatever one wants."""

    def __init__(self, rows=10, bytes_=1_000, groups=1, claimed=None):
        self.num_rows, self.num_row_groups = rows * groups if claimed is None else claimed, groups
        self._group = type("Group", (), {"num_rows": rows, "total_byte_size": bytes_})

    def row_group(self, number):
        return self._group


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        (Claims(), None),
        (Claims(rows=1_000_000, bytes_=2_000_000_000), None),
        (Claims(bytes_=2**40), "too_large"),
        (Claims(rows=2**40, bytes_=1), "too_large"),
        (Claims(rows=1_000, bytes_=2**29, groups=1_000), "too_large"),
        (Claims(claimed=11), "not_parquet"),
        (Claims(bytes_=-1), "not_parquet"),
        (Claims(rows=-1), "not_parquet"),
    ],
)
def test_claims_are_judged_before_anything_is_decoded(claims, reason):
    if reason is None:
        parquetfile._check_claims(claims)
        return
    with pytest.raises(parquetfile.FaultError) as caught:
        parquetfile._check_claims(claims)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("bad/PARQUET-1481.parquet", {"not_parquet"}),
        ("odd/rle-dict-uncompressed-corrupt-checksum.parquet", {"corrupt"}),
        ("good/alltypes_plain.snappy.parquet", {"unknown_kind"}),
        ("good/list_columns.parquet", {"unknown_kind"}),
        ("good/nulls.snappy.parquet", {"unknown_kind"}),
        ("good/single_nan.parquet", {"unknown_kind"}),
    ],
)
def test_files_of_the_parquet_test_suite_are_refused_whole_or_row_by_row(home, name, reasons):
    home.put("a.parquet", shared_data(f"parquet/{name}").read_bytes())
    report = home()
    assert set(report["quarantined"]) == reasons
    assert report["rows_taken"] == 0
