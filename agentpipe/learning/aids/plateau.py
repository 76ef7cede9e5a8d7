"""When learning has come to a standstill: what gate 4 says of it, and whether the mean return still rises."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.learning.gates import GateFigure

STANDSTILL: Final = ("entropy", "plateau gain")
"""figures of gate 4 that tell of a standstill: the policy hardly tries anything, or validation has stopped gaining"""
RETURN: Final = "charts/episodic_return"


class Plateau:
    """Listens to every update for signs of a standstill.

    The return stands still where the mean m_1 of the newest w updates exceeds the mean m_0 of the w before by no more
    than one standard error, sqrt((s_0^2 + s_1^2) / w), s being the standard deviations within both windows. A return
    that rises evenly by b an update gains w b with a standard error of b sqrt((w + 1) / 6), which is a seventh of it
    for w = 10: a rise is not taken for a standstill, however slow it is beside the return itself. One that truly stands
    still is found in five updates of six, one that gains two standard errors is taken for it in one of six.

    Args:
        window: w.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.returns: list[float] = []
        """mean return of the newest 2 w updates in which episodes ended"""

    def hear(self, figures: Mapping[str, float], warnings: Sequence[GateFigure]) -> str:
        """What there is to complain of after an update; empty where learning goes on."""
        if RETURN in figures:
            self.returns = [*self.returns, float(figures[RETURN])][-2 * self.window :]
        told = [
            f"gate {w.gate}: {w.name} {w.value:.3g} short of {w.target:g}" for w in warnings if w.name in STANDSTILL
        ]
        if len(self.returns) == 2 * self.window:
            before, now = self.returns[: self.window], self.returns[self.window :]
            gain = statistics.fmean(now) - statistics.fmean(before)
            error = ((statistics.variance(before) + statistics.variance(now)) / self.window) ** 0.5
            if gain <= error:
                told.append(f"mean return gained {gain:.3g} in {self.window} updates, standard error {error:.2g}")
        return "; ".join(told)
