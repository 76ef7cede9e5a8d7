"""Feedback: every row in exactly one place, however often and in whatever pieces it comes."""

from __future__ import annotations

import datetime as dt
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import CorruptError, FeedbackError
from agentpipe.feedback import intake as intake_module
from agentpipe.feedback.intake import read_day, take_in
from agentpipe.feedback.rows import Accepted, Refused, parse_lines
from agentpipe.feedback.schema import DECISION_TABLE, FeedbackShape

SHAPE = FeedbackShape(3, 2)
DAY = dt.date(2026, 3, 29)
NOW = dt.datetime(2026, 4, 1, tzinfo=dt.UTC)


def decision(identifier="d1", **changes):
    return {
        "kind": "decision",
        "decision_id": identifier,
        "time": "2026-03-29T01:30:00Z",
        "line_id": "L1",
        "policy_version": "p1",
        "observation": [0.5, -1, 2e3],
        "last_action": 2,
        "elapsed_minutes": 1.5,
        "mask": [True, True],
        "probabilities": [0.25, 0.75],
        "action": 1,
        "result": "done",
        **changes,
    }


def label(identifier="l1", **changes):
    return {
        "kind": "label",
        "label_id": identifier,
        "decision_id": "d1",
        "time": "2026-03-29T09:00:00+02:00",
        "verdict": "wrong",
        "error_type": "planning",
        "confidence": 0.8,
        "annotator": "kim",
        "corrected_action": 0,
        **changes,
    }


def drop(folder, name, rows, end="\n"):
    folder.mkdir(exist_ok=True)
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end
    (folder / name).write_text(text)


@pytest.fixture
def run(tmp_path):
    """Takes in what lies in ``inbox``; returns the report."""

    def take(day=DAY):
        return take_in(tmp_path / "inbox", day, tmp_path / "store", now=NOW, shape=SHAPE)

    take.inbox, take.store = tmp_path / "inbox", tmp_path / "store"
    return take


def quarantine(store):
    files = sorted((store / "quarantine").glob("*.jsonl")) if (store / "quarantine").exists() else []
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_an_empty_day_has_no_rows_and_says_so(run):
    report = run()
    assert (report.decisions, report.labels, report.rows_taken, report.quarantined) == (0, 0, 0, {})
    stored = pq.ParquetFile(report.decisions_path)
    assert stored.metadata.num_rows == 0
    assert stored.schema_arrow.equals(DECISION_TABLE)
    assert run().digest == report.digest


def test_decision_and_label_land_in_their_day_and_are_joined(run):
    drop(run.inbox, "a.jsonl", [decision(), decision("d2"), label()])
    report = run()
    assert (report.decisions, report.labels) == (2, 1)
    assert (report.labelled_decisions, report.unlabelled_decisions, report.orphan_labels) == (1, 1, 0)
    assert report.verdicts == {"wrong": 1}
    decisions, labels = read_day(run.store, DAY)
    row = decisions.to_pylist()[0]
    assert row["observation"] == [0.5, -1.0, 2000.0]
    assert row["time"] == dt.datetime(2026, 3, 29, 1, 30, tzinfo=dt.UTC)
    assert labels.to_pylist()[0]["time"] == dt.datetime(2026, 3, 29, 7, tzinfo=dt.UTC)
    assert labels.to_pylist()[0]["verdict"] == "wrong"
    assert list(run.inbox.glob("*.jsonl")) == []
    assert len(list((run.inbox / "taken").iterdir())) == 1
    json.dumps(report.to_json())


def test_rows_of_another_day_land_in_that_day_by_utc(run):
    """01:30 in Berlin on the day that the clocks change is still the evening of the day before in UTC."""
    rows = [decision("d1", time="2026-03-29T00:30:00+01:00"), decision("d2", time="2026-03-30T05:00:00+05:30")]
    drop(run.inbox, "a.jsonl", rows)
    assert run().decisions == 1
    assert read_day(run.store, dt.date(2026, 3, 28))[0].column("decision_id").to_pylist() == ["d1"]
    assert read_day(run.store, DAY)[0].column("decision_id").to_pylist() == ["d2"]


def test_a_second_run_changes_nothing(run):
    drop(run.inbox, "a.jsonl", [decision(), label(), "nonsense"])
    first = run()
    second = run()
    assert second.digest == first.digest
    assert (second.rows_taken, second.decisions, second.labels) == (0, 1, 1)
    assert len(quarantine(run.store)) == 1


