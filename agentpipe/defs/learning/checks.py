"""Gates 2 (warm-up) and 4 (training)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.gates import specs

if TYPE_CHECKING:
    from agentpipe.evaluation.gates import GateResult
    from agentpipe.learning.result import TrainingResult
    from agentpipe.learning.succession.finetuning import FineTuned
    from agentpipe.settings import GateSettings

WARM_UP = ("actor_loss", "critic_error", "gradient_norm")
TRAINING = ("entropy", "advantage_mean", "plateau", "rewards", "circuit_breaker")


def training_specs() -> list[dg.AssetCheckSpec]:
    """The checks of ``policy_checkpoint``."""
    return specs("policy_checkpoint", (*WARM_UP, *TRAINING))


def training_gates(trained: TrainingResult, gates: GateSettings) -> list[GateResult]:
    """Gates 2 and 4 over what training measured; a warm-up that did not take place is not judged as good."""
    from agentpipe.evaluation.gates import training_gate, warmup_gate

    last = trained.update_log[-1] if trained.update_log else {}
    figures: dict[str, Any] = {
        "entropy": last.get("losses/entropy", math.nan),
        "advantage_mean": last.get("losses/advantage_mean", math.nan),
        "validation_curve": [score for _, score in trained.validations],
    }
    trainings = [*training_gate(figures, gates), _rewards(trained), _breaker(trained)]
    warm_up = trained.warm_up
    if warm_up is None:
        return [*not_held("no warm-up: it starts from the champion's weights"), *trainings]
    cloned = {
        "actor_loss": warm_up.actor_loss,
        "critic_mae": warm_up.critic_mae,
        "gradient_norm_median": warm_up.gradient_norm_median,
    }
    return [*warmup_gate(cloned, gates), *trainings]


def _rewards(trained: TrainingResult) -> GateResult:
    """Rewards of the last update, and how they changed over the newest live shard that holds its full records."""
    from agentpipe.evaluation.gates import rewards_gate
    from agentpipe.experience.store.shard import is_shrunk, open_shard
    from agentpipe.learning.aids.reward_checks import check_shard
    from agentpipe.learning.aids.reward_watch import reward_figures

    judged = reward_figures(trained.update_log[-1]) if trained.update_log else ()
    shard = next((path for path in reversed(trained.shards) if not is_shrunk(path)), None)
    if shard is None:
        return rewards_gate(judged, ["reward gradients: not measured, no live shard holds its full records"])
    report = check_shard(open_shard(shard))
    gradients = [figure for figure in report.figures if figure.name.startswith("reward gradient")]
    return rewards_gate([*judged, *gradients], report.notes)


def _breaker(trained: TrainingResult) -> GateResult:
    """An open circuit breaker is an error: the last good state is kept, but nothing is built on it."""
    from agentpipe.evaluation.gates import GateResult

    good = trained.reason != "gate"
    return GateResult(
        4, "circuit_breaker", good, "error", None, None, trained.explanation, {"stopped_by": trained.reason}
    )


def not_held(reason: str, gate: int = 2, names: Sequence[str] = WARM_UP) -> list[GateResult]:
    """A gate where there is nothing to judge, such as gate 2 without a warm-up: warns, and says why."""
    from agentpipe.evaluation.gates import GateResult

    return [GateResult(gate, name, False, "warn", None, None, reason, {"judged": False}) for name in names]


def candidate_gates(trained: TrainingResult | None, tuned: FineTuned | None, gates: GateSettings) -> list[GateResult]:
    """Gates 2 and 4 of a candidate, whichever way it was made."""
    if trained is not None:
        return training_gates(trained, gates)
    assert tuned is not None
    reason = "learned from labelled decisions only: no warm-up and no policy gradient of its own"
    judged = [name for name in TRAINING if name != "circuit_breaker"]
    return [*not_held(reason), *not_held(reason, 4, judged), _kept(tuned)]


def _kept(tuned: FineTuned) -> GateResult:
    """Fine-tuning that forgets leaves no candidate; one that is here has kept its validation success."""
    from agentpipe.evaluation.gates import GateResult

    text = f"the weights of epoch {tuned.kept_epoch} are kept"
    return GateResult(4, "circuit_breaker", True, "error", None, None, text, {"stopped_by": "labels"})
