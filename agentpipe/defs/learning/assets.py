"""The policy: warm-up by cloning, then the segment-wise clipped policy gradient, with a checkpoint that resumes."""

from typing import TYPE_CHECKING

import dagster as dg

from agentpipe.defs.gates import check_result, figures
from agentpipe.defs.graph import specification
from agentpipe.defs.learning.checks import training_gates, training_specs
from agentpipe.defs.partitions import split_candidate
from agentpipe.defs.players import champion, expert, validator
from agentpipe.defs.resources import Workspace
from agentpipe.defs.scene import scene
from agentpipe.defs.steps import Step, plot, step
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import LearningError

if TYPE_CHECKING:
    from agentpipe.learning.package import PolicyPackage
    from agentpipe.learning.trainer import TrainingResult


@dg.asset(**specification("policy_checkpoint"), check_specs=training_specs())
def policy_checkpoint(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """One trained policy, with everything needed to go on training.

    `nightly` and `feedback` start from the champion, `manual` from random weights and a warm-up that clones an expert.
    Training rolls out live in all training environments; early stopping watches the validation split and the best
    weights are kept. The recorded trajectories of all cells are the experience that this training had before it began:
    the success of their behaviour is the figure it must improve on. An interrupted training goes on from its last
    checkpoint.
    """
    with step(context, workspace) as work:
        trained = _train(work)
        if trained.reason == "interrupted":
            raise LearningError("training was interrupted", remedy="run it again: it goes on from its last checkpoint")
        gates = training_gates(trained, workspace.settings.gates)
        package = trained.package
        return work.result(
            data_version=package.digest,
            path=trained.package_path,
            figures={
                "best_validation": trained.best_validation if trained.best_validation is not None else "not validated",
                "stopped_by": trained.reason,
                "updates": trained.updates,
                "environment_steps": trained.environment_steps,
                "parent": package.provenance.get("parent") or "none",
                "behaviour_success": _behaviour_success(workspace),
                "simulator_version": package.simulator_version,
                "table_version": package.provenance["table_version"],
                "checkpoint": str(trained.checkpoint.relative_to(workspace.root.resolve())),
                "gates": figures(gates),
            },
            metadata={
                "explanation": trained.explanation,
                "steps_per_second": trained.steps_per_second,
                "validation": plot(_curve(trained, workspace), "validation success"),
                "tensorboard": dg.MetadataValue.path(str(trained.tensorboard)),
            },
            checks=[check_result(judged) for judged in gates],
        )


def _train(work: Step) -> "TrainingResult":
    from agentpipe.environments.layout import SIMULATOR_VERSION
    from agentpipe.learning.checkpoint import latest
    from agentpipe.learning.normalisation import ObservationStatistics
    from agentpipe.learning.options import training_options
    from agentpipe.learning.trainer import train

    workspace = work.workspace
    setting, current = scene(workspace), champion(workspace)
    initial = _initial(work)
    return train(
        setting.pool(setting.catalog.environments("train"), "TRAIN"),
        ObservationStatistics.load(workspace.references.artefact("observation_statistics")),
        training_options(workspace.settings),
        directory=work.folder.resolve(),
        expert=None if initial is not None else expert(),
        validate=validator(setting),
        initial=initial,
        resume=latest(work.folder.resolve() / "checkpoints"),
        parent=current.digest if current else None,
        provenance={
            "partition": work.partition,
            "simulator_version": SIMULATOR_VERSION,
            "table_version": setting.table.version,
            "line_profile": setting.profile.digest,
            "catalog": setting.catalog.digest,
            "trajectories": {cell: workspace.references.version("trajectories", cell) for cell in CELLS},
        },
        configuration_digest=work.configuration,
        progress=work.progress,
    )


def _initial(work: Step) -> "PolicyPackage | None":
    """The champion's package for a retraining, nothing for a manual training or before the first champion."""
    from agentpipe.learning.package import PolicyPackage

    assert work.partition is not None
    current = champion(work.workspace)
    if split_candidate(work.partition)[1] == "manual" or current is None:
        return None
    return PolicyPackage.load(work.workspace.root / current.package)


def _behaviour_success(workspace: Workspace) -> float:
    """Success share over all recorded episodes of all cells."""
    recorded = [workspace.references.load("trajectories", cell).figures for cell in CELLS]
    episodes = sum(cell["episodes"] for cell in recorded)
    return float(sum(cell["success_share"] * cell["episodes"] for cell in recorded) / episodes)


def _curve(trained: "TrainingResult", workspace: Workspace) -> bytes:
    from agentpipe.evaluation.run_plots import training_curve

    updates = [update for update, _ in trained.validations]
    scores = {"validation success": [score for _, score in trained.validations]}
    target = workspace.settings.gates.success_target
    return training_curve(updates, scores, target=target, ylabel="success", unit="updates")
