"""Gates 2 (warm-up) and 4 (training) as figures with a verdict, and the circuit breaker that stops training by them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.learning.options import GateOptions

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class GateFigure:
    """One figure of a gate with its verdict."""

    gate: str
    """number of the gate in S18"""
    name: str
    """what is judged"""
    value: float
    """measured"""
    target: float
    """passes up to (or from) this"""
    alarm: float
    """fails beyond this; between target and alarm the gate warns"""
    status: Status
    """verdict"""
    remedy: str
    """what to do about it"""


@dataclass(frozen=True)
class WarmUpFigures:
    """What behaviour cloning ended with: means over the last tenth of a warm-up, or over held-out demonstrations."""

    actor_loss: float
    """masked cross-entropy, nats"""
    critic_mae: float | None
    """mean absolute error in scaled returns; none where no reward was recorded, so that there was nothing to learn"""
    gradient_norm_median: float
    """over all gradient steps, before clipping"""
    accuracy: float
    """share of decisions with a choice where the most probable action was the expert's"""
    samples: int
    """expert decisions"""
    episodes: int
    """expert episodes"""
    expert: str = ""
    """name of the expert"""


def at_most(gate: str, name: str, value: float, target: float, alarm: float, remedy: str) -> GateFigure:
    """Passes up to ``target``, fails beyond ``alarm`` (and for NaN), warns between."""
    status: Status = "pass" if value <= target else "warn" if value <= alarm else "fail"
    return GateFigure(gate, name, value, target, alarm, status, remedy)


def at_least(gate: str, name: str, value: float, target: float, alarm: float, remedy: str) -> GateFigure:
    """Passes from ``target``, fails below ``alarm`` (and for NaN), warns between."""
    status: Status = "pass" if value >= target else "warn" if value >= alarm else "fail"
    return GateFigure(gate, name, value, target, alarm, status, remedy)


def warm_up_gate(figures: WarmUpFigures, options: GateOptions) -> tuple[GateFigure, ...]:
    """Gate 2."""
    remedy = "more expert episodes or epochs; check that the expert sees what the policy sees"
    norm, error = figures.gradient_norm_median, figures.critic_mae
    found = [at_most("2", "actor loss", figures.actor_loss, options.actor_loss, options.actor_loss_warn, remedy)]
    if error is not None:
        name = "critic mean absolute error"
        found.append(at_most("2", name, error, options.critic_mae, options.critic_mae_warn, remedy))
    slower = "lower the learning rate"
    found.append(at_most("2", "gradient norm median", norm, options.gradient_norm_warn, float("inf"), slower))
    return tuple(found)


def training_gate(
    losses: Mapping[str, float], validations: Sequence[tuple[int, float]], options: GateOptions
) -> tuple[GateFigure, ...]:
    """Gate 4: entropy, advantage mean, plateau (gain of the last third of the validations over what came before)."""
    entropy = losses.get("losses/entropy", float("nan"))
    advantage = abs(losses.get("losses/advantage_mean", float("nan")))
    figures = [
        at_least("4", "entropy", entropy, options.entropy_min, options.entropy_stop, "raise the entropy weight"),
        at_most(
            "4", "advantage mean", advantage, options.advantage_mean_warn, float("inf"), "more epochs for the critic"
        ),
    ]
    if len(validations) >= 3:
        scores = [score for _, score in validations]
        cut = len(scores) - len(scores) // 3
        gain = max(scores[cut:]) - max(scores[:cut])
        remedy = "the policy has stopped improving: a smaller learning rate, more environments, or an end"
        figures.append(at_least("4", "plateau gain", gain, options.plateau_gain, float("-inf"), remedy))
    return tuple(figures)


@dataclass
class Breaker:
    """Opens when the same complaint has been heard for several updates running.

    Args:
        options: limits and patience.
    """

    options: GateOptions
    streaks: dict[str, int] = field(default_factory=dict)

    def observe(self, losses: Mapping[str, float]) -> str | None:
        """Looks at the figures of one update; says why training must stop, or ``None``."""
        complaints = {
            "entropy": losses["losses/entropy"] < self.options.entropy_stop,
            "value loss": losses["losses/value_loss"] > self.options.value_loss_stop,
        }
        for name, heard in complaints.items():
            self.streaks[name] = self.streaks.get(name, 0) + 1 if heard else 0
            if self.streaks[name] >= self.options.breaker_patience:
                limits = {"entropy": self.options.entropy_stop, "value loss": self.options.value_loss_stop}
                value = losses[f"losses/{name.replace(' ', '_')}"]
                return f"gate 4: {name} {value:.4g} beyond {limits[name]:g} for {self.streaks[name]} updates"
        return None

    @property
    def healthy(self) -> bool:
        """Nothing is being complained about."""
        return not any(self.streaks.values())
