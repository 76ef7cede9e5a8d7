"""A day of the loop with the daemon really running; tests share one home, and go on from where the last one left it.

Every run costs ten seconds or more, so the fixtures set going what can go on at once: the night begins while feedback
is taken in, the table is edited while the night trains, and so on. Each test then looks at its own part.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dagster as dg
import pytest

from agentpipe.defs.partitions import monday
from agentpipe.defs.references import References
from agentpipe.defs.resources import hold_home
from agentpipe.experience.store.shard import open_shard
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe_tests.acceptance.conftest import Day
from agentpipe_tests.acceptance.harness import OVER, Loop
from agentpipe_tests.production import drop

pytestmark = pytest.mark.slow
CELL = "network-2"
ROW = "kind = network and intensity = 2 and variant = 1"
TWO = ("sensor-1", "sensor-3")
TWO_ROWS = "kind = sensor and (intensity = 1 or intensity = 3) and variant = 0"
CHAIN = ("disturbance_table", "environment_pool_health", "trajectories")
CHANGE, FEEDBACK, NIGHT = "agentpipe/table-change", "agentpipe/feedback", "agentpipe/night"
Counts = Counter[tuple[str, str | None]]


def of_cells(*cells: str) -> Counts:
    """What a change of these cells makes, once each."""
    return Counter([*((asset, cell) for asset in CHAIN for cell in cells), ("champion_evaluation", None)])


def named(plan: dict[str, Any]) -> Counts:
    return Counter((item["asset"], item["partition"]) for item in plan["partitions"])


def changed(loop: Loop, before: Counts, *assets: str) -> Counts:
    """Materialisations since ``before`` of the given assets."""
    return Counter({key: count for key, count in (loop.counts() - before).items() if key[0] in assets})


def edit(loop: Loop, where: str, value: int) -> dict[str, Any]:
    """Edits the table as a user does; returns what the plan says of it."""
    loop.command("table", "set", f"network_rtt_ms={value}", "--where", where, "--who", "eve", "--why", "switch")
    return loop.command("table", "plan")


def one_backfill(loop: Loop, number: int) -> Any:
    """The backfill after the first ``number``, once there is one."""
    return loop.wait(lambda: loop.backfills()[number:], "a backfill of the change")[0]


def ended(loop: Loop, backfill_id: str) -> str:
    """The last status of a backfill."""
    going = ("REQUESTED", "CANCELING", "FAILING")
    loop.wait(lambda: loop.instance.get_backfill(backfill_id).status.value not in going, "the backfill's end")
    return str(loop.instance.get_backfill(backfill_id).status.value)


def started(loop: Loop, job: str | None, partition: str | None, **tags: str) -> dg.DagsterRun:
    """The newest such run, once its process works."""

    def working() -> list[dg.DagsterRun]:
        runs = [record.dagster_run for record in loop.runs(job, partition, **tags)]
        return [run for run in runs if run.status is dg.DagsterRunStatus.STARTED and "agentpipe/process" in run.tags]

    return loop.wait(working, f"{job or 'a run'}[{partition}] works")[-1]


def whole(loop: Loop) -> None:
    """Every reference of the home names an artefact that is there; every recorded trajectory can be read."""
    root = loop.home.path
    for file in (root / "references").rglob("*.json"):
        reference = json.loads(file.read_text())
        path = root / reference["path"]
        assert path.exists(), reference
        if reference["asset"] == "trajectories":
            assert open_shard(path).digest == reference["data_version"]


# ---------------------------------------------------------------------------------------------- what is set going


@dataclass(frozen=True)
class Fed:
    """What was dropped into the inbox."""

    before: Counts
    rows: list[dict[str, Any]]

    @property
    def labels(self) -> set[str]:
        return {row["label_id"] for row in self.rows if row["kind"] == "label"}


@dataclass(frozen=True)
class Edit:
    """An edit of the table: what the plan said of it, and what was there before."""

    before: Counts
    backfills: int
    plan: dict[str, Any]


@pytest.fixture(scope="module")
def fed(day: Day) -> Fed:
    """Two files of the champion's decisions of yesterday and their labels, a moment before the night."""
    found = Fed(day.loop.counts(), day.production)
    left = (day.begins - dt.datetime.now(dt.UTC)).total_seconds() - 12
    assert left > -10, "the UI came up too late: the night has begun"
    time.sleep(max(0.0, left))
    drop_both(day.loop, found.rows)
    return found


