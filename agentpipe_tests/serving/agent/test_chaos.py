"""An agent at work while things break at random instants: no decision is lost, none recorded twice or otherwise.

Two of each kind; ``python -m benchmarks.chaos`` does twenty, with a real Triton.
"""

from __future__ import annotations

import pytest

from agentpipe.environments.layout import ACTION_COUNT, ACTION_NAMES, OBSERVATION_NAMES, OBSERVATION_SIZE
from agentpipe.serving.agent.incidents import read_incidents
from agentpipe.serving.signature import policy_signature
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.serving.agent.fake_triton import FakeTriton
from benchmarks.chaos import Chaos, Outcome, small_disk

pytestmark = pytest.mark.slow
LINE = policy_signature(OBSERVATION_SIZE, ACTION_COUNT, observation_names=OBSERVATION_NAMES, action_names=ACTION_NAMES)


class Server:
    """A fake Triton that ends at once and comes back at the same port."""

    def __init__(self):
        self._server = FakeTriton(LINE)
        self._port, self.address = self._server.port, self._server.url

    def kill(self):
        self._server.stop()

    def start(self):
        self._server = FakeTriton(LINE, self._port)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("even") / "bundle"
    save_bundle(folder, 0, LINE)
    return folder


def test_what_breaks_costs_no_decision(bundle, tmp_path):
    server, home = Server(), tmp_path / "home"
    home.mkdir()
    with small_disk(home) as small:
        chaos = Chaos(bundle, server, home, stations=2, probe_every=0.1)
        kinds = ["triton", "network", "line", "sensor", *(["disk"] if small else []), "sigkill"]
        outcomes = {kind: Outcome(kind) for kind in kinds}
        try:
            for kind in kinds:
                for _ in range(2):
                    chaos.fault(kind, outcomes[kind])
        finally:
            figures, books = chaos.end()
            server.kill()
        incidents = read_incidents(home / "agent" / "chaos" / "incidents")
    assert books.taken > 100
    assert (books.lost, books.twice, books.other) == ([], [], [])
    assert figures["decisions"] > 0
    assert {incident.part for incident in incidents} >= {"triton", *(["disk"] if small else [])}
    assert "open" not in {incident.status for incident in incidents}
