"""Keeps an eye on rewards in every update (S11): their range, and the signs of the advantages they lead to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from agentpipe.learning.aids.base import Aid
from agentpipe.learning.aids.reward_checks import RANGE, range_figures, sign_figure, sign_ratio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.gates import GateFigure
    from agentpipe.learning.samples.rollout import Rollout

INSIDE, SIGNS, CLAMPED = "rewards/inside_ten", "rewards/advantage_signs", "rewards/clamped_share"


class RewardWatch(Aid):
    """Measures; turns nothing, and keeps nothing from one update to the next."""

    name: ClassVar[str] = "reward watch"

    def __init__(self) -> None:
        super().__init__()
        self._rollout: Rollout | None = None
        self._figures: dict[str, float] = {}

    def collected(self, rollout: Rollout, pool: LinePool) -> None:
        """Looks at the raw rewards, and keeps the rollout at hand until its advantages are known."""
        del pool
        self._rollout = rollout
        self._figures = {INSIDE: float((np.abs(rollout.reward) <= RANGE).mean())}

    def updated(self, figures: Mapping[str, float], warnings: Sequence[GateFigure]) -> None:
        """Looks at the advantages that were learned from, as they were normalised."""
        del figures, warnings
        assert self._rollout is not None
        advantage = self._rollout.batch.advantage[: self._rollout.live].numpy()
        self._figures[SIGNS], self._rollout = sign_ratio(advantage), None

    def figures(self) -> dict[str, float]:
        """Share of raw rewards within ±10, and positive to negative advantages."""
        return self._figures


def reward_figures(figures: Mapping[str, float]) -> tuple[GateFigure, ...]:
    """Judges the rewards of an update by its row in the log; empty where nothing was measured."""
    if INSIDE not in figures:
        return ()
    return (*range_figures(figures[INSIDE], figures.get(CLAMPED)), sign_figure(figures[SIGNS]))
