"""A policy that plays greedily in compiled code, on several threads: for looks at the validation split while it learns.

:class:`~agentpipe.learning.player.PolicyPlayer` is what reports, promotions and servers go by: it runs the very network
that is exported. The two differ in the last bits of a probability, so in a decision only where two actions are as good
as each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from agentpipe.environments.players import Decision
from agentpipe.errors import EmptyMaskError, NonFiniteError
from agentpipe.learning.compiled import CompiledPolicy

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.package import PolicyPackage
    from agentpipe.learning.workers import Workers

BLOCK = 1_024
"""environments that one thread takes at a time"""


class CompiledPlayer:
    """Plays the most probable actions of a policy.

    A memory is kept for each row of the pool, as :class:`~agentpipe.learning.player.PolicyPlayer` does.

    Args:
        package: the policy; its weights are copied.
        workers: share the environments; the decisions do not depend on how many there are.
        name: shown in reports.
    """

    def __init__(self, package: PolicyPackage, workers: Workers, *, name: str = "policy") -> None:
        self.name = name
        self._network, self._workers = package.network, workers
        self._policy = CompiledPolicy(package.network, workers.threads)
        self._memory = package.network.fresh_memory(0)

    def reset(self) -> None:
        """Forgets what was observed."""
        self._memory = self._network.fresh_memory(0)

    def act(self, pool: LinePool) -> Decision:
        """Actions i64[N], the probability f32[N] with which the policy chooses each, and the critic's values f32[N].

        Raises:
            EmptyMaskError: nothing is allowed in an environment; names it.
            NonFiniteError: a probability or value is not finite; names the environment.
        """
        if len(self._memory) != pool.size:
            self._memory = self._network.fresh_memory(pool.size)
        arrays = (pool.observation, pool.last_action, pool.time, pool.mask)
        observation, last_action, time, mask = (torch.from_numpy(array) for array in arrays)
        action, chosen, value = np.empty(pool.size, np.int64), *np.empty((2, pool.size), np.float32)

        @torch.inference_mode()  # holds for one thread only
        def block(worker: int, piece: int) -> None:
            at = slice(piece * BLOCK, min((piece + 1) * BLOCK, pool.size))
            encoded = torch.empty(at.stop - at.start, self._network.encoded_size)
            inputs = (observation[at], last_action[at], time[at], self._memory[at])
            self._memory[at] = self._policy.encode(worker, *inputs, encoded)
            probability = torch.empty(at.stop - at.start, self._network.action_count)
            value[at] = self._policy.distribution(worker, (encoded, last_action[at], mask[at]), probability)
            action[at] = probability.argmax(dim=1).numpy()
            chosen[at] = probability.amax(dim=1).numpy()

        self._workers.run(block, -(-pool.size // BLOCK))
        stuck = ~pool.mask.any(axis=1)
        if stuck.any():
            raise EmptyMaskError("no action is allowed", environment=pool.names[int(stuck.argmax())], field="mask")
        bad = ~(np.isfinite(chosen) & np.isfinite(value))
        if bad.any():
            name = pool.names[int(bad.argmax())]
            raise NonFiniteError("the policy's output is not finite", environment=name, field="value or probabilities")
        return Decision(action, chosen, value)
