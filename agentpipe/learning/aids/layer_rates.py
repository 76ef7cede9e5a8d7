"""Rates of each layer: the remedy of instability. The lowest layer learns slowest, the heads at the full rate.

A low layer that moves changes what all layers above it stand on; where training becomes unstable it is slowed down to
``bottom_rate`` of the heads' rate, the layers between along a geometric series. Signs of instability, of one update:

- the mean gradient norm (before it is clipped to ``max_gradient_norm``) is above the limit of gate 2;
- the value loss is more than ``spike`` times its median over the last ten updates;
- so is KL(policy before || policy), where it also exceeds :data:`KL_FLOOR`: under a falling learning rate it should
  fall, too.

After ``calm`` updates without a sign the lowest rate rises back to the heads' in :data:`EASING` steps of equal ratio,
one an update; a sign on the way puts it down again.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, ClassVar, Final

from agentpipe.learning.aids.remedy import Remedy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.aids.base import Knobs
    from agentpipe.learning.aids.options import AidOptions
    from agentpipe.learning.gates import GateFigure
    from agentpipe.learning.options import GateOptions
    from agentpipe.learning.tensors import Arrays

REMEMBERED: Final = 10
"""updates whose median a spike is held against"""
KL_FLOOR: Final = 0.01
"""a smaller KL is no sign of anything"""
EASING: Final = 5
"""steps in which the lowest rate comes back"""
GRADIENT, VALUE, KL = "losses/gradient_norm", "losses/value_loss", "losses/approx_kl"


class LayerRates(Remedy):
    """Turns ``bottom_rate``.

    Args:
        options: of all aids.
        gates: limit of the gradient norm.
    """

    name: ClassVar[str] = "layer rates"

    def __init__(self, options: AidOptions, gates: GateOptions) -> None:
        super().__init__(options.layer_rates, options)
        self.limit = gates.gradient_norm_warn
        self.eased = 0 if self.active else EASING
        self._losses: list[float] = []
        self._kls: list[float] = []

    @property
    def share(self) -> float:
        """The lowest layer's rate over the heads'."""
        return float(self.options.bottom_rate ** (1.0 - self.eased / EASING))

    def warmed_up(self, warnings: Sequence[GateFigure]) -> None:
        """Gradients that were too large in the warm-up are reason enough to start."""
        for warned in warnings:
            if warned.name == "gradient norm median" and not self.active:
                self.begin(f"gate {warned.gate}: {warned.name} {warned.value:.3g} above {warned.target:g}")

    def before(self, knobs: Knobs, pool: LinePool) -> None:
        """Sets the lowest layer's rate."""
        del pool
        knobs.bottom_rate = self.share

    def updated(self, figures: Mapping[str, float], warnings: Sequence[GateFigure]) -> None:
        """Looks for signs of instability."""
        del warnings
        complaint = self._signs(figures)
        self.judge(complaint)
        if self.mode == "always":
            return
        if self.active and complaint:
            self._ease(0, complaint)
        elif not self.active and self.eased < EASING:
            if complaint and not self.resting:
                self.begin(f"again: {complaint}")
            else:
                self._ease(self.eased + 1, "on its way back to the heads' rate")

    def begin(self, reason: str) -> None:
        """Slows the lower layers down at once."""
        super().begin(reason)
        self._ease(0, reason)

    def _ease(self, steps: int, reason: str) -> None:
        if steps != self.eased:
            self.eased = steps
            self.note("lowest rate", reason, self.share)

    def _signs(self, figures: Mapping[str, float]) -> str:
        told = []
        if figures[GRADIENT] > self.limit:
            told.append(f"gradient norm {figures[GRADIENT]:.3g} above {self.limit:g}")
        for name, key, past, floor in (("value loss", VALUE, self._losses, 0.0), ("KL", KL, self._kls, KL_FLOOR)):
            if len(past) == REMEMBERED:
                usual = statistics.median(past)
                if figures[key] > max(self.options.spike * usual, floor):
                    told.append(f"{name} {figures[key]:.3g}, its median over {REMEMBERED} updates being {usual:.3g}")
            past.append(float(figures[key]))
            del past[:-REMEMBERED]
        return "; ".join(told)

    def figures(self) -> dict[str, float]:
        """On or off."""
        return {"aids/layer_rates": float(self.active)}

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """See :meth:`Remedy.state`; with how far the rates have come back, and what spikes are held against."""
        content, arrays = super().state()
        return {**content, "eased": self.eased, "losses": self._losses, "kls": self._kls}, arrays

    def restore(self, content: Mapping[str, Any], arrays: Arrays) -> None:
        """The inverse of :meth:`state`."""
        super().restore(content, arrays)
        self.eased = int(content["eased"])
        self._losses, self._kls = list(content["losses"]), list(content["kls"])
