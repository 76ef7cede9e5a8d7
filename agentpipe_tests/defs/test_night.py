"""What a night does next, from what is materialised, what it has launched and what the feedback does."""

from __future__ import annotations

import datetime as dt

import dagster as dg
import pytest

from agentpipe.defs.night import Past, Step, next_step, past_runs
from agentpipe.defs.nights import NIGHT_TAG, Night
from agentpipe.defs.resources import CELL_CHAIN, Workspace
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import TableError
from agentpipe_tests.defs.homes import Status, add_requested, add_run, edit, leave, make_cell, utc

DAY, WEEK = "2026-11-24", "2026-11-23"
KEY = f"{DAY}|nightly"
NIGHT = Night(DAY, "2026-11-25T02:00:00+00:00")
EARLY, LATER = utc("2026-11-25 02:05"), utc("2026-11-25 02:31")
TRAINED = "policy_checkpoint[2026-11-24|feedback] runs"
ABOUT = "60 new labelled decisions are about to be trained on"


@pytest.fixture
def night_home(home: Workspace) -> Workspace:
    """A home in which the day's feedback is taken in, and nothing but the candidate is due."""
    leave(home, "production_feedback", DAY)
    return home


def past(*runs: str) -> list[Past]:
    """Runs written as ``job:partition`` or ``job``, with a trailing ``!`` where failed and ``…`` where not over."""
    status = {"!": Status.FAILURE, "…": Status.STARTED}
    found = []
    for run in runs:
        job, _, partition = run.rstrip("!…").partition(":")
        found.append(Past(job, partition or None, status.get(run[-1], Status.SUCCESS)))
    return found


def ask(workspace: Workspace, *runs: str, feedback: str = "", now: dt.datetime = EARLY) -> Step:
    return next_step(workspace, NIGHT, past(*runs), feedback, now)


def asked(step: Step) -> list[tuple[str, str | None]]:
    assert step.kind == "ask", step
    return [(item.job, item.partition) for item in step.asked]


def publish(workspace: Workspace, fate: str, reason: str = "as compared") -> None:
    leave(workspace, "publish", KEY, fate=fate, reason=reason)


# ---------------------------------------------------------------------------------------------------- the order


def test_the_candidate_comes_at_once_where_everything_is_fresh(night_home: Workspace) -> None:
    step = ask(night_home)
    assert asked(step) == [("candidate", KEY)]
    [request] = [item.request(NIGHT) for item in step.asked]
    assert (request.run_key, request.job_name, request.partition_key) == (
        f"night:{DAY}:candidate:{KEY}:1",
        "candidate",
        KEY,
    )
    assert request.tags == {NIGHT_TAG: DAY, "agentpipe/why": "nightly retraining"}


def test_the_line_comes_before_the_cells_that_play_on_it(night_home: Workspace) -> None:
    night_home.references.path("environment_catalog").unlink()
    assert asked(ask(night_home)) == [("line", None)]
    assert ask(night_home, "line!") == Step("end", "failed: line")


def test_stale_cells_are_asked_for_once_and_a_failed_one_is_left_out(night_home: Workspace) -> None:
    for cell in ("load-1", "load-2", "network-5"):
        edit(night_home, cell, 99.0)
    assert asked(ask(night_home)) == [("cell", "network-5"), ("cell", "load-1"), ("cell", "load-2")]
    for cell in ("network-5", "load-1"):
        make_cell(night_home, cell)
    runs = ("cell:network-5", "cell:load-1", "cell:load-2!")
    leave(night_home, "observation_statistics")
    assert asked(ask(night_home, *runs)) == [("candidate", KEY)]


def test_while_one_of_its_runs_is_not_over_the_night_waits(night_home: Workspace) -> None:
    edit(night_home, "load-1", 99.0)
    step = ask(night_home, "cell:load-1…", "cell:load-2")
    assert step == Step("wait", "1 of its runs are not over: cell[load-1]")


def test_statistics_and_feedback_follow_in_order(night_home: Workspace) -> None:
    night_home.references.path("observation_statistics").unlink()
    night_home.references.path("production_feedback", DAY).unlink()
    assert asked(ask(night_home)) == [("statistics", None)]
    assert ask(night_home, "statistics!") == Step("end", "failed: statistics")
    leave(night_home, "observation_statistics")
    assert asked(ask(night_home, "statistics")) == [("feedback_day", DAY)]
    assert ask(night_home, "statistics", "feedback_day:2026-11-24!") == Step("end", f"failed: feedback_day[{DAY}]")


