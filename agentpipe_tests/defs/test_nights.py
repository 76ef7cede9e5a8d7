"""When a night begins, for which day, and that it is begun once."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import zoneinfo
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dagster._utils.schedules import schedule_execution_time_iterator
from hypothesis import example, given
from hypothesis import strategies as st

from agentpipe.defs.nights import Due, Nights, cron, day_of, last_due, last_time
from agentpipe.errors import CorruptError
from agentpipe.settings import ScheduleSettings
from agentpipe_tests.defs.homes import utc

DAY = dt.date(2026, 3, 28)
BERLIN, KOLKATA = "Europe/Berlin", "Asia/Kolkata"


def at(zone: str, hour: int, minute: int = 0) -> ScheduleSettings:
    return ScheduleSettings(timezone=zone, hour=hour, minute=minute)


@pytest.mark.parametrize(
    ("schedule", "now", "begins", "day"),
    [
        # the clock goes on from 02:00 to 03:00 at 01:00 UTC: what is skipped begins when it is over
        (at(BERLIN, 1), "2026-03-29 12:00", "2026-03-29 00:00", "2026-03-28"),
        (at(BERLIN, 2), "2026-03-29 12:00", "2026-03-29 01:00", "2026-03-28"),
        (at(BERLIN, 2, 30), "2026-03-29 12:00", "2026-03-29 01:00", "2026-03-28"),
        (at(BERLIN, 3), "2026-03-29 12:00", "2026-03-29 01:00", "2026-03-28"),
        (at(BERLIN, 2), "2026-03-29 00:59", "2026-03-28 01:00", "2026-03-27"),
        (at(BERLIN, 2), "2026-03-30 12:00", "2026-03-30 00:00", "2026-03-29"),
        # it goes back from 03:00 to 02:00 at 01:00 UTC: what comes twice counts the second time
        (at(BERLIN, 1), "2026-10-25 12:00", "2026-10-24 23:00", "2026-10-23"),
        (at(BERLIN, 2), "2026-10-25 12:00", "2026-10-25 01:00", "2026-10-24"),
        (at(BERLIN, 2, 30), "2026-10-25 12:00", "2026-10-25 01:30", "2026-10-24"),
        (at(BERLIN, 2), "2026-10-25 00:30", "2026-10-24 00:00", "2026-10-23"),
        (at(BERLIN, 3), "2026-10-25 12:00", "2026-10-25 02:00", "2026-10-24"),
        # half past eight in the evening, UTC: the day that is running is not over
        (at(KOLKATA, 2), "2026-03-29 20:29", "2026-03-28 20:30", "2026-03-27"),
        (at(KOLKATA, 2), "2026-03-29 20:30", "2026-03-29 20:30", "2026-03-28"),
        (at("UTC", 2), "2026-03-29 01:59:59", "2026-03-28 02:00", "2026-03-27"),
        (at("UTC", 2), "2026-03-29 02:00", "2026-03-29 02:00", "2026-03-28"),
        (at("UTC", 0), "2026-03-29 00:00", "2026-03-29 00:00", "2026-03-28"),
        # the last hour of a day is skipped in Nuuk
        (at("America/Nuuk", 23, 30), "2026-03-29 01:10", "2026-03-28 01:30", "2026-03-27"),
    ],
)
def test_the_latest_time_and_its_day_around_changes_of_the_clock(
    schedule: ScheduleSettings, now: str, begins: str, day: str
) -> None:
    found = last_time(utc(now), schedule)
    assert (found, found.tzinfo) == (utc(begins), dt.UTC)
    assert day_of(found).isoformat() == day


def ticks(schedule: ScheduleSettings, start: dt.datetime, end: dt.datetime) -> list[dt.datetime]:
    """Dagster's own ticks; its iterator is begun at noon, since it fails where it begins close to a change."""
    zone = zoneinfo.ZoneInfo(schedule.timezone)
    noon = dt.datetime.combine(start.astimezone(zone).date() - dt.timedelta(days=2), dt.time(12), zone)
    found = schedule_execution_time_iterator(noon.timestamp(), cron(schedule), schedule.timezone)
    before_end = itertools.takewhile(lambda tick: tick < end, (tick.astimezone(dt.UTC) for tick in found))
    return [tick for tick in before_end if tick >= start]


@pytest.mark.parametrize("hour", [1, 2, 3])
@pytest.mark.parametrize(("start", "end"), [("2026-03-27", "2026-04-01"), ("2026-10-23", "2026-10-28")])
def test_a_night_is_never_taken_for_missed_before_the_schedule_s_own_tick(hour: int, start: str, end: str) -> None:
    """At every quarter of an hour the latest time is Dagster's latest tick."""
    schedule = at(BERLIN, hour)
    own = ticks(schedule, utc(start) - dt.timedelta(days=2), utc(end))
    now = utc(start)
    while now < utc(end):
        assert last_time(now, schedule) == max(tick for tick in own if tick <= now)
        now += dt.timedelta(minutes=15)


