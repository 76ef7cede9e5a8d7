"""What can be chosen about the training aids (S10) and the orchestrator (S7); none of it needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from agentpipe.errors import SettingsError

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
    lambda_step: float = 0.01
    """one move of dynamic lambda"""
    lambda_updates: int = 5
    """updates running that a rule of dynamic lambda must hold, and rest between two moves"""
    negative_advantage: float = 0.05
    """dynamic lambda goes down where the mean advantage, in its deviations, stays negative and is below minus this"""
    reach: float = 0.4
    """and up where less than this share of early segments' advantages comes from later segments"""
    layer_rates: Mode = "remedy"
    """learning rates that rise from the lowest layer to the heads"""
    bottom_rate: float = 1e-5 / 3e-4
    """learning rate of the lowest layer over that of the heads, where layers have rates of their own"""
    spike: float = 3.0
    """value loss or KL beyond this many times its median over ten updates is instability"""
    patience: int = 3
    """updates running with a complaint after which a remedy starts"""
    calm: int = 10
    """updates running without one after which it ends"""
    longest: int = 50
    """updates after which a remedy that does not help ends; it rests for as long"""
    stall_updates: int = 10
    """the mean return of so many updates is held against that of as many before"""
    distillation: Mode = "off"
    """fine-tuning on the hardest training environments once the training ended; a remedy: where validation stalled"""
    hardest: int = 500
    """environments that are fine-tuned on"""
    least_episodes: int = 10
    """episodes of an environment below which nobody can tell how hard it is"""
    distillation_steps: int = 1_000_000
    """environment steps of the fine-tuning"""
    distillation_rate_share: float = 0.3
    """its learning rate over that of the training"""
    distillation_kl_weight: float = 0.1
    """weight of KL(policy before || policy), which holds it near what it was"""
    distillation_tolerance: float = 0.005
    """validation success that it may cost"""

    def __post_init__(self) -> None:
        for name in ("curiosity", "dynamic_lambda", "layer_rates", "distillation"):
            if getattr(self, name) not in get_args(Mode):
                raise SettingsError(f"unknown mode {getattr(self, name)!r}", field=name, remedy="off, remedy or always")
        low, high = self.lambda_limits
        if not 0 <= low <= high <= 1:
            raise SettingsError(f"limits {low} to {high}", field="lambda_limits", remedy="from 0 to 1, the lower first")
        above = ("lambda_step", "lambda_updates", "spike", "patience", "calm", "longest", "hardest", "least_episodes")
        for name in (*above, "distillation_steps", "distillation_rate_share", "bottom_rate"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} {getattr(self, name)}", field=name, remedy="choose a number above 0")
        for name in ("curiosity_weight", "negative_advantage", "distillation_kl_weight", "distillation_tolerance"):
            if not getattr(self, name) >= 0:
                raise SettingsError(f"{name} {getattr(self, name)}", field=name, remedy="choose a number from 0 up")
        if self.stall_updates < 2:
            raise SettingsError(f"stall_updates {self.stall_updates}", field="stall_updates", remedy="choose 2 or more")
        if self.bottom_rate > 1:
            raise SettingsError(f"bottom_rate {self.bottom_rate}", field="bottom_rate", remedy="choose at most 1")


@dataclass(frozen=True)
class DemonstrationOptions:
    """Behaviour cloning from recorded episodes, instead of an expert that plays without end."""

    least: int = 50
    """episodes below which nothing is cloned"""
    epochs: int = 30
    """passes over the episodes at most"""
    patience: int = 4
    """epochs running without a better held-out loss after which cloning stops"""
    held_out: float = 0.1
    """share of the episodes that is never learned from, at least one"""
    minibatch: int = 256
    """samples of one gradient step"""
    learning_rate: float = 1e-3
    """at the start; it falls along a cosine"""
    successes_only: bool = True
    """recorded episodes that failed are left out, where the record says so"""

    def __post_init__(self) -> None:
        for name in ("least", "epochs", "patience", "minibatch"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} {getattr(self, name)}", field=name, remedy="choose 1 or more")
        if not 0 < self.held_out < 1:
            raise SettingsError(f"held_out {self.held_out}", field="held_out", remedy="choose a share between 0 and 1")
        if not 0 < self.learning_rate < 1:
            text = f"learning_rate {self.learning_rate}"
            raise SettingsError(text, field="learning_rate", remedy="choose a number between 0 and 1")


@dataclass(frozen=True)
class OrchestratorOptions:
    """The contextual bandit that steers training environments towards disturbances the policy is unsure of."""

    share: float = 0.25
    """of the training environments that it may steer"""
    floor: float = 0.2
    """share of its moves that is spread evenly over all combinations"""
    every: int = 5
    """updates between two decisions"""
    discount: float = 0.8
    """of all that was seen, at each decision: the policy has changed since"""
    certainty: float = 200.0
    """samples a combination that outlast a decision; more = surer beliefs, and moves to fewer combinations"""

    def __post_init__(self) -> None:
        for name in ("share", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingsError(f"{name} {getattr(self, name)}", field=name, remedy="choose a share from 0 to 1")
        if self.every < 1:
            raise SettingsError(f"every {self.every}", field="every", remedy="choose 1 or more updates")
        if not 0 < self.discount <= 1:
            text = f"discount {self.discount}"
            raise SettingsError(text, field="discount", remedy="choose a number above 0, at most 1")
        if not self.certainty >= 1:
            raise SettingsError(f"certainty {self.certainty}", field="certainty", remedy="choose 1 or more samples")
