"""A notice of Redis shortens the wait of the sensor ``table_changes``; it changes nothing that the sensor does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
import redis as client_library

from agentpipe.defs.environments import sensors
from agentpipe.defs.environments.sensors import table_sensor
from agentpipe.defs.instance import CONFIGURATION, dagster_home, open_instance, sensors_have_threads
from agentpipe.defs.resources import Workspace
from agentpipe.environments.table_redis import RedisTables
from agentpipe.environments.table_redis_home import publish_current
from agentpipe.settings import ScheduleSettings
from agentpipe_tests.defs.homes import edit
from agentpipe_tests.defs.test_table_changes import Table, partitions, said
from agentpipe_tests.redis_server import RedisServer, redis_server

THREADS = {"sensors": {"use_threads": True, "num_workers": 4}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """A server that is set, and ticks that wait until a notice comes."""
    with redis_server(own=True) as running:
        monkeypatch.setenv("REDIS_URL", running.url)
        monkeypatch.setattr(sensors, "LONGEST_WAIT", 600.0)
        yield running


@pytest.fixture
def threaded() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral(settings=THREADS) as found:
        yield found


@pytest.fixture
def table(home: Workspace, threaded: dg.DagsterInstance) -> Table:
    """A home whose source Dagster was told of: its ticks have nothing to say."""
    ready = Table(home, threaded)
    ready.tick()
    ready.sensor = table_sensor(ScheduleSettings(every_seconds=10_000))
    return ready


class Waiting:
    """A tick in a thread, from the moment on at which it waits for a notice."""

    def __init__(self, table: Table, server: RedisServer) -> None:
        self.found: list[dg.SensorResult] = []
        self.thread = threading.Thread(target=lambda: self.found.append(table.tick()))
        self.thread.start()
        with contextlib.closing(client_library.Redis.from_url(server.url)) as raw:
            channels: Any = raw.pubsub_numsub("agentpipe:table:changes")
            while channels[0][1] == 0 and self.thread.is_alive():
                channels = raw.pubsub_numsub("agentpipe:table:changes")
        assert self.thread.is_alive(), "the tick did not wait"

    def result(self) -> dg.SensorResult:
        self.thread.join(120)
        assert not self.thread.is_alive(), "the tick waits on"
        return self.found[0]


@pytest.fixture
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*_: object) -> None:
        raise AssertionError("the tick waits")

    monkeypatch.setattr(RedisTables, "wait_for_change", waits)


@pytest.mark.redis
@pytest.mark.parametrize("published", [False, True])
def test_a_change_that_is_published_while_a_tick_waits_is_launched_by_that_tick(
    table: Table, server: RedisServer, published: bool
) -> None:
    store = table.workspace.table_store()
    if published:
        publish_current(store, server.url)
    waiting = Waiting(table, server)
    edit(table.workspace, "network-3", 333.0)
    publish_current(store, server.url)
    found = waiting.result()
    assert [event.partition for event in found.asset_events] == ["network-3"]
    assert {cell for _, cell in partitions(found)} == {"network-3", None}


@pytest.mark.redis
def test_a_change_that_is_published_after_the_tick_has_looked_at_the_table_is_seen_at_once(
    table: Table, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_current(table.workspace.table_store(), server.url)
    plan = sensors.table_plan

    def late(workspace: Workspace) -> object:
        found = plan(workspace)
        monkeypatch.setattr(sensors, "table_plan", plan)
        edit(workspace, "load-1", 44.0)
        publish_current(workspace.table_store(), server.url)
        return found

    monkeypatch.setattr(sensors, "table_plan", late)
    assert {cell for _, cell in table.launched()} == {"load-1", None}


@pytest.mark.redis
def test_a_notice_of_what_is_no_change_of_this_home_launches_nothing(table: Table, server: RedisServer) -> None:
    waiting = Waiting(table, server)
    with RedisTables(server.url) as tables:
        tables.publish(table.workspace.table_store().current(), 1)
    assert said(waiting.result()) == "no cell is due"


@pytest.mark.redis
def test_a_redis_that_is_lost_while_a_tick_waits_costs_nothing(table: Table, server: RedisServer) -> None:
    waiting = Waiting(table, server)
    server.kill()
    assert said(waiting.result()) == "no cell is due"
    edit(table.workspace, "network-3", 333.0)
    assert len(table.launched()) == 4


@pytest.mark.parametrize("url", ["redis://:geheim@localhost/x", "redis://:geheim@127.0.0.1:1"])
def test_a_redis_that_cannot_be_used_is_said_and_costs_nothing_else(
    table: Table, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("REDIS_URL", url)
    text = said(table.tick())
    assert text.startswith("no cell is due; no notice of a change can come: ")
    assert ("REDIS_URL is malformed" in text) == url.endswith("/x")
    assert "geheim" not in text
    edit(table.workspace, "network-3", 333.0)
    assert len(table.launched()) == 4


@pytest.mark.redis
@pytest.mark.usefixtures("_no_wait")
def test_what_is_due_is_launched_without_a_wait(table: Table, server: RedisServer) -> None:
    del server
    edit(table.workspace, "network-3", 333.0)
    assert len(table.launched()) == 4


@pytest.mark.redis
@pytest.mark.usefixtures("_no_wait")
def test_a_tick_that_would_hold_other_sensors_up_does_not_wait(
    home: Workspace, instance: dg.DagsterInstance, server: RedisServer
) -> None:
    del server
    table = Table(home, instance)
    table.tick()
    assert said(table.tick()) == "no cell is due"


@pytest.mark.redis
@pytest.mark.usefixtures("_no_wait")
def test_ticks_that_follow_one_another_closely_do_not_wait(table: Table, server: RedisServer) -> None:
    del server
    table.sensor = table_sensor(ScheduleSettings(every_seconds=5))
    assert said(table.tick()) == "no cell is due"


@pytest.mark.redis
@pytest.mark.parametrize(("every", "seconds"), [(30, 15.0), (15, 10.0), (6, 1.0)])
def test_a_wait_ends_before_the_next_tick_and_before_the_ui_would_have_to_kill_it(
    table: Table, monkeypatch: pytest.MonkeyPatch, every: int, seconds: float
) -> None:
    waited = []

    def wait(self: RedisTables, known: str | None, seconds: float) -> None:
        del self, known
        waited.append(seconds)

    monkeypatch.setattr(RedisTables, "wait_for_change", wait)
    with redis_server() as running:
        monkeypatch.setenv("REDIS_URL", running.url)
        table.sensor = table_sensor(ScheduleSettings(every_seconds=every))
        assert said(table.tick()) == "no cell is due"
    assert waited == [seconds]


def test_the_sensors_of_a_home_have_threads_and_those_of_an_older_home_may_not(tmp_path: Any) -> None:
    with open_instance(tmp_path / "new") as new:
        assert sensors_have_threads(new)
    folder = dagster_home(tmp_path / "old")
    begin, end = CONFIGURATION.index("sensors:"), CONFIGURATION.index("run_monitoring:")
    (folder / "dagster.yaml").write_text(CONFIGURATION[:begin] + CONFIGURATION[end:])
    with open_instance(tmp_path / "old") as old:
        assert not sensors_have_threads(old)
    single = CONFIGURATION.replace("num_workers: 4", "num_workers: 1")
    (folder / "dagster.yaml").write_text(single)
    with open_instance(tmp_path / "old") as old:
        assert not sensors_have_threads(old)