ZONES = st.sampled_from(sorted(zone for zone in zoneinfo.available_timezones() if "/" in zone or zone == "UTC"))
SCHEDULES = st.builds(at, ZONES, st.integers(0, 23), st.sampled_from([0, 1, 30, 59]))
TIMES = st.integers(0, 4 * 366 * 24 * 60).map(lambda minutes: utc("2026-01-01") + dt.timedelta(minutes=minutes))


@given(SCHEDULES, TIMES)
@example(at("America/Nuuk", 23, 30), utc("2026-03-29 01:10"))
@example(at("America/Nuuk", 23), utc("2026-10-28 01:00"))
@example(at("Antarctica/Troll", 1), utc("2026-03-31 23:30"))
def test_the_latest_time_is_dagster_s_in_every_zone(schedule: ScheduleSettings, now: dt.datetime) -> None:
    begins = last_time(now, schedule)
    assert now - dt.timedelta(hours=26) < begins <= now
    assert begins == ticks(schedule, now - dt.timedelta(days=5), now + dt.timedelta(seconds=1))[-1]
    assert day_of(begins) < begins.date()


@given(SCHEDULES, TIMES)
@example(at(BERLIN, 1), utc("2026-03-27 12:00"))
@example(at(BERLIN, 1), utc("2026-10-23 12:00"))
def test_no_utc_day_has_two_nights(schedule: ScheduleSettings, start: dt.datetime) -> None:
    """Days never go back; where a clock change moves a tick over midnight, a day comes twice, or one is passed over."""
    days = [day_of(tick) for tick in ticks(schedule, start, start + dt.timedelta(days=6))]
    assert days == sorted(days)
    assert len(set(days)) >= len(days) - 1
    assert all((after - before).days <= 2 for before, after in itertools.pairwise(days))


@pytest.mark.parametrize(
    ("start", "days"),
    [("2026-03-27 12:00", ["27", "28", "28", "29"]), ("2026-10-23 12:00", ["22", "23", "25", "26"])],
)
def test_a_tick_that_a_clock_change_moves_over_midnight_repeats_or_passes_over_a_day(
    start: str, days: list[str]
) -> None:
    """One o'clock in Berlin is midnight UTC in winter, and eleven in the evening before in summer."""
    found = [day_of(tick) for tick in ticks(at(BERLIN, 1), utc(start), utc(start) + dt.timedelta(days=4))]
    assert [f"{day:%d}" for day in found] == days


@pytest.mark.parametrize(
    ("schedule", "now", "expected"),
    [
        # the night of the 24th has no time of its own: at 23:00 the 23rd is the last day over, at 00:00 the 25th is
        (at(BERLIN, 1), "2026-10-24 23:59", Due(dt.date(2026, 10, 23), utc("2026-10-24 23:00"))),
        (at(BERLIN, 1), "2026-10-25 00:00", Due(dt.date(2026, 10, 24), utc("2026-10-25 00:00"), passed_over=True)),
        (at(BERLIN, 1), "2026-10-25 23:59", Due(dt.date(2026, 10, 24), utc("2026-10-25 00:00"), passed_over=True)),
        (at(BERLIN, 1), "2026-10-26 00:00", Due(dt.date(2026, 10, 25), utc("2026-10-26 00:00"))),
        (at("Europe/London", 0), "2026-10-25 00:00", Due(dt.date(2026, 10, 24), utc("2026-10-25 00:00"), True)),
        # the 28th is the last day over at two times in a row, of which the first counts
        (at(BERLIN, 1), "2026-03-29 00:00", Due(dt.date(2026, 3, 28), utc("2026-03-29 00:00"))),
        (at(BERLIN, 1), "2026-03-29 23:00", Due(dt.date(2026, 3, 28), utc("2026-03-29 00:00"))),
        (at(BERLIN, 1), "2026-03-30 22:59", Due(dt.date(2026, 3, 28), utc("2026-03-29 00:00"))),
        (at(BERLIN, 1), "2026-03-30 23:00", Due(dt.date(2026, 3, 29), utc("2026-03-30 23:00"))),
        # without a change it is the day of the latest time, whatever is over since
        (at(KOLKATA, 2), "2026-03-29 20:29", Due(dt.date(2026, 3, 27), utc("2026-03-28 20:30"))),
        (at("UTC", 2), "2026-03-29 01:59", Due(dt.date(2026, 3, 27), utc("2026-03-28 02:00"))),
    ],
)
def test_the_night_that_is_due_around_changes_of_the_clock(schedule: ScheduleSettings, now: str, expected: Due) -> None:
    assert last_due(utc(now), schedule) == expected


