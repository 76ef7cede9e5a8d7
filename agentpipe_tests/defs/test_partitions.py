from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest

from agentpipe.defs import partitions
from agentpipe.errors import SettingsError


def test_cells_are_the_fifteen_pairs_of_kind_and_intensity() -> None:
    keys = partitions.cells.get_partition_keys()
    assert keys[0] == "sensor-1"
    assert keys[-1] == "load-5"
    assert len(set(keys)) == 15


def test_a_candidate_is_a_day_and_a_trigger() -> None:
    key = partitions.candidate_key(dt.date(2026, 3, 29), "manual")
    assert key == "2026-03-29|manual"
    assert partitions.split_candidate(key) == (dt.date(2026, 3, 29), "manual")


def test_keys_are_bounded() -> None:
    days = partitions.days.get_partition_keys()
    assert len(partitions.candidates.get_partition_keys()) == 3 * len(days)
    assert len(days) < 400


def test_the_week_that_runs_is_there_and_starts_on_monday() -> None:
    weeks = [dt.date.fromisoformat(key) for key in partitions.weeks.get_partition_keys()]
    assert all(week.weekday() == 0 for week in weeks)
    assert partitions.monday(partitions.last_closed_day()) in weeks


@pytest.mark.parametrize(
    ("moment", "closed"),
    [
        ("2026-03-29T00:30:00+01:00", "2026-03-27"),  # still the 28th in UTC
        ("2026-03-29T03:30:00+02:00", "2026-03-28"),  # the hour that Berlin skips is no hour of UTC
        ("2026-10-25T02:30:00+01:00", "2026-10-24"),  # the hour that Berlin has twice
    ],
)
def test_daylight_saving_neither_moves_nor_loses_a_day(moment: str, closed: str) -> None:
    assert partitions.last_closed_day(dt.datetime.fromisoformat(moment)).isoformat() == closed


def test_the_last_closed_day_is_that_of_utc_wherever_one_is() -> None:
    now = dt.datetime(2026, 6, 1, 2, 0, tzinfo=ZoneInfo("Asia/Kolkata"))  # 20:30 on 31 May in UTC
    assert partitions.last_closed_day(now) == dt.date(2026, 5, 30)


def test_the_start_is_kept_in_the_home(tmp_path) -> None:
    first = partitions.keep_start(tmp_path)
    assert first.weekday() == 0
    (tmp_path / "calendar.json").write_text('{"start": "2026-01-07"}')
    assert partitions.keep_start(tmp_path) == dt.date(2026, 1, 5)


@pytest.mark.parametrize("content", ["{}", '{"start": "soon"}', '{"start": 5}'])
def test_a_malformed_calendar_names_file_and_field(tmp_path, content: str) -> None:
    (tmp_path / "calendar.json").write_text(content)
    with pytest.raises(SettingsError, match="calendar") as caught:
        partitions.start_of(tmp_path)
    assert caught.value.where == {"file": tmp_path / "calendar.json", "field": "start"}


def test_a_day_that_is_not_over_is_refused() -> None:
    today = partitions.last_closed_day() + dt.timedelta(days=1)
    with pytest.raises(SettingsError, match=today.isoformat()):
        partitions.check_day(today, partitions.START)
    with pytest.raises(SettingsError, match="not a partition"):
        partitions.check_day(partitions.START - dt.timedelta(days=1), partitions.START)
