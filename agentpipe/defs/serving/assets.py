"""The Triton bundle of a candidate whose gates pass, and the first champion."""

from typing import Any

import dagster as dg

from agentpipe.defs.gates import check_result, demand, figures
from agentpipe.defs.graph import specification
from agentpipe.defs.players import champion
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving.checks import bundle_specs
from agentpipe.defs.steps import rows, step
from agentpipe.environments.parameters import CELLS

JUDGED = ("policy_checkpoint", "holdout_evaluation", "failure_attribution")


@dg.asset(**specification("triton_bundle"), check_specs=bundle_specs())
def triton_bundle(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """A Triton model repository of the candidate, published whole or not at all.

    One ONNX graph from raw observation, last action, time and mask to action, probabilities and value; compared with
    the policy on recorded and extreme observations; configuration, provenance and checksums beside it. An error in
    gates 2, 4 or 5 means no bundle: the blocking checks stop it, and it looks at their records itself. The checkpoint
    stays.
    """
    from agentpipe.evaluation.gates import bundle_gate
    from agentpipe.serving.bundle import build_bundle, gate_figures
    from agentpipe.serving.inputs import recorded_inputs

    with step(context, workspace) as work:
        references, settings = workspace.references, workspace.settings
        judged = {name: references.load(name, work.partition) for name in JUDGED}
        for name, reference in judged.items():
            demand(reference.figures["gates"], f"no bundle for {work.partition}: {name}")
        reasons = _why_not(workspace)
        evaluation = judged["holdout_evaluation"]
        bundle = build_bundle(
            references.artefact("policy_checkpoint", work.partition),
            workspace.root / "bundles",
            provenance={"partition": work.partition, "configuration": work.configuration, "consumed": work.consumed},
            evaluation={"digest": evaluation.data_version, "players": evaluation.figures["players"]},
            promotable=not reasons,
            reasons=reasons,
            recorded=recorded_inputs([references.artefact("trajectories", cell) for cell in CELLS], seed=settings.seed),
            seed=settings.seed,
            progress=work.progress,
        )
        current = champion(workspace)
        size = current.figures.get("package_bytes") if current else None
        gates = list(bundle_gate(gate_figures(bundle, champion_package_bytes=size), settings.gates))
        return work.result(
            data_version=bundle.digest,
            path=bundle.path,
            figures={**bundle.figures(), "reasons": reasons, "gates": figures(gates)},
            metadata={"why_not_promotable": "; ".join(reasons) or "it is"},
            checks=[check_result(result) for result in gates],
        )


def _why_not(workspace: Workspace) -> list[str]:
    """Why a bundle made under these settings may not become champion; empty where it may."""
    settings = workspace.settings
    reasons = {
        "the demo profile is for a first look": settings.profile == "demo",
        "its gates only ask that it beats random": settings.gates.beats_random_only,
        "it was judged on a part of the hold-out only": settings.evaluation.environments is not None,
    }
    return [reason for reason, applies in reasons.items() if applies]


@dg.asset(**specification("publish"))
def publish(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Makes the first promotable bundle whose gates pass the champion.

    Where there is a champion already, or the bundle is not promotable, nothing is changed and the reason is shown:
    whether a later candidate is better is decided by a comparison, not here.
    """
    from agentpipe.learning.champion import ChampionStore

    with step(context, workspace) as work:
        references = workspace.references
        bundle = references.load("triton_bundle", work.partition)
        demand(bundle.figures["gates"], f"{work.partition} is not published")
        checkpoint = references.load("policy_checkpoint", work.partition)
        current = champion(workspace)
        promoted = bool(bundle.figures["promotable"]) and current is None
        if promoted:
            evaluation = references.load("holdout_evaluation", work.partition)
            current = ChampionStore(workspace.root / "champion").promote(
                checkpoint.data_version,
                checkpoint.path,
                expected=None,
                reason="the first bundle whose gates pass",
                who=f"publish[{work.partition}]",
                figures={
                    "bundle": bundle.path,
                    "bundle_digest": bundle.data_version,
                    "package_bytes": bundle.figures["package_bytes"],
                    "success": evaluation.figures["success"],
                },
            )
            context.instance.report_runless_asset_event(_champion_event(current.digest, bundle.path, work.partition))
        figures_ = {"promoted": promoted, "champion": current.digest if current else "none", "bundle": bundle.path}
        reason = _outcome(
            promoted=promoted, promotable=bool(bundle.figures["promotable"]), reasons=bundle.figures["reasons"]
        )
        return work.result(
            data_version=bundle.data_version,
            path=workspace.root / bundle.path,
            figures={**figures_, "reason": reason},
            metadata={"champion_history": rows(_history(workspace))},
        )


def _champion_event(digest: str, bundle: str, partition: str | None) -> dg.AssetMaterialization:
    metadata = {"bundle": bundle, "candidate": str(partition)}
    return dg.AssetMaterialization("champion", metadata=metadata, tags={"dagster/data_version": digest})


def _outcome(*, promoted: bool, promotable: bool, reasons: list[str]) -> str:
    if promoted:
        return "the first promotable bundle whose gates pass is the champion"
    if not promotable:
        return f"not promotable: {'; '.join(reasons)}"
    return "there is a champion already; a candidate replaces it only after a comparison"


def _history(workspace: Workspace) -> list[dict[str, Any]]:
    from agentpipe.learning.champion import ChampionStore

    history = ChampionStore(workspace.root / "champion").history()
    return [{"at": c.at, "package": c.digest[:12], "who": c.who, "reason": c.reason} for c in history]
