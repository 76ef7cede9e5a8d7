"""Self-healing as one thing: sensors, ladder, clock and disk watched, incidents kept, figures counted."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from agentpipe.closing import Closing
from agentpipe.serving.agent.clocks import PART as CLOCK
from agentpipe.serving.agent.clocks import ClockWatch
from agentpipe.serving.agent.deciders import LocalDecider, RulesDecider
from agentpipe.serving.agent.incidents import IncidentBook
from agentpipe.serving.agent.ladder import Ladder
from agentpipe.serving.agent.metrics import AgentMetrics
from agentpipe.serving.agent.probes import Change, Part, disk_probe
from agentpipe.serving.agent.sensors import SensorWatch
from agentpipe.serving.agent.states import OrderStates
from agentpipe.serving.agent.triton_decider import TritonDecider
from agentpipe.serving.agent.types import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.serving.agent.deciders import PolicyFiles
    from agentpipe.serving.agent.types import Decider, Frame
    from agentpipe.serving.signature import Signature
    from agentpipe.settings import Settings

DISK, LINE = "disk", "line"


def declared_rungs(
    files: PolicyFiles,
    triton: Sequence[str],
    profile: LineProfile | None = None,
    states: OrderStates | None = None,
) -> list[Decider]:
    """The declared ladder of one bundle: every Triton in its order, the graph in this process, rules.

    Args:
        files: of the bundle.
        triton: gRPC addresses; the rungs are called ``triton``, ``triton-2``, …
        profile: of the line, for the rules.
        states: what the policy remembers of each line's order; the rungs share it, so that any of them can go on.

    Raises:
        BundleError: ONNX Runtime refuses the graph.
    """
    names = (f"triton-{number}" if number > 1 else "triton" for number in range(1, len(triton) + 1))
    shared = OrderStates() if states is None else states
    servers = [TritonDecider(url, files, name, shared) for url, name in zip(triton, names, strict=True)]
    return [*servers, LocalDecider(files, states=shared), RulesDecider(files.signature, profile)]


class Healing(Closing):
    """Answers questions and keeps itself able to.

    Args:
        deciders: the rungs of the ladder, best first; the last one never fails.
        signature: of the line.
        settings: its sections ``agent`` and ``alerts``.
        folder: ``HOME/agent/<name>``; its disk is probed, and reports are kept in ``incidents`` below it.
        agent: its name.
        line_probe: looks whether the line can be reached; none where there is nothing to look at.
        others: what else is probed.
        ready: rungs that are asked before their first probe.
        profile: of the line, for the estimates of lost sensors.
        on_change: told of each loss and return besides; must neither block nor raise.
        say: told of incidents that cannot be used, one line.
    """

    def __init__(  # noqa: PLR0913 - each is another thing to live on
        self,
        deciders: Sequence[Decider],
        signature: Signature,
        settings: Settings,
        folder: Path,
        agent: str,
        *,
        line_probe: Callable[[float], None] | None = None,
        others: Sequence[Part] = (),
        ready: Sequence[str] = (),
        profile: LineProfile | None = None,
        on_change: Callable[[Change], None] | None = None,
        say: Callable[[str], object] = str,
    ) -> None:
        alerts, self._told = settings.alerts, on_change
        self._estimates = 0
        self._unprobed: dict[str, str] = {}
        self.metrics = AgentMetrics(agent)
        self.incidents = IncidentBook(
            folder / "incidents",
            agent,
            settings.agent,
            webhook=alerts.webhook,
            alert_timeout=alerts.timeout_seconds,
            say=say,
        )
        self.sensors = SensorWatch(signature, settings.agent, profile, self._changed)
        self.clock = ClockWatch(self._changed)
        parts = [Part(DISK, disk_probe(folder)), Part(CLOCK, self.clock.probe), *others]
        if line_probe is not None:
            parts.append(Part(LINE, line_probe))
        self.ladder = Ladder(deciders, settings.agent, parts=parts, ready=ready, on_change=self._changed)
        self.metrics.gauge("level", lambda: self.ladder.level.index)
        self.metrics.gauge("incidents_open", lambda: self.incidents.open_count)
        self.metrics.gauge("sensor_estimates", lambda: self._estimates)

    def decide(self, frame: Frame) -> Answer:
        """An answer, always: −1 where a person is to decide. Counts it, too; belongs to one thread."""
        seen = self.sensors.look(frame)
        self._estimates = len(seen.estimated)
        notes = tuple(f"estimated: {name}" for name in seen.estimated)
        if seen.ask:
            nothing = np.zeros(len(frame.mask), np.float32)
            answer = Answer(-1, nothing, 0.0, "sensors", "", (f"a person is asked: {seen.ask}",))
        else:
            answer = self.ladder.decide(seen.frame)
        if notes:
            answer = replace(answer, notes=(*notes, *answer.notes), observation=seen.frame.observation)
        now = time.monotonic()
        late, took = now > frame.deadline, now - frame.received
        self.metrics.decided(answer.decided_by, took, late=late)
        self.incidents.decided(answer, took, late=late)
        return answer

    def degraded(self) -> dict[str, str]:
        """Everything that is lost now, and why."""
        sensors = {f"sensor {name}": "lost" for name in self.sensors.lost()}
        return {**self.ladder.lost(), **sensors, **self._unprobed}

    def tell(self, part: str, reason: str) -> None:
        """A part that nobody probes is lost, for ``reason``, or back where that is empty. Any thread."""
        others = {name: why for name, why in self._unprobed.items() if name != part}
        self._unprobed = {**others, part: reason} if reason else others
        now = dt.datetime.now(dt.UTC)
        self._changed(Change(part, not reason, reason or "it works again", now, time.monotonic()))

    def _changed(self, change: Change) -> None:
        self.metrics.note(change)
        self.incidents.note(change)
        if self._told is not None:
            with contextlib.suppress(Exception):  # whoever is told may fail (a closed terminal); the watch goes on
                self._told(change)

    def close(self) -> None:
        """Ends probes, incidents, the metrics' endpoint and every decider's connection."""
        self.ladder.close()
        self.incidents.close()
        self.metrics.close()
