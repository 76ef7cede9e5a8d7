"""The policy: from random weights, near the champion, or from a day's labelled decisions."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.gates import check_result, figures
from agentpipe.defs.graph import specification
from agentpipe.defs.learning.checks import candidate_gates, training_specs
from agentpipe.defs.learning.training import Made, NothingLearnedError, make
from agentpipe.defs.resources import Workspace
from agentpipe.defs.steps import Step, plot, rows, step
from agentpipe.defs.under_way import SKIPPED_TAG
from agentpipe.errors import LearningError

if TYPE_CHECKING:
    from agentpipe.learning.result import TrainingResult
    from agentpipe.learning.succession.finetuning import FineTuned


AIDS_SHOWN = 60
"""Newest entries of the aids' log in the UI; all of them are in the checkpoint."""
DESCRIPTION = """One candidate policy, with everything needed to go on training.

`manual` starts from random weights and a warm-up that clones an expert. `nightly` starts from the champion and is
held near it by KL(champion || policy), then learns the day's labelled decisions that no ancestor has learned.
Where distillation is on, `manual` then learns the hardest training environments alone, and keeps what that gains.
`feedback` learns a day's labelled decisions only: a tenth of the learning rate, weighted by confidence and error type,
with rehearsal from the buffer and the same anchor; where they have nothing to teach, its run says why and ends without
a candidate. Each label trains once in a lineage; the package lists them. Early stopping watches the validation split.
An interrupted training goes on from its last checkpoint.
"""


def _spec() -> dg.AssetSpec:
    shape = specification("policy_checkpoint")
    return dg.AssetSpec(shape.pop("name"), **shape, description=DESCRIPTION)


# An asset with checks that may end with nothing to materialise: `dg.asset` cannot, since it demands its checks.
@dg.multi_asset(name="policy_checkpoint", specs=[_spec()], check_specs=training_specs(), can_subset=True)
def policy_checkpoint(context: dg.AssetExecutionContext, workspace: Workspace) -> Iterator[dg.MaterializeResult]:
    """See the description.

    Raises:
        LearningError: only its checks are to be run; or what :func:`~agentpipe.defs.learning.training.make` raises.
    """
    if not context.selected_asset_keys:
        raise LearningError("its checks are judged with the training itself", remedy="materialise policy_checkpoint")
    with step(context, workspace) as work:
        try:
            result = _result(work, make(work))
        except NothingLearnedError as error:
            _say_why_not(context, error)
            return
    yield result


def _result(work: Step, made: Made) -> dg.MaterializeResult:
    workspace = work.workspace
    package, provenance = made.package, made.package.provenance
    gates = candidate_gates(made.trained, made.tuned, workspace.settings.gates)
    return work.result(
        data_version=package.digest,
        path=made.path,
        figures={
            "parent": provenance.get("parent") or "none",
            "behaviour_success": _behaviour_success(workspace, provenance["trajectories"]),
            "simulator_version": package.simulator_version,
            "table_version": provenance["table_version"],
            "cells": len(provenance["trajectories"]),
            "labels_of_lineage": len(package.labels),
            **_trained(made.trained, workspace),
            **_tuned(made),
            **_distilled(made),
            "gates": figures(gates),
        },
        metadata=_shown(made, workspace),
        checks=[check_result(judged) for judged in gates],
    )


def _say_why_not(context: dg.AssetExecutionContext, error: NothingLearnedError) -> None:
    """In the run's log, with its tags, and with the asset."""
    context.log.warning("no candidate: %s", error.message)
    context.instance.add_run_tags(context.run.run_id, {SKIPPED_TAG: error.message[:250]})
    told = {"skipped": error.message}
    context.log_event(dg.AssetObservation(context.asset_key, partition=context.partition_key, metadata=told))


def _trained(trained: "TrainingResult | None", workspace: Workspace) -> dict[str, Any]:
    if trained is None:
        return {"stopped_by": "labels", "updates": 0, "environment_steps": 0}
    best = trained.best_validation
    reached = trained.seconds_to(workspace.settings.gates.success_target)
    return {
        "best_validation": best if best is not None else "not validated",
        "steps_per_second": trained.steps_per_second,
        "training_seconds": trained.seconds,
        **({} if reached is None else {"seconds_to_target": reached}),
        "stopped_by": trained.reason,
        "updates": trained.updates,
        "environment_steps": trained.environment_steps,
        "live_shards": len(trained.shards),
        "aids_at_work": len(trained.aid_log),
        **_shares(trained),
        "checkpoint": str(trained.checkpoint.relative_to(workspace.root.resolve())),
    }