def test_a_stage_that_went_well_and_is_due_again_is_not_asked_for_for_ever(night_home: Workspace) -> None:
    """A file that is still being written grows while the day is taken in."""
    inbox = night_home.root / "feedback" / "inbox"
    inbox.mkdir(parents=True)
    (inbox / "growing.jsonl").write_text('{"kind"')
    assert asked(ask(night_home)) == [("feedback_day", DAY)]
    assert asked(ask(night_home, f"feedback_day:{DAY}")) == [("candidate", KEY)]


# ------------------------------------------------------------------------------------------------- enough cells


@pytest.mark.parametrize(("stale", "kind"), [(2, "ask"), (3, "end")])
def test_with_twelve_of_fifteen_cells_the_night_is_skipped_and_says_which_are_missing(
    night_home: Workspace, stale: int, kind: str
) -> None:
    lost = CELLS[:stale]
    for cell in lost:  # the table's part was made anew, what follows failed
        leave(night_home, CELL_CHAIN[0], cell, f"other-{cell}")
    leave(night_home, "observation_statistics")
    step = ask(night_home, *(f"cell:{cell}!" for cell in lost))
    assert step.kind == kind
    if kind == "end":
        missing = "sensor-1, sensor-2, sensor-3"
        assert step.text == f"skipped: 12 of 15 cells are fresh, 13 are needed; not fresh: {missing}"


def test_a_cell_that_was_never_made_and_failed_is_left_out(night_home: Workspace) -> None:
    night_home.references.path("trajectories", "load-5").unlink()
    assert asked(ask(night_home)) == [("cell", "load-5")]
    assert asked(ask(night_home, "cell:load-5!")) == [("candidate", KEY)]


# ---------------------------------------------------------------------------------------------------- feedback


@pytest.mark.parametrize(
    ("feedback", "now", "kind"),
    [
        (ABOUT, EARLY, "wait"),
        (ABOUT, LATER, "ask"),  # it never began: no longer than half an hour
        (TRAINED, EARLY, "wait"),
        (TRAINED, utc("2026-11-25 09:00"), "wait"),  # it runs: as long as that takes
        ("", EARLY, "ask"),
    ],
)
def test_the_night_waits_for_the_day_s_feedback_run(
    night_home: Workspace, feedback: str, now: dt.datetime, kind: str
) -> None:
    step = ask(night_home, feedback=feedback, now=now)
    assert step.kind == kind
    assert kind == "ask" or step.text == f"for the day's feedback: {feedback}"


# ------------------------------------------------------------------------------------------- candidate and after


def test_a_failed_candidate_ends_the_night(night_home: Workspace) -> None:
    step = ask(night_home, f"candidate:{KEY}!")
    assert step == Step("end", f"failed: candidate[{KEY}]; its checks and log say why")


@pytest.mark.parametrize("fate", ["retrain", "compare_again"])
def test_a_candidate_that_lost_a_race_is_made_once_more_and_only_once(night_home: Workspace, fate: str) -> None:
    publish(night_home, fate, "2 correction(s) are missing")
    step = ask(night_home, f"candidate:{KEY}")
    [again] = [item.request(NIGHT) for item in step.asked]
    assert again.run_key == f"night:{DAY}:candidate:{KEY}:2"
    assert again.tags["agentpipe/why"] == "once more: 2 correction(s) are missing"
    twice = (f"candidate:{KEY}", f"candidate:{KEY}")
    assert asked(ask(night_home, *twice)) == [("week", WEEK)]
    assert ask(night_home, *twice, f"week:{WEEK}") == Step("end", f"{fate}: 2 correction(s) are missing")
    assert ask(night_home, f"candidate:{KEY}", f"candidate:{KEY}!").kind == "end"


@pytest.mark.parametrize("fate", ["promote", "hold", "refuse"])
def test_the_week_s_report_follows_and_the_night_ends_with_the_candidate_s_fate(
    night_home: Workspace, fate: str
) -> None:
    publish(night_home, fate)
    assert asked(ask(night_home, f"candidate:{KEY}")) == [("week", WEEK)]
    for report in (f"week:{WEEK}", f"week:{WEEK}!"):  # a report that fails costs the night nothing else
        assert ask(night_home, f"candidate:{KEY}", report) == Step("end", f"{fate}: as compared")


