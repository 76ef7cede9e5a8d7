"""How a night begins: by the schedule's tick, or made up by the sensor after a stand-still."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, ScheduleInstigatorData

from agentpipe.defs.learning.schedules import begin, nightly_schedule
from agentpipe.defs.learning.sensors import _make_up, nightly_sensor, schedule_on_since
from agentpipe.defs.nights import NIGHT_TAG, Nights, day_of, last_time
from agentpipe.defs.partitions import candidate_key
from agentpipe.defs.resources import Workspace
from agentpipe.errors import CorruptError
from agentpipe.settings import ScheduleSettings
from agentpipe_tests.defs.homes import add_requested, edit, leave, utc

DAY = dt.date(2026, 3, 28)
NOW = utc("2026-03-29 02:00")
SENSOR = nightly_sensor(ScheduleSettings())
Answer = list[dg.RunRequest] | dg.SkipReason


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """An instance on disk: one in memory keeps no states of schedules."""
    folder = str(tmp_path_factory.mktemp("instance"))
    with dg.DagsterInstance.local_temp(folder, overrides={"telemetry": {"enabled": False}}) as found:
        yield found


@pytest.fixture
def scheduled(kept: dg.DagsterInstance) -> Iterator[dg.DagsterInstance]:
    """An instance that has never seen the schedule."""
    yield kept
    for state in kept.all_instigator_state():
        kept.delete_instigator_state(state.instigator_origin_id, state.selector_id)


def turn(
    instance: dg.DagsterInstance,
    since: dt.datetime | None,
    status: InstigatorStatus = InstigatorStatus.DECLARED_IN_CODE,
) -> None:
    """The schedule's state, as the daemon keeps it."""
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("agentpipe"), "__repository__")
    data = ScheduleInstigatorData("0 2 * * *", None if since is None else since.timestamp())
    origin = RemoteInstigatorOrigin(repository, "nightly")
    instance.add_instigator_state(InstigatorState(origin, InstigatorType.SCHEDULE, status, data))


def missed(workspace: Workspace, instance: dg.DagsterInstance, now: dt.datetime) -> Answer:
    context = dg.build_sensor_context(instance=instance)
    return _make_up(context, workspace, Nights(workspace.root), now)


def said(answer: object) -> str:
    assert isinstance(answer, dg.SkipReason)
    return answer.skip_message or ""


def begun(workspace: Workspace) -> list[str]:
    return sorted(path.stem for path in (workspace.root / "nights").glob("*.json"))


# ------------------------------------------------------------------------------------------------------ begin


def test_a_night_begins_with_its_stale_cells_under_keys_that_name_it(home: Workspace) -> None:
    edit(home, "load-1", 99.0)
    requests = begin(home, DAY, now=NOW)
    assert isinstance(requests, list)
    [request] = requests
    assert (request.job_name, request.partition_key) == ("cell", "load-1")
    assert request.run_key == "night:2026-03-28:cell:load-1:1"
    assert request.tags == {NIGHT_TAG: "2026-03-28", "agentpipe/why": "disturbance_table is not current"}
    assert said(begin(home, DAY, now=NOW)) == "the night of 2026-03-28 was begun before"


def test_a_night_without_a_stale_cell_or_with_a_table_nobody_can_read_begins_all_the_same(home: Workspace) -> None:
    assert said(begin(home, DAY, now=NOW)) == "begun; no cell is stale, nightly_candidate goes on"
    edit(home, "load-1", 99.0)
    source = home.table_store().source_path
    source.write_text(source.read_text().replace("99", "nan", 1))
    answer = begin(home, DAY + dt.timedelta(days=1), now=NOW + dt.timedelta(days=1))
    assert said(answer).startswith("begun; no cell is launched: ")
    assert begun(home) == ["2026-03-28", "2026-03-29"]


def test_a_night_that_a_later_one_has_overtaken_is_not_begun(home: Workspace) -> None:
    """After three days without the daemon its catching up comes with three ticks; the last one counts."""
    now = NOW + dt.timedelta(days=2, hours=1)
    answers = [begin(home, DAY + dt.timedelta(days=late), now=now) for late in range(3)]
    assert said(answers[0]) == "the night of 2026-03-28 is overtaken by that of 2026-03-30"
    assert begun(home) == ["2026-03-30"]