def _tuned(made: Made) -> dict[str, Any]:
    tuned = made.tuned
    if tuned is None:
        return {"labels": 0, **({"no_labels": made.untuned} if made.untuned else {})}
    best = tuned.best_validation
    return {
        "labels": len(tuned.labels),
        "useful_labels": tuned.useful,
        "kept_epoch": tuned.kept_epoch,
        "best_validation": best if best is not None else "not validated",
    }


def _distilled(made: Made) -> dict[str, Any]:
    """What fine-tuning on the hardest environments gained, and whether it was kept."""
    distilled = made.distilled
    if distilled is None:
        return {"distillation": made.undistilled} if made.undistilled else {}
    return {
        "distillation": distilled.explanation,
        "distillation_kept": distilled.kept,
        "hardest_environments": len(distilled.environments),
        "hardest_success_before": distilled.hard_before,
        "hardest_success_after": distilled.hard_after,
        "validation_before_distillation": distilled.validation_before,
        "validation_after_distillation": distilled.validation_after,
        **({"best_validation": distilled.validation_after} if distilled.kept else {}),
    }


def _shown(made: Made, workspace: Workspace) -> dict[str, Any]:
    if made.trained is None:
        assert made.tuned is not None
        return {"validation": plot(_tuning_curve(made.tuned), "validation success")}
    return {
        "explanation": made.trained.explanation,
        "validation": plot(_curve(made.trained, workspace), "validation success"),
        "aids": rows([dataclasses.asdict(entry) for entry in made.trained.aid_log[-AIDS_SHOWN:]]),
        "tensorboard": dg.MetadataValue.path(str(made.trained.tensorboard)),
        **_steered(made.trained),
    }


def _steered(trained: "TrainingResult") -> dict[str, Any]:
    """Where the orchestrator sent training environments: over time, by levels, and the whole log as a file."""
    from agentpipe.evaluation.orchestrator_plots import FULL, steering_by_level, steering_over_time
    from agentpipe.learning.aids.orchestrator_log import chance_shares, coupling_shares, read_log
    from agentpipe.storage import write_bytes

    log = trained.left.get("orchestrator")
    if log is None:
        return {}
    decisions = read_log(log)
    if not len(decisions):
        return {}
    picture = log.with_name("orchestrator.png")
    write_bytes(picture, steering_over_time(decisions, FULL))
    own, chance = coupling_shares(decisions, ["explore", "exploit"]), chance_shares()
    chosen = math.isfinite(own["all three"])  # not where all moves were those of the floor
    shares = [
        {"combination": name, "share of moves": f"{share:.1%}" if chosen else "–", "by chance": f"{chance[name]:.1%}"}
        for name, share in own.items()
    ]
    return {
        "steering": plot(steering_over_time(decisions), "where training environments were steered"),
        **({"steering_by_level": plot(steering_by_level(decisions), "moves by levels of two kinds")} if chosen else {}),
        "steering_shares": rows(shares),
        "steering_log": dg.MetadataValue.path(str(log)),
        "steering_picture": dg.MetadataValue.path(str(picture)),
    }


def _tuning_curve(tuned: "FineTuned") -> bytes:
    from agentpipe.evaluation.run_plots import training_curve

    epochs = [epoch for epoch, _ in tuned.validations]
    scores = {"validation success": [score for _, score in tuned.validations]}
    return training_curve(epochs, scores, target=None, ylabel="success", unit="epochs")


def _behaviour_success(workspace: Workspace, cells: Iterable[str]) -> float:
    """Success share over all recorded episodes of the cells that were learned from."""
    recorded = [workspace.references.load("trajectories", cell).figures for cell in cells]
    episodes = sum(cell["episodes"] for cell in recorded)
    return float(sum(cell["success_share"] * cell["episodes"] for cell in recorded) / episodes)


def _shares(trained: "TrainingResult") -> dict[str, float]:
    """Mean shares of live and replayed samples over all updates."""
    names = sorted({name for update in trained.update_log for name in update if name.startswith("share/")})
    updates = max(1, len(trained.update_log))
    return {
        name.replace("/", "_"): round(sum(update.get(name, 0.0) for update in trained.update_log) / updates, 4)
        for name in names
    }


def _curve(trained: "TrainingResult", workspace: Workspace) -> bytes:
    from agentpipe.evaluation.run_plots import training_curve

    updates = [update for update, _ in trained.validations]
    scores = {"validation success": [score for _, score in trained.validations]}
    target = workspace.settings.gates.success_target
    return training_curve(updates, scores, target=target, ylabel="success", unit="updates")
