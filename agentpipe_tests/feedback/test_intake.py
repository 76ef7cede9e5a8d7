"""Feedback: every row in exactly one place, however often and in whatever pieces it comes."""

from __future__ import annotations

import datetime as dt
import json

import pyarrow.parquet as pq
import pytest

from agentpipe.errors import CorruptError, FeedbackError
from agentpipe.feedback import intake as intake_module
from agentpipe.feedback.batch import Batch
from agentpipe.feedback.figures import Figures
from agentpipe.feedback.intake import take_in
from agentpipe.feedback.labelled import read_labelled
from agentpipe.feedback.retry import retry
from agentpipe.feedback.rows import FaultError
from agentpipe.feedback.schema import DECISION_TABLE
from agentpipe.feedback.store import day_state, days, quarantine_counts, quarantined, read_day
from agentpipe_tests.feedback.examples import DAY, SHAPE, Home, decision, label


def test_an_empty_day_has_no_rows_and_says_so(home):
    report = home()
    assert (report["decisions"], report["labels"], report["rows_taken"], report["quarantined"]) == (0, 0, 0, {})
    decisions, _ = read_day(home.store, DAY)
    assert decisions.num_rows == 0
    assert decisions.schema.equals(DECISION_TABLE)
    assert home()["digest"] == report["digest"]
    assert days(home.store) == []


def test_decision_and_label_land_in_their_day_and_are_joined(home):
    home.drop("a.jsonl", decision(), decision("d2"), label())
    report = home()
    assert (report["decisions"], report["labels"]) == (2, 1)
    assert (report["labelled"], report["unlabelled"], report["orphans"], report["trainable"]) == (1, 1, 0, 1)
    assert (report["verdicts"], report["error_types"]) == ({"wrong": 1}, {"planning": 1})
    decisions, labels = read_day(home.store, DAY)
    row = decisions.to_pylist()[0]
    assert row["observation"] == [0.5, -1.0, 2000.0]
    assert row["mask"] == [True, True]
    assert row["time"] == dt.datetime(2026, 3, 29, 1, 30, tzinfo=dt.UTC)
    assert row["line"] == "1"
    assert labels.to_pylist()[0]["time"] == dt.datetime(2026, 3, 29, 7, tzinfo=dt.UTC)
    assert labels.to_pylist()[0]["verdict"] == "wrong"
    assert home.names() == ["taken"]
    assert len(home.names("taken")) == 1
    json.dumps(report)


def test_rows_of_another_day_land_in_that_day_by_utc(home):
    """01:30 in Berlin on the day that the clocks change is still the evening of the day before in UTC."""
    rows = [decision("d1", time="2026-03-29T00:30:00+01:00"), decision("d2", time="2026-03-30T05:00:00+05:30")]
    home.drop("a.jsonl", *rows)
    assert home()["decisions"] == 1
    assert read_day(home.store, dt.date(2026, 3, 28))[0].column("decision_id").to_pylist() == ["d1"]
    assert read_day(home.store, DAY)[0].column("decision_id").to_pylist() == ["d2"]
    assert days(home.store) == [dt.date(2026, 3, 28), DAY]


def test_the_hour_that_comes_twice_is_two_hours(home):
    """Berlin, 2026-10-25: 02:30 comes twice; the offset tells them apart, and both are the same UTC day."""
    day = dt.date(2026, 10, 25)
    rows = [
        decision("summer", time="2026-10-25T02:30:00+02:00"),
        decision("winter", time="2026-10-25T02:30:00+01:00"),
        decision("before", time="2026-10-25T01:59:59+02:00"),
        decision("after", time="2026-10-26T00:59:59+01:00"),
        decision("next", time="2026-10-26T05:30:00+05:30"),
    ]
    home.drop("a.jsonl", *rows)
    assert home(day, now=dt.datetime(2026, 10, 27, tzinfo=dt.UTC))["decisions"] == 3
    times = {row["decision_id"]: row["time"].hour for row in read_day(home.store, day)[0].to_pylist()}
    assert times == {"summer": 0, "winter": 1, "after": 23}


def test_a_second_run_changes_nothing(home):
    home.drop("a.jsonl", decision(), label(), "nonsense")
    first = home()
    second = home()
    assert second["digest"] == first["digest"]
    assert (second["rows_taken"], second["decisions"], second["labels"]) == (0, 1, 1)
    assert len(quarantined(home.store)) == 1


