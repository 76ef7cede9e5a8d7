"""``agentpipe feedback``: what an engineer does with files, quarantine and labels."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3

import pytest
from typer.testing import CliRunner

from agentpipe.cli import labelling
from agentpipe.cli.main import app
from agentpipe.environments.datafiles import data_dir
from agentpipe.storage import home_lock
from agentpipe_tests.redis_server import redis_server

SAMPLE = data_dir() / "feedback_sample.jsonl"
MANY = "10000"
COMMANDS = ("submit", "take", "status", "quarantine", "retry", "label")


@pytest.fixture
def feedback(tmp_path):
    def run(*arguments, ok=True, given=None):
        command = ["feedback", *arguments, "--home", str(tmp_path / "home")]
        result = CliRunner().invoke(app, command, input=given)
        assert (result.exit_code == 0) == ok, result.output
        return json.loads(result.stdout) if "--json" in arguments else result.stdout

    run.inbox = tmp_path / "home" / "feedback" / "inbox"
    return run


@pytest.fixture
def taken(feedback):
    feedback("submit", str(SAMPLE))
    feedback("take", "--late-days", MANY)
    return feedback


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_takes_home_and_json(command):
    result = CliRunner().invoke(app, ["feedback", command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--home" in result.stdout
    assert "--json" in result.stdout


def test_a_file_is_submitted_taken_and_shown(feedback):
    before = feedback("status", "--json")
    assert before == {"ok": True, "days": [], "inbox": [], "ignored": {}, "quarantine": {}}
    (placed,) = feedback("submit", str(SAMPLE), "--json")["files"]
    assert feedback("status", "--json")["inbox"] == ["feedback_sample.jsonl"] == [placed.rpartition("/")[2]]
    done = feedback("take", "--late-days", MANY, "--json")
    assert (done["inbox"]["rows_taken"], done["inbox"]["quarantined"]) == (36, {})
    state = feedback("status", "--json")
    assert [(day["day"], day["decisions"], day["trainable"]) for day in state["days"]] == [
        ("2026-01-05", 24, 0),
        ("2026-01-06", 0, 12),
    ]
    text = feedback("status")
    assert "2026-01-05" in text
    assert "quarantine: nothing" in text
    assert "0 rows" in feedback("take")


def test_a_file_with_a_hidden_name_is_not_lost_in_the_inbox(feedback, tmp_path):
    shutil.copy(SAMPLE, tmp_path / ".sample.jsonl")
    feedback("submit", str(tmp_path / ".sample.jsonl"))
    assert feedback("status", "--json")["inbox"] == ["sample.jsonl"]


def test_files_in_the_inbox_that_nothing_reads_are_listed_as_ignored_and_do_not_move(feedback):
    (feedback.inbox / "folder").mkdir(parents=True)
    names = ("a.json", "a.jsonl.gz", "notes", ".hidden.txt")
    for name in names:
        (feedback.inbox / name).write_text("{}")
    read = ".jsonl, .ndjson, .csv and .parquet are read"
    expected = {
        "a.json": f"ending .json; {read}",
        "a.jsonl.gz": f"ending .gz; {read}",
        "folder": f"a folder; {read}",
        "notes": f"no ending; {read}",
        ".hidden.txt": "a hidden name, as of a file that is still being written; rename it if it is whole",
    }
    shutil.copy(SAMPLE, feedback.inbox)
    assert feedback("take", "--late-days", MANY, "--json")["ignored"] == expected
    assert feedback("status", "--json")["ignored"] == expected
    assert sorted(path.name for path in feedback.inbox.iterdir()) == sorted([*names, "folder", "taken"])
    home = ["--home", str(feedback.inbox.parent.parent)]
    for command in ("take", "status"):
        result = CliRunner().invoke(app, ["feedback", command, *home])
        assert f"ignored: a.json: ending .json; {read}" in result.stderr


def test_of_many_ignored_files_people_are_shown_some(feedback):
    feedback.inbox.mkdir(parents=True)
    for number in range(25):
        (feedback.inbox / f"{number:02}.txt").write_text("x")
    assert len(feedback("status", "--json")["ignored"]) == 25
    home = ["--home", str(feedback.inbox.parent.parent)]
    lines = CliRunner().invoke(app, ["feedback", "status", *home]).stderr.splitlines()
    assert len(lines) == 21
    assert lines[-1] == "ignored: 5 more; --json lists all"


def test_a_file_submitted_twice_is_taken_once(feedback):
    feedback("submit", str(SAMPLE), str(SAMPLE))
    done = feedback("take", "--late-days", MANY, "--json")["inbox"]
    assert (len(done["files_taken"]), done["rows_taken"], done["rows_already"]) == (2, 36, 36)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"x", "nothing reads"),
        ("a.ndjson", b"{", "not a finished file"),
        ("a.parquet", b"no parquet, not at all", "not_parquet"),
        ("a.csv", b"a,b\n", "no_header"),
        ("a.jsonl", b"{", "not a finished file"),
        ("a.jsonl", b"", "not a finished file"),
        ("missing.csv", None, "unreadable"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_is_copied(feedback, tmp_path, name, data, message):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    error = feedback("submit", str(SAMPLE), str(path), "--json", ok=False)["error"]
    assert error["type"] == "FeedbackError"
    assert message in error["message"]
    assert not feedback.inbox.exists()


def test_a_table_whose_last_cell_may_be_cut_off_is_no_label_until_its_line_ends(feedback, tmp_path):
    """``25`` that was cut off after its first digit is another action."""
    header = "kind,label_id,decision_id,time,verdict,annotator,corrected_action"
    whole = f"{header}\nlabel,l1,d1,2026-01-05T00:00:00Z,wrong,kim,25"
    for cut in (whole[:-1], whole):
        (tmp_path / "a.csv").write_text(cut)
        error = feedback("submit", str(tmp_path / "a.csv"), "--json", ok=False)["error"]
        assert error["message"] == "not a finished file: the last line has no line end"
        assert "end the file with a line end if it is whole" in error["remedy"]
    assert not feedback.inbox.exists()
    (tmp_path / "a.csv").write_text(whole + "\n")
    feedback("submit", str(tmp_path / "a.csv"))
    assert feedback("take", "--late-days", MANY, "--json")["inbox"]["rows_taken"] == 1


def test_late_rows_are_in_quarantine_until_they_are_judged_with_more_days(feedback):
    feedback("submit", str(SAMPLE))
    assert "late 36" in feedback("take", "--late-days", "3")
    listed = feedback("quarantine", "--limit", "2", "--json")
    assert listed["counts"] == {"late": 36}
    assert [(row["line"], row["file"]) for row in listed["rows"]] == [(1, SAMPLE.name), (3, SAMPLE.name)]
    assert json.loads(listed["rows"][0]["raw"])["decision_id"] == "sample-0-0"
    number = listed["rows"][0]["number"]
    assert f"{SAMPLE.name}:1" in feedback("quarantine", "--reason", "late")
    assert feedback("retry", "--late-days", "3", "--json")["still_quarantined"] == {"late": 36}
    assert feedback("retry", "--late-days", MANY, "--id", str(number), "--json")["rows_taken"] == 1
    assert "35 rows taken" in feedback("retry", "--late-days", MANY, "--reason", "late")
    assert "nothing" in feedback("quarantine")


def test_quarantine_says_how_many_rows_it_does_not_show(feedback):
    feedback("submit", str(SAMPLE))
    assert "inbox: 1 file, 0 rows\n" in feedback("take")
    assert "20 of 36 shown; --limit 36 shows all" in feedback("quarantine")
    assert "shown" not in feedback("quarantine", "--limit", "36")


def test_an_unknown_reason_or_number_of_quarantine_is_said(feedback, tmp_path):
    (tmp_path / "a.csv").write_text("no header\n")
    feedback("submit", str(SAMPLE))
    shutil.copy(tmp_path / "a.csv", feedback.inbox)
    feedback("take")
    (whole_file, *_) = [row["number"] for row in feedback("quarantine", "--json")["rows"] if row["line"] == 0]

    def said(*arguments):
        return CliRunner().invoke(app, ["feedback", *arguments, "--home", str(tmp_path / "home")]).stderr

    assert said("quarantine", "--reason", "nosuch") == "nothing in quarantine has the reason nosuch\n"
    assert said("retry", "--reason", "nosuch") == "no row with the reason nosuch in quarantine\n"
    assert said("retry", "--id", "99999") == "no row 99999 in quarantine\n"
    assert said("retry", "--id", str(whole_file)) == f"no row {whole_file} in quarantine\n"
    assert said("retry", "--reason", "late", "--late-days", "3") == ""
    assert feedback("retry", "--id", "99999", "--json")["unknown_ids"] == [99999]


def test_the_sample_tried_as_shown_is_late_and_the_line_of_the_guide_takes_it_in(feedback):
    guide = (data_dir().parent / "docs" / "how-to" / "feedback.md").read_text()
    (line,) = re.findall("`agentpipe feedback (retry .*?)`", guide)
    feedback("submit", str(SAMPLE))
    assert "late 36" in feedback("take")
    assert "36 rows taken" in feedback(*line.split())


def test_decisions_of_a_policy_that_the_home_does_not_know_wait_in_quarantine(feedback, tmp_path):
    lines = SAMPLE.read_text().splitlines()[:1]
    (tmp_path / "a.jsonl").write_text(lines[0].replace('"policy_version":"random-', '"policy_version":"other-') + "\n")
    feedback("submit", str(tmp_path / "a.jsonl"))
    done = feedback("take", "--late-days", MANY, "--json")["inbox"]
    assert done["quarantined"] == {"unknown_policy_version": 1}


def test_a_held_home_is_said_and_nothing_is_taken(feedback, tmp_path):
    feedback("submit", str(SAMPLE))
    with home_lock(tmp_path / "home", "a test"):
        assert feedback("take", "--json", ok=False)["error"]["type"] == "LockHeldError"
        assert feedback("status", "--json")["days"] == []


@pytest.mark.parametrize("statement", ["UPDATE days SET figures = 'garbage'", "UPDATE days SET day = day + 4000000"])
@pytest.mark.parametrize("command", ["status", "label"])
def test_a_damaged_index_is_a_typed_error(taken, statement, command):
    path = taken.inbox.parent / "store" / "index.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)
    error = taken(command, "--json", ok=False)["error"]
    assert (error["type"], error["where"]["file"]) == ("CorruptError", str(path))


def test_labels_are_asked_for_as_a_sheet_and_taken_once(taken, tmp_path):
    sheet = tmp_path / "sheet.csv"
    assert taken("label", "--csv", str(sheet), "--limit", "3", "--json")["decisions"] == 3
    lines = sheet.read_text().splitlines()
    allowed = lines[1].rsplit(",", 1)[1]
    filled = lines[1].rsplit(",", 6)[0] + f",wrong,planning,0.5,,close,{allowed}"
    sheet.write_text("\n".join([lines[0], filled, *lines[2:]]) + "\n")
    answers = ("label", "--answers", str(sheet), "--annotator", "kim", "--json")
    assert taken(*answers) == {"ok": True, "labels": 1, "already": 0, "taken": True}
    assert taken(*answers) == {"ok": True, "labels": 0, "already": 1, "taken": False}
    identifier = lines[1].split(",")[0]
    left = taken("label", "--limit", "100", "--json")["decisions"]
    assert len(left) == 11
    assert identifier not in {row["decision_id"] for row in left}


def test_a_sheet_that_is_filled_in_is_replaced_only_by_force(taken, tmp_path):
    sheet = tmp_path / "sheet.csv"
    sheet.write_text("decision_id,verdict\nsample-0-0,wrong\n")
    error = taken("label", "--csv", str(sheet), "--json", ok=False)["error"]
    assert (error["type"], error["where"]) == ("InputError", {"file": str(sheet)})
    assert "--force" in error["remedy"]
    assert sheet.read_text() == "decision_id,verdict\nsample-0-0,wrong\n"
    assert taken("label", "--csv", str(sheet), "--force", "--json")["decisions"] == 12
    assert sheet.read_text().startswith("decision_id,time,")


def test_answers_wait_in_the_inbox_while_the_home_is_held(taken, tmp_path):
    (decision, *_) = taken("label", "--json")["decisions"]
    sheet = tmp_path / "sheet.csv"
    sheet.write_text(f"decision_id,verdict\n{decision['decision_id']},correct\n")
    with home_lock(tmp_path / "home", "a test"):
        assert taken("label", "--answers", str(sheet), "--annotator", "kim", "--json")["taken"] is False
    assert taken("take", "--json")["inbox"]["rows_taken"] == 1


def test_the_list_is_a_table_without_a_terminal_and_days_are_checked(taken):
    assert "sample-" in taken("label", "--limit", "2")
    assert len(taken("label", "--day", "2026-01-05", "--limit", "99", "--json")["decisions"]) == 12
    assert taken("label", "--day", "soon", "--json", ok=False)["error"]["where"] == {"field": "day"}


def test_on_a_terminal_one_decision_after_the_other_is_asked_for(taken, monkeypatch):
    monkeypatch.setattr(labelling, "on_terminal", lambda: True)
    answers = ["x", "w", "l", "fly", "close", "2", "0.5", "s", "c", "", "n", "", "", "0.9", "q"]
    text = taken("label", "--annotator", "kim", given="\n".join(answers) + "\n")
    assert "3 labels, 0 said before" in text
    days = taken("status", "--json")["days"]
    assert days[-1]["verdicts"] == {"correct": 1, "needs_improvement": 1, "wrong": 1}
    assert days[-1]["error_types"] == {"planning": 1}


def test_answers_before_the_end_of_input_are_kept_and_the_half_one_is_not(taken, monkeypatch):
    monkeypatch.setattr(labelling, "on_terminal", lambda: True)
    assert "1 label, 0 said before" in taken("label", "--annotator", "kim", given="c\n\nw\np\n")


def test_an_annotator_is_one_word(taken, monkeypatch):
    monkeypatch.setattr(labelling, "on_terminal", lambda: True)
    taken("label", "--annotator", "kim lee", given="q\n", ok=False)


def test_what_the_inbox_gave_is_printed_though_the_redis_is_away(feedback, tmp_path, monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    feedback("submit", str(SAMPLE))
    assert "inbox: 1 file" in feedback("take", "--late-days", MANY, ok=False)
    (tmp_path / "a.jsonl").write_text(SAMPLE.read_text())
    feedback("submit", str(tmp_path / "a.jsonl"))
    done = feedback("take", "--late-days", MANY, "--json", ok=False)
    assert (done["ok"], done["error"]["type"]) == (False, "RedisServerError")
    assert (done["inbox"]["rows_taken"], done["inbox"]["rows_already"]) == (0, 36)
    (decision, *_) = feedback("label", "--json")["decisions"]
    (tmp_path / "sheet.csv").write_text(f"decision_id,verdict\n{decision['decision_id']},correct\n")
    answers = feedback("label", "--answers", str(tmp_path / "sheet.csv"), "--annotator", "kim", "--json")
    assert answers == {"ok": True, "labels": 1, "already": 0, "taken": True}


@pytest.mark.redis
def test_take_reads_the_stream_where_there_is_one(feedback, monkeypatch):
    import redis

    with redis_server(own=True) as server:
        monkeypatch.setenv("REDIS_URL", server.url)
        client = redis.Redis.from_url(server.url)
        for line in SAMPLE.read_bytes().splitlines():
            client.xadd("agentpipe:feedback", {"row": line})
        client.close()
        done = feedback("take", "--late-days", MANY, "--json")
        assert done["stream"]["rows_taken"] == 36
        assert done["inbox"]["rows_taken"] == 0
    shutil.copy(SAMPLE, feedback.inbox)
    error = feedback("take", "--late-days", MANY, "--json", ok=False)["error"]
    assert error["type"] == "RedisServerError"
    assert server.url not in json.dumps(error)
