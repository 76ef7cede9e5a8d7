"""Assets with a Redis: ``disturbance_table`` publishes, gate 1 judges round trip and connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import dagster as dg
import pytest

from agentpipe.defs.environments import checks
from agentpipe.defs.environments.assets import disturbance_table
from agentpipe.defs.resources import Workspace
from agentpipe.environments.table_redis import RedisTables
from agentpipe.settings import GateSettings
from agentpipe_tests.redis_server import redis_server

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
FIGURES = {"reset_p99_ms": 12.0, "start_success": 1.0, "slow_reset_share": 0.0}
MEASURE = """
import json, sys
import dagster as dg
from agentpipe.defs.environments import assets
from agentpipe.defs.resources import Workspace

workspace = Workspace(home=sys.argv[1], profile="demo")
single = {"resources": {"workspace": workspace}, "run_config": json.loads(sys.argv[2])}
assert dg.materialize([assets.line_profile, assets.environment_catalog], **single).success
made = [assets.disturbance_table, assets.environment_pool_health]
done = dg.materialize(made, partition_key="sensor-1", **single)
found = {e.check_name: [e.passed, e.metadata["threshold"].value] for e in done.get_asset_check_evaluations()}
reference = workspace.references.load("environment_pool_health", "sensor-1")
health = json.loads((workspace.root / reference.path).read_text())
print(json.dumps([found, reference.figures["redis_connection_share"], sorted(health["not_applicable"])]))
"""


@pytest.mark.redis
def test_the_table_is_published_when_a_cell_is_materialised(tmp_path, monkeypatch):
    with redis_server() as server, RedisTables(server.url) as tables:
        monkeypatch.setenv("AGENTPIPE_REDIS_URL", server.url)
        workspace = Workspace(home=str(tmp_path), profile="demo")
        options = {"resources": {"workspace": workspace}, "run_config": QUIET}
        done = dg.materialize([disturbance_table], partition_key="load-1", **options)
        assert tables.current() == workspace.table_store().current()
        [materialised] = done.asset_materializations_for_node("disturbance_table")
        assert materialised.metadata["redis"].value.endswith(", entry 1")
        server.kill()
        failed = dg.materialize([disturbance_table], partition_key="load-2", raise_on_error=False, **options)
        assert not failed.success
        [failure] = [event for event in failed.all_events if event.is_step_failure]
        assert "cannot be reached" in str(failure.step_failure_data.error)


@pytest.mark.slow
@pytest.mark.redis
def test_round_trip_and_connections_are_checks_where_a_redis_is_set(tmp_path):
    with redis_server(options=("--maxclients", "50")) as server:
        command = [sys.executable, "-c", MEASURE, str(tmp_path), json.dumps(QUIET)]
        environment = {**os.environ, "REDIS_URL": server.url}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found, share, not_applicable = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"reset_p99", "start_success", "slow_resets", "redis_round_trip", "redis_connections"}
    assert found["redis_connections"] == [True, 0.85]
    assert found["redis_round_trip"][1] == 15.0
    assert 1 / 50 <= share <= 3 / 50
    assert not any("redis" in name for name in not_applicable)


@pytest.mark.parametrize("name", ["AGENTPIPE_REDIS_URL", "REDIS_URL"])
def test_the_checks_of_redis_exist_only_where_one_is_set(name, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert [spec.name for spec in checks.health_specs()] == list(checks.HEALTH)
    monkeypatch.setenv(name, "redis://localhost")
    specs = checks.health_specs()
    assert [spec.name for spec in specs] == [*checks.HEALTH, *checks.REDIS]
    assert all(spec.partitions_def == specs[0].partitions_def and not spec.blocking for spec in specs[3:])


def test_what_was_declared_and_not_measured_warns_and_what_was_not_declared_is_no_check():
    gates = GateSettings()
    both = (*checks.HEALTH, *checks.REDIS)
    measured = checks.health_gates({**FIGURES, "redis_round_trip_ms": 20.0, "redis_connection_share": None}, gates)
    shown = {judged.name: (judged.passed, judged.severity) for judged in checks.declared(measured, both)}
    assert shown["redis_round_trip"] == shown["redis_connections"] == (False, "warn")
    assert [judged.name for judged in checks.declared(measured, checks.HEALTH)] == list(checks.HEALTH)
    note = checks.declared(measured, both)[-1].metadata["note"]
    assert note == "not measured"
