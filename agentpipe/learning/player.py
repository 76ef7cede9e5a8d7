"""A policy package as a player of the simulator's pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentpipe.environments.players import Decision

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.package import PolicyPackage


class PolicyPlayer:
    """Plays the actions of a policy.

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
        self._seed = seed
        self.reset()

    def reset(self) -> None:
        """Starts the stream of draws anew."""
        self._generator = np.random.default_rng(self._seed)

    def act(self, pool: LinePool) -> Decision:
        """Actions i64[N] and the probability f32[N] with which the policy chooses each."""
        uniforms = None if self._greedy else self._generator.random(pool.size)
        output = self.package.act(
            pool.observation, pool.last_action, pool.time, pool.mask, greedy=self._greedy, uniforms=uniforms
        )
        probabilities = np.take_along_axis(output.probabilities, output.action[:, None], axis=1)[:, 0]
        return Decision(output.action, probabilities)