def test_the_same_file_dropped_again_doubles_nothing(home):
    home.drop("a.jsonl", decision(), "nonsense")
    first = home()
    home.drop("b.jsonl", decision(), "nonsense")
    home.drop("c.jsonl", decision(), "nonsense")
    second = home()
    assert second["digest"] == first["digest"]
    assert (second["rows_taken"], second["rows_already"]) == (0, 2)
    assert len(quarantined(home.store)) == 1


def test_two_equal_files_in_one_intake_are_one(home):
    home.drop("a.jsonl", decision(), "nonsense")
    home.drop("b.jsonl", decision(), "nonsense")
    report = home()
    assert (report["rows_taken"], report["rows_already"], report["quarantined"]) == (1, 1, {"not_json": 1})


def test_a_repeated_id_goes_to_quarantine_with_its_source(home):
    home.drop("a.jsonl", decision(), decision(action=0))
    home.drop("b.jsonl", decision(result="other"))
    report = home()
    assert report["decisions"] == 1
    assert report["quarantined"] == {"duplicate": 2}
    assert [(row.file, row.line, row.reason) for row in quarantined(home.store)] == [
        ("a.jsonl", 2, "duplicate"),
        ("b.jsonl", 1, "duplicate"),
    ]
    assert "in a.jsonl" in quarantined(home.store)[1].detail
    assert read_day(home.store, DAY)[0].column("action").to_pylist() == [1]


def test_an_id_of_another_day_is_a_duplicate_too(home):
    home.drop("a.jsonl", decision())
    home()
    home.drop("b.jsonl", decision(time="2026-03-30T00:00:00Z"))
    assert home(dt.date(2026, 3, 30))["quarantined"] == {"duplicate": 1}


def test_ids_of_decisions_and_of_labels_are_two_things(home):
    home.drop("a.jsonl", decision("same"), label("same", decision_id="same"))
    assert home()["quarantined"] == {}


def test_a_label_may_come_days_later_and_before_its_decision(home):
    home.drop("a.jsonl", label("l1", time="2026-03-31T00:00:00Z"), label("l2", decision_id="d9"))
    before = home()
    assert (before["orphans"], before["trainable"]) == (1, 0)
    assert day_state(home.store, dt.date(2026, 3, 31)).orphans == 1
    home.drop("b.jsonl", decision())
    report = home()
    assert (report["labelled"], report["unlabelled"]) == (1, 0)
    later = day_state(home.store, dt.date(2026, 3, 31))
    assert (later.orphans, later.trainable) == (0, 1)


def test_a_later_label_supersedes_an_earlier_one_whatever_comes_first(home):
    home.drop("a.jsonl", decision(), label("new", time="2026-03-30T00:00:00Z", verdict="correct", error_type=None))
    home()
    home.drop("b.jsonl", label("old"))
    report = home()
    assert (report["labels"], report["superseded"], report["trainable"], report["labelled"]) == (1, 1, 0, 1)
    assert day_state(home.store, dt.date(2026, 3, 30)).trainable == 1


def test_a_byte_order_mark_crlf_and_blank_lines_are_fine_and_latin_1_is_not(home):
    text = json.dumps(decision()) + "\r\n\r\n" + json.dumps(label()) + "\r\n"
    home.put("a.jsonl", b"\xef\xbb\xbf" + text.encode())
    row = json.dumps(decision("d2", result="é"), ensure_ascii=False)
    home.put("b.jsonl", row.encode("latin-1") + b"\n")
    report = home()
    assert (report["decisions"], report["labels"]) == (1, 1)
    assert report["quarantined"] == {"not_utf8": 1}
    assert quarantined(home.store)[0].raw == row.encode("latin-1")


def test_json_lines_may_end_in_ndjson(home):
    home.drop("a.NDJSON", decision(), label())
    assert home()["rows_taken"] == 2
    assert home.names() == ["taken"]


def test_a_file_that_is_still_being_written_waits(home):
    home.drop("a.jsonl", decision(), '{"kind": "decis', end="")
    home.put("b.jsonl", b"")
    report = home()
    assert sorted(report["files_waiting"]) == ["a.jsonl", "b.jsonl"]
    assert (report["files_taken"], report["rows_taken"]) == ([], 0)
    home.drop("a.jsonl", decision(), decision("d2"), end="")
    assert home()["decisions"] == 2