def test_the_same_file_dropped_again_doubles_nothing(run):
    drop(run.inbox, "a.jsonl", [decision(), "nonsense"])
    first = run()
    drop(run.inbox, "b.jsonl", [decision(), "nonsense"])
    second = run()
    assert second.digest == first.digest
    assert (second.rows_taken, second.rows_already) == (0, 1)
    assert len(quarantine(run.store)) == 1


def test_a_repeated_id_goes_to_quarantine_with_its_source(run):
    drop(run.inbox, "a.jsonl", [decision(), decision(action=0)])
    drop(run.inbox, "b.jsonl", [decision(result="other")])
    report = run()
    assert report.decisions == 1
    assert report.quarantined == {"duplicate": 2}
    places = [(row["file"], row["line"], row["reason"]) for row in quarantine(run.store)]
    assert sorted(places) == [("a.jsonl", 2, "duplicate"), ("b.jsonl", 1, "duplicate")]
    assert read_day(run.store, DAY)[0].column("action").to_pylist() == [1]


def test_an_id_of_another_day_is_a_duplicate_too(run):
    drop(run.inbox, "a.jsonl", [decision()])
    run()
    drop(run.inbox, "b.jsonl", [decision(time="2026-03-30T00:00:00Z")])
    assert run(dt.date(2026, 3, 30)).quarantined == {"duplicate": 1}


def test_a_label_may_come_days_later_and_before_its_decision(run):
    drop(run.inbox, "a.jsonl", [label("l1", time="2026-03-31T00:00:00Z"), label("l2", decision_id="d9")])
    assert run().orphan_labels == 1
    drop(run.inbox, "b.jsonl", [decision()])
    report = run()
    assert (report.labelled_decisions, report.unlabelled_decisions) == (1, 0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not_json"),
        ("[1]", "not_json"),
        ("42", "not_json"),
        ('{"kind": "decision", "kind": "label"}', "not_json"),
        (json.dumps(decision()).replace("0.5", "NaN"), "not_json"),
        (json.dumps(decision()).replace("0.5", "-Infinity"), "not_json"),
        (json.dumps(decision()).replace("0.5", "1e400"), "invalid_field"),
        (json.dumps(decision()).replace("0.5", "1e39"), "invalid_field"),
        ("[" * 100_000, "not_json"),
        ({"kind": "opinion"}, "unknown_kind"),
        ({}, "unknown_kind"),
        (decision(time="2026-03-29T01:30:00"), "invalid_time"),
        (decision(time="yesterday"), "invalid_time"),
        (decision(time=1774747800), "invalid_time"),
        (decision(time="0001-01-01T00:00:00+10:00"), "invalid_time"),
        (decision(time="2026-04-01T00:06:00Z"), "future_time"),
        (decision(decision_id=""), "invalid_field"),
        (decision(decision_id=7), "invalid_field"),
        (decision(observation="abc"), "invalid_field"),
        (decision(observation=[True, 1, 2]), "invalid_field"),
        (decision(mask=[1, 1]), "invalid_field"),
        (decision(surprise=1), "unknown_field"),
        ({key: value for key, value in decision().items() if key != "action"}, "missing_field"),
        (decision(observation=[1, 2]), "does_not_fit_policy"),
        (decision(probabilities=[0.2, 0.3]), "does_not_fit_policy"),
        (decision(probabilities=[-0.5, 1.5]), "does_not_fit_policy"),
        (decision(mask=[True, False]), "does_not_fit_policy"),
        (decision(action=2), "does_not_fit_policy"),
        (decision(last_action=3), "does_not_fit_policy"),
        (decision(action=0, mask=[True, False]), "does_not_fit_policy"),
        (label(verdict="maybe"), "invalid_field"),
        (label(confidence=0), "invalid_field"),
        (label(confidence=1.1), "invalid_field"),
        (label(corrected_action=2), "does_not_fit_policy"),
        (label(error_type="mood"), "invalid_field"),
    ],
)
def test_each_malformed_row_is_quarantined_with_reason_and_line_and_the_good_one_taken(run, row, reason):
    drop(run.inbox, "a.jsonl", [row, decision("good")])
    report = run()
    assert report.quarantined == {reason: 1}
    assert report.decisions == 1
    (refused,) = quarantine(run.store)
    assert (refused["reason"], refused["line"], refused["file"]) == (reason, 1, "a.jsonl")
    assert refused["detail"]
    assert refused["raw"] == (row if isinstance(row, str) else json.dumps(row))


