"""The three kinds of partition: cells, days (times trigger), weeks. Keys are bounded: never an episode."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

import dagster as dg

from agentpipe.environments.parameters import CELLS
from agentpipe.errors import SettingsError
from agentpipe.storage import read_json, write_json

TRIGGERS = ("nightly", "feedback", "manual")
WEEKS_BEFORE = 4
"""A new home can look so many weeks back."""


def monday(day: dt.date) -> dt.date:
    """The Monday of the week that holds ``day``."""
    return day - dt.timedelta(days=day.weekday())


def last_closed_day(now: dt.datetime | None = None) -> dt.date:
    """The last UTC day that is over at ``now`` (default: the clock)."""
    return (now or dt.datetime.now(dt.UTC)).astimezone(dt.UTC).date() - dt.timedelta(days=1)


def start_of(home: Path) -> dt.date:
    """The first day of the home's partitions, always a Monday; of a home that does not exist yet, what it would be."""
    path = home / "calendar.json"
    if not path.exists():
        return monday(last_closed_day()) - dt.timedelta(weeks=WEEKS_BEFORE)
    try:
        return monday(dt.date.fromisoformat(read_json(path)["start"]))
    except (KeyError, TypeError, ValueError) as error:
        remedy = 'write {"start": "YYYY-MM-DD"} into it, or remove it'
        raise SettingsError("the calendar of the home is malformed", file=path, field="start", remedy=remedy) from error


def keep_start(home: Path) -> dt.date:
    """Writes the start day into the home at first use, so that keys never move; returns it."""
    start = start_of(home)
    if not (home / "calendar.json").exists():
        write_json(home / "calendar.json", {"start": start.isoformat()})
    return start


START = start_of(Path(os.environ.get("AGENTPIPE_HOME", ".agentpipe")))

cells = dg.StaticPartitionsDefinition(list(CELLS))
days = dg.DailyPartitionsDefinition(start_date=START.isoformat(), timezone="UTC")
candidates = dg.MultiPartitionsDefinition({"day": days, "trigger": dg.StaticPartitionsDefinition(list(TRIGGERS))})
weeks = dg.WeeklyPartitionsDefinition(start_date=START.isoformat(), day_offset=1, end_offset=1, timezone="UTC")
"""Mondays; the week that is running is there too: its report is preliminary."""


def candidate_key(day: dt.date, trigger: str) -> str:
    """The key of one candidate policy, such as ``2026-11-28|manual``."""
    return str(dg.MultiPartitionKey({"day": day.isoformat(), "trigger": trigger}))


def split_candidate(key: str) -> tuple[dt.date, str]:
    """The inverse of :func:`candidate_key`."""
    day, _, trigger = key.partition("|")
    return dt.date.fromisoformat(day), trigger


def days_of_week(week: dt.date) -> tuple[dt.date, ...]:
    """Monday to Sunday of the week that begins on ``week``."""
    return tuple(week + dt.timedelta(days=offset) for offset in range(7))


def check_day(day: dt.date, start: dt.date) -> dt.date:
    """``day`` where it is one of the home's partitions.

    Raises:
        SettingsError: it is before the start of the home, or not over yet (UTC).
    """
    last = last_closed_day()
    if not start <= day <= last:
        remedy = f"choose {start.isoformat()} to {last.isoformat()}, the last day that is over in UTC"
        raise SettingsError(f"{day.isoformat()} is not a partition of this home", field="day", remedy=remedy)
    return day
