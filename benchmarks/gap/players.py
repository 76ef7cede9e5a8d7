"""Players put together from parts: the policy does some of the work, the truth or an observer the rest.

The work of an episode falls into five parts. *Measuring*: which machine, and when to stop. *Diagnosis*: machine and
cause, and whether the alarm is rejected. *Severity*: the judgement and the depth of the repair. *Dispatch*: depot,
technician, haste. *Execution*: from start to close. What success loses when a part passes from the truth to the policy
is what the policy's way of doing that part costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from agentpipe.environments import physics
from agentpipe.environments.layout import (
    A_CLOSE,
    A_DEPTH,
    A_ESCALATE,
    A_MACHINE,
    A_MODE,
    A_REJECT,
    A_RETRY,
    A_SEVERITY,
    A_START,
    A_VERIFY,
    FALSE_ALARM,
    PHYSICAL_MODES,
    SENSOR_FAILURE,
)
from agentpipe.environments.players import Actions, Decision, certain, dispatch_actions
from agentpipe.environments.rules import largest_deviation, measuring
from agentpipe.environments.state import (
    ORDER_ESCALATIONS,
    ORDER_MACHINE,
    ORDER_MODE,
    ORDER_SEVERITY,
    ORDER_STARTED,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.policy.package import PolicyPackage

    Bools = npt.NDArray[np.bool_]

DIAGNOSIS, SEVERITY, DISPATCH, EXECUTION = PARTS = ("diagnosis", "severity", "dispatch", "execution")
AHEAD: Final = 75.0
"""seconds ahead for which the oracle chooses the depth of a repair"""
SEARCH, SAMPLES = 4.0, 16.0
"""what the demonstrator wants to hear of every machine, and of the suspected one"""
MISHAP: Final = 3
"""``botched`` of a repair that was right and failed all the same"""


class Diagnosis(Protocol):
    """Somebody who names machine and cause."""

    def follow(self, pool: LinePool) -> None:
        """Told of every state of the pool, once, before anything is asked."""

    def declare(self, pool: LinePool, asked: Bools) -> Actions:
        """i64[N]: what to declare now; heeded, and legal, where it is ``asked`` bool[N]."""


class Measuring(Protocol):
    """Somebody who measures."""

    def wanted(self, pool: LinePool) -> Actions:
        """i64[N]: the machine to measure, or -1 where it is time to declare."""


def declarations(pool: LinePool, machine: Actions, mode: Actions) -> Actions:
    """i64[N]: declares ``machine`` first, then ``mode``; a false alarm at once."""
    undeclared = pool.plant().order[:, ORDER_MACHINE] < 0
    return np.where(undeclared & (mode != FALSE_ALARM), A_MACHINE + machine, A_MODE + mode).astype(np.int64)


class TrueDiagnosis:
    """Names what is true."""

    def follow(self, pool: LinePool) -> None:
        """Nothing to follow."""

    def declare(self, pool: LinePool, asked: Bools) -> Actions:  # noqa: ARG002 - answers everywhere
        """The true machine and mode."""
        truth = pool.hidden()
        return declarations(pool, truth.machine.astype(np.int64), truth.mode.astype(np.int64))


class NoMeasuring:
    """Declares on what the alarm brought."""

    def wanted(self, pool: LinePool) -> Actions:
        """-1 everywhere."""
        return np.full(pool.size, -1, np.int64)


class RuleMeasuring:
    """Measures as the demonstrator does."""

    def wanted(self, pool: LinePool) -> Actions:
        """The rule's next machine until one is declared, then none."""
        _, suspect = largest_deviation(pool)
        wanted = measuring(pool, suspect, SEARCH, SAMPLES)
        return np.where(pool.plant().order[:, ORDER_MACHINE] < 0, wanted, -1).astype(np.int64)


class Policy:
    """A policy asked part by part; one forward pass a step serves all of them.

    Args:
        package: the policy; greedy.
    """

    def __init__(self, package: PolicyPackage) -> None:
        self._package = package
        self.reset()

    def reset(self) -> None:
        """Forgets what was observed."""
        self._memory = self._package.fresh_memory(0)

    def look(self, pool: LinePool) -> None:
        """The forward pass: call it once a step."""
        if len(self._memory) != pool.size:
            self._memory = self._package.fresh_memory(pool.size)
        seen = (pool.observation, pool.last_action, pool.time, pool.mask)
        self._output = self._package.act(*seen, memory=self._memory)
        self._memory = self._output.memory

    @property
    def actions(self) -> Actions:
        """i64[N]: what the policy would do."""
        return self._output.action

    def best(self, pool: LinePool, low: int, high: int) -> Actions:
        """i64[N]: the most probable legal action of ``low`` to ``high``; any of them where none is legal."""
        chances = np.where(pool.mask[:, low:high], self._output.probabilities[:, low:high], -1.0)
        best: Actions = low + chances.argmax(axis=1)
        return best

    def follow(self, pool: LinePool) -> None:
        """Nothing to follow besides :meth:`look`."""

    def wanted(self, pool: LinePool) -> Actions:
        """The machine that the policy measures, or -1."""
        return np.where((pool.segment == 0) & (self.actions < A_MACHINE), self.actions, -1)

    def declare(self, pool: LinePool, asked: Bools) -> Actions:  # noqa: ARG002 - answers everywhere
        """The declaration that the policy finds most probable."""
        return self.best(pool, A_MACHINE, A_SEVERITY)