def test_a_byte_order_mark_crlf_and_blank_lines_are_fine_and_latin_1_is_not(run):
    run.inbox.mkdir()
    text = json.dumps(decision()) + "\r\n\r\n" + json.dumps(label()) + "\r\n"
    (run.inbox / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    row = json.dumps(decision("d2", result="é"), ensure_ascii=False)
    (run.inbox / "b.jsonl").write_bytes(row.encode("latin-1") + b"\n")
    report = run()
    assert (report.decisions, report.labels) == (1, 1)
    assert report.quarantined == {"not_utf8": 1}


def test_a_file_that_is_still_being_written_waits(run):
    drop(run.inbox, "a.jsonl", [decision(), '{"kind": "decis'], end="")
    report = run()
    assert (report.files_waiting, report.files_taken, report.rows_taken) == (("a.jsonl",), (), 0)
    drop(run.inbox, "a.jsonl", [decision(), decision("d2")], end="")
    assert run().decisions == 2


def test_folders_and_other_files_are_left_alone(run):
    (run.inbox / "x.jsonl").mkdir(parents=True)
    (run.inbox / "notes.txt").write_text("hello")
    (run.inbox / "empty.jsonl").write_text("")
    report = run()
    assert report.files_taken == ("empty.jsonl",)
    assert sorted(path.name for path in run.inbox.iterdir()) == ["notes.txt", "taken", "x.jsonl"]


@pytest.mark.parametrize("step", ["write_kind", "write_quarantine", "_move"])
def test_a_crash_in_the_middle_changes_nothing_in_the_end(run, monkeypatch, step):
    rows = [decision(), label(), decision("d2", time="2026-03-30T00:00:00Z"), "nonsense"]
    drop(run.inbox, "a.jsonl", rows)
    drop(run.inbox, "b.jsonl", [decision("d3")])
    original, calls = getattr(intake_module, step), []

    def fail_second(*arguments):
        calls.append(arguments)
        if len(calls) == (2 if step == "write_kind" else 1):
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(intake_module, step, fail_second)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(intake_module, step, original)
    report = run()
    assert (report.decisions, report.labels) == (2, 1)
    assert read_day(run.store, dt.date(2026, 3, 30))[0].num_rows == 1
    assert [row["reason"] for row in quarantine(run.store)] == ["not_json"]


def test_new_feedback_changes_the_digest_and_unchanged_feedback_does_not(run):
    drop(run.inbox, "a.jsonl", [decision()])
    first = run()
    drop(run.inbox, "b.jsonl", [decision("e1", time="2026-03-28T00:00:00Z")])
    assert run().digest == first.digest
    drop(run.inbox, "c.jsonl", [label()])
    assert run().digest != first.digest


def test_the_digest_does_not_depend_on_how_rows_were_split_into_files(run, tmp_path):
    drop(run.inbox, "a.jsonl", [decision("d1"), decision("d2")])
    inbox = tmp_path / "other"
    drop(inbox, "x.jsonl", [decision("d2")])
    drop(inbox, "y.jsonl", [decision("d1")])
    assert take_in(inbox, DAY, tmp_path / "store2", now=NOW, shape=SHAPE).digest == run().digest


def test_a_damaged_day_is_a_typed_error(run):
    drop(run.inbox, "a.jsonl", [decision()])
    report = run()
    with report.decisions_path.open("r+b") as file:
        file.seek(0, 2)
        file.truncate(file.tell() - 20)
    with pytest.raises(CorruptError, match="cannot be read"):
        read_day(run.store, DAY)
    pq.write_table(pa.table({"a": [1]}), report.decisions_path)
    with pytest.raises(CorruptError, match="columns"):
        read_day(run.store, DAY)


def test_a_present_without_zone_is_refused(tmp_path):
    with pytest.raises(FeedbackError):
        take_in(tmp_path, DAY, tmp_path / "store", now=dt.datetime(2026, 4, 1), shape=SHAPE)  # noqa: DTZ001


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60).filter(lambda line: b"\n" not in line)))
def test_every_line_of_any_bytes_gives_exactly_one_result(lines):
    data = b"\n".join([*lines, b""])
    results = list(parse_lines(data, SHAPE, NOW))
    stripped = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [number for number, line in enumerate(stripped, 1) if line.strip()]
    assert [result.line for result in results] == expected
    assert all(isinstance(result, Accepted | Refused) for result in results)
