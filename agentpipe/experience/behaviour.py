"""The player that fills the buffer before there is a champion: a fixed player that sometimes acts at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from agentpipe.environments.players import Decision
from agentpipe.errors import EmptyMaskError, SettingsError

if TYPE_CHECKING:
    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool

_EXPLORE: Final = 30  # channels of the pool's random numbers for players, apart from those that a base may use
_CHOOSE: Final = 31


class EpsilonPlayer:
    """Plays ``base``, but with probability ``epsilon`` a legal action drawn uniformly.

    The probability recorded is exact: epsilon / (number of legal actions), plus 1 - epsilon when the action is the one
    that ``base`` takes. That holds for a ``base`` without randomness of its own only. Draws are keyed by environment,
    episode and step, so any episode can be played again alone; another ``seed`` explores elsewhere in the same episodes
    (it rotates the draws, which leaves them uniform).
    """

    def __init__(self, base: Player, epsilon: float = 0.2, seed: int = 0) -> None:
        if not 0 <= epsilon <= 1:
            raise SettingsError(f"epsilon {epsilon}", field="epsilon", remedy="choose a number from 0 to 1")
        self.base = base
        self.epsilon = epsilon
        self._rotation = np.random.default_rng(seed).random(2)
        self.name = f"{base.name}+{epsilon:g}"

    def act(self, pool: LinePool) -> Decision:
        """One decision for every environment of the pool.

        Raises:
            EmptyMaskError: an environment allows no action.
        """
        mask = pool.mask
        legal = mask.sum(axis=1)
        if not legal.all():
            row = int(legal.argmin())
            raise EmptyMaskError("no action is allowed", environment=row, remedy="report this simulator")
        preferred = np.asarray(self.base.act(pool).actions)
        explore = (pool.uniforms(_EXPLORE) + self._rotation[0]) % 1.0 < self.epsilon
        # The k-th legal action of each row, k uniform: the first column where the running count exceeds k.
        k = np.minimum(((pool.uniforms(_CHOOSE) + self._rotation[1]) % 1.0 * legal).astype(np.int64), legal - 1)
        uniform = (np.cumsum(mask, axis=1) > k[:, None]).argmax(axis=1)
        actions = np.where(explore, uniform, preferred).astype(np.int64)
        probabilities = self.epsilon / legal + np.where(actions == preferred, 1 - self.epsilon, 0.0)
        return Decision(actions, probabilities.astype(np.float32))


def epsilon_player(base: Player, epsilon: float = 0.2, seed: int = 0) -> EpsilonPlayer:
    """``base`` with ``epsilon`` of uniformly drawn legal actions; see :class:`EpsilonPlayer`."""
    return EpsilonPlayer(base, epsilon, seed)