@pytest.fixture(scope="module")
def undone(day: Day, fed: Fed) -> Edit:
    """While the home is held and the night's training waits: an edit whose backfill is there, and then undone."""
    loop = day.loop
    loop.wait(lambda: loop.runs("candidate", f"{day.date}|nightly"), "the night's training")
    with held(loop):
        before, backfills, version = loop.counts(), len(loop.backfills()), loop.command("table", "show")["version"]
        plan = edit(loop, TWO_ROWS, 70)
        backfill = one_backfill(loop, backfills)
        loop.command("table", "rollback", version, "--who", "eve", "--why", "a mistake")
        assert ended(loop, backfill.backfill_id) == "CANCELED"
    return Edit(before, backfills, plan)


@pytest.fixture(scope="module")
def row(day: Day, undone: Edit) -> Edit:
    """One edited row of one cell, while the night trains."""
    before, backfills = day.loop.counts(), len(day.loop.backfills())
    return Edit(before, backfills, edit(day.loop, ROW, 77))


@pytest.fixture(scope="module")
def amended(day: Day, fed: Fed, row: Edit) -> Fed:
    """The night is over, and both files come again under their names and of their sizes, one label said otherwise."""
    over(day)
    which = next(index for index, row in enumerate(fed.rows) if row.get("verdict") == "wrong")
    label, before = fed.rows[which], day.loop.counts()
    later = {"label_id": label["label_id"].replace("label", "amend"), "time": label["time"].replace("T09", "T10")}
    rows = [*fed.rows[:which], {**label, **later, "confidence": 0.5}, *fed.rows[which + 1 :]]
    drop_both(day.loop, rows)
    return Fed(before, rows)


def drop_both(loop: Loop, rows: list[dict[str, Any]]) -> None:
    """Two files at once."""
    inbox = loop.home.path / "feedback" / "inbox"
    for name, part in (("a.jsonl", rows[:24]), ("b.jsonl", rows[24:])):
        drop(part, inbox, name)


def champion(day: Day) -> dict[str, Any]:
    found = day.loop.command("champion", "show")["champion"]
    assert isinstance(found, dict)
    return found


def night(day: Day) -> dict[str, Any]:
    """The record of the night; empty before it begins."""
    path = day.loop.home.path / "nights" / f"{day.date}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def over(day: Day) -> dict[str, Any]:
    """The record of the night once it has ended."""
    day.loop.wait(lambda: night(day).get("ended"), "the night's end")
    return night(day)


@contextlib.contextmanager
def held(loop: Loop) -> Iterator[None]:
    """Holds the home, so that a run that has begun waits, and those behind it wait in the queue."""
    with hold_home(loop.home.path, "a test", 120):
        yield


# ---------------------------------------------------------------------------------------------- night and feedback


def test_two_files_in_one_tick_launch_one_run_and_its_package_lists_every_label(day: Day, fed: Fed) -> None:
    loop, key = day.loop, f"{day.date}|feedback"
    [run] = loop.wait(lambda: loop.runs("candidate", key), "the feedback's run")
    loop.wait(lambda: loop.runs("candidate", key)[0].dagster_run.status in OVER, "its end")
    assert loop.runs("candidate", key)[0].dagster_run.status is dg.DagsterRunStatus.SUCCESS
    made = changed(loop, fed.before, "production_feedback", "policy_checkpoint")
    assert made["production_feedback", str(day.date)] == 1
    assert made["policy_checkpoint", key] == 1
    assert run.dagster_run.tags[FEEDBACK].startswith(str(day.date))
    assert not list((loop.home.path / "feedback" / "inbox").glob("*.jsonl"))
    checkpoint = References(loop.home.path).artefact("policy_checkpoint", key)
    assert PolicyPackage.load(checkpoint).labels == fed.labels


def test_an_edit_that_is_undone_before_its_runs_start_costs_nothing(day: Day, undone: Edit) -> None:
    assert named(undone.plan) == of_cells(*TWO)
    assert not changed(day.loop, undone.before, *CHAIN, "champion_evaluation")
    assert named(day.loop.command("table", "plan")) == Counter()
    [backfill] = day.loop.backfills()[undone.backfills :]
    runs = day.loop.runs(**{"dagster/backfill": backfill.backfill_id})
    assert {run.dagster_run.status for run in runs} <= {dg.DagsterRunStatus.CANCELED}


def test_one_edited_row_makes_exactly_its_cell_again_and_judges_the_champion(day: Day, row: Edit) -> None:
    loop = day.loop
    assert named(row.plan) == of_cells(CELL)
    backfill = one_backfill(loop, row.backfills)
    assert ended(loop, backfill.backfill_id) == "COMPLETED_SUCCESS"
    assert backfill.tags[CHANGE] == row.plan["change"][:16]
    assert changed(loop, row.before, *CHAIN, "champion_evaluation") == of_cells(CELL)
    runs = loop.runs(**{CHANGE: row.plan["change"][:16]})
    assert {run.dagster_run.tags["dagster/backfill"] for run in runs} == {backfill.backfill_id}
    assert named(loop.command("table", "plan")) == Counter()
    assert len(loop.backfills()) == row.backfills + 1


