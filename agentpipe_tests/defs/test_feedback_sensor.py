"""The sensor ``feedback``: takes in what came, and trains on each day's labels once."""

from __future__ import annotations

import contextlib
import datetime as dt
import sqlite3
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from agentpipe.defs.feedback import sensors
from agentpipe.defs.feedback.due import FEEDBACK_TAG, feedback_waits, store
from agentpipe.defs.feedback.sensors import ATTEMPTS, INTAKE_TAG, feedback_sensor
from agentpipe.defs.partitions import candidate_key, last_closed_day
from agentpipe.defs.resources import Workspace
from agentpipe.defs.under_way import SKIPPED_TAG
from agentpipe.feedback.index import index_path
from agentpipe.feedback.intake import take_in
from agentpipe.feedback.store import day_state, days
from agentpipe.settings import ScheduleSettings
from agentpipe_tests.defs.homes import Status, add_requested, add_run, leave, promote
from agentpipe_tests.feedback import examples
from agentpipe_tests.production import drop

SENSOR = feedback_sensor(ScheduleSettings())
LAST = last_closed_day()
BEFORE = LAST - dt.timedelta(days=1)


@pytest.fixture(autouse=True)
def _few_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTPIPE_FEEDBACK__MINIMUM_LABELS", "3")


class Loop:
    """The sensor of a home with a champion, and the runs that it asks for."""

    def __init__(self, workspace: Workspace, instance: dg.DagsterInstance) -> None:
        self.workspace, self.instance = workspace, instance
        self.inbox = workspace.root / "feedback" / "inbox"

    def tick(self) -> list[dg.RunRequest] | str:
        context = dg.build_sensor_context(instance=self.instance, resources={"workspace": self.workspace})
        found = SENSOR(context)
        if isinstance(found, dg.SkipReason):
            return found.skip_message or ""
        assert isinstance(found, list)
        keys = [request.run_key for request in found]
        assert len(set(keys)) == len(keys)
        assert len({(request.job_name, request.partition_key) for request in found}) == len(found)
        return found

    def asked(self) -> list[tuple[str | None, str | None]]:
        found = self.tick()
        return [] if isinstance(found, str) else [(request.job_name, request.partition_key) for request in found]

    def said(self) -> str:
        found = self.tick()
        assert isinstance(found, str), found
        return found

    def work(self, request: dg.RunRequest, status: dg.DagsterRunStatus = Status.SUCCESS) -> None:
        """Does what the run of a request does."""
        add_requested(self.instance, request, status)
        if status is Status.SUCCESS and request.job_name == "feedback_day":
            assert request.partition_key is not None
            self.take(dt.date.fromisoformat(request.partition_key))
        elif status is Status.SUCCESS:
            leave(self.workspace, "policy_checkpoint", request.partition_key)

    def take(self, day: dt.date) -> None:
        report = take_in(self.inbox, day, store(self.workspace), shape=examples.SHAPE)
        leave(self.workspace, "production_feedback", day.isoformat(), report.state.digest)

    def settle(self) -> str:
        """Ticks and works until nothing is asked for; what the sensor says then."""
        for _ in range(10):
            found = self.tick()
            if isinstance(found, str):
                return found
            for request in found:
                self.work(request)
        raise AssertionError("it never came to rest")

    def take_all(self) -> None:
        """All intakes, and no training."""
        while any(job == "feedback_day" for job, _ in self.asked()):
            found = self.tick()
            assert not isinstance(found, str)
            for request in found:
                self.work(request)

    def trained(self) -> list[str]:
        """The days that were trained on, in order."""
        runs = self.instance.get_runs(dg.RunsFilter(job_name="candidate"))
        return [run.tags["dagster/partition"].partition("|")[0] for run in reversed(runs)]


