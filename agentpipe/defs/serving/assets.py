"""The Triton bundle of a candidate whose gates pass, and what becomes of the candidate."""

from typing import Any

import dagster as dg

from agentpipe.defs.gates import check_result, demand, figures
from agentpipe.defs.graph import specification
from agentpipe.defs.players import champion
from agentpipe.defs.resources import Workspace
from agentpipe.defs.serving.checks import bundle_specs
from agentpipe.defs.serving.promotion import Candidate, serve_champion, settle
from agentpipe.defs.sources import champion_events
from agentpipe.defs.steps import markdown, rows, step
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
    from agentpipe.serving.latency import latency_table
    from agentpipe.serving.optimised import operator_table

    with step(context, workspace) as work:
        references, settings = workspace.references, workspace.settings
        judged = {name: references.load(name, work.partition) for name in JUDGED}
        for name, reference in judged.items():
            demand(reference.figure("gates"), f"no bundle for {work.partition}: {name}")
        reasons = _why_not(workspace)
        evaluation = judged["holdout_evaluation"]
        bundle = build_bundle(
            references.artefact("policy_checkpoint", work.partition),
            workspace.root / "bundles",
            provenance={"partition": work.partition, "configuration": work.configuration, "consumed": work.consumed},
            evaluation={"digest": evaluation.data_version, "players": evaluation.figure("players")},
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
            metadata={
                "why_not_promotable": "; ".join(reasons) or "it is",
                "operators": markdown(operator_table(bundle.export.operators, bundle.optimised)),
                "latency": markdown(latency_table(bundle.figures(), {})),
            },
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
    """Decides a candidate's fate: promoted, held for a person, refused, or to be trained again.

    The first promotable bundle whose gates and server check pass becomes the champion. Later ones play the same fresh
    episodes of the held-out environments as the champion of now, paired by environment; one that is not worse overall,
    nor in any cell beyond its limit, is promoted by compare-and-set. Drift above the limit holds it for a person: the
    job `approval`, or `agentpipe champion approve`. An old partition never promotes past a later champion. What
    production serves follows the champion: its bundle appears in the serving repository as the next version.
    """
    with step(context, workspace) as work:
        assert work.partition is not None
        demand(workspace.references.load("triton_bundle", work.partition).figure("gates"), f"{work.partition} is out")
        candidate = Candidate.of(workspace, work.partition)
        settled = settle(work, candidate)
        served = "nothing new"
        if settled.promoted:
            for event in champion_events(context.instance, workspace):
                context.instance.report_runless_asset_event(event)
            served = serve_champion(workspace)
        compared = settled.challenge
        return work.result(
            data_version=candidate.bundle.data_version,
            path=workspace.root / candidate.bundle.path,
            figures={
                "promoted": settled.promoted,
                "fate": settled.fate.action,
                "reason": settled.fate.reason,
                "champion": settled.champion.digest if settled.champion else "none",
                "bundle": candidate.bundle.path,
                "drift": settled.drift,
                "served": served,
            },
            metadata={
                "champion_history": rows(_history(workspace)),
                **({"comparison": markdown(compared.markdown())} if compared else {}),
            },
        )


def _history(workspace: Workspace) -> list[dict[str, Any]]:
    from agentpipe.learning.succession.champion import ChampionStore

    history = ChampionStore(workspace.root / "champion").history()
    return [
        {"at": c.at, "package": c.digest[:12], "kind": c.kind, "who": c.who, "reason": c.reason} for c in history[-30:]
    ]