@given(SCHEDULES, TIMES)
@example(at(BERLIN, 1), utc("2026-10-24 12:00"))
@example(at("Antarctica/Troll", 1), utc("2026-10-24 12:00"))
def test_in_every_zone_each_utc_day_is_due_once_and_in_order(schedule: ScheduleSettings, start: dt.datetime) -> None:
    looks = sorted({*ticks(schedule, start, start + dt.timedelta(days=6)), *(midnights(start, 6))})
    found = list(dict.fromkeys(last_due(look, schedule) for look in looks))
    days = [due.day for due in found]
    assert days == [days[0] + dt.timedelta(days=number) for number in range(len(days))]
    assert all(due.day < due.at.date() for due in found)
    assert all(due.passed_over or due.at == last_time(due.at, schedule) for due in found)


def midnights(start: dt.datetime, count: int) -> list[dt.datetime]:
    first = dt.datetime.combine(start.date(), dt.time(), dt.UTC)
    return [first + dt.timedelta(days=number) for number in range(1, count + 1)]


def test_a_time_three_days_after_a_change_of_the_clock_failed_the_tick() -> None:
    """Dagster's iterator fails where it starts in the hour before the clock goes on, in some zones."""
    for minutes in range(0, 4 * 24 * 60, 15):
        now = utc("2026-03-29 00:00") + dt.timedelta(minutes=minutes)
        assert last_time(now, at("Antarctica/Troll", 1)) <= now


# ------------------------------------------------------------------------------------------------ the record


def test_a_night_is_begun_once(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    begun = nights.begin(DAY, utc("2026-03-29 02:00"))
    assert begun is not None
    assert begun.begun == "2026-03-29T02:00:00+00:00"
    assert nights.begin(DAY, utc("2026-03-29 03:00"), made_up=True) is None
    assert nights.find(DAY) == begun
    nights.end(begun, utc("2026-03-29 04:00"), "promote: better")
    assert nights.begin(DAY, utc("2026-03-29 05:00")) is None
    found = nights.find(DAY)
    assert found is not None
    assert (found.ended, found.outcome) == ("2026-03-29T04:00:00+00:00", "promote: better")


def test_schedule_and_sensor_at_the_same_moment_begin_one_night(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for number in range(10):
            day = DAY + dt.timedelta(days=number)
            begun = list(pool.map(lambda _, day=day: Nights(tmp_path).begin(day, utc("2026-04-30")), range(8)))
            assert len([night for night in begun if night is not None]) == 1


def test_the_oldest_night_that_has_not_ended_runs_and_a_later_one_waits(tmp_path: Path) -> None:
    nights, now = Nights(tmp_path), utc("2026-04-02")
    assert nights.running() is None
    later = nights.begin(DAY + dt.timedelta(days=1), now)
    first = nights.begin(DAY, now)
    assert nights.running() == first
    assert first is not None
    nights.end(first, now, "done")
    assert nights.running() == later


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '"night"',
        '{"day": "2026-03-28"}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "mood": 1}',
        '{"day": "2026-03-27", "begun": "2026-03-29T02:00:00+00:00"}',
        '{"day": "2026-03-28", "begun": "yesterday"}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00"}',
        '{"day": "2026-03-28", "begun": 5}',
        '{"day": null, "begun": null}',
        '{"day": "2026-03-28", "begun": null}',
        '{"day": "2026-03-28", "begun": []}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "ended": 5}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "ended": "later"}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "ended": ""}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "ended": "2026-03-29T04:00:00"}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "made_up": null}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "made_up": 1}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "outcome": null}',
        '{"day": "2026-03-28", "begun": "2026-03-29T02:00:00+00:00", "outcome": {}}',
        '{"day": [], "begun": "2026-03-29T02:00:00+00:00"}',
    ],
)
def test_a_damaged_night_is_a_typed_error_that_names_its_file(tmp_path: Path, content: str) -> None:
    nights = Nights(tmp_path)
    nights.begin(DAY, utc("2026-03-29"))
    path = tmp_path / "nights" / "2026-03-28.json"
    path.write_text(content)
    for ask in (lambda: nights.find(DAY), nights.running, lambda: nights.begin(DAY, utc("2026-03-29"))):
        with pytest.raises(CorruptError, match=r"2026-03-28\.json"):
            ask()


def test_a_file_that_is_no_day_is_a_typed_error(tmp_path: Path) -> None:
    folder = tmp_path / "nights"
    folder.mkdir()
    (folder / "abcd-ef-gh.json").write_text(json.dumps({"day": "abcd-ef-gh", "begun": "2026-03-29T02:00:00+00:00"}))
    with pytest.raises(CorruptError, match="not a night"):
        Nights(tmp_path).running()
