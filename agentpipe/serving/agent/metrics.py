"""Figures of one agent for Prometheus, on this machine's loopback address where no other is set.

Counted in plain numbers, so that nothing heavy is imported before :meth:`AgentMetrics.serve`, and collected when they
are asked for. Each agent has a registry of its own.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agentpipe.serving.agent.probes import Change

HOST: Final = "127.0.0.1"
BUCKETS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""upper bounds in seconds: a local policy takes 50 µs, a server a few milliseconds, a line waits half a second"""
GAUGES: Final = {
    "level": "rung of the ladder that is asked first, 0 is the top",
    "feedback_backlog": "decisions recorded here and not yet handed to the intake",
    "journal_damaged": "records of the journal that were found damaged or torn since the start",
    "incidents_open": "incidents that are open",
    "ready": "1 where questions are answered",
    "complete": "1 where everything has been loaded in the background",
    "sensor_estimates": "lost sensors whose estimates are in use",
    "takeover": "1 while a person has the line",
}
POLICIES: Final = {
    "changes": "policies put in place of another while the agent worked",
    "refusals": "bundles that were to be used and are not",
}
_PREFIX: Final = "agentpipe_agent"


class AgentMetrics:
    """Counters that any thread may raise, and gauges that are read when somebody looks.

    Args:
        agent: its name, a label of every figure.
    """

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._seconds: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._late = 0
        self._lost: Counter[str] = Counter()
        self._policy = ""
        self._policies: Counter[str] = Counter()
        self._gauges: dict[str, Callable[[], float]] = {}
        self._server: Any = None

    def decided(self, rung: str, seconds: float, *, late: bool = False) -> None:
        """Counts a decision of ``rung`` that took ``seconds``."""
        bucket = bisect.bisect_left(BUCKETS, seconds)
        with self._lock:
            self._seconds.setdefault(rung, [0] * (len(BUCKETS) + 1))[bucket] += 1
            self._sums[rung] = self._sums.get(rung, 0.0) + seconds
            self._late += late

    def note(self, change: Change) -> None:
        """Counts the loss of a part; sensors of a line count together."""
        if not change.up:
            with self._lock:
                self._lost[change.part.partition(": ")[0]] += 1

    def policy(self, version: str) -> None:
        """Says which policy orders that begin now get; all but the first count as changes."""
        with self._lock:
            self._policies["changes"] += bool(self._policy)
            self._policy = version

    def policy_refused(self) -> None:
        """Counts a bundle that was to be used and is not."""
        with self._lock:
            self._policies["refusals"] += 1

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Has ``read`` called whenever the gauge ``name`` (one of :data:`GAUGES`) is asked for; any thread."""
        if name not in GAUGES:
            raise KeyError(name)
        self._gauges[name] = read

    def serve(self, port: int, host: str = HOST) -> int:
        """Opens the endpoint on ``port`` of the address ``host``, 0 for a free port; returns the port.

        Raises:
            ServiceError: the port is in use or may not be used, or the address is none of this machine.
        """
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector

        class Figures(Collector):
            def collect(collector) -> Iterator[Any]:  # noqa: N805 - self is the metrics'
                return self.collect()

        registry = CollectorRegistry()
        registry.register(Figures())
        try:
            self._server, _ = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            remedy = "set AGENTPIPE_AGENT__METRICS_PORT to another, or to 0 for a free one"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                text = f"the metrics cannot listen on {host}: {error.strerror}"
                remedy = "set AGENTPIPE_AGENT__METRICS_HOST to an address of this machine"
                raise ServiceError(text, host=host, remedy=remedy) from error
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise ServiceError(f"port {port} of the metrics {reason}", port=port, remedy=remedy) from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Closes the endpoint."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def collect(self) -> Iterator[Any]:
        """Every figure, as Prometheus' client takes them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        with self._lock:
            seconds = {rung: list(counts) for rung, counts in self._seconds.items()}
            sums, late, lost = dict(self._sums), self._late, dict(self._lost)
            policy, policies = self._policy, dict(self._policies)
        latency = HistogramMetricFamily(
            f"{_PREFIX}_decision_seconds", "seconds from question to answer", labels=["agent", "rung"]
        )
        decisions = CounterMetricFamily(f"{_PREFIX}_decisions", "decisions by rung", labels=["agent", "rung"])
        bounds = [*(str(bound) for bound in BUCKETS), "+Inf"]
        for rung, counts in seconds.items():
            buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
            latency.add_metric([self._agent, rung], buckets, sums[rung])
            decisions.add_metric([self._agent, rung], sum(counts))
        yield latency
        yield decisions
        counter = CounterMetricFamily(f"{_PREFIX}_late", "answers after their deadline", labels=["agent"])
        counter.add_metric([self._agent], late)
        yield counter
        degradations = CounterMetricFamily(f"{_PREFIX}_degradations", "losses of a part", labels=["agent", "part"])
        for part, count in lost.items():
            degradations.add_metric([self._agent, part], count)
        yield degradations
        if policy:
            used = GaugeMetricFamily(
                f"{_PREFIX}_policy", "1 for the policy of orders that begin now", labels=["agent", "policy"]
            )
            used.add_metric([self._agent, policy], 1.0)
            yield used
            for name, text in POLICIES.items():
                counted = CounterMetricFamily(f"{_PREFIX}_policy_{name}", text, labels=["agent"])
                counted.add_metric([self._agent], policies.get(name, 0))
                yield counted
        for name, text in GAUGES.items():
            if name in self._gauges:
                gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["agent"])
                gauge.add_metric([self._agent], float(self._gauges[name]()))
                yield gauge
