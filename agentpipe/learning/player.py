"""A policy package as a player of the simulator's pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from agentpipe.environments.players import Decision

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.package import PolicyPackage

_DRAW: Final = 29  # channel of the pool's random numbers for players, apart from those of a player that explores


class PolicyPlayer:
    """Plays the actions of a policy.

    Draws are keyed by environment, episode and step, so any episode can be played again alone; another ``seed`` draws
    otherwise in the same episodes (it rotates the draws, which leaves them uniform).

    Args:
        package: the policy.
        greedy: the most probable action; else one drawn from the probabilities.
        seed: of the draws.
        name: shown in reports.
    """

    def __init__(self, package: PolicyPackage, *, greedy: bool = True, seed: int = 0, name: str = "policy") -> None:
        self.name = name
        self.package = package
        self._greedy = greedy
        self._rotation = np.random.default_rng(seed).random()

    def act(self, pool: LinePool) -> Decision:
        """Actions i64[N], the probability f32[N] with which the policy chooses each, and the critic's values f32[N]."""
        uniforms = None if self._greedy else (pool.uniforms(_DRAW) + self._rotation) % 1.0
        output = self.package.act(
            pool.observation, pool.last_action, pool.time, pool.mask, greedy=self._greedy, uniforms=uniforms
        )
        probabilities = np.take_along_axis(output.probabilities, output.action[:, None], axis=1)[:, 0]
        return Decision(output.action, probabilities, output.value)
