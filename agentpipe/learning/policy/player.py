"""A policy package as a player of the simulator's pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from agentpipe.environments.players import Decision

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.policy.package import PolicyPackage

_DRAW: Final = 29  # channel of the pool's random numbers for players, apart from those of a player that explores


class PolicyPlayer:
    """Plays the actions of a policy.

    A memory is kept for each row of the pool, one step a call: an episode begins with an empty one wherever nothing was
    done yet. :meth:`reset` forgets everything; so does a pool of another size.

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
        self._memory = package.fresh_memory(0)

    def reset(self) -> None:
        """Forgets what was observed."""
        self._memory = self.package.fresh_memory(0)

    def act(self, pool: LinePool) -> Decision:
        """Actions i64[N], the probability f32[N] with which the policy chooses each, and the critic's values f32[N]."""
        uniforms = None if self._greedy else (pool.uniforms(_DRAW) + self._rotation) % 1.0
        if len(self._memory) != pool.size:
            self._memory = self.package.fresh_memory(pool.size)
        seen = (pool.observation, pool.last_action, pool.time, pool.mask)
        output = self.package.act(*seen, greedy=self._greedy, uniforms=uniforms, memory=self._memory)
        self._memory = output.memory
        probabilities = np.take_along_axis(output.probabilities, output.action[:, None], axis=1)[:, 0]
        return Decision(output.action, probabilities, output.value)