def test_a_night_late_in_the_utc_day_is_not_overtaken_by_midnight(
    home: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """02:00 in Kolkata is 20:30 UTC: a tick that comes four hours late is still that of the last night."""
    monkeypatch.setenv("AGENTPIPE_SCHEDULE__TIMEZONE", "Asia/Kolkata")
    tick = utc("2026-03-28 20:30")
    assert "begun" in said(begin(home, day_of(tick), now=utc("2026-03-29 00:30")))
    assert begun(home) == ["2026-03-27"]


def test_a_damaged_night_is_not_begun_over(home: Workspace) -> None:
    begin(home, DAY, now=NOW)
    (home.root / "nights" / "2026-03-28.json").write_text("{}")
    with pytest.raises(CorruptError, match="not a night"):
        begin(home, DAY, now=NOW)


def test_the_schedule_s_tick_begins_the_night_of_the_last_day_that_is_over(
    home: Workspace, kept: dg.DagsterInstance
) -> None:
    chosen = ScheduleSettings()
    schedule = nightly_schedule(chosen)
    tick = last_time(dt.datetime.now(dt.UTC), chosen)
    context = dg.build_schedule_context(instance=kept, scheduled_execution_time=tick, resources={"workspace": home})
    assert said(schedule(context)).startswith("begun")
    assert begun(home) == [(tick.date() - dt.timedelta(days=1)).isoformat()]
    assert (schedule.cron_schedule, schedule.execution_timezone) == ("0 2 * * *", "UTC")


# ------------------------------------------------------------------------------------------------------ missed


def test_a_missed_night_is_made_up_exactly_once(home: Workspace, scheduled: dg.DagsterInstance) -> None:
    edit(home, "load-1", 99.0)
    turn(scheduled, utc("2026-03-20"))
    late = utc("2026-03-29 09:00")
    requests = missed(home, scheduled, late)
    assert isinstance(requests, list)
    assert [request.partition_key for request in requests] == ["load-1"]
    night = Nights(home.root).find(DAY)
    assert night is not None
    assert night.made_up
    Nights(home.root).end(night, late, "promote: better")
    assert said(missed(home, scheduled, late)) == "the night of 2026-03-28 has ended: promote: better"
    assert said(begin(home, DAY, now=late)) == "the night of 2026-03-28 was begun before"


def test_a_night_that_nobody_has_begun_for_ten_minutes_is_missed(
    home: Workspace, scheduled: dg.DagsterInstance
) -> None:
    turn(scheduled, utc("2026-03-20"))
    assert said(missed(home, scheduled, utc("2026-03-29 02:09"))) == "the night of 2026-03-28 is about to begin"
    assert "begun" in said(missed(home, scheduled, utc("2026-03-29 02:10")))


def test_before_its_time_the_night_before_is_the_missed_one(home: Workspace, scheduled: dg.DagsterInstance) -> None:
    turn(scheduled, utc("2026-03-20"))
    missed(home, scheduled, utc("2026-03-29 01:00"))
    assert begun(home) == ["2026-03-27"]


def test_a_night_missed_in_a_zone_whose_night_is_late_in_the_utc_day_was_never_made_up(
    home: Workspace, scheduled: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTPIPE_SCHEDULE__TIMEZONE", "Asia/Kolkata")
    turn(scheduled, utc("2026-03-20"))
    missed(home, scheduled, utc("2026-03-29 05:00"))
    assert begun(home) == ["2026-03-27"]


def test_no_night_is_made_up_from_before_the_schedule_was_on(home: Workspace, scheduled: dg.DagsterInstance) -> None:
    turn(scheduled, utc("2026-03-29 08:00"))
    reason = "the schedule is on since 2026-03-29 08:00 UTC; no night was due since then"
    assert said(missed(home, scheduled, utc("2026-03-29 09:00"))) == reason
    assert begun(home) == []


@pytest.mark.parametrize(
    ("since", "status"),
    [(utc("2026-03-20"), InstigatorStatus.STOPPED), (None, InstigatorStatus.RUNNING), (None, None)],
)
def test_no_night_is_made_up_while_the_schedule_is_off_or_was_never_seen(
    home: Workspace, scheduled: dg.DagsterInstance, since: dt.datetime | None, status: InstigatorStatus | None
) -> None:
    if status is not None:
        turn(scheduled, since, status)
    assert schedule_on_since(scheduled) is None
    assert said(missed(home, scheduled, utc("2026-03-29 09:00"))) == "the schedule `nightly` is off"
    assert begun(home) == []


# ------------------------------------------------------------------------------------------------- the sensor


def tick(workspace: Workspace, instance: dg.DagsterInstance) -> Answer:
    answer = SENSOR(dg.build_sensor_context(instance=instance, resources={"workspace": workspace}))
    assert isinstance(answer, list | dg.SkipReason)
    return answer


def test_two_nights_at_once_are_one_after_the_other(home: Workspace, instance: dg.DagsterInstance) -> None:
    """The second waits until the first has ended, whatever that is waiting for."""
    nights = Nights(home.root)
    first = nights.begin(DAY, NOW, made_up=True)
    assert first is not None
    nights.begin(DAY + dt.timedelta(days=1), NOW + dt.timedelta(days=1))
    for day in ("2026-03-28", "2026-03-29"):
        leave(home, "production_feedback", day)
    [request] = tick(home, instance)
    assert request.partition_key == candidate_key(DAY, "nightly")
    run = add_requested(instance, request, dg.DagsterRunStatus.STARTED)
    assert said(tick(home, instance)).startswith("night 2026-03-28 waits: 1 of its runs are not over: candidate")
    instance.report_run_failed(run)
    ended = "night 2026-03-28 has ended: failed: candidate[2026-03-28|nightly]; its checks and log say why"
    assert said(tick(home, instance)) == ended
    [request] = tick(home, instance)
    assert request.partition_key == candidate_key(DAY + dt.timedelta(days=1), "nightly")
    found = nights.find(DAY)
    assert found is not None
    assert found.outcome.startswith("failed: candidate")


def test_a_night_that_cannot_go_on_says_why_and_goes_on_when_it_can(
    home: Workspace, instance: dg.DagsterInstance
) -> None:
    Nights(home.root).begin(DAY, NOW)
    leave(home, "production_feedback", "2026-03-28")
    path = home.references.path("trajectories", "load-1")
    whole = path.read_text()
    path.write_text("{")
    assert said(tick(home, instance)).startswith("night 2026-03-28 cannot go on: not valid JSON")
    path.write_text(whole)
    assert len(tick(home, instance)) == 1  # type: ignore[arg-type]


def test_a_damaged_night_fails_the_tick_and_begins_no_other(home: Workspace, instance: dg.DagsterInstance) -> None:
    Nights(home.root).begin(DAY, NOW)
    (home.root / "nights" / "2026-03-28.json").write_text('{"day": 5}')
    with pytest.raises(CorruptError, match="remove it"):
        tick(home, instance)
