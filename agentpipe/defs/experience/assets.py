"""Trajectories: what the behaviour policy did in the training environments of one cell."""

import dagster as dg

from agentpipe.defs.graph import specification
from agentpipe.defs.players import behaviour
from agentpipe.defs.resources import Workspace
from agentpipe.defs.scene import scene
from agentpipe.defs.steps import step


@dg.asset(**specification("trajectories"))
def trajectories(context: dg.AssetExecutionContext, workspace: Workspace) -> dg.MaterializeResult:
    """Recorded episodes of every training environment of one cell, as one sealed shard of checksummed step records.

    Before there is a champion the behaviour is the rule-based player that acts at random one time in five; later it is
    the champion, sampled. The exact probability of every action is recorded. The bundle's parity check and the
    reference observations of the export draw on these records.
    """
    from agentpipe.experience.record import record_trajectories

    with step(context, workspace) as work:
        assert work.partition is not None
        setting, settings = scene(workspace, work.partition), workspace.settings
        environments = setting.catalog.environments("train", work.partition)
        pool = setting.pool(environments, "COLLECT", threads=1)
        player, policy_version = behaviour(workspace)
        shard = record_trajectories(
            pool,
            player,
            environments=environments,
            table=setting.table,
            episodes_per_env=settings.evaluation.trajectory_episodes_per_env,
            out_dir=work.folder,
            cell=work.partition,
            policy_version=policy_version,
            progress=work.progress,
        )
        quality = shard.quality.to_json()
        histogram = quality.pop("reward_histogram")
        return work.result(
            data_version=shard.digest,
            path=shard.path,
            figures={
                "behaviour": player.name,
                "policy_version": policy_version,
                "table_version": setting.table.version,
                **quality,
            },
            metadata={
                "measurements": dg.MetadataValue.json(shard.measurements),
                "reward_histogram": dg.MetadataValue.json(histogram),
            },
        )
