"""How a night begins: by the schedule's tick, or made up by the sensor after a stand-still."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import ClassVar

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, ScheduleInstigatorData

from agentpipe.defs.learning import schedules, sensors
from agentpipe.defs.learning.schedules import begin, nightly_schedule
from agentpipe.defs.learning.sensors import _make_up, nightly_sensor, schedule_on_since
from agentpipe.defs.nights import NIGHT_TAG, Night, Nights, day_of, last_due, last_time
from agentpipe.defs.partitions import candidate_key
from agentpipe.defs.resources import Workspace
from agentpipe.errors import CorruptError
from agentpipe.settings import ScheduleSettings
from agentpipe.storage import read_json
from agentpipe_tests.defs.homes import add_requested, edit, leave, utc
from agentpipe_tests.defs.test_nights import ticks

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


ENTRY = {"sequence": 1, "package": "p", "digest": "aaa", "previous": None, "reason": "r", "who": "w", "at": "t"}
NIGHT = "2026-03-28.json"


def write(home: Workspace, name: str, content: object) -> None:
    path = home.root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def figures(home: Workspace, **changes: object) -> None:
    path = home.references.path("trajectories", "load-1")
    content = read_json(path)
    path.write_text(json.dumps({**content, "figures": {**content["figures"], **changes}}))


def champion(**figures: object) -> dict[str, object]:
    return {"format": 2, "history": [{**ENTRY, "figures": figures}]}


DAMAGE: dict[str, tuple[str, Callable[[Workspace], object]]] = {
    "the champion": ("not a champion pointer", lambda home: write(home, "champion/champion.json", [])),
    "the champion's partition": (
        "'partition' has another type",
        lambda home: write(home, "champion/champion.json", champion(partition=5)),
    ),
    "the champion's difference": (
        "'difference' has another type",
        lambda home: write(home, "champion/champion.json", champion(difference="x")),
    ),
    "how old a behaviour is": ("of another type", lambda home: figures(home, behaviour_ordinal="old")),
    "whether it is a number": ("of another type", lambda home: figures(home, behaviour_ordinal=True)),
    "the gates": ("of another type", lambda home: figures(home, gates=5)),
    "a gate": ("of another type", lambda home: figures(home, gates=[{"name": "buffer_size", "severity": "error"}])),
    "a cell": ("not a reference", lambda home: write(home, "references/trajectories/load-1.json", [])),
    "the line": ("not a reference", lambda home: write(home, "references/line_profile/reference.json", {})),
    "the table's source": ("source.csv", lambda home: write(home, "table/source.csv", "nonsense")),
}
NIGHTS = {
    "no object": "[]",
    "no fields": "{}",
    "when it was begun": '{"day": "2026-03-28", "begun": null}',
    "how it ended": '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "outcome": 5}',
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_fails_no_tick_of_a_night_and_is_said(
    home: Workspace, scheduled: dg.DagsterInstance, what: str
) -> None:
    text, damage = DAMAGE[what]
    damage(home)
    night = Nights(home.root).begin(DAY, NOW)
    assert night is not None
    told = said(tick(home, scheduled))
    assert told.startswith("night 2026-03-28 cannot go on: ")
    assert text in told
    Nights(home.root).end(night, NOW, "")
    turn(scheduled, utc("2026-03-20"))
    told = said(missed(home, scheduled, utc("2026-03-30 09:00")))  # the next one, made up
    assert told.startswith("begun; no cell is launched: ")
    assert text in told


@pytest.mark.parametrize("content", NIGHTS.values(), ids=NIGHTS.keys())
def test_a_damaged_night_fails_no_tick_and_begins_no_other(
    home: Workspace, scheduled: dg.DagsterInstance, content: str
) -> None:
    turn(scheduled, utc("2026-03-20"))
    write(home, f"nights/{NIGHT}", content)
    told = said(tick(home, scheduled))
    assert told.startswith("the night cannot go on: not ")
    assert NIGHT in told
    assert "remove it" in told
    assert begun(home) == ["2026-03-28"]


@pytest.mark.parametrize("content", NIGHTS.values(), ids=NIGHTS.keys())
def test_a_damaged_night_fails_no_tick_of_the_schedule(home: Workspace, kept: dg.DagsterInstance, content: str) -> None:
    chosen = ScheduleSettings()
    at = last_time(dt.datetime.now(dt.UTC), chosen)
    write(home, f"nights/{day_of(at)}.json", content.replace("2026-03-28", str(day_of(at))))
    context = dg.build_schedule_context(instance=kept, scheduled_execution_time=at, resources={"workspace": home})
    assert said(nightly_schedule(chosen)(context)).startswith(f"the night of {day_of(at)} cannot begin: not ")


# ------------------------------------------------------------------------------------------- changes of the clock


class Remembered:
    """The record of nights, in memory."""

    nights: ClassVar[dict[dt.date, list[tuple[dt.datetime, bool]]]] = {}

    def __init__(self, _home: object = None) -> None:
        pass

    def find(self, day: dt.date) -> Night | None:
        return Night(str(day), "") if day in self.nights else None

    def begin(self, day: dt.date, now: dt.datetime, *, made_up: bool) -> Night | None:
        if day in self.nights:
            return None
        self.nights[day] = [(now, made_up)]
        return Night(str(day), "")


HOURS = (0, 1, 2, 3)
PASSED_OVER = {
    "Europe/Berlin": {1: "2026-10-24"},
    "Europe/London": {0: "2026-10-24"},
    "Asia/Kolkata": {},
    "America/New_York": {},
    "Australia/Lord_Howe": {},
    "Pacific/Apia": {},
    "Antarctica/Troll": {0: "2026-10-24", 1: "2026-10-23"},  # two hours in summer; one o'clock comes twice in October
    "UTC": {},
}
"""By hour, the day that no tick of 2026 finds as the last one that is over."""


@pytest.mark.parametrize("zone", PASSED_OVER)
def test_each_utc_day_of_a_year_has_exactly_one_night(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tick of the schedule, and the sensor at midnight UTC and when a night would count as missed."""
    monkeypatch.setattr(schedules, "Nights", Remembered)
    monkeypatch.setattr(schedules, "cells_to_ask", lambda _: ())
    monkeypatch.setattr(sensors, "schedule_on_since", lambda _: utc("2025-12-01"))
    context = SimpleNamespace(instance=None)
    year = [dt.date(2026, 1, 1) + dt.timedelta(days=number) for number in range(365)]
    for hour in HOURS:
        Remembered.nights = {}
        chosen = ScheduleSettings(timezone=zone, hour=hour)
        workspace = SimpleNamespace(root=None, settings=SimpleNamespace(schedule=chosen))
        own = ticks(chosen, utc("2025-12-30"), utc("2027-01-03"))
        looks = [tick + dt.timedelta(minutes=11) for tick in own]
        looks += [dt.datetime.combine(day, dt.time(), dt.UTC) for day in year]
        for now, by_schedule in sorted([*((tick, True) for tick in own), *((look, False) for look in looks)]):
            if by_schedule:
                begin(workspace, day_of(now), now=now)  # type: ignore[arg-type]
            else:
                _make_up(context, workspace, Remembered(), now)  # type: ignore[arg-type]
        found = {day: night for day, night in Remembered.nights.items() if day in year}
        assert sorted(found) == year
        late = {day: at for day, [(at, made_up)] in found.items() if made_up}
        assert all(at - dt.datetime.combine(day, dt.time(), dt.UTC) == dt.timedelta(days=1) for day, at in late.items())
        assert sorted(map(str, late)) == ([PASSED_OVER[zone][hour]] if hour in PASSED_OVER[zone] else [])


