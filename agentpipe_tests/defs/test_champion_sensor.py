"""The sensor ``champion_changes``: one event and one evaluation for each change of the champion."""

from __future__ import annotations

import dagster as dg
import pytest

from agentpipe.defs.evaluation.sensors import champion_sensor
from agentpipe.defs.instance import recorded_version
from agentpipe.defs.resources import Workspace
from agentpipe.learning.succession.champion import ChampionStore
from agentpipe.settings import ScheduleSettings
from agentpipe_tests.defs.homes import leave, promote

SENSOR = champion_sensor(ScheduleSettings())


class Watch:
    """The sensor, tick by tick; what it tells Dagster is recorded, and what it asks for is done."""

    def __init__(self, workspace: Workspace, instance: dg.DagsterInstance) -> None:
        self.workspace, self.instance = workspace, instance
        self.keys: list[str] = []

    def tick(self) -> tuple[list[str], list[str]]:
        """Data versions of the events, and keys of the runs."""
        context = dg.build_sensor_context(instance=self.instance, resources={"workspace": self.workspace})
        found = SENSOR(context)
        assert isinstance(found, dg.SensorResult)
        for event in found.asset_events:
            self.instance.report_runless_asset_event(event)
        told = [(event.tags or {})["dagster/data_version"] for event in found.asset_events]
        requests = found.run_requests or []
        assert all(request.job_name == "champion" for request in requests)
        return told, [request.run_key or "" for request in requests]

    def judge(self) -> None:
        leave(self.workspace, "champion_evaluation")


@pytest.fixture
def watch(tmp_path, instance: dg.DagsterInstance) -> Watch:
    return Watch(Workspace(home=str(tmp_path / "home"), profile="demo"), instance)


def test_before_the_first_champion_there_is_nothing_to_judge(watch: Watch) -> None:
    assert watch.tick() == ([], [])


def test_each_change_of_the_champion_has_one_event_and_one_evaluation(watch: Watch) -> None:
    promote(watch.workspace, "first")
    assert watch.tick() == (["first"], ["champion:1:first"])
    assert watch.tick() == ([], ["champion:1:first"])  # not judged yet: the same key, which runs once
    watch.judge()
    assert watch.tick() == ([], [])
    promote(watch.workspace, "second")
    assert watch.tick() == (["second"], ["champion:2:second"])
    watch.judge()
    assert recorded_version(watch.instance, "champion", None) == "second"


def test_a_rollback_is_a_change_with_a_key_of_its_own(watch: Watch) -> None:
    for digest in ("first", "second"):
        promote(watch.workspace, digest)
        watch.tick()
        watch.judge()
    store = ChampionStore(watch.workspace.root / "champion")
    store.rollback(expected="second", reason="it fails on line 4", who="ann")
    assert watch.tick() == (["first"], ["champion:3:first"])
    watch.judge()
    assert watch.tick() == ([], [])


def test_the_event_says_who_and_why(watch: Watch) -> None:
    promote(watch.workspace, "first")
    context = dg.build_sensor_context(instance=watch.instance, resources={"workspace": watch.workspace})
    found = SENSOR(context)
    assert isinstance(found, dg.SensorResult)
    [event] = found.asset_events
    assert event.asset_key == dg.AssetKey("champion")
    shown = {name: value.value for name, value in event.metadata.items()}
    assert shown == {"sequence": 1, "kind": "promotion", "who": "agentpipe", "why": "a test"}


def test_a_change_of_the_table_alone_is_not_this_sensor_s(watch: Watch) -> None:
    promote(watch.workspace, "first")
    watch.judge()
    leave(watch.workspace, "disturbance_table", "load-1", "other rows")
    assert watch.tick()[1] == []


def test_a_damaged_pointer_says_so(watch: Watch) -> None:
    promote(watch.workspace, "first")
    (watch.workspace.root / "champion" / "champion.json").write_text("{")
    found = SENSOR(dg.build_sensor_context(instance=watch.instance, resources={"workspace": watch.workspace}))
    assert isinstance(found, dg.SkipReason)
    assert (found.skip_message or "").startswith("the champion cannot be read: not valid JSON")


@pytest.mark.parametrize("content", ["{", "[]", '{"asset": 5}'])
def test_a_damaged_evaluation_of_the_champion_fails_no_tick_and_the_change_is_told(watch: Watch, content: str) -> None:
    promote(watch.workspace, "first")
    path = watch.workspace.references.path("champion_evaluation")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    found = SENSOR(dg.build_sensor_context(instance=watch.instance, resources={"workspace": watch.workspace}))
    assert isinstance(found, dg.SensorResult)
    assert (found.skip_reason.skip_message or "").startswith("the champion's evaluation cannot be read: ")
    assert (len(found.asset_events), found.run_requests) == (1, [])
