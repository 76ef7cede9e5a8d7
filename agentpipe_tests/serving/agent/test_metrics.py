"""Figures that Prometheus reads."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import urllib.request

import pytest

from agentpipe.errors import ServiceError
from agentpipe.serving.agent.metrics import AgentMetrics
from agentpipe.serving.agent.probes import Change


def read(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode().splitlines()


@pytest.fixture
def metrics():
    made = AgentMetrics("a")
    yield made
    made.close()


def test_decisions_losses_and_gauges_are_shown(metrics):
    port = metrics.serve(0)
    metrics.decided("local", 0.0002)
    metrics.decided("local", 0.3, late=True)
    metrics.decided("triton", 0.004)
    moment = dt.datetime.now(dt.UTC)
    for part, up in (("triton", False), ("triton", True), ("sensor x: a", False), ("sensor x: b", False)):
        metrics.note(Change(part, up, "", moment, 0.0))
    backlog = iter((3, 5))
    metrics.gauge("feedback_backlog", lambda: next(backlog))
    lines = read(port)
    for line in (
        'agentpipe_agent_decision_seconds_bucket{agent="a",le="0.0003",rung="local"} 1.0',
        'agentpipe_agent_decision_seconds_bucket{agent="a",le="+Inf",rung="local"} 2.0',
        'agentpipe_agent_decision_seconds_count{agent="a",rung="local"} 2.0',
        'agentpipe_agent_decision_seconds_sum{agent="a",rung="triton"} 0.004',
        'agentpipe_agent_decisions_total{agent="a",rung="triton"} 1.0',
        'agentpipe_agent_late_total{agent="a"} 1.0',
        'agentpipe_agent_degradations_total{agent="a",part="triton"} 1.0',
        'agentpipe_agent_degradations_total{agent="a",part="sensor x"} 2.0',
        'agentpipe_agent_feedback_backlog{agent="a"} 3.0',
    ):
        assert line in lines
    assert 'agentpipe_agent_feedback_backlog{agent="a"} 5.0' in read(port)


def test_two_agents_of_one_process_do_not_clash(metrics):
    other = AgentMetrics("b")
    ports = metrics.serve(0), other.serve(0)
    other.decided("rules", 0.1)
    assert not any('rung="rules"' in line for line in read(ports[0]))
    assert any('rung="rules"' in line for line in read(ports[1]))
    other.close()


def test_a_port_in_use_is_a_typed_error(metrics):
    port = metrics.serve(0)
    with pytest.raises(ServiceError, match=f"port {port} of the metrics is in use"):
        AgentMetrics("b").serve(port)


def test_it_listens_where_it_is_told(metrics):
    port = metrics.serve(0, "127.0.0.2")
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(OSError, match="refused"):
        read(port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_none_of_this_machine_is_a_typed_error(metrics, host):
    with pytest.raises(ServiceError, match=f"cannot listen on {host}"):
        metrics.serve(0, host)


def test_a_gauge_that_nobody_declared_is_refused(metrics):
    with pytest.raises(KeyError):
        metrics.gauge("lvel", lambda: 0.0)


def test_counting_imports_no_prometheus():
    code = (
        "import sys\nfrom agentpipe.serving.agent.healing import Healing\n"
        "from agentpipe.serving.agent.metrics import AgentMetrics\n"
        "AgentMetrics('a').decided('local', 0.1)\n"
        "heavy = 'prometheus_client', 'torch', 'numba', 'grpc', 'tritonclient', 'pandas', 'pyarrow', 'onnx', 'scipy'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
