"""What can be chosen about the training aids (S10) and the orchestrator (S7); none of it needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["off", "remedy", "always"]


@dataclass(frozen=True)
class AidOptions:
    """Aids of the policy gradient: never, as the remedy of a gate that warns, or from the first update on."""

    curiosity: Mode = "remedy"
    """a bonus for states that have rarely been met"""
    curiosity_weight: float = 0.02
    """of the bonus, beside scaled rewards"""
    dynamic_lambda: Mode = "remedy"
    """lambda of the advantages moves between its limits"""
    lambda_limits: tuple[float, float] = (0.92, 0.97)
    """of dynamic lambda"""
    layer_rates: Mode = "remedy"
    """learning rates that rise from the lowest layer to the heads"""
    bottom_rate: float = 1e-5 / 3e-4
    """learning rate of the lowest layer over that of the heads, where layers have rates of their own"""


@dataclass(frozen=True)
class OrchestratorOptions:
    """The contextual bandit that steers training environments towards disturbances the policy is unsure of."""

    share: float = 0.25
    """of the training environments that it may steer"""
    floor: float = 0.2
    """share of its moves that is spread evenly over all combinations"""
    every: int = 5
    """updates between two decisions"""