def test_a_night_begins_at_its_time_after_the_feedback_and_ends_with_a_reason_and_a_report(
    day: Day, fed: Fed, row: Edit
) -> None:
    loop, record = day.loop, over(day)
    begun = dt.datetime.fromisoformat(record["begun"])
    assert day.begins <= begun < day.begins + dt.timedelta(minutes=1)
    assert record["made_up"] is False
    assert record["outcome"].startswith("hold: drift is REVIEW")
    made = changed(loop, fed.before, "policy_checkpoint", "publish", "weekly_drift_report")
    week = monday(day.date).isoformat()
    assert made == {
        ("policy_checkpoint", f"{day.date}|feedback"): 1,
        ("policy_checkpoint", f"{day.date}|nightly"): 1,
        ("publish", f"{day.date}|feedback"): 1,
        ("publish", f"{day.date}|nightly"): 1,
        ("weekly_drift_report", week): 1,
    }
    jobs = {run.dagster_run.job_name for run in loop.runs(**{NIGHT: str(day.date)})}
    assert jobs <= {"feedback_day", "candidate", "week"}, "the edit during the training is not this night's"
    assert any("waits: for the day's feedback" in text for text in loop.said("nightly_candidate"))
    [nightly] = loop.runs("candidate", f"{day.date}|nightly")
    [feedback] = loop.runs("candidate", f"{day.date}|feedback")
    assert nightly.start_time >= feedback.end_time
    assert [path.stem for path in (loop.home.path / "nights").glob("*.json")] == [str(day.date)]
    assert "<html" in References(loop.home.path).artefact("weekly_drift_report", week).read_text()


def test_amended_feedback_trains_once_more_and_unchanged_feedback_never(day: Day, fed: Fed, amended: Fed) -> None:
    loop, key = day.loop, f"{day.date}|feedback"
    loop.wait(lambda: len(loop.runs("candidate", key)) == 2 and loop.idle(), "the second run of the feedback")
    made = changed(loop, amended.before, "production_feedback", "policy_checkpoint")
    assert made == {("production_feedback", str(day.date)): 1, ("policy_checkpoint", key): 1}
    first, second = (run.dagster_run for run in loop.runs("candidate", key))
    assert second.status is dg.DagsterRunStatus.SUCCESS
    assert first.tags[FEEDBACK] != second.tags[FEEDBACK]
    loop.ticks("feedback", "exactly these")
    assert len(loop.runs("candidate", key)) == 2


# ---------------------------------------------------------------------------------------------- what goes wrong


@pytest.fixture(scope="module")
def failing(day: Day, amended: Fed) -> str:
    """An approval of a candidate that nobody holds; the run's id."""
    day.loop.wait(day.loop.idle, "the end of what was set going before")
    asked = {"candidate": "nobody", "decision": "APPROVE", "who": "eve", "why": "looks good"}
    return day.loop.launch("approval", {"ops": {"decide": {"config": asked}}})


def test_a_held_candidate_is_approved_in_the_ui_and_judged_once(day: Day, failing: str) -> None:
    loop, before = day.loop, day.loop.counts()
    candidate = loop.command("champion", "held")["held"][-1]["candidate"]
    asked = {"candidate": candidate, "decision": "APPROVE", "who": "eve", "why": "the drift is wanted"}
    run_id = loop.launch("approval", {"ops": {"decide": {"config": asked}}})
    loop.wait(lambda: champion(day)["digest"] == candidate, "the approval")
    now = champion(day)
    assert (now["kind"], now["who"], now["reason"]) == ("approval", "eve", "the drift is wanted")
    loop.wait(lambda: changed(loop, before, "champion_evaluation"), "the champion's evaluation")
    loop.wait(loop.idle, "an end")
    loop.ticks("champion_changes")
    assert changed(loop, before, "champion_evaluation") == {("champion_evaluation", None): 1}
    assert loop.instance.get_run_by_id(run_id).status is dg.DagsterRunStatus.SUCCESS
    assert References(loop.home.path).load("champion_evaluation").figures["champion"] == candidate