class MoreMeasuring:
    """The policy's measuring, and ``extra`` more of the machine it is about to declare.

    Args:
        policy: whose measuring.
        extra: measurements an episode.
    """

    def __init__(self, policy: Policy, extra: int) -> None:
        self._policy, self._extra = policy, extra
        self._left = np.zeros(0, np.int64)

    def wanted(self, pool: LinePool) -> Actions:
        """The policy's machine, or the one that it would declare while there are extra measurements left."""
        if len(self._left) != pool.size:
            self._left = np.zeros(pool.size, np.int64)
        self._left[pool.plant().step == 0] = self._extra
        own = self._policy.wanted(pool)
        undeclared = (pool.segment == 0) & (pool.plant().order[:, ORDER_MACHINE] < 0)
        more = undeclared & (own < 0) & (self._left > 0)
        self._left -= more
        return np.where(more, self._policy.best(pool, A_MACHINE, A_MODE) - A_MACHINE, own)


def true_execution(pool: LinePool) -> Actions:
    """i64[N]: starts, and closes once it is repaired; what was too shallow is retried one deeper.

    What was the wrong repair is verified, which refutes it, and identified again; what a mishap or a lack of skill left
    undone is ordered again.
    """
    truth, order, mask = pool.hidden(), pool.plant().order, pool.mask
    wrong = (order[:, ORDER_MACHINE] != truth.machine) | (order[:, ORDER_MODE] != truth.mode)
    again = np.where(mask[:, A_ESCALATE], A_ESCALATE, A_CLOSE)
    undone = np.where(mask[:, A_RETRY] & (truth.botched != 2), A_RETRY, again)
    undone = np.where(wrong, np.where(mask[:, A_VERIFY], A_VERIFY, again), undone)
    started = np.where(truth.repaired == 1, A_CLOSE, undone)
    return np.where(order[:, ORDER_STARTED] == 1, started, A_START).astype(np.int64)


def true_severity(pool: LinePool) -> Actions:
    """i64[N]: the true level, then the depth that it asks for :data:`AHEAD` seconds from now, as the oracle has it."""
    truth, plant = pool.hidden(), pool.plant()

    def level(ahead: float) -> Actions:
        severity = truth.severity + truth.growth * (plant.elapsed + ahead)
        return np.searchsorted(physics.SEVERITY_LIMITS, severity, side="right").astype(np.int64)

    structural = np.where(truth.mode == SENSOR_FAILURE, 2, 0)
    depth = np.where(truth.mode < PHYSICAL_MODES, level(AHEAD), structural)
    judged = plant.order[:, ORDER_SEVERITY] >= 0
    return np.where(judged, A_DEPTH + depth, A_SEVERITY + level(0.0)).astype(np.int64)


class HybridPlayer:
    """One owner for each part of the work.

    Args:
        name: shown in tables.
        policy: who does the parts that are the policy's.
        measures: who measures; None: the policy.
        diagnosis: who names machine and cause; None: the policy.
        parts: those of severity, dispatch and execution that are the policy's; the truth does the others.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        measures: Measuring | None,
        diagnosis: Diagnosis | None,
        parts: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self._policy, self._parts = policy, parts
        self._measures, self._diagnosis = measures or policy, diagnosis or policy
        self._own = diagnosis is None

    def reset(self) -> None:
        """Forgets what was observed."""
        self._policy.reset()

    def claims(self) -> list[float]:
        """How likely an observer found what it named first; nothing of others."""
        return list(getattr(self._diagnosis, "claims", ()))

    def act(self, pool: LinePool) -> Decision:
        """One action an environment, without chance."""
        self._policy.look(pool)
        self._diagnosis.follow(pool)
        measure = self._measures.wanted(pool)
        declare = self._diagnosis.declare(pool, (measure < 0) & (pool.segment == 0))
        identify = np.where(measure >= 0, measure, declare)
        dispatch = self._policy.actions if DISPATCH in self._parts else dispatch_actions(pool)
        execute = self._policy.actions if EXECUTION in self._parts else true_execution(pool)
        choices = [identify, self._assess(pool), dispatch, execute]
        return certain(np.choose(pool.segment.astype(np.int64), choices).astype(np.int64))

    def _assess(self, pool: LinePool) -> Actions:
        """Rejecting is part of the diagnosis; how severe and how deep is not."""
        chosen = self._policy.best(pool, A_SEVERITY, A_REJECT) if SEVERITY in self._parts else true_severity(pool)
        rejects = pool.plant().order[:, ORDER_MODE] == FALSE_ALARM
        if self._own:
            rejects = rejects | (self._policy.actions == A_REJECT)
        return np.where(rejects, A_REJECT, chosen)


class Watched:
    """A player, and what is seen of its first ``episodes`` episodes besides how they end.

    Attributes:
        right: bool[N, K], the first diagnosis named the true mode, and the true machine unless it is a false alarm.
        mishap: bool[N, K], a right repair failed all the same.
    """

    def __init__(self, player: Player, size: int, episodes: int) -> None:
        self.name = player.name
        self._player, self._episodes = player, episodes
        self.right, self.mishap = np.zeros((size, episodes), np.bool_), np.zeros((size, episodes), np.bool_)

    def reset(self) -> None:
        """Forwarded where the player has one."""
        restart: Any = getattr(self._player, "reset", None)
        if restart is not None:
            restart()

    def act(self, pool: LinePool) -> Decision:
        """The player's own decision."""
        decision = self._player.act(pool)
        truth, order, episode = pool.hidden(), pool.plant().order, pool.episode
        counted = episode < self._episodes
        rows = np.flatnonzero(counted & (truth.botched == MISHAP))
        self.mishap[rows, episode[rows]] = True
        named = decision.actions - A_MODE
        first = counted & (pool.segment == 0) & (named >= 0) & (order[:, ORDER_ESCALATIONS] == 0)
        right = (named == truth.mode) & ((named == FALSE_ALARM) | (order[:, ORDER_MACHINE] == truth.machine))
        rows = np.flatnonzero(first)
        self.right[rows, episode[rows]] = right[rows]
        return decision
