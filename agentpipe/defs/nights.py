"""The record of each night: that it was begun, and how it ended. Everything in between is read from Dagster's runs."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dagster._utils.schedules import schedule_execution_time_iterator

from agentpipe.defs.partitions import last_closed_day
from agentpipe.errors import CorruptError
from agentpipe.learning.succession.champion import exclusive
from agentpipe.settings import ScheduleSettings
from agentpipe.storage import read_json, write_json

NIGHT_TAG = "agentpipe/night"
"""Tag of every run that a night launched; its value is the night's day."""
_REMEDY = "remove it; the night is begun again"


@dataclass(frozen=True)
class Night:
    """One night; ``day`` is the UTC day whose candidate it makes."""

    day: str
    begun: str
    """UTC, ISO 8601"""
    made_up: bool = False
    """begun by the sensor, since its time was missed"""
    ended: str | None = None
    """UTC, ISO 8601; none while it runs"""
    outcome: str = ""

    @property
    def date(self) -> dt.date:
        """The day as a date."""
        return dt.date.fromisoformat(self.day)


class Nights:
    """The nights of one home, one small file each, replaced by rename."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "nights"

    def find(self, day: dt.date) -> Night | None:
        """The night of ``day``, or ``None`` where it was never begun.

        Raises:
            CorruptError: its file is damaged.
        """
        path = self._path(day.isoformat())
        return _read(path) if path.exists() else None

    def begin(self, day: dt.date, now: dt.datetime, *, made_up: bool = False) -> Night | None:
        """Records that the night of ``day`` begins; ``None`` where it was begun before.

        After a stand-still the schedule and the sensor may come at the same moment: one of them begins the night.

        Raises:
            CorruptError: its file is damaged.
        """
        with exclusive(self.folder / "nights.lock"):
            if self.find(day) is not None:
                return None
            night = Night(day.isoformat(), now.isoformat(timespec="seconds"), made_up)
            write_json(self._path(night.day), asdict(night))
            return night

    def end(self, night: Night, now: dt.datetime, outcome: str) -> None:
        """Records how ``night`` ended."""
        write_json(
            self._path(night.day), asdict(replace(night, ended=now.isoformat(timespec="seconds"), outcome=outcome))
        )

    def running(self) -> Night | None:
        """The oldest night that was begun and has not ended; a later one waits for it.

        Raises:
            CorruptError: the file of a night is damaged.
        """
        nights = (_read(path) for path in sorted(self.folder.glob("????-??-??.json")))
        return next((night for night in nights if night.ended is None), None)

    def _path(self, day: str) -> Path:
        return self.folder / f"{day}.json"


def _read(path: Path) -> Night:
    """The night in a file.

    Raises:
        CorruptError: it is none, or that of another day.
    """
    content: Any = read_json(path)
    try:
        night = Night(**content)
        times = [night.begun, *(() if night.ended is None else (night.ended,))]
        sound = night.day == dt.date.fromisoformat(path.stem).isoformat() and all(
            dt.datetime.fromisoformat(time).tzinfo for time in times
        )
    except (TypeError, ValueError) as error:
        raise CorruptError(f"not a night: {error}", file=path, remedy=_REMEDY) from error
    if not all(isinstance(content.get(name, of()), of) for name, of in (("made_up", bool), ("outcome", str))):
        raise CorruptError("not a night: a field has another type", file=path, remedy=_REMEDY)
    if not sound:
        raise CorruptError("not a night: another day's, or a time without a zone", file=path, remedy=_REMEDY)
    return night


def cron(schedule: ScheduleSettings) -> str:
    """When a night begins, in the schedule's zone."""
    return f"{schedule.minute} {schedule.hour} * * *"


@dataclass(frozen=True)
class Due:
    """A night that is due."""

    day: dt.date
    at: dt.datetime
    """since when, in UTC"""
    passed_over: bool = False
    """no time of the schedule is its own: the sensor makes it up as soon as its day is over"""


def last_due(now: dt.datetime, schedule: ScheduleSettings) -> Due:
    """The night that is the last one due at ``now``: each UTC day has one.

    Where a clock change moves the schedule's time over midnight UTC, two times in a row find the same day over, or one
    finds two days more over than the one before. Of the former the first counts. Of the latter the earlier day has no
    time of its own: its night is due when the day is over.
    """
    *before, following = _times_around(now, schedule)
    day, newest = day_of(before[-1]), min(day_of(following) - dt.timedelta(days=1), last_closed_day(now))
    if newest > day:
        over = dt.datetime.combine(newest + dt.timedelta(days=1), dt.time(), dt.UTC)
        return Due(newest, over, passed_over=True)
    return Due(day, next(time for time in before if day_of(time) == day))


def last_time(now: dt.datetime, schedule: ScheduleSettings) -> dt.datetime:
    """The latest time not after ``now`` at which the schedule ticks, in UTC: Dagster's own tick.

    Of a local time that a clock change skips or repeats Dagster makes one instant; a second rule beside its own would
    take a night for missed that is only about to begin.
    """
    return _times_around(now, schedule)[-2]


def _times_around(now: dt.datetime, schedule: ScheduleSettings) -> list[dt.datetime]:
    """The schedule's times of the three days before ``now`` or a little more, and the first one after it, in UTC.

    Dagster's iterator fails where it starts within an hour of some changes of the clock, so it starts at noon.
    """
    day = now.astimezone(zoneinfo.ZoneInfo(schedule.timezone)).date() - dt.timedelta(days=4)
    start = dt.datetime.combine(day, dt.time(12), zoneinfo.ZoneInfo(schedule.timezone)).timestamp()
    found: list[dt.datetime] = []
    for tick in schedule_execution_time_iterator(
        start, cron(schedule), schedule.timezone
    ):  # backwards it fails in gaps
        found.append(tick.astimezone(dt.UTC))
        if tick > now:
            break
    return found


def day_of(begins: dt.datetime) -> dt.date:
    """The last UTC day that is over at ``begins``: the one whose candidate a night makes that begins then."""
    return last_closed_day(begins)
