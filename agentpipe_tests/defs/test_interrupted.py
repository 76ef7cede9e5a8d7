"""A run whose process is gone is marked as failed; every other is left alone."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import dagster as dg
import pytest

from agentpipe.defs import interrupted
from agentpipe.defs.interrupted import PROCESS_TAG, fail_dead_runs, interrupted_sensor, mark_process, process_name
from agentpipe.settings import ScheduleSettings
from agentpipe_tests.defs.homes import Status, add_run


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait()


def status(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dg.DagsterRunStatus:
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status


@pytest.mark.parametrize("begun", [Status.STARTED, Status.CANCELING])
def test_a_run_whose_process_was_killed_kept_the_others_waiting_for_ever(
    instance: dg.DagsterInstance, process: subprocess.Popen[bytes], begun: dg.DagsterRunStatus
) -> None:
    name = process_name(process.pid)
    assert name is not None
    run = add_run(instance, "cell", "load-1", begun, {PROCESS_TAG: name})
    assert fail_dead_runs(instance) == []
    assert status(instance, run) is begun
    process.send_signal(signal.SIGKILL)
    while process_name(process.pid) is not None:  # a zombie counts as gone
        pass
    assert fail_dead_runs(instance) == [run.run_id]
    assert status(instance, run) is Status.FAILURE
    assert fail_dead_runs(instance) == []


@pytest.mark.parametrize(("minutes", "dead"), [(1, False), (11, True)])
def test_a_run_that_was_killed_before_its_first_step_names_no_process(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, minutes: int, dead: bool
) -> None:
    run = add_run(instance, "cell", "load-1", Status.STARTING)
    instance.report_dagster_event(dg.DagsterEvent("PIPELINE_START", run.job_name), run.run_id)
    now = time.time()
    monkeypatch.setattr(interrupted.time, "time", lambda: now + 60 * minutes)
    assert fail_dead_runs(instance) == ([run.run_id] if dead else [])


def test_a_run_of_this_process_is_alive(instance: dg.DagsterInstance) -> None:
    run = add_run(instance, "cell", "load-1", Status.STARTED)
    mark_process(instance, run.run_id)
    assert fail_dead_runs(instance) == []


def test_a_process_of_another_host_is_not_judged(instance: dg.DagsterInstance) -> None:
    run = add_run(instance, "cell", "load-1", Status.STARTED, {PROCESS_TAG: f"not-{platform.node()}:999999:1"})
    unmarked = add_run(instance, "cell", "load-2", Status.STARTED)
    assert fail_dead_runs(instance) == []
    assert status(instance, run) is status(instance, unmarked) is Status.STARTED


def test_a_process_id_that_somebody_else_has_by_now_is_not_the_run_s(
    instance: dg.DagsterInstance, process: subprocess.Popen[bytes]
) -> None:
    name = process_name(process.pid)
    assert name is not None
    host, number, start = name.rsplit(":", 2)
    earlier = f"{host}:{number}:{int(start) - 1}"
    run = add_run(instance, "cell", "load-1", Status.STARTED, {PROCESS_TAG: earlier})
    assert fail_dead_runs(instance) == [run.run_id]


def test_a_run_that_waits_or_is_over_is_left_alone(instance: dg.DagsterInstance) -> None:
    gone = {PROCESS_TAG: f"{platform.node()}:999999999:1"}
    for left in (Status.NOT_STARTED, Status.STARTING, Status.SUCCESS, Status.FAILURE, Status.CANCELED):
        add_run(instance, "cell", "load-1", left, gone)
    assert fail_dead_runs(instance) == []


def test_a_run_that_ended_well_while_it_was_looked_at_was_marked_as_failed(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was listed as begun, then reported its success, and then its process ended."""
    run = add_run(instance, "cell", "load-1", Status.STARTED, {PROCESS_TAG: f"{platform.node()}:999999999:1"})

    def ends(_number: int | None = None) -> None:
        instance.report_dagster_event(
            dg.DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name="cell"), run_id=run.run_id
        )

    monkeypatch.setattr(interrupted, "process_name", ends)
    assert fail_dead_runs(instance) == []
    assert status(instance, run) is Status.SUCCESS


def test_the_sensor_says_which_runs_it_marked(instance: dg.DagsterInstance) -> None:
    sensor = interrupted_sensor(ScheduleSettings())
    said = sensor(dg.build_sensor_context(instance=instance))
    assert said.skip_message == "every run that has begun is alive"
    run = add_run(instance, "cell", None, Status.STARTED, {PROCESS_TAG: f"{platform.node()}:999999999:1"})
    assert sensor(dg.build_sensor_context(instance=instance)).skip_message == f"marked as failed: {run.run_id}"
