"""Who races, and the settings that are tried for each: a short trial on validation lines chooses one of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

OURS, OURS_WARM = "agentpipe", "agentpipe, cloned first"
MASKABLE, PLAIN, ONE_FILE = "sb3-contrib MaskablePPO", "Stable-Baselines3 PPO", "PPO in one file, CleanRL style"
DISCOUNT, GAE_LAMBDA, CLIP, VALUE_WEIGHT, GRADIENT_NORM = 0.995, 0.95, 0.2, 0.5, 1.0
"""of every peer; discount, lambda, value weight and gradient norm are agentpipe's defaults too"""
HIDDEN = (256, 256)
REWARD_CLAMP = 5.0
WITH_MASK, REPLACED = "most probable allowed action", "forbidden actions replaced as in training"
"""how a policy is played that is judged"""


@dataclass(frozen=True)
class Sizes:
    """How large the race is."""

    steps: int = 1_200_000
    """environment steps after which all are compared"""
    seconds: float = 180.0
    """of training after which all are compared"""
    grid: int = 4
    """snapshots up to either"""
    trial_seconds: float = 60.0
    """of training of each setting that is tried"""
    thread_seconds: float = 8.0
    """on each number of threads, before a trial"""
    environments: int = 7_000
    """that may be trained in"""
    validation: int = 245
    validation_episodes: int = 8
    holdout: int = 3_000
    holdout_episodes: int = 2
    largest: int = 7_000
    """lines side by side at most"""
    longest: float = 1_800.0
    """seconds after which a run that has not come to its steps is given up"""


SMOKE = Sizes(2_048, 0.2, 2, 0.2, 0.1, 64, 15, 1, 30, 1, 64)


@dataclass(frozen=True)
class Setting:
    """What a user of a PPO would choose for the line."""

    rows: int
    """lines side by side"""
    rollout_steps: int
    minibatch: int
    epochs: int
    learning_rate: float
    entropy_weight: float = 0.01
    activation: Literal["tanh", "relu"] = "relu"
    shared: bool = True
    """one trunk for actor and critic, or one for each"""
    anneal: bool = False
    """the learning rate falls to zero at the end, else it stays"""
    last_action: bool = False
    """the last action, one-hot, beside the observation"""
    segments: bool = False
    """of agentpipe alone: the clip range of each segment instead of one for all"""
    threads: int = 1
    """of torch; a trial finds out which number is fastest, and the simulator has as many as there are cores"""

    def text(self) -> str:
        """In words."""
        trunk = "one trunk" if self.shared else "two networks"
        parts = [
            f"{self.rows:,} lines × {self.rollout_steps}",
            f"minibatch {self.minibatch:,}",
            f"{self.epochs} epochs",
            f"rate {self.learning_rate:g}{' falling' if self.anneal else ''}",
            f"entropy {self.entropy_weight:g}",
            f"{self.activation}, {trunk}",
        ]
        more = ["last action"] * self.last_action + ["clip range of each segment"] * self.segments
        return ", ".join(parts + more)


@dataclass(frozen=True)
class Contestant:
    """One who races."""

    name: str
    settings: tuple[Setting, ...]
    """tried; none: it has its own"""
    plays: tuple[str, ...] = (WITH_MASK,)
    """ways of playing that are tried"""


_WIDE = Setting(2_048, 32, 2_048, 4, 1e-3)
_MIDDLE = Setting(1_024, 32, 2_048, 6, 5e-4, shared=False, last_action=True)
_NARROW = Setting(256, 32, 512, 4, 5e-4, last_action=True)
_OURS_NARROW = dataclasses.replace(_NARROW, last_action=False)

CONTESTANTS = (
    Contestant(OURS, (_WIDE, _OURS_NARROW, dataclasses.replace(_OURS_NARROW, segments=True))),
    Contestant(OURS_WARM, ()),
    Contestant(ONE_FILE, (_WIDE, _NARROW, dataclasses.replace(_MIDDLE, anneal=True))),
    Contestant(MASKABLE, (_WIDE, _MIDDLE, _NARROW)),
    Contestant(PLAIN, (_WIDE, _MIDDLE, _NARROW), (WITH_MASK, REPLACED)),
)
