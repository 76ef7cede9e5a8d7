"""The service ``agent``, started as the file says, at a simulated line."""

from __future__ import annotations

import tempfile
import urllib.request
from pathlib import Path

import pytest

from agentpipe.learning.succession.champion import ChampionStore
from agentpipe_tests.docker.deployment import Deployment
from agentpipe_tests.serving.agent.line_bundle import save_line_bundle
from agentpipe_tests.serving.agent.lines import running_line

pytestmark = pytest.mark.slow


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="agentpipe-agent-", dir="/var/tmp") as folder:
        yield Path(folder)


def by_agent(running):
    """Decisions that were acted on and are not those of the person whom it asks."""
    return sum(who == "agent" for *_, who in running.line.taken)


def test_the_champion_works_at_the_line_and_where_triton_is_away_by_itself(place):
    with running_line(1, seconds=30.0, every=0.01) as running:
        deployment = Deployment(place, None, variables={"AGENTPIPE_LINE": running.url})
        deployment.settings["AGENTPIPE_AGENT__METRICS_HOST"] = "127.0.0.1"
        deployment.settings["AGENTPIPE_AGENT__METRICS_PORT"] = str(deployment.ports[9464])
        digest = save_line_bundle(deployment.home / "bundles" / "bundle-1")
        champions = ChampionStore(deployment.home / "champion")
        champions.promote(digest, "packages/1", expected=None, reason="a test", figures={"bundle": "bundles/bundle-1"})
        deployment.start("agent")
        try:
            deployment.wait(lambda: deployment.listens("agent", 9464), "the agent's figures")
            deployment.wait(lambda: by_agent(running) > 3, "decisions at the line")
            assert deployment.healthy("agent")
            target = f"http://127.0.0.1:{deployment.ports[9464]}/metrics"
            assert "agentpipe_agent_decisions_total" in urllib.request.urlopen(target, timeout=30).read().decode()
        finally:
            ended = deployment.stop()
    assert ended == {"agent": 130}
    assert list((deployment.home / "agent" / "agent" / "journal").iterdir())
