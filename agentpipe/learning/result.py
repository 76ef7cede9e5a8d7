"""What a training run ends with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from agentpipe.learning.aids.base import LogEntry
    from agentpipe.learning.gates import GateFigure, WarmUpFigures
    from agentpipe.learning.policy.package import PolicyPackage

Reason = Literal["target", "budget", "patience", "gate", "interrupted", "time"]


@dataclass(frozen=True)
class TrainingResult:
    """What a run ended with."""

    package: PolicyPackage
    """the best validated policy (the last good one where nothing was validated)"""
    package_path: Path
    """where it was published"""
    checkpoint: Path
    """the last checkpoint; a run with the same options goes on from it"""
    reason: Reason
    """why the run ended"""
    explanation: str
    """the same in a sentence"""
    best_validation: float | None
    """score of the package on the validation split"""
    validations: tuple[tuple[int, float], ...]
    """update, score"""
    updates: int
    """done in total, earlier parts of a resumed run included"""
    environment_steps: int
    """of the policy gradient, likewise"""
    steps_per_second: float
    """environment steps over wall time of all updates of this process: collecting, learning, logging"""
    seconds: float
    """wall time of this process's part, everything included"""
    looked: tuple[tuple[float, float], ...]
    """looks of this process at the validation split: seconds since it began, warm-up included, and score"""
    warm_up: WarmUpFigures | None
    """figures of gate 2"""
    gates: tuple[GateFigure, ...]
    """gates 2 and 4"""
    update_log: tuple[dict[str, Any], ...]
    """one row an update"""
    aid_log: tuple[LogEntry, ...]
    """what training aids did, and why"""
    left: dict[str, Path]
    """files that they leave, by the name of the aid"""
    tensorboard: Path
    """folder of the event files"""
    shards: tuple[Path, ...] = ()
    """sealed shards of the live rollouts, in order; where the run was interrupted one more is open"""
    unshrunk: str = ""
    """why older shards keep their full records although there are too many; empty where nothing went wrong"""

    def seconds_to(self, score: float) -> float | None:
        """Wall time of this process until validation first reached ``score``; ``None`` where it never did."""
        return next((seconds for seconds, reached in self.looked if reached >= score), None)