def test_cells_edited_while_the_candidate_is_trained_are_not_this_night_s(night_home: Workspace) -> None:
    publish(night_home, "promote")
    for cell in CELLS[:4]:
        edit(night_home, cell, 99.0)
    assert asked(ask(night_home, f"candidate:{KEY}")) == [("week", WEEK)]
    assert ask(night_home, f"candidate:{KEY}", f"week:{WEEK}") == Step("end", "promote: as compared")


def test_a_candidate_without_a_fate_says_so(night_home: Workspace) -> None:
    leave(night_home, "weekly_drift_report", WEEK)
    assert ask(night_home, f"candidate:{KEY}") == Step("end", "unknown: nothing was published")


# ---------------------------------------------------------------------------------------------------- its runs


def test_runs_that_the_schedule_has_just_asked_for_were_asked_for_again(night_home: Workspace) -> None:
    """The record of the night is there a moment before its first runs are."""
    edit(night_home, "load-1", 99.0)
    soon = utc("2026-11-25 02:00:19")
    assert ask(night_home, now=soon) == Step("wait", "its first runs are being launched")
    assert asked(ask(night_home, now=utc("2026-11-25 02:00:20"))) == [("cell", "load-1")]
    assert ask(night_home, "cell:load-1!", now=soon).kind == "ask"
    made_up = Night(DAY, NIGHT.begun, made_up=True)  # the sensor's own requests carry keys that it knows
    assert next_step(night_home, made_up, [], "", soon).kind == "ask"


def test_only_a_night_s_own_runs_count(instance: dg.DagsterInstance) -> None:
    add_run(instance, "cell", "load-1", Status.FAILURE, {NIGHT_TAG: DAY})
    add_run(instance, "candidate", KEY, Status.STARTED, {NIGHT_TAG: DAY})
    add_run(instance, "cell", "load-2", Status.SUCCESS, {NIGHT_TAG: "2026-11-23"})
    add_run(instance, "cell", "load-3", Status.SUCCESS)
    assert past_runs(instance, NIGHT) == past("cell:load-1!", f"candidate:{KEY}…")


def test_a_night_from_beginning_to_end(night_home: Workspace, instance: dg.DagsterInstance) -> None:
    """Every run that is asked for does its work; each is asked for once."""
    edit(night_home, "load-1", 99.0)
    night_home.references.path("production_feedback", DAY).unlink()
    made: list[tuple[str, str | None]] = []

    def work(job: str, partition: str | None) -> None:
        if job == "cell":
            assert partition is not None
            make_cell(night_home, partition)
        elif job == "candidate":
            publish(night_home, "promote", "not worse")
        else:
            names = {"statistics": "observation_statistics", "feedback_day": "production_feedback"}
            leave(night_home, names.get(job, "weekly_drift_report"), partition)

    for _ in range(12):
        step = next_step(night_home, NIGHT, past_runs(instance, NIGHT), "", EARLY)
        if step.kind == "end":
            break
        for item in step.asked:
            add_requested(instance, item.request(NIGHT))
            work(item.job, item.partition)
            made.append((item.job, item.partition))
    assert made == [
        ("cell", "load-1"),
        ("statistics", None),
        ("feedback_day", DAY),
        ("candidate", KEY),
        ("week", WEEK),
    ]
    assert step == Step("end", "promote: not worse")


def test_a_table_that_cannot_be_read_is_a_typed_error(night_home: Workspace) -> None:
    edit(night_home, "load-1", 99.0)
    source = night_home.table_store().source_path
    source.write_text(source.read_text().replace("99", "nan", 1))
    with pytest.raises(TableError):
        ask(night_home)


@pytest.mark.parametrize(
    ("status", "finished", "good"),
    [
        (Status.SUCCESS, True, True),
        (Status.FAILURE, True, False),
        (Status.CANCELED, True, False),
        (Status.CANCELING, False, False),
        (Status.QUEUED, False, False),
        (Status.STARTED, False, False),
    ],
)
def test_a_run_is_over_when_it_has_ended(status: dg.DagsterRunStatus, finished: bool, good: bool) -> None:
    run = Past("cell", "load-1", status)
    assert (run.finished, run.good) == (finished, good)


def test_a_cancelled_run_counts_as_one_that_failed(night_home: Workspace) -> None:
    cancelled = [Past("candidate", KEY, Status.CANCELED)]
    assert next_step(night_home, NIGHT, cancelled, "", EARLY).text.startswith("failed: candidate")