def test_a_failing_run_is_told_once_and_with_its_reason(day: Day, failing: str) -> None:
    day.loop.wait(lambda: day.receiver.of(failing), "the alert")
    [alert] = day.receiver.of(failing)
    assert alert["text"].startswith("Run failed: approval: ")
    assert "no held candidate nobody" in alert["text"]


@pytest.fixture(scope="module")
def killed(day: Day, failing: str) -> tuple[Edit, str, str]:
    """An edit of two cells; the first run is killed, the second ended with the backfill; the backfill and first run."""
    loop = day.loop
    loop.wait(loop.idle, "the end of what was set going before")
    before, backfills = loop.counts(), len(loop.backfills())
    found = Edit(before, backfills, edit(loop, TWO_ROWS, 71))
    tag = {"dagster/backfill": one_backfill(loop, backfills).backfill_id}
    first = started(loop, None, None, **tag)
    loop.wait(lambda: begun(loop, first.run_id), "an asset of it")
    os.kill(int(first.tags["agentpipe/process"].split(":")[1]), signal.SIGKILL)
    with held(loop):  # lest the second is over before its backfill is ended
        loop.wait(lambda: loop.instance.get_run_by_id(first.run_id).status is dg.DagsterRunStatus.FAILURE, "its end")
        second = started(loop, None, None, **tag)
        assert second.run_id != first.run_id
        loop.graphql(
            "mutation($b: String!) { cancelPartitionBackfill(backfillId: $b) { __typename } }",
            b=tag["dagster/backfill"],
        )
        assert ended(loop, tag["dagster/backfill"]) == "CANCELED"
    loop.wait(loop.idle, "the end of its runs")
    assert loop.instance.get_run_by_id(second.run_id).status is dg.DagsterRunStatus.CANCELED
    return found, tag["dagster/backfill"], first.run_id


def begun(loop: Loop, run_id: str) -> bool:
    """An asset of the run is being computed."""
    kinds = {dg.DagsterEventType.STEP_START, dg.DagsterEventType.STEP_SUCCESS}
    return bool(loop.instance.all_logs(run_id, of_type=kinds))


def test_a_killed_run_is_marked_as_failed_and_told_once(day: Day, killed: tuple[Edit, str, str]) -> None:
    _, _, run_id = killed
    day.loop.wait(lambda: day.receiver.of(run_id), "the alert")
    [alert] = day.receiver.of(run_id)
    assert "no step failed: the run ended before, or from outside" in alert["text"]


def test_a_kill_and_an_ended_backfill_leave_the_home_whole_and_no_lock(day: Day, killed: tuple[Edit, str, str]) -> None:
    loop = day.loop
    whole(loop)
    with hold_home(loop.home.path, "a test"):
        due = named(loop.command("table", "plan"))
    assert due
    assert set(due) <= set(of_cells(*TWO))
    loop.ticks("table_changes", "launched before, and not made")
    assert len(loop.backfills()) == killed[0].backfills + 1


def test_an_edit_of_two_cells_is_one_backfill(day: Day, killed: tuple[Edit, str, str]) -> None:
    loop, before, backfills = day.loop, day.loop.counts(), len(day.loop.backfills())
    assert named(edit(loop, TWO_ROWS, 72)) == of_cells(*TWO)
    backfill = one_backfill(loop, backfills)
    assert ended(loop, backfill.backfill_id) == "COMPLETED_SUCCESS"
    assert changed(loop, before, *CHAIN, "champion_evaluation") == of_cells(*TWO)
    assert named(loop.command("table", "plan")) == Counter()
    assert len(loop.backfills()) == backfills + 1
    whole(loop)


# ---------------------------------------------------------------------------------------------- all day long


def test_the_database_is_never_locked_for_those_who_read_while_runs_write(
    day: Day, killed: tuple[Edit, str, str]
) -> None:
    for code, last in day.readers.ends():
        assert code is None, last
        assert int(last) > 10
    assert "database is locked" not in day.loop.served.log.read_text()
    assert day.loop.tick_errors() == []


def test_one_run_at_a_time_works_on_the_home(day: Day, killed: tuple[Edit, str, str]) -> None:
    times = sorted((run.start_time, run.end_time) for run in day.loop.runs() if run.start_time is not None)
    assert len(times) > 10
    assert all(end <= following for (_, end), (following, _) in itertools.pairwise(times))


def test_every_failure_of_the_day_is_told_once_and_nothing_else(
    day: Day, failing: str, killed: tuple[Edit, str, str]
) -> None:
    failed = {
        run.dagster_run.run_id for run in day.loop.runs() if run.dagster_run.status is dg.DagsterRunStatus.FAILURE
    }
    assert failed == {failing, killed[2]}
    assert len(day.receiver.told) == 2