def test_a_file_that_grows_while_it_is_taken_stays_and_its_rows_count_once(home, monkeypatch):
    home.drop("a.jsonl", decision())
    original = intake_module.put_away

    def grow_first(path, *arguments):
        with path.open("a") as file:
            file.write(json.dumps(decision("d2")) + "\n")
        return original(path, *arguments)

    monkeypatch.setattr(intake_module, "put_away", grow_first)
    assert home()["decisions"] == 1
    monkeypatch.setattr(intake_module, "put_away", original)
    assert home.names() == ["a.jsonl", "taken"]
    assert home()["decisions"] == 2
    assert home.names() == ["taken"]


def test_what_is_no_plain_file_is_refused_with_a_reason_and_other_files_are_left_alone(home, tmp_path):
    (home.inbox / "x.jsonl").mkdir(parents=True)
    (tmp_path / "outside.jsonl").write_text(json.dumps(decision()) + "\n")
    (home.inbox / "link.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (home.inbox / "notes.txt").write_text("hello")
    (home.inbox / ".hidden.jsonl").write_text("{")
    report = home()
    assert sorted(report["files_refused"]) == ["link.jsonl", "x.jsonl"]
    assert report["quarantined"] == {"not_a_file": 2}
    assert home.names() == [".hidden.jsonl", "notes.txt", "refused"]
    assert len(home.names("refused")) == 2
    assert [(row.file, row.line) for row in quarantined(home.store)] == [("link.jsonl", 0), ("x.jsonl", 0)]
    (home.inbox / "x.jsonl").mkdir()
    home()
    assert home.names() == [".hidden.jsonl", "notes.txt", "refused"]


def test_a_file_that_breaks_off_after_it_was_checked_is_refused_whole_and_the_others_taken(home, monkeypatch):
    from agentpipe.feedback import jsonl

    original = jsonl.read

    def break_off(file):
        rows = list(original(file))
        yield from rows[:1]
        if len(rows) == 3:
            raise FaultError("unreadable", "the disk gave up")
        yield from rows[1:]

    home.drop("a.jsonl", decision("a1"), decision("a2"))
    home.drop("b.jsonl", decision("b1"), decision("b2"), decision("b3"))
    monkeypatch.setattr(jsonl, "read", break_off)
    report = home()
    assert (report["decisions"], report["quarantined"]) == (2, {"unreadable": 1})
    assert (report["files_taken"], list(report["files_refused"])) == (["a.jsonl"], ["b.jsonl"])
    assert read_day(home.store, DAY)[0].column("decision_id").to_pylist() == ["a1", "a2"]


def test_files_of_one_name_do_not_replace_each_other(home):
    for number in range(3):
        home.drop("a.jsonl", decision(f"d{number}"))
        home()
    assert len(home.names("taken")) == 3


def test_new_feedback_changes_the_digest_and_unchanged_feedback_does_not(home):
    home.drop("a.jsonl", decision())
    first = home()
    home.drop("b.jsonl", decision("e1", time="2026-03-28T00:00:00Z"))
    assert home()["digest"] == first["digest"]
    home.drop("c.jsonl", label())
    assert home()["digest"] != first["digest"]


def test_the_digest_changes_when_a_label_of_the_day_begins_or_ceases_to_count(home):
    home.drop("a.jsonl", label())
    orphan = home()["digest"]
    home.drop("b.jsonl", decision(time="2026-03-28T00:00:00Z"))
    joined = home()["digest"]
    home.drop("c.jsonl", label("l2", time="2026-03-30T00:00:00Z"))
    assert len({orphan, joined, home()["digest"]}) == 3


def test_the_digest_does_not_depend_on_how_rows_were_split_into_files(home, tmp_path):
    home.drop("a.jsonl", decision("d1"), decision("d2"), label())
    other = Home(tmp_path / "other")
    other.drop("x.jsonl", label())
    other()
    other.drop("y.jsonl", decision("d2"))
    other.drop("z.jsonl", decision("d1"))
    assert other()["digest"] == home()["digest"]


@pytest.mark.parametrize("change", [{"action": 0}, {"result": ""}, {"observation": [0.5, -1, 2001]}, {"line_id": "L2"}])
def test_the_digest_covers_every_field(home, tmp_path, change):
    other = Home(tmp_path / "other")
    home.drop("a.jsonl", decision())
    other.drop("a.jsonl", decision(**change))
    assert home()["digest"] != other()["digest"]


def test_late_rows_are_quarantined_by_utc_days(home):
    rows = [decision("d1", time="2026-03-29T23:59:59Z"), decision("d2", time="2026-03-30T00:00:00Z")]
    home.drop("a.jsonl", *rows)
    assert home(late_days=2)["quarantined"] == {"late": 1}
    assert [row.line for row in quarantined(home.store)] == [1]


def test_unknown_policy_versions_are_quarantined_where_versions_are_known(home):
    home.drop("a.jsonl", decision(), decision("d2", policy_version="p2"), label())
    report = home(versions=["p2", "p3"])
    assert (report["quarantined"], report["decisions"]) == ({"unknown_policy_version": 1}, 1)


def test_a_damaged_day_is_a_typed_error_and_does_not_stop_other_days(home):
    home.drop("a.jsonl", decision())
    home()
    (part,) = home.store.glob("*/*.parquet")
    data = part.read_bytes()
    part.write_bytes(data[:-20])
    with pytest.raises(CorruptError, match="cannot be read"):
        read_day(home.store, DAY)
    middle = data.index(b"L1") if b"L1" in data else 60
    part.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(CorruptError):
        read_day(home.store, DAY)
    pq.write_table(DECISION_TABLE.empty_table().select(["action"]), part)
    with pytest.raises(CorruptError, match="columns"):
        read_day(home.store, DAY)
    part.unlink()
    with pytest.raises(CorruptError, match="missing"):
        read_day(home.store, DAY)
    for number in range(10):
        home.drop("b.jsonl", decision(f"e{number}"))
        assert home()["rows_taken"] == 1


def test_a_damaged_index_is_a_typed_error(home):
    home.drop("a.jsonl", decision())
    home()
    (home.store / "index.sqlite3").write_bytes(b"this is no index" * 1000)
    with pytest.raises(CorruptError, match="cannot be read"):
        day_state(home.store, DAY)


@pytest.mark.parametrize("lose", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_parts_without_their_index_are_kept_and_nothing_reads_as_no_feedback(home, lose):
    home.drop("a.jsonl", decision(), label())
    home()
    lose(home.store / "index.sqlite3")
    parts = sorted(home.store.glob("*/*.parquet"))
    home.drop("b.jsonl", decision("d2"))
    rules = intake_module.rules_for(shape=SHAPE)
    for act in (
        home,
        lambda: retry(home.store, rules),
        lambda: days(home.store),
        lambda: day_state(home.store, DAY),
        lambda: read_day(home.store, DAY),
        lambda: quarantine_counts(home.store),
        lambda: quarantined(home.store),
        lambda: read_labelled(home.store, DAY),
    ):
        with pytest.raises(CorruptError, match="parts without an index"):
            act()
    assert sorted(home.store.glob("*/*.parquet")) == parts
    assert len(parts) == 2
    assert home.names() == ["b.jsonl", "taken"]


def test_a_first_intake_that_breaks_off_after_its_parts_are_in_place_is_simply_done_again(home, monkeypatch):
    home.drop("a.jsonl", decision())
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "abandon", lambda batch: None)
        patch.setattr(Figures, "settle", lambda figures: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            home()
    assert len(list(home.store.glob("*/*.parquet"))) == 1
    assert days(home.store) == []
    assert home()["rows_taken"] == 1
    assert len(list(home.store.glob("*/*.parquet"))) == 1


def test_a_present_without_zone_is_refused(tmp_path):
    with pytest.raises(FeedbackError):
        take_in(tmp_path, DAY, tmp_path / "store", now=dt.datetime(2026, 4, 1), shape=SHAPE)  # noqa: DTZ001


def test_many_small_intakes_leave_few_parts_and_all_rows(home):
    for number in range(20):
        home.drop("a.jsonl", decision(f"d{number:02d}"), label(f"l{number:02d}", decision_id=f"d{number:02d}"))
        home()
    decisions, labels = read_day(home.store, DAY)
    assert decisions.column("decision_id").to_pylist() == [f"d{number:02d}" for number in range(20)]
    assert labels.num_rows == 20
    assert len(list(home.store.glob("*/decisions-*.parquet"))) < 14
    assert day_state(home.store, DAY).labelled == 20


def test_the_time_now_is_the_clock_by_default(tmp_path):
    home = Home(tmp_path)
    home.drop("a.jsonl", decision(time=(dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)).isoformat()))
    assert home(now=None)["quarantined"] == {"future_time": 1}
    assert quarantine_counts(home.store) == {"future_time": 1}
