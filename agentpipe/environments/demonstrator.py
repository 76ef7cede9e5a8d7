"""The expert whose episodes are cloned: it measures as the plant would have to, then does what the true state asks for.

The oracle alone is a poor teacher: it never measures, so its pupil would declare at once, on one noisy snapshot. The
demonstrator first gathers the samples a careful engineer would want, so that what it declares next can be learned from
what has been received.
"""

from __future__ import annotations

import numpy as np

from agentpipe.environments.layout import A_CLOSE, A_VERIFY
from agentpipe.environments.players import Decision, OraclePlayer, certain
from agentpipe.environments.pool import LinePool
from agentpipe.environments.rules import largest_deviation, measuring


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
        return certain(np.where(verify, A_VERIFY, actions).astype(np.int64))
