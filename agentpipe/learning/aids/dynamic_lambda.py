"""Dynamic lambda: how far credit reaches back follows what the advantages of the last updates say.

For the advantages A of one update (generalised, over whole episodes), every step t of a segment before the last one
that was met has

    late_t = sum of (gamma lambda)^k delta_(t+k) over those later steps of its episode that belong to later segments
    own_t  = A_t - late_t

and the *reach* of credit is sum |late_t| / sum (|late_t| + |own_t|) over these steps. The rules, each of which must
hold in ``lambda_updates`` updates running:

down
    The mean advantage is negative, and over these updates below ``-negative_advantage`` standard deviations: returns
    fall short of what the critic expects. Every later error of the critic then counts against every earlier decision,
    with the weight lambda gives it; a smaller lambda blames fewer decisions for the same shortfall.
up
    The reach is below ``reach``: early decisions are judged by what happens in their own segment. The value at the
    border may know better, but only once the critic has learned it; a larger lambda carries what was earned itself.

Where both hold they contradict each other, and lambda stays. After a move it rests for as many updates, so that the
next move sees what came of it. Where the aid ends as a remedy, lambda returns to the run's own by one step an update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from agentpipe.environments.jit import entry
from agentpipe.learning.aids.plateau import Plateau
from agentpipe.learning.aids.remedy import Remedy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.aids.base import Knobs
    from agentpipe.learning.aids.options import AidOptions
    from agentpipe.learning.gates import GateFigure
    from agentpipe.learning.options import PpoOptions
    from agentpipe.learning.samples.rollout import Rollout
    from agentpipe.learning.tensors import Arrays

ADVANTAGE = "losses/advantage_mean"


class DynamicLambda(Remedy):
    """Turns ``gae_lambda``, within its limits.

    Args:
        options: of all aids.
        ppo: discount and the run's own lambda.
    """

    name: ClassVar[str] = "dynamic lambda"

    def __init__(self, options: AidOptions, ppo: PpoOptions) -> None:
        super().__init__(options.dynamic_lambda, options)
        self.own, self.discount = ppo.gae_lambda, ppo.discount
        self.value = self._inside(self.own) if self.active else self.own
        self.plateau = Plateau(options.stall_updates)
        self._advantages: list[float] = []
        self._reaches: list[float] = []
        self._still = 0
        self._rollout: Rollout | None = None

    def _inside(self, value: float) -> float:
        low, high = self.options.lambda_limits
        return min(max(value, low), high)

    def warmed_up(self, warnings: Sequence[GateFigure]) -> None:
        """A critic that the warm-up left with large errors is reason enough to start."""
        for warned in warnings:
            if warned.name == "critic mean absolute error" and not self.active:
                self.begin(f"gate {warned.gate}: {warned.name} {warned.value:.3g} above {warned.target:g}")

    def before(self, knobs: Knobs, pool: LinePool) -> None:
        """Sets lambda."""
        del pool
        knobs.gae_lambda = self.value

    def collected(self, rollout: Rollout, pool: LinePool) -> None:
        """Keeps the rollout at hand until its advantages are known."""
        del pool
        self._rollout = rollout

    def updated(self, figures: Mapping[str, float], warnings: Sequence[GateFigure]) -> None:
        """Measures, and moves lambda for the next update where a rule says so."""
        assert self._rollout is not None
        kept = self.options.lambda_updates
        self._advantages = [*self._advantages, float(figures[ADVANTAGE])][-kept:]
        self._reaches = [*self._reaches, reach(self._rollout, self.discount * self.value)][-kept:]
        self._rollout = None
        self._still = max(0, self._still - 1)
        told = [self.plateau.hear(figures, warnings)]
        told += [f"gate {w.gate}: {w.name} {w.value:.3g} above {w.target:g}" for w in warnings if "advantage" in w.name]
        self.judge("; ".join(part for part in told if part))
        if self.active:
            self._follow()
        elif self.value != self.own:
            step = self.options.lambda_step
            self._move(min(max(self.own, self.value - step), self.value + step), "back towards the run's own")

    def begin(self, reason: str) -> None:
        """Starts within the limits."""
        super().begin(reason)
        self.value = self._inside(self.value)

    def _follow(self) -> None:
        options = self.options
        if self._still > 0 or len(self._advantages) < options.lambda_updates:
            return
        mean, reached = float(np.mean(self._advantages)), float(np.mean(self._reaches))
        down = max(self._advantages) < 0.0 and mean < -options.negative_advantage
        up = max(self._reaches) < options.reach
        if down == up:
            return
        move = -options.lambda_step if down else options.lambda_step
        times = f"in each of {options.lambda_updates} updates"
        if down:
            reason = f"advantages negative {times}, mean {mean:.3f} of their deviation"
        else:
            reason = (
                f"less than {options.reach:.0%} of early advantages from later segments {times}, mean {reached:.1%}"
            )
        self._move(self._inside(self.value + move), reason)

    def _move(self, value: float, reason: str) -> None:
        value = round(value, 10)
        if value != self.value:
            self.note("lambda down" if value < self.value else "lambda up", reason, value)
            self.value, self._still = value, self.options.lambda_updates

    def figures(self) -> dict[str, float]:
        """On or off, and the reach of the update's credit."""
        return {"aids/dynamic_lambda": float(self.active), "aids/credit_reach": self._reaches[-1]}

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """See :meth:`Remedy.state`; with lambda and what the rules go by."""
        content, arrays = super().state()
        kept = {"advantages": self._advantages, "reaches": self._reaches, "returns": self.plateau.returns}
        return {**content, **kept, "value": self.value, "still": self._still}, arrays

    def restore(self, content: Mapping[str, Any], arrays: Arrays) -> None:
        """The inverse of :meth:`state`."""
        super().restore(content, arrays)
        self._advantages, self._reaches = list(content["advantages"]), list(content["reaches"])
        self.plateau.returns = list(content["returns"])
        self.value, self._still = float(content["value"]), int(content["still"])


def reach(rollout: Rollout, decay: float) -> float:
    """Share of the early segments' advantages that comes from later segments; see the module.

    Args:
        rollout: whose returns are known (:func:`~agentpipe.learning.gradient.ppo.prepare`).
        decay: gamma lambda of its advantages.

    Returns:
        0 to 1; 1 where no step has a later segment to hear from.
    """
    returns = rollout.batch.returns[: rollout.live].numpy().reshape(rollout.steps, rollout.size)
    sums = np.zeros(2)
    _reach(returns, rollout.value.numpy(), rollout.done, rollout.segment, np.float32(decay), sums)
    late, own = (float(part) for part in sums)
    return late / (late + own) if late + own > 0 else 1.0


@entry
def _reach(  # type: ignore[no-untyped-def]  # noqa: ANN202 - a kernel
    returns,  # noqa: ANN001
    value,  # noqa: ANN001
    done,  # noqa: ANN001
    segment,  # noqa: ANN001
    decay,  # noqa: ANN001
    sums,  # noqa: ANN001
):
    steps, size = returns.shape
    last = 0
    for t in range(steps):
        for n in range(size):
            last = max(last, segment[t, n])
    for n in range(size):
        late = np.float32(0.0)
        for back in range(steps):
            t = steps - 1 - back
            if back == 0 or done[t, n]:
                late = np.float32(0.0)
            elif segment[t + 1, n] != segment[t, n]:
                late = decay * (returns[t + 1, n] - value[t + 1, n])
            else:
                late *= decay
            if segment[t, n] < last:
                sums[0] += abs(late)
                sums[1] += abs(returns[t, n] - value[t, n] - late)
