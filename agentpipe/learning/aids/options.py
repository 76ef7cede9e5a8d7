"""What can be chosen about the training aids (S10) and the orchestrator (S7); none of it needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from agentpipe.errors import SettingsError
from agentpipe.learning.checked import Count, Positive, Share, ShareAboveZero, Weight, check_fields

Mode = Literal["off", "remedy", "always"]


@dataclass(frozen=True)
class AidOptions:
    """Aids of the policy gradient: never, as the remedy of a gate that warns, or from the first update on."""

    curiosity: Mode = "remedy"
    """a bonus for states that have rarely been met"""
    curiosity_weight: Weight = 0.02
    """of the bonus, beside scaled rewards"""
    dynamic_lambda: Mode = "remedy"
    """lambda of the advantages moves between its limits"""
    lambda_limits: tuple[Share, Share] = (0.92, 0.97)
    """of dynamic lambda"""
    lambda_step: Positive = 0.01
    """one move of dynamic lambda"""
    lambda_updates: Count = 5
    """updates running that a rule of dynamic lambda must hold, and rest between two moves"""
    negative_advantage: Weight = 0.05
    """dynamic lambda goes down where the mean advantage, in its deviations, stays negative and is below minus this"""
    reach: Share = 0.4
    """and up where less than this share of early segments' advantages comes from later segments"""
    layer_rates: Mode = "remedy"
    """learning rates that rise from the lowest layer to the heads"""
    bottom_rate: ShareAboveZero = 1e-5 / 3e-4
    """learning rate of the lowest layer over that of the heads, where layers have rates of their own"""
    spike: Positive = 3.0
    """value loss or KL beyond this many times its median over ten updates is instability"""
    patience: Count = 3
    """updates running with a complaint after which a remedy starts"""
    calm: Count = 10
    """updates running without one after which it ends"""
    longest: Count = 50
    """updates after which a remedy that does not help ends; it rests for as long"""
    stall_updates: Annotated[int, Field(ge=2)] = 10
    """the mean return of so many updates is held against that of as many before"""
    distillation: Mode = "off"
    """fine-tuning on the hardest training environments once the training ended; a remedy: where validation stalled"""
    hardest: Count = 500
    """environments that are fine-tuned on"""
    least_episodes: Count = 10
    """episodes of an environment below which nobody can tell how hard it is"""
    distillation_steps: Count = 1_000_000
    """environment steps of the fine-tuning"""
    distillation_rate_share: Positive = 0.3
    """its learning rate over that of the training"""
    distillation_kl_weight: Weight = 0.1
    """weight of KL(policy before || policy), which holds it near what it was"""
    distillation_tolerance: Weight = 0.005
    """validation success that it may cost"""

    def __post_init__(self) -> None:
        check_fields(self)
        low, high = self.lambda_limits
        if low > high:
            raise SettingsError(f"limits {low} to {high}", field="lambda_limits", remedy="give the lower first")


@dataclass(frozen=True)
class DemonstrationOptions:
    """Behaviour cloning from recorded episodes, instead of an expert that plays without end."""

    least: Count = 50
    """episodes below which nothing is cloned"""
    epochs: Count = 30
    """passes over the episodes at most"""
    patience: Count = 4
    """epochs running without a better held-out loss after which cloning stops"""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """share of the episodes that is never learned from, at least one"""
    minibatch: Count = 256
    """samples of one gradient step"""
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    """at the start; it falls along a cosine"""
    successes_only: bool = True
    """recorded episodes that failed are left out, where the record says so"""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class OrchestratorOptions:
    """The contextual bandit that steers training environments towards disturbances the policy is unsure of."""

    share: Share = 0.25
    """of the training environments that it may steer"""
    floor: Share = 0.2
    """share of its moves that is spread evenly over all combinations"""
    every: Count = 5
    """updates between two decisions"""
    discount: ShareAboveZero = 0.8
    """of all that was seen, at each decision: the policy has changed since"""
    certainty: Annotated[float, Field(ge=1)] = 200.0
    """samples a combination that outlast a decision; more = surer beliefs, and moves to fewer combinations"""

    def __post_init__(self) -> None:
        check_fields(self)