def rows(day: dt.date, labels: int = 3, start: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """Decisions and labels of one day."""
    at, later = f"{day}T08:00:00Z", f"{day}T09:00:00Z"
    found = []
    for number in range(start, start + labels):
        name = f"{day}-{number}"
        found.append(examples.decision(name, time=at))
        found.append(examples.label(f"label-{name}", decision_id=name, **{"time": later, **changes}))
    return found


@pytest.fixture
def loop(tmp_path, instance: dg.DagsterInstance) -> Loop:
    workspace = Workspace(home=str(tmp_path / "home"), profile="demo")
    promote(workspace, "first")
    return Loop(workspace, instance)


# ------------------------------------------------------------------------------------------------------- intake


def test_what_lies_in_the_inbox_is_taken_in_by_one_run(loop: Loop) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        drop(rows(LAST, start=10 * ord(name[0])), loop.inbox, name)
    found = loop.tick()
    assert not isinstance(found, str)
    [request] = found
    assert (request.job_name, request.partition_key) == ("feedback_day", LAST.isoformat())
    loop.work(request)
    assert list(loop.inbox.glob("*.jsonl")) == []
    assert day_state(store(loop.workspace), LAST).trainable == 6


def test_the_same_run_key_twice_in_one_tick_ran_twice(loop: Loop) -> None:
    """A day lags behind the store and a file waits: one run for that day, which takes in both."""
    drop(rows(LAST), loop.inbox, "a.jsonl")
    take_in(loop.inbox, LAST, store(loop.workspace), shape=examples.SHAPE)
    drop(rows(LAST, start=9), loop.inbox, "b.jsonl")
    assert loop.asked() == [("feedback_day", LAST.isoformat())]


def test_each_day_that_lags_behind_the_store_gets_its_own_run(loop: Loop) -> None:
    drop([*rows(LAST), *rows(BEFORE)], loop.inbox, "a.jsonl")
    take_in(loop.inbox, LAST, store(loop.workspace), shape=examples.SHAPE)
    assert sorted(loop.asked(), key=str) == [("feedback_day", BEFORE.isoformat()), ("feedback_day", LAST.isoformat())]


def test_while_feedback_is_being_taken_in_nothing_else_is_launched(loop: Loop) -> None:
    """The inbox changes with every file that a run takes."""
    drop(rows(LAST), loop.inbox, "a.jsonl")
    run = add_run(loop.instance, "feedback_day", LAST.isoformat(), Status.STARTED)
    assert loop.said() == f"feedback is being taken in by run {run.run_id}"


def test_an_intake_that_fails_is_tried_three_times_and_then_left_to_a_person(loop: Loop) -> None:
    drop(rows(LAST), loop.inbox, "a.jsonl")
    keys = []
    for _ in range(ATTEMPTS):
        found = loop.tick()
        assert not isinstance(found, str)
        [request] = found
        keys.append(request.run_key)
        loop.work(request, Status.FAILURE)
    assert len(set(keys)) == ATTEMPTS == 3
    said = loop.said()
    assert "failed 3 times" in said
    assert f"materialise production_feedback[{LAST}]" in said
    drop(rows(LAST, start=9), loop.inbox, "b.jsonl")  # another file is another try
    assert loop.asked() == [("feedback_day", LAST.isoformat())]


def test_an_intake_that_a_person_cancelled_is_not_launched_again(loop: Loop) -> None:
    drop(rows(LAST), loop.inbox, "a.jsonl")
    found = loop.tick()
    assert not isinstance(found, str)
    loop.work(found[0], Status.CANCELED)
    assert loop.asked() == []


def test_a_failed_intake_does_not_keep_what_is_in_the_store_from_training(loop: Loop) -> None:
    drop(rows(LAST), loop.inbox, "a.jsonl")
    loop.take(LAST)
    (loop.inbox / "b.jsonl").write_text("{}\n")
    for _ in range(ATTEMPTS):
        found = loop.tick()
        assert not isinstance(found, str)
        loop.work(found[0], Status.FAILURE)
    assert loop.asked() == [("candidate", candidate_key(LAST, "feedback"))]


def test_an_unfinished_file_kept_a_whole_day_from_training(loop: Loop) -> None:
    """It waits on after its run went well: it is asked for again only when it has grown."""
    drop(rows(LAST), loop.inbox, "a.jsonl")
    loop.take(LAST)
    growing = loop.inbox / "b.jsonl"
    growing.write_text('{"kind": "deci')
    assert loop.asked() == [("feedback_day", LAST.isoformat())]
    found = loop.tick()
    assert not isinstance(found, str)
    loop.work(found[0])
    assert growing.exists()
    assert loop.asked() == [("candidate", candidate_key(LAST, "feedback"))]
    growing.write_text('{"kind": "decision", ')
    assert loop.asked() == [("feedback_day", LAST.isoformat())]


def test_a_file_that_is_taken_away_while_the_sensor_looks_fails_nothing(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentpipe.feedback import inbox

    listing = inbox.listing
    loop.inbox.mkdir(parents=True)
    monkeypatch.setattr(inbox, "listing", lambda folder: [*listing(folder), folder / "gone.jsonl"])
    assert loop.said() == "no feedback of a day that is over"


# ------------------------------------------------------------------------------------------------------ training


def test_feedback_of_a_day_that_is_over_trains_exactly_once(loop: Loop) -> None:
    drop(rows(LAST), loop.inbox, "a.jsonl")
    loop.take_all()
    found = loop.tick()
    assert not isinstance(found, str)
    [request] = found
    assert (request.job_name, request.partition_key) == ("candidate", f"{LAST}|feedback")
    assert request.tags[FEEDBACK_TAG] == f"{LAST}:{day_state(store(loop.workspace), LAST).digest[:16]}"
    assert request.run_key == f"feedback:{request.tags[FEEDBACK_TAG]}"
    loop.work(request)
    assert loop.said() == f"{LAST}: a candidate was trained on exactly these"


def overtaken(loop: Loop, fate: str, reason: str) -> None:
    """Yesterday's feedback has trained a candidate of that fate, and another one has become champion meanwhile."""
    key, parent = candidate_key(LAST, "feedback"), promote(loop.workspace, "parent").digest
    drop(rows(LAST), loop.inbox, "a.jsonl")
    loop.take_all()
    add_requested(loop.instance, asked_once(loop))
    leave(loop.workspace, "policy_checkpoint", key, "candidate", parent=parent)
    leave(loop.workspace, "triton_bundle", key, "bundle")
    leave(loop.workspace, "publish", key, "bundle", fate=fate, reason=reason)
    promote(loop.workspace, "another")


def asked_once(loop: Loop) -> dg.RunRequest:
    found = loop.tick()
    assert not isinstance(found, str), found
    [request] = found
    return request


@pytest.mark.parametrize(
    ("fate", "reason"),
    [("retrain", "2 corrections"), ("compare_again", "another champion"), ("refuse", "it is older than the champion")],
)
def test_feedback_whose_candidate_was_overtaken_trains_once_from_the_new_champion(
    loop: Loop, fate: str, reason: str
) -> None:
    overtaken(loop, fate, reason)
    request = asked_once(loop)
    assert request.partition_key == f"{LAST}|feedback"
    assert request.tags[FEEDBACK_TAG].endswith(":another")
    assert feedback_waits(loop.instance, loop.workspace, LAST).endswith("are about to be trained on")
    add_requested(loop.instance, request, Status.FAILURE)
    assert "the run of exactly this feedback was launched before" in loop.said()
    leave(loop.workspace, "policy_checkpoint", candidate_key(LAST, "feedback"), "second", parent="another")
    assert loop.said() == f"{LAST}: a candidate was trained on exactly these"


@pytest.mark.parametrize(
    ("fate", "reason"), [("refuse", "WORSE: by 2 points"), ("hold", "drift is REVIEW"), ("promote", "not worse")]
)
def test_feedback_whose_candidate_was_judged_never_trains_again(loop: Loop, fate: str, reason: str) -> None:
    overtaken(loop, fate, reason)
    assert loop.said() == f"{LAST}: a candidate was trained on exactly these"


def test_a_run_that_had_nothing_to_learn_is_said_with_its_reason(loop: Loop) -> None:
    drop(rows(LAST), loop.inbox, "a.jsonl")
    loop.take_all()
    run = add_requested(loop.instance, asked_once(loop))
    loop.instance.add_run_tags(run.run_id, {SKIPPED_TAG: "all are masked"})
    assert loop.said() == f"{LAST}: the run of exactly this feedback trained nothing: all are masked"


def test_a_fate_of_an_earlier_candidate_is_none_of_this_one(loop: Loop) -> None:
    overtaken(loop, "retrain", "2 corrections")
    leave(loop.workspace, "policy_checkpoint", candidate_key(LAST, "feedback"), "later", parent="parent")
    assert loop.said() == f"{LAST}: a candidate was trained on exactly these"


def test_without_a_champion_nothing_is_trained(tmp_path, instance: dg.DagsterInstance) -> None:
    loop = Loop(Workspace(home=str(tmp_path / "home"), profile="demo"), instance)
    drop(rows(LAST), loop.inbox, "a.jsonl")
    assert loop.settle() == f"{LAST}: no champion yet that could learn from them"


def test_too_few_labels_say_how_many_there_are(loop: Loop) -> None:
    drop([*rows(LAST, labels=2), examples.decision("unlabelled", time=f"{LAST}T10:00:00Z")], loop.inbox, "a.jsonl")
    assert loop.settle() == f"{LAST}: 2 labelled decisions, 3 are needed"


FORCED = "of a decision whose mask allows no other action"
ELSEWHERE = "an execution error of an action outside the execute segment"
ONE_WAY = {"mask": [False, True], "probabilities": [0, 1]}


def taught(number: int, decided: dict[str, Any] | None = None, **said: Any) -> list[dict[str, Any]]:
    """A decision of the last day and its label."""
    name = f"t{number}"
    decision = examples.decision(name, time=f"{LAST}T08:00:00Z", **(decided or {}))
    return [decision, examples.label(f"label-{name}", decision_id=name, time=f"{LAST}T09:00:00Z", **said)]


@pytest.mark.parametrize(
    ("rows_of", "why"),
    [
        (
            lambda number: taught(number, ONE_WAY),
            f"4 {FORCED}",
        ),
        (
            lambda number: taught(number, ONE_WAY, verdict="correct", error_type=None, corrected_action=None),
            f"4 {FORCED}",
        ),
        (
            lambda number: taught(number, error_type="execution"),
            f"4 {ELSEWHERE}",
        ),
        (
            lambda number: taught(number, ONE_WAY if number < 3 else None, error_type="execution"),
            f"3 {FORCED}, 1 {ELSEWHERE}",
        ),
    ],
)
def test_labels_none_of_which_can_teach_anything_launched_a_run_that_failed(
    loop: Loop, rows_of: Callable[[int], list[dict[str, Any]]], why: str
) -> None:
    drop([row for number in range(4) for row in rows_of(number)], loop.inbox, "a.jsonl")
    assert loop.settle() == f"{LAST}: none of 4 new labels can teach anything: {why}"
    assert loop.trained() == []
    assert feedback_waits(loop.instance, loop.workspace, LAST) == ""
    drop(taught(9), loop.inbox, "b.jsonl")  # one that can
    loop.settle()
    assert loop.trained() == [LAST.isoformat()]


def test_without_a_weight_of_their_own_weak_negatives_teach_nothing(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop([row for number in range(4) for row in taught(number, verdict="needs_improvement")], loop.inbox, "a.jsonl")
    loop.take_all()
    monkeypatch.setenv("AGENTPIPE_FINETUNING__WEAK_NEGATIVE", "0")
    assert loop.said() == f"{LAST}: none of 4 new labels can teach anything: 4 of weight zero"
    monkeypatch.delenv("AGENTPIPE_FINETUNING__WEAK_NEGATIVE")
    assert loop.asked() == [("candidate", candidate_key(LAST, "feedback"))]


def test_an_empty_home_says_that_there_is_nothing(loop: Loop) -> None:
    assert loop.said() == "no feedback of a day that is over"


def test_a_day_that_is_not_over_is_taken_in_and_not_trained_on(loop: Loop) -> None:
    today = dt.datetime.now(dt.UTC)
    at = (today - dt.timedelta(seconds=1)).isoformat()
    decisions = [examples.decision(f"d{number}", time=at) for number in range(4)]
    labels = [examples.label(f"l{number}", decision_id=f"d{number}", time=at) for number in range(4)]
    drop([*decisions, *labels], loop.inbox, "a.jsonl")
    assert loop.settle() in ("no feedback of a day that is over", f"{LAST}: 0 labelled decisions, 3 are needed")
    assert [day.isoformat() for day in days(store(loop.workspace))] == [today.date().isoformat()]
    assert loop.trained() == []


def test_amended_feedback_trains_once_more_and_unchanged_feedback_never(loop: Loop) -> None:
    drop(rows(LAST), loop.inbox, "a.jsonl")
    loop.settle()
    drop(rows(LAST), loop.inbox, "again.jsonl")  # the same rows once more
    loop.settle()
    assert loop.trained() == [LAST.isoformat()]
    first = loop.instance.get_runs(dg.RunsFilter(job_name="candidate"))
    later = f"{LAST}T11:00:00Z"
    amended = examples.label("amended", decision_id=f"{LAST}-0", time=later, verdict="correct", error_type=None)
    drop([{**amended, "corrected_action": None}], loop.inbox, "amended.jsonl")
    loop.settle()
    assert loop.trained() == [LAST.isoformat()] * 2
    keys = {run.tags[FEEDBACK_TAG] for run in loop.instance.get_runs(dg.RunsFilter(job_name="candidate"))}
    assert len(keys) == 2
    assert first[0].tags[FEEDBACK_TAG] in keys
    loop.settle()
    assert len(loop.trained()) == 2


def test_a_training_that_failed_is_not_launched_again_for_the_same_feedback(loop: Loop) -> None:
    drop(rows(LAST), loop.inbox, "a.jsonl")
    loop.take_all()
    found = loop.tick()
    assert not isinstance(found, str)
    loop.work(found[0], Status.FAILURE)
    for _ in range(2):
        reason = "the run of exactly this feedback was launched before; see the runs page"
        assert loop.said() == f"{LAST}: {reason}"
    drop(rows(LAST, labels=1, start=9), loop.inbox, "more.jsonl")
    loop.take_all()
    assert loop.asked() == [("candidate", f"{LAST}|feedback")]


def test_several_days_train_one_after_the_other_oldest_first(loop: Loop) -> None:
    drop([*rows(LAST), *rows(BEFORE)], loop.inbox, "a.jsonl")
    loop.take_all()
    found = loop.tick()
    assert not isinstance(found, str)
    [first] = found
    assert first.partition_key == f"{BEFORE}|feedback"
    run = add_requested(loop.instance, first, Status.STARTED)
    assert loop.said() == f"{first.tags[FEEDBACK_TAG]} is being trained on by run {run.run_id}"
    loop.instance.report_run_failed(run)
    assert loop.asked() == [("candidate", f"{LAST}|feedback")]  # it waited for ever behind the day that failed


def test_labels_of_the_champion_s_lineage_do_not_count_again(loop: Loop) -> None:
    drop(rows(LAST, labels=5), loop.inbox, "a.jsonl")
    loop.take_all()
    promote(loop.workspace, "second", frozenset(f"label-{LAST}-{number}" for number in range(3)))
    assert loop.said() == f"{LAST}: 2 of 5 labelled decisions are new to the champion, 3 are needed"
    drop(rows(LAST, labels=1, start=9), loop.inbox, "b.jsonl")
    loop.take_all()
    assert loop.asked() == [("candidate", f"{LAST}|feedback")]


def test_labels_that_are_too_late_for_their_day_train_nothing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    drop(rows(BEFORE), loop.inbox, "a.jsonl")
    loop.take(BEFORE)
    monkeypatch.setenv("AGENTPIPE_FEEDBACK__LATE_DAYS", "0")
    assert loop.said() == "no feedback of a day that is over"


@pytest.mark.parametrize("damaged", ["index.sqlite", "figures", "page", "champion"])
def test_a_damaged_store_says_so_and_is_not_taken_for_no_feedback(loop: Loop, damaged: str) -> None:
    drop(rows(LAST), loop.inbox, "a.jsonl")
    loop.take_all()
    if damaged == "champion":
        (loop.workspace.root / "champion" / "champion.json").write_text("{")
    elif damaged == "figures":
        with contextlib.closing(sqlite3.connect(index_path(store(loop.workspace)))) as connection, connection:
            connection.execute("UPDATE days SET figures = '{\"digest\": 1'")
    else:
        [index] = store(loop.workspace).glob("*.sqlite*")
        whole = index.read_bytes()
        noise = b"not a database, whatever its name says" * 100
        index.write_bytes(noise if damaged == "index.sqlite" else whole[:4096] + bytes(len(whole) - 4096))
    assert loop.said().startswith("the feedback cannot be judged: ")


# ------------------------------------------------------------------------------------------------------ the night


def test_the_night_waits_for_a_day_that_is_about_to_train_and_for_its_run(loop: Loop) -> None:
    assert feedback_waits(loop.instance, loop.workspace, LAST) == ""
    drop(rows(LAST), loop.inbox, "a.jsonl")
    loop.take_all()
    about = "3 new labelled decisions are about to be trained on"
    assert feedback_waits(loop.instance, loop.workspace, LAST) == about
    found = loop.tick()
    assert not isinstance(found, str)
    run = add_requested(loop.instance, found[0], Status.STARTED)
    assert feedback_waits(loop.instance, loop.workspace, LAST) == f"policy_checkpoint[{LAST}|feedback] runs"
    loop.instance.report_run_failed(run)
    assert feedback_waits(loop.instance, loop.workspace, LAST) == ""


def test_requests_say_what_waited(loop: Loop) -> None:
    drop(rows(LAST), loop.inbox, "a.jsonl")
    found = loop.tick()
    assert not isinstance(found, str)
    assert found[0].tags[INTAKE_TAG].startswith("waiting:")
    assert sensors.ATTEMPTS == 3
