"""The expert whose episodes are cloned: it measures as the plant would have to, then does what the true state asks for.

The oracle alone is a poor teacher: it never measures, so its pupil would declare at once, on one noisy snapshot. The
demonstrator first gathers the samples a careful engineer would want, so that what it declares next can be learned from
what has been received.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from agentpipe.environments import physics
from agentpipe.environments.layout import (
    A_CLOSE,
    A_DEPTH,
    A_ESCALATE,
    A_MACHINE,
    A_MODE,
    A_SEVERITY,
    A_VERIFY,
    ACTION_COUNT,
    FALSE_ALARM,
    PHYSICAL_MODES,
)
from agentpipe.environments.players import Decision, OraclePlayer, Player, certain
from agentpipe.environments.rules import largest_deviation, measuring

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool

# Questions that a decision answers: which machine, which mode, how severe. Number of the question for each action.
QUESTIONS: Final[npt.NDArray[np.int8]] = np.full(ACTION_COUNT, -1, np.int8)
QUESTIONS[A_MACHINE:A_MODE] = 0
QUESTIONS[A_MODE:A_SEVERITY] = 1
QUESTIONS[A_SEVERITY:A_DEPTH] = 2
QUESTION_COUNT: Final = 3


class Expert(Player, Protocol):
    """A player that can also say, at any time, what it would answer to each question."""

    def answers(self, pool: LinePool) -> npt.NDArray[np.int64]:
        """i64[N, QUESTION_COUNT]: for each question the right action, or -1 where it is not to be asked now."""
        ...


class DemonstratorPlayer:
    """Measures by rule, declares and repairs by the truth, verifies before closing.

    Args:
        search: samples wanted of every machine before one is suspected.
        samples: samples wanted of the suspected machine.
    """

    name = "demonstrator"

    def __init__(self, search: float = 4.0, samples: float = 16.0) -> None:
        self._search, self._samples = search, samples
        self._oracle = OraclePlayer()

    def act(self, pool: LinePool) -> Decision:
        """One action an environment, without chance."""
        actions = self._oracle.act(pool).actions
        _, suspect = largest_deviation(pool)
        order = pool.plant().order
        wanted = measuring(pool, suspect, self._search, self._samples)
        identifying = (pool.segment == 0) & (order[:, 0] < 0) & (wanted >= 0)
        actions = np.where(identifying, wanted, actions)
        verify = (actions == A_CLOSE) & pool.mask[:, A_VERIFY]
        actions = np.where(verify, A_VERIFY, actions)
        wrong = self._mistaken(pool) & (pool.segment == 3) & pool.mask[:, A_ESCALATE]
        return certain(np.where(wrong, A_ESCALATE, actions).astype(np.int64))

    @staticmethod
    def _mistaken(pool: LinePool) -> npt.NDArray[np.bool_]:
        """Where the work order names something else than the true fault."""
        truth, order = pool.hidden(), pool.plant().order
        return (order[:, 0] != truth.machine) | (order[:, 1] != truth.mode)

    def answers(self, pool: LinePool) -> npt.NDArray[np.int64]:
        """While identifying: the true machine, mode and severity, as the actions that would declare them."""
        truth = pool.hidden()
        asked = pool.segment == 0
        severity = truth.severity + truth.growth * pool.plant().elapsed
        level = np.searchsorted(physics.SEVERITY_LIMITS, severity, side="right")
        machine = np.where(asked & (truth.mode != FALSE_ALARM), A_MACHINE + truth.machine, -1)
        mode = np.where(asked, A_MODE + truth.mode, -1)
        judged = np.where(asked & (truth.mode < PHYSICAL_MODES), A_SEVERITY + level, -1)
        return np.stack([machine, mode, judged], axis=1).astype(np.int64)
