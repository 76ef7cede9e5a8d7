"""Trajectories: what the behaviour policy did in the training environments of one cell."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.experience.checks import buffer_gates, buffer_specs
from agentpipe.defs.gates import check_result, figures
from agentpipe.defs.graph import specification
from agentpipe.defs.players import behaviour
from agentpipe.defs.resources import Workspace
from agentpipe.defs.scene import scene
from agentpipe.defs.steps import Step, plot, rows, step

if TYPE_CHECKING:
    from agentpipe.defs.players import Behaviour
    from agentpipe.experience.store.shard import Shard


@dg.asset(**specification("trajectories"), check_specs=buffer_specs())
def trajectories(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Recorded episodes of every training environment of one cell, as one sealed shard with an index and a graph each.

    Before there is a champion the behaviour is the rule-based player that acts at random one time in five; later it is
    the champion, sampled. The exact probability of every action is recorded, since training draws on these steps
    off-policy. A recording that was killed goes on from what it had counted. Gate 3 judges the buffer.
    """
    with step(context, workspace) as work:
        assert work.partition is not None
        player = behaviour(workspace)
        shard = _record(work, player)
        before = workspace.references.find("trajectories", work.partition)
        assert shard.quality is not None
        found = _figures(shard, shard.quality, player)
        gates = buffer_gates(found, before.figures if before else None, workspace.settings.gates)
        return work.result(
            data_version=shard.digest,
            path=shard.path,
            figures={**found, "gates": figures(gates)},
            metadata={
                "measurements": dg.MetadataValue.json(dict(shard.measurements)),
                "samplers": rows(_samplers(shard.quality)),
                "rewards": plot(_histogram(shard.quality), "rewards"),
                "outcomes": rows([dict(shard.quality["reasons"])]),
            },
            checks=[check_result(judged) for judged in gates],
        )


def _record(work: Step, player: "Behaviour") -> "Shard":
    from agentpipe.experience.record import record_trajectories

    setting, settings = scene(work.workspace, work.partition), work.workspace.settings
    assert work.partition is not None
    return record_trajectories(
        lambda some: setting.pool(some, "COLLECT", threads=1),
        player.player,
        environments=setting.catalog.environments("train", work.partition),
        table=setting.table,
        episodes_per_env=settings.evaluation.trajectory_episodes_per_env,
        # Of its own for each behaviour: a checkpoint may refer to what an earlier champion has recorded.
        out_dir=work.folder.with_name(f"{work.folder.name}-{player.ordinal}"),
        cell=work.partition,
        policy_version=player.version,
        policy_ordinal=player.ordinal,
        origin=setting.origin("COLLECT"),
        durability=settings.experience.durability,
        progress=work.progress,
    )


def _figures(shard: "Shard", measured: Mapping[str, Any], player: "Behaviour") -> dict[str, Any]:
    quality = {name: value for name, value in measured.items() if value is not None}
    shares = quality["key_fault_shares"]
    return {
        "behaviour": player.version,
        "behaviour_ordinal": player.ordinal,
        "table_version": shard.manifest["table_version"],
        **{name: value for name, value in quality.items() if not isinstance(value, Mapping)},
        "bytes_per_episode": quality["bytes"] / quality["episodes"],
        **{f"key_fault_share_{name}": value for name, value in shares.items()},
        **({"write_bytes_per_second": speed} if (speed := shard.measurements.get("write_bytes_per_second")) else {}),
    }


def _samplers(quality: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an epoch drawn by each sampler is made of."""
    return [
        {
            "sampler": name,
            "key fault share": round(share, 4),
            "idle share": round(quality["idle_shares"][name], 4),
            "coverage": round(quality["coverages"][f"{name}_stratified"] or 0.0, 4),
            "coverage, independent draws": round(quality["coverages"][f"{name}_independent"] or 0.0, 4),
        }
        for name, share in quality["key_fault_shares"].items()
    ]


def _histogram(quality: Mapping[str, Any]) -> bytes:
    from agentpipe.evaluation.run_plots import reward_histogram

    return reward_histogram(quality["reward_histogram"]["edges"], quality["reward_histogram"]["counts"])
