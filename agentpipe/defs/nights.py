"""The record of each night: that it was begun, and how it ended. Everything in between is read from Dagster's runs."""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dagster._utils.schedules import schedule_execution_time_iterator

from agentpipe.defs.partitions import last_closed_day
from agentpipe.errors import CorruptError
from agentpipe.learning.champion import exclusive
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
        sound = night.day == dt.date.fromisoformat(path.stem).isoformat() and all(
            dt.datetime.fromisoformat(time).tzinfo for time in (night.begun, night.ended) if time is not None
        )
    except (TypeError, ValueError) as error:
        raise CorruptError(f"not a night: {error}", file=path, remedy=_REMEDY) from error
    if not sound:
        raise CorruptError("not a night: another day's, or a time without a zone", file=path, remedy=_REMEDY)
    return night


def cron(schedule: ScheduleSettings) -> str:
    """When a night begins, in the schedule's zone."""
    return f"{schedule.minute} {schedule.hour} * * *"


def last_time(now: dt.datetime, schedule: ScheduleSettings) -> dt.datetime:
    """The latest time not after ``now`` at which a night begins, in UTC: Dagster's own tick.

    Of a local time that a clock change skips or repeats Dagster makes one instant; a second rule beside its own would
    take a night for missed that is only about to begin.
    """
    start = (now - dt.timedelta(days=3)).timestamp()
    ticks = schedule_execution_time_iterator(start, cron(schedule), schedule.timezone)  # backwards it fails in a gap
    return list(itertools.takewhile(lambda tick: tick <= now, ticks))[-1].astimezone(dt.UTC)


def day_of(begins: dt.datetime) -> dt.date:
    """The day whose candidate a night makes that begins at ``begins``: the last UTC day that is over then."""
    return last_closed_day(begins)
