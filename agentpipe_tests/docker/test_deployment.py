"""Postgres, code location, webserver and daemon started as the files say, and four runs at once."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from pathlib import Path

import dagster as dg
import pytest

from agentpipe.defs.instance import open_instance
from agentpipe.storage import home_lock
from agentpipe_tests.docker import files
from agentpipe_tests.docker.deployment import Deployment, read_only_is_possible
from agentpipe_tests.docker.postgres_server import postgres_server

pytestmark = pytest.mark.slow

LAUNCH = """
mutation ($config: RunConfigData!) {
  launchRun(executionParams: {
    selector: {repositoryLocationName: "agentpipe", repositoryName: "__repository__", jobName: "line"},
    runConfigData: $config
  }) { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } }
}"""
HEALTH = "{ instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } } }"
LOCATIONS = """{ workspaceOrError { ... on Workspace {
  locationEntries { name loadStatus locationOrLoadError { __typename } }
} } }"""
FOUR = 4


@pytest.fixture(scope="module")
def deployment():
    """Everything up and healthy, with room for four runs, as four homes behind one Dagster would have."""
    settings = files.services()["postgres"]["environment"]
    who = (settings["POSTGRES_USER"], settings["POSTGRES_PASSWORD"], settings["POSTGRES_DB"])
    _, *options = files.command(files.services()["postgres"])
    with (
        postgres_server(*who, options) as server,
        tempfile.TemporaryDirectory(prefix="agentpipe-deployment-", dir="/var/tmp") as place,
    ):
        given = Deployment(
            Path(place),
            server,
            changes={"max_concurrent_runs: 1 ": f"max_concurrent_runs: {FOUR} "},
            settings={"AGENTPIPE_PROFILE": "demo", "AGENTPIPE_SCHEDULE__EVERY_SECONDS": "600"},
        )
        try:
            given.finish("prepare")
            given.start("code")
            given.wait(lambda: given.listens("code", 4000), "the code location listens")
            for service in ("webserver", "daemon"):
                given.start(service)
            given.wait(lambda: given.listens("webserver", 3000), "the webserver listens")
            yield given
        finally:
            given.stop()


@pytest.fixture
def instance(deployment, monkeypatch):
    """The instance as `agentpipe run` in the container `code` opens it."""
    for name, value in deployment.environment("code").items():
        if name.startswith("DAGSTER_"):
            monkeypatch.setenv(name, value)
    with open_instance(deployment.home) as found:
        yield found


def test_the_services_come_up_by_the_commands_of_the_files(deployment, instance):
    """The webserver shows the code location and a daemon whose every part is well; then every health check passes."""
    assert type(instance.run_storage).__name__ == "PostgresRunStorage"
    assert (deployment.home / "serving" / "models").is_dir()
    (location,) = deployment.graphql(LOCATIONS)["workspaceOrError"]["locationEntries"]
    assert location == {
        "name": "agentpipe",
        "loadStatus": "LOADED",
        "locationOrLoadError": {"__typename": "RepositoryLocation"},
    }
    parts = deployment.wait(
        lambda: _all_well(deployment.graphql(HEALTH)["instance"]["daemonHealth"]["allDaemonStatuses"]), "the daemon"
    )
    assert {"SENSOR", "SCHEDULER", "QUEUED_RUN_COORDINATOR", "BACKFILL", "MONITORING"} <= set(parts)
    for process in deployment.processes.values():
        roots = [mount for mount in Path(f"/proc/{process.pid}/mountinfo").read_text().splitlines() if " / / " in mount]
        assert not read_only_is_possible() or roots[-1].split()[5].startswith("ro")
    assert [service for service in deployment.processes if not deployment.healthy(service)] == []


def _all_well(statuses):
    required = [status for status in statuses if status["required"]]
    return [status["daemonType"] for status in required] if all(status["healthy"] for status in required) else None


def test_four_runs_side_by_side_leave_whole_logs_in_postgres(deployment, instance):
    """All four are in their first step at one moment: each waits there for its home, which this test holds."""
    homes = [deployment.home / "lines" / str(number) for number in range(FOUR)]
    with contextlib.ExitStack() as held:
        for home in homes:
            held.enter_context(home_lock(home, "the test"))
        launched = [_launch(deployment, home) for home in homes]
        deployment.wait(
            lambda: all(_has(instance, run_id, dg.DagsterEventType.STEP_START) for run_id in launched),
            "four runs begun",
        )
        assert [instance.get_run_by_id(run_id).status for run_id in launched] == [dg.DagsterRunStatus.STARTED] * FOUR
    deployment.wait(lambda: all(instance.get_run_by_id(run_id).is_finished for run_id in launched), "four runs over")
    assert [instance.get_run_by_id(run_id).status for run_id in launched] == [dg.DagsterRunStatus.SUCCESS] * FOUR

    logs = [
        [entry.dagster_event for entry in instance.all_logs(run_id) if entry.is_dagster_event] for run_id in launched
    ]
    counts = [Counter(event.event_type for event in log) for log in logs]
    assert counts == [counts[0]] * FOUR
    for log, count in zip(logs, counts, strict=True):
        made = [event.asset_key.to_user_string() for event in log if event.is_step_materialization]
        assert sorted(made) == ["environment_catalog", "line_profile"]
        assert count[dg.DagsterEventType.STEP_START] == count[dg.DagsterEventType.STEP_SUCCESS] == 2
        assert log[-1].event_type in (dg.DagsterEventType.RUN_SUCCESS, dg.DagsterEventType.ENGINE_EVENT)
        assert count[dg.DagsterEventType.RUN_SUCCESS] == 1
    assert all((home / "format.json").exists() for home in homes)


def _launch(deployment, home):
    config = {"resources": {"workspace": {"config": {"home": str(home)}}}}
    answer = deployment.graphql(LAUNCH, config=config)["launchRun"]
    assert answer["__typename"] == "LaunchRunSuccess", answer
    return answer["run"]["runId"]


def _has(instance, run_id, kind):
    return bool(instance.all_logs(run_id, of_type=kind))


def test_the_password_is_in_no_log_and_in_no_command_line(deployment):
    secret = files.PASSWORDS["POSTGRES_PASSWORD"]
    for service, process in deployment.processes.items():
        assert secret not in (deployment.place / f"{service}.log").read_text(), service
        assert secret not in Path(f"/proc/{process.pid}/cmdline").read_text(), service


def test_the_services_end_whole_when_the_engine_stops_them(deployment):
    """The last test: it ends them. An engine sends SIGTERM and waits for ``stop_grace_period``."""
    assert deployment.stop() == {"code": 0, "webserver": 0, "daemon": 0}
