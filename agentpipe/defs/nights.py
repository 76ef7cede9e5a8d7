"""The record of each night: that it was begun, and how it ended. Everything in between is read from Dagster's runs."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from zoneinfo import ZoneInfo

from agentpipe.defs.partitions import last_closed_day
from agentpipe.errors import CorruptError
from agentpipe.settings import ScheduleSettings
from agentpipe.storage import read_json, write_json

NIGHT_TAG = "agentpipe/night"
"""Tag of every run that a night launched; its value is the night's day."""


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
        if not path.exists():
            return None
        try:
            return Night(**read_json(path))
        except TypeError as error:
            raise CorruptError(
                f"not a night: {error}", file=path, remedy="remove it; the night is begun again"
            ) from error

    def begin(self, day: dt.date, now: dt.datetime, *, made_up: bool = False) -> Night | None:
        """Records that the night of ``day`` begins; ``None`` where it was begun before."""
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
        """The oldest night that was begun and has not ended; a later one waits for it."""
        for path in sorted(self.folder.glob("????-??-??.json")):
            night = self.find(dt.date.fromisoformat(path.stem))
            if night is not None and night.ended is None:
                return night
        return None

    def _path(self, day: str) -> Path:
        return self.folder / f"{day}.json"


def last_time(now: dt.datetime, schedule: ScheduleSettings) -> dt.datetime:
    """The latest time not after ``now`` at which a night begins, in UTC.

    A local time that a clock change skips is the same instant an hour later on the clock; one that occurs twice counts
    the first time.
    """
    zone = ZoneInfo(schedule.timezone)
    local = now.astimezone(zone).date()
    for day in (local, local - dt.timedelta(days=1)):
        begins = dt.datetime.combine(day, dt.time(schedule.hour, schedule.minute), zone).astimezone(dt.UTC)
        if begins <= now:
            return begins
    raise AssertionError("a night begins every day")


def day_of(begins: dt.datetime) -> dt.date:
    """The day whose candidate a night makes that begins at ``begins``: the last UTC day that is over then."""
    return last_closed_day(begins)
