"""The sensor ``agents``: one event for each new or changed report of an agent, none for one that was told."""

from __future__ import annotations

import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from agentpipe.defs import sources
from agentpipe.defs.instance import recorded_version
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving import sensors
from agentpipe.serving.agent.incident_text import report
from agentpipe.serving.agent.incidents import Incident
from agentpipe.settings import AgentSettings, ScheduleSettings

SENSOR = sensors.agents_sensor(ScheduleSettings())
OPENED = dt.datetime(2026, 3, 29, 1, tzinfo=dt.UTC)


class Watch:
    """The sensor, tick by tick, with its cursor and a clock that stands."""

    def __init__(self, workspace: Workspace, instance: dg.DagsterInstance) -> None:
        self.workspace, self.instance, self.now = workspace, instance, 1_000.0
        self.cursor: str | None = None
        self.said = ""

    def tick(self) -> list[dg.AssetMaterialization]:
        context = dg.build_sensor_context(
            instance=self.instance, cursor=self.cursor, resources={"workspace": self.workspace}
        )
        found = SENSOR(context)
        assert isinstance(found, dg.SensorResult)
        assert not found.run_requests
        self.cursor = self.cursor if found.cursor is None else found.cursor
        self.said = (found.skip_reason.skip_message or "") if found.skip_reason else ""
        for event in found.asset_events:
            self.instance.report_runless_asset_event(event)
        return [event for event in found.asset_events if isinstance(event, dg.AssetMaterialization)]

    @property
    def agents(self) -> Path:
        return self.workspace.root / "agent"


