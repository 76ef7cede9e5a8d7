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
    from agentpipe.learning.result import TrainingResult


@dg.asset(**specification("policy_checkpoint"), check_specs=training_specs())
def policy_checkpoint(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """One trained policy, with everything needed to go on training.

    `nightly` and `feedback` start from the champion, `manual` from random weights and a warm-up that clones an expert.
    Training rolls out live in all training environments; a quarter of each batch is drawn from the recorded
    trajectories of all cells and judged by V-trace. The live rollouts are kept as shards, so that every update names
    the samples that it used. Early stopping watches the validation split and the best weights are kept. An interrupted
    training goes on from its last checkpoint.
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
                "live_shards": len(trained.shards),
                **_shares(trained),
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
    from agentpipe.experience.origin import home_pools
    from agentpipe.experience.store.shard import open_shard
    from agentpipe.learning.checkpoint import latest
    from agentpipe.learning.normalisation import ObservationStatistics
    from agentpipe.learning.options import training_options
    from agentpipe.learning.stream import line_source
    from agentpipe.learning.trainer import train

    workspace = work.workspace
    setting, current = scene(workspace), champion(workspace)
    initial, environments = _initial(work), setting.catalog.environments("train")
    pools = home_pools(workspace.root, threads=setting.threads)
    return train(
        setting.pool(environments, "TRAIN"),
        ObservationStatistics.load(workspace.references.artefact("observation_statistics")),
        training_options(workspace.settings),
        directory=work.folder.resolve(),
        expert=None if initial is not None else expert(),
        validate=validator(setting),
        initial=initial,
        resume=latest(work.folder.resolve() / "checkpoints"),
        recorded=[open_shard(workspace.references.artefact("trajectories", cell)) for cell in CELLS],
        source=line_source(environments, setting.table.version, setting.origin("TRAIN"), pools),
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
