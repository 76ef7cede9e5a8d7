"""Who can work a line: the player protocol, the random player and the oracle.

A player looks at the public arrays of a pool (the oracle alone also at the true state) and chooses one legal action for
every environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from agentpipe.environments import physics
from agentpipe.environments.layout import (
    A_CLOSE,
    A_DEPOT,
    A_DEPTH,
    A_MACHINE,
    A_MODE,
    A_REJECT,
    A_RETRY,
    A_SEVERITY,
    A_START,
    A_TECHNICIAN,
    DEPOTS,
    FALSE_ALARM,
    PHYSICAL_MODES,
    SENSOR_FAILURE,
    TECHNICIANS,
    block_start,
)

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool

Actions = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

O_LEAD, O_TRAVEL, O_SKILLED = block_start("lead"), block_start("travel"), block_start("skilled")
O_DEPOT, O_MACHINE = block_start("depot"), block_start("declared_machine")
O_SEVERITY, O_ORDER = block_start("severity"), block_start("order")


class Decision(NamedTuple):
    """One action an environment, and how likely the player was to choose it."""

    actions: Actions
    """i64[N]"""
    probabilities: npt.NDArray[np.float32]
    """f32[N], probability of the chosen action under the player"""
    values: npt.NDArray[np.float32] | None = None
    """f32[N], the player's own estimate of the return to come; None where it makes none"""


class Seen(Protocol):
    """What lines show to those who work them, N side by side: a pool's public arrays, or one question of a plant."""

    @property
    def size(self) -> int:
        """N."""

    @property
    def observation(self) -> npt.NDArray[np.float32]:
        """``[N, D]``, see :data:`layout.OBSERVATION_NAMES`."""

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """``[N, A]``, the legal actions."""

    @property
    def segment(self) -> npt.NDArray[np.int8]:
        """``[N]``, index into :data:`layout.SEGMENTS`."""


class Player(Protocol):
    """Anything that can act in a pool."""

    @property
    def name(self) -> str:
        """Short name, used in tables and plots."""
        ...

    def act(self, pool: LinePool) -> Decision:
        """One legal action for every environment of ``pool``."""
        ...


def certain(actions: Actions) -> Decision:
    """A decision without chance."""
    return Decision(actions, np.ones(len(actions), np.float32))


class RandomPlayer:
    """Chooses uniformly among the legal actions; its draws are keyed like all others, so it can be replayed."""

    name = "random"

    def act(self, pool: LinePool) -> Decision:
        """Uniform over ``pool.mask``."""
        allowed = pool.mask.sum(axis=1)
        target = np.floor(pool.uniforms(0) * allowed).astype(np.int64) + 1
        actions = np.argmax(np.cumsum(pool.mask, axis=1) == target[:, None], axis=1)
        return Decision(actions, (1.0 / allowed).astype(np.float32))


def nearest_depot(observation: npt.NDArray[np.float32]) -> Actions:
    """i64[N]: the depot from which the part arrives first."""
    return np.argmin(observation[:, O_LEAD : O_LEAD + DEPOTS], axis=1)


def nearest_technician(observation: npt.NDArray[np.float32]) -> Actions:
    """i64[N]: the skilled technician who arrives first; the nearest of all when none has the skill."""
    travel = observation[:, O_TRAVEL : O_TRAVEL + TECHNICIANS]
    unskilled = observation[:, O_SKILLED : O_SKILLED + TECHNICIANS] == 0
    return np.argmin(travel + 1e3 * unskilled, axis=1)


def dispatch_actions(seen: Seen) -> Actions:
    """i64[N]: reserve the part at the nearest depot, then choose the nearest technician with the skill."""
    reserved = seen.observation[:, O_DEPOT : O_DEPOT + DEPOTS].any(axis=1)
    technician = A_TECHNICIAN + nearest_technician(seen.observation)
    return np.where(reserved, technician, A_DEPOT + nearest_depot(seen.observation))


class OraclePlayer:
    """Sees the true state: the upper bound. Declares what is true, repairs as deep as needed, closes when repaired."""

    name = "oracle"

    def act(self, pool: LinePool) -> Decision:
        """The right action in every segment, dispatching like the rules do."""
        truth, order = pool.hidden(), pool.plant().order
        mode, segment = truth.mode.astype(np.int64), pool.segment
        alarm = mode == FALSE_ALARM
        undeclared = order[:, 0] < 0
        identify = np.where(undeclared & ~alarm, A_MACHINE + truth.machine, A_MODE + mode)
        assess = np.where(order[:, 2] < 0, A_SEVERITY + self._level(pool, 0.0), A_DEPTH + self._depth(pool))
        assess = np.where(alarm, A_REJECT, assess)
        started, repaired = order[:, 7] == 1, truth.repaired == 1
        execute = np.where(started, np.where(repaired, A_CLOSE, A_RETRY), A_START)
        execute = np.where(started & ~pool.mask[:, A_RETRY], A_CLOSE, execute)
        actions = np.choose(segment.astype(np.int64), [identify, assess, dispatch_actions(pool), execute])
        return certain(actions.astype(np.int64))

    @staticmethod
    def _level(pool: LinePool, ahead: float) -> Actions:
        truth = pool.hidden()
        severity = truth.severity + truth.growth * (pool.plant().elapsed + ahead)
        return np.searchsorted(physics.SEVERITY_LIMITS, severity, side="right").astype(np.int64)

    def _depth(self, pool: LinePool) -> Actions:
        mode = pool.hidden().mode
        structural = np.where(mode == SENSOR_FAILURE, 2, 0)
        return np.where(mode < PHYSICAL_MODES, self._level(pool, 75.0), structural).astype(np.int64)