@pytest.fixture
def watch(tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch(Workspace(home=str(tmp_path / "home"), profile="demo"), instance)
    monkeypatch.setattr(sensors.time, "time", lambda: made.now)
    return made


def leave_incident(folder: Path, name: str = "20260329T010000.000000-triton", **changes: Any) -> Incident:
    incident = Incident(name, "press", "triton", OPENED)
    incident.losses = 1
    incident.tell(OPENED, "lost: away")
    for field, value in changes.items():
        setattr(incident, field, value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(report(incident, AgentSettings()))
    (folder / f"{name}.json").write_text(json.dumps(incident.to_json()))
    return incident


def leave_comparison(folder: Path, name: str = "c", **changes: Any) -> None:
    group = {"rows": 8, "agreement": 0.75, "rows_with_kl": 8, "kl_mean": 0.02, "kl_most": 0.4}
    content = {
        "format": 1,
        "candidate": "c" * 64,
        "champion": "a" * 64,
        "started": "2026-03-29T01:00:00+00:00",
        "ended": False,
        "written": "2026-03-29T02:00:00+00:00",
        "dropped": 1,
        "failed": 0,
        "last_failure": "",
        **group,
        "segments": {"identify": {**group, "rows": 5}, "execute": {**group, "kl_mean": None, "kl_most": None}},
        "disagreements": [{"champion": "wait", "candidate": "retry", "count": 2}],
        "latency_seconds": {"candidate": {"p50": 0.0001, "p99": 0.001}, "champion": {"p50": 0.002, "p99": None}},
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content))


def shown(event: dg.AssetMaterialization) -> dict[str, Any]:
    return {name: value.value for name, value in event.metadata.items()}


def test_without_agents_there_is_nothing_to_tell(watch: Watch) -> None:
    assert watch.tick() == []
    assert watch.said == "no report is new or changed"
    assert watch.cursor is None


def test_an_incident_is_told_when_it_opens_and_when_it_is_over(watch: Watch) -> None:
    folder = watch.agents / "press" / "incidents"
    leave_incident(folder)
    [event] = watch.tick()
    assert event.asset_key == dg.AssetKey("agent_incidents")
    found = shown(event)
    assert (found["agent"], found["part"], found["status"], found["losses"]) == ("press", "triton", "open", 1)
    assert found["report"].startswith("# Incident: triton (open)")
    assert "Look at the server's log" in found["report"]
    assert watch.tick() == []
    leave_incident(folder, decided={"local": 7})
    watch.now += 30
    assert watch.tick() == [], "under way: not every count is told"
    ended = OPENED + dt.timedelta(minutes=1)
    leave_incident(folder, status="closed", ended=ended, decided={"local": 9}, latency_sum=0.018, latency_max=0.004)
    [event] = watch.tick()
    found = shown(event)
    assert (found["status"], found["decisions"], found["decisions_local"]) == ("closed", 9, 9)
    assert found["latency_mean_ms"] == pytest.approx(2.0)
    assert found["latency_most_ms"] == pytest.approx(4.0)
    assert watch.tick() == []
    assert recorded_version(watch.instance, "agent_incidents", None) == (event.tags or {})["dagster/data_version"]


def test_a_comparison_shows_figures_by_segment_and_is_told_again_after_ten_minutes(watch: Watch) -> None:
    folder = watch.agents / "press" / "shadow"
    leave_comparison(folder)
    [event] = watch.tick()
    assert event.asset_key == dg.AssetKey("agent_shadow")
    found = shown(event)
    assert {name: found[name] for name in ("rows", "dropped", "agreement", "kl_mean", "kl_most")} == {
        "rows": 8,
        "dropped": 1,
        "agreement": 0.75,
        "kl_mean": 0.02,
        "kl_most": 0.4,
    }
    assert (found["agreement_identify"], found["kl_mean_identify"]) == (0.75, 0.02)
    assert "kl_mean_execute" not in found
    assert (found["latency_p50_ms_candidate"], found["latency_p99_ms_candidate"]) == (0.1, 1.0)
    assert "| identify | 5 | 75.0 % | 0.0200 | 0.4000 |" in found["report"]
    assert "| wait | retry | 2 |" in found["report"]
    leave_comparison(folder, written="2026-03-29T03:00:00+00:00")
    watch.now += 1_000
    assert watch.tick() == [], "the same, written again"
    leave_comparison(folder, dropped=2)
    [again] = watch.tick()
    leave_comparison(folder, dropped=3)
    watch.now += 599
    assert watch.tick() == []
    watch.now += 1
    assert [shown(each)["dropped"] for each in watch.tick()] == [3]
    leave_comparison(folder, dropped=3, ended=True)
    assert len(watch.tick()) == 1
    assert again.tags != event.tags


def test_damaged_reports_are_said_and_the_others_told(watch: Watch) -> None:
    incidents, shadow = watch.agents / "press" / "incidents", watch.agents / "press" / "shadow"
    leave_incident(incidents)
    leave_comparison(shadow)
    (incidents / "cut.json").write_text("{")
    leave_incident(incidents, "no-text")
    (incidents / "no-text.md").unlink()
    leave_comparison(shadow, "other", format=9)
    leave_comparison(shadow, "strange", segments=[])
    leave_comparison(shadow, "words", agreement="much")
    (shadow / "giant.json").write_text(" " * ((1 << 20) + 1))
    assert len(watch.tick()) == 2
    assert watch.said.startswith("told 2 new or changed report(s). 6 damaged: press/incidents/cut: not valid JSON")
    assert watch.tick() == []
    assert "6 damaged" in watch.said
    leave_comparison(shadow, "other")
    assert len(watch.tick()) == 1


def test_a_long_report_is_cut_and_says_so(watch: Watch) -> None:
    leave_incident(watch.agents / "press" / "incidents", events=[(OPENED, "lost: " + "ä" * 20_000)])
    [event] = watch.tick()
    text = shown(event)["report"]
    assert len(text.encode()) < 16_384
    assert text.endswith("… cut; the file has all of it")


def test_many_reports_are_told_in_several_ticks_and_what_is_gone_is_forgotten(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MOST_EVENTS", 2)
    for number in range(5):
        leave_incident(watch.agents / "press" / "incidents", f"i{number}", status="stopped")
    assert [len(watch.tick()) for _ in range(4)] == [2, 2, 1, 0]
    assert len(json.loads(watch.cursor or "")) == 5
    (watch.agents / "press" / "incidents" / "i0.json").unlink()
    watch.tick()
    assert len(json.loads(watch.cursor or "")) == 4


def test_what_was_written_last_is_told_last(watch: Watch) -> None:
    for name, second in (("b", 1), ("a", 2), ("c", 3)):
        leave_comparison(watch.agents / "press" / "shadow", name, dropped=second)
        path = watch.agents / "press" / "shadow" / f"{name}.json"
        os.utime(path, (second, second))
    assert [shown(event)["dropped"] for event in watch.tick()] == [1, 2, 3]


@pytest.mark.parametrize("cursor", ["x", "[]", '{"a": 1}', '{"a": ["m", "v", "x"]}'])
def test_a_strange_cursor_tells_everything_again(watch: Watch, cursor: str) -> None:
    leave_incident(watch.agents / "press" / "incidents")
    watch.cursor = cursor
    assert len(watch.tick()) == 1


def test_folders_that_are_no_agent_s_are_left_alone(watch: Watch) -> None:
    leave_incident(watch.agents / "Not one" / "incidents")
    leave_incident(watch.agents / "press" / "diagnoses")
    assert watch.tick() == []
