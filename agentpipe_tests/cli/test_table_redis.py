"""``agentpipe table`` with a Redis: a change is published, and stands where it cannot be."""

import json

import pytest
from typer.testing import CliRunner

from agentpipe.cli.table import app
from agentpipe.environments.table_redis import RedisTables
from agentpipe_tests.redis_server import redis_server

pytestmark = pytest.mark.redis
SET = ("set", "sensor_sigma=0.4", "--where", "kind = sensor and intensity = 5", "--who", "ann", "--why", "quieter")


@pytest.fixture
def table(tmp_path):
    def run(*arguments):
        result = CliRunner().invoke(app, [*arguments, "--home", str(tmp_path / "home")])
        assert result.exit_code == 0, result.output
        return result

    return run


def test_set_and_rollback_publish(table, monkeypatch):
    with redis_server(password="geheim") as server, RedisTables(server.url) as tables:
        monkeypatch.setenv("REDIS_URL", server.url)
        first = json.loads(table("show", "--json").stdout)["version"]
        change = json.loads(table(*SET, "--json").stdout)
        assert change["redis"] == {"published": True}
        assert tables.current_version() == change["version"]
        assert "published in Redis" in table("rollback", first, "--who", "ann", "--why", "not better").stdout
        assert tables.current_version() == first


def test_a_change_stands_where_redis_is_away_and_the_password_is_not_told(table, monkeypatch):
    with redis_server(password="geheim") as server:
        monkeypatch.setenv("AGENTPIPE_REDIS_URL", server.url)
    shown = table(*SET)
    assert "not published in Redis:" in shown.stderr
    assert "cannot be reached" in shown.stderr
    change = table(*SET, "--json")
    assert json.loads(change.stdout)["redis"]["error"]["type"] == "RedisServerError"
    assert "geheim" not in shown.output + change.output
    assert [line["action"] for line in json.loads(table("history", "--json").stdout)["changes"]] == ["import", "set"]


def test_without_redis_nothing_is_said_of_it(table):
    assert json.loads(table(*SET, "--json").stdout)["redis"] is None
    assert "Redis" not in table(*SET).output
