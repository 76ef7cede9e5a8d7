"""Rows in quarantine are judged again when asked: each then stands in one place."""

from __future__ import annotations

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentpipe.feedback.intake import rules_for
from agentpipe.feedback.retry import retry
from agentpipe.feedback.store import day_state, quarantine_counts, quarantined, read_day
from agentpipe_tests.feedback import test_csv, test_parquet, test_rules
from agentpipe_tests.feedback.examples import DAY, NOW, SHAPE, Home, decision, label
from agentpipe_tests.feedback.test_csv import text
from agentpipe_tests.feedback.test_parquet import table


def again(home, **options):
    chosen = {name: options.pop(name) for name in ("reason", "numbers") if name in options}
    return retry(home.store, rules_for(now=NOW, shape=SHAPE, **options), **chosen).to_json()


def parquet(*rows):
    file = io.BytesIO()
    pq.write_table(table(*rows), file)
    return file.getvalue()


ROWS = [decision("d1", result='a "b",\nc'), decision("d2", policy_version="p2"), label()]


@pytest.mark.parametrize("name", ["jsonl", "csv", "parquet"])
def test_rows_of_an_unknown_policy_are_taken_once_it_is_known_whatever_they_came_in(home, name):
    if name == "jsonl":
        home.drop("a.jsonl", *ROWS)
    else:
        home.put(f"a.{name}", text(*ROWS).encode() if name == "csv" else parquet(*ROWS))
    assert home(versions=[])["quarantined"] == {"unknown_policy_version": 2}
    assert again(home, versions=["p1"])["rows_taken"] == 1
    assert quarantine_counts(home.store) == {"unknown_policy_version": 1}
    assert day_state(home.store, DAY).trainable == 1
    assert again(home)["rows_taken"] == 1
    assert quarantined(home.store) == []
    decisions = read_day(home.store, DAY)[0]
    assert decisions.column("result").to_pylist()[0] == 'a "b",\nc'
    assert decisions.column("observation").to_pylist() == [[0.5, -1.0, 2000.0]] * 2
    assert again(home)["rows_taken"] == 0


def test_what_came_of_a_retry_has_the_digest_that_it_would_have_had_at_once(home, tmp_path):
    other = Home(tmp_path / "other")
    for each in (home, other):
        each.drop("a.jsonl", *ROWS)
    home(versions=[])
    again(home)
    assert home()["digest"] == other()["digest"]


def test_late_rows_are_taken_with_more_days_and_only_those_asked_for(home):
    home.drop("a.jsonl", decision("d1", time="2026-03-20T00:00:00Z"), decision("d2", time="2026-03-21T00:00:00Z"), "x")
    assert home(late_days=2)["quarantined"] == {"late": 2, "not_json": 1}
    assert again(home, late_days=2, reason="late")["quarantined"] == {"late": 2}
    (_, second, _) = quarantined(home.store)
    assert again(home, numbers=[second.number])["rows_taken"] == 1
    assert again(home, reason="not_json")["rows_taken"] == 0
    assert quarantine_counts(home.store) == {"late": 1, "not_json": 1}


def test_a_row_that_is_refused_for_another_reason_now_says_so(home):
    home.drop("a.jsonl", decision("d1", time="2026-03-20T00:00:00Z"))
    home(late_days=2)
    home.drop("b.jsonl", decision("d1"))
    home()
    assert again(home)["quarantined"] == {"duplicate": 1}
    (row,) = quarantined(home.store)
    assert (row.reason, row.file, row.line) == ("duplicate", "a.jsonl", 1)
    assert "in b.jsonl" in row.detail


def test_of_two_rows_of_one_id_in_quarantine_the_first_is_taken(home):
    home.drop("a.jsonl", decision(), decision(action=0))
    home(versions=[])
    found = again(home)
    assert (found["rows_taken"], found["quarantined"]) == (1, {"duplicate": 1})
    assert read_day(home.store, DAY)[0].column("action").to_pylist() == [1]


def examples(test):
    """The arguments that another test is parametrised with."""
    return test.pytestmark[0].args[1]


def every_fault(home):
    """Every malformed row that the tests of the formats have, each in the format of its test."""
    rows = [
        row
        for row, _ in examples(
            test_rules.test_each_malformed_row_is_quarantined_with_reason_and_line_and_the_good_one_taken
        )
    ]
    home.drop("a.jsonl", *(row if isinstance(row, str) else json.dumps(row) for row in rows))
    changes = [
        change for change, _ in examples(test_csv.test_each_malformed_row_is_quarantined_with_its_line_and_its_cells)
    ]
    wrong = [{**test_csv.cells(decision(f"c{number}")), **change} for number, change in enumerate(changes)]
    body = io.StringIO()
    writer = csv.DictWriter(body, test_csv.COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(wrong)
    more = "decision,d3\n" + "x," * 40 + "\n" + "decision," + "x" * 1_100_000 + "\n"
    home.put("b.csv", (body.getvalue() + more).encode(errors="surrogateescape"))
    of_rows = examples(test_parquet.test_each_malformed_row_is_quarantined_with_its_number_and_the_good_one_taken)
    for number, (change, types, _) in enumerate(of_rows):
        home.put(f"row{number}.parquet", test_parquet.data(table(decision(f"p{number}", **change), **types)))
    of_columns = examples(test_parquet.test_a_column_of_another_type_refuses_its_rows)
    for number, (name, values, _) in enumerate(of_columns):
        content = table(decision(f"q{number}"))
        place = content.schema.get_field_index(name)
        changed = content.append_column(name, values) if place < 0 else content.set_column(place, name, values)
        home.put(f"column{number}.parquet", test_parquet.data(changed))


def test_a_row_that_is_judged_again_by_the_same_rules_keeps_its_reason(home):
    every_fault(home)
    assert home()["files_refused"] == {}
    before = {row.number: (row.file, row.line, row.reason, row.raw) for row in quarantined(home.store)}
    assert len(before) > 90
    assert again(home)["rows_taken"] == 0
    assert {row.number: (row.file, row.line, row.reason, row.raw) for row in quarantined(home.store)} == before


def test_a_row_of_parquet_that_is_not_kept_as_it_came_is_not_taken_as_something_else(home):
    """The bytes ``b"d1"`` are written as a text in quarantine, and would pass as an id of that name."""
    content = table(decision())
    place = content.schema.get_field_index("decision_id")
    home.put("a.parquet", test_parquet.data(content.set_column(place, "decision_id", pa.array([b"d1"]))))
    assert home()["quarantined"] == {"invalid_field": 1}
    assert again(home)["quarantined"] == {"invalid_field": 1}


def test_files_that_were_refused_and_rows_that_are_no_text_stay(home):
    (home.inbox / "x.jsonl").mkdir(parents=True)
    home.put("a.jsonl", b"\xff\n")
    home.put("b.csv", text(decision()).encode() + b"decision,\xff\r\n")
    home()
    assert again(home)["rows_taken"] == 0
    assert sum(quarantine_counts(home.store).values()) == 3