def at_berlin(monkeypatch: pytest.MonkeyPatch) -> ScheduleSettings:
    monkeypatch.setenv("AGENTPIPE_SCHEDULE__TIMEZONE", "Europe/Berlin")
    monkeypatch.setenv("AGENTPIPE_SCHEDULE__HOUR", "1")
    return ScheduleSettings(timezone="Europe/Berlin", hour=1)


def test_a_day_that_no_tick_finds_over_is_made_up_as_soon_as_it_is_over(
    home: Workspace, scheduled: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Berlin one o'clock is 23:00 UTC until 25 October 2026, and midnight from then on."""
    at_berlin(monkeypatch)
    turn(scheduled, utc("2026-10-01"))
    nights = Nights(home.root)
    begin(home, dt.date(2026, 10, 23), now=utc("2026-10-24 23:00"))
    first = nights.running()
    assert first is not None
    nights.end(first, utc("2026-10-24 23:30"), "done")
    assert said(missed(home, scheduled, utc("2026-10-24 23:59"))) == "the night of 2026-10-23 has ended: done"
    assert said(missed(home, scheduled, utc("2026-10-25 00:00"))).startswith("begun")
    night = nights.find(dt.date(2026, 10, 24))
    assert night is not None
    assert night.made_up
    nights.end(night, utc("2026-10-25 01:00"), "done")
    assert said(missed(home, scheduled, utc("2026-10-25 12:00"))) == "the night of 2026-10-24 has ended: done"
    assert said(begin(home, dt.date(2026, 10, 25), now=utc("2026-10-26 00:00"))).startswith("begun")
    assert begun(home) == ["2026-10-23", "2026-10-24", "2026-10-25"]


def test_a_tick_that_has_no_day_left_says_so_and_launches_nothing(
    home: Workspace, kept: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Berlin one o'clock is midnight UTC until 29 March 2026, and 23:00 from then on: the 28th is over twice."""
    schedule = nightly_schedule(at_berlin(monkeypatch))
    found = []
    for now in ("2026-03-29 00:00", "2026-03-29 23:00", "2026-03-30 23:00"):
        monkeypatch.setattr(schedules, "last_due", lambda _, chosen, now=now: last_due(utc(now), chosen))
        context = dg.build_schedule_context(
            instance=kept, scheduled_execution_time=utc(now), resources={"workspace": home}
        )
        found.append(said(schedule(context)))
    assert found[1] == "no day is left: 2026-03-29 is not over (UTC), and the night of 2026-03-28 was begun before"
    assert [text[:5] for text in found] == ["begun", "no da", "begun"]
    assert begun(home) == ["2026-03-28", "2026-03-29"]


def test_a_tick_whose_day_the_tick_before_has_missed_begins_it(
    home: Workspace, kept: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, now = nightly_schedule(at_berlin(monkeypatch)), utc("2026-03-29 23:00")
    monkeypatch.setattr(schedules, "last_due", lambda _, chosen: last_due(now, chosen))
    context = dg.build_schedule_context(instance=kept, scheduled_execution_time=now, resources={"workspace": home})
    assert said(schedule(context)).startswith("begun")
    assert begun(home) == ["2026-03-28"]
