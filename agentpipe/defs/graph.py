"""The shape of the asset graph, in one table: who consumes whom, in which group, under which code version.

Dependencies of the assets and what the main job regards as finished are both derived from it, so they cannot disagree.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from agentpipe.defs.partitions import candidates, cells, days, weeks


class Take(enum.Enum):
    """Which partitions of an upstream asset one partition consumes."""

    SAME = "the same partition (or both have none)"
    WHOLE = "the asset has no partitions"
    ALL = "every partition"
    DAY = "the partition of its day"
    WEEK = "every day of its week"
    WEEK_OF_CANDIDATES = "every day of its week, every trigger"


@dataclass(frozen=True)
class Shape:
    """One asset: its place in the graph and what decides that it must run again."""

    group: str
    kinds: frozenset[str]
    consumes: Mapping[str, Take]
    partitions: dg.PartitionsDefinition[Any] | None = None
    code_version: str = "1"
    settings: tuple[str, ...] = ()
    """Fields of the settings that change its content; ``*`` stands for all that change results."""
    files: tuple[str, ...] = ()
    """Files of the data folder whose content it reads."""


_SIZES = ("profile", "seed", "evaluation", "training.environments")
_python = frozenset({"python"})

SHAPES: dict[str, Shape] = {
    "line_profile": Shape(
        "environments",
        frozenset({"python", "csv"}),
        {"machine_history": Take.WHOLE},
        files=("line_profile.json",),
    ),
    "environment_catalog": Shape(
        "environments",
        frozenset({"python", "csv"}),
        {"line_profile": Take.WHOLE},
        settings=("evaluation.environments", "training.environments"),
        files=("templates.csv", "splits.csv"),
    ),
    "disturbance_table": Shape(
        "environments", frozenset({"parquet", "csv"}), {"table_source": Take.SAME}, partitions=cells
    ),
    "environment_pool_health": Shape(
        "environments",
        frozenset({"numba"}),
        {"disturbance_table": Take.SAME, "line_profile": Take.WHOLE, "environment_catalog": Take.WHOLE},
        partitions=cells,
        settings=_SIZES,
    ),
    "trajectories": Shape(
        "experience",
        frozenset({"numba"}),
        {"environment_pool_health": Take.SAME, "line_profile": Take.WHOLE, "environment_catalog": Take.WHOLE},
        partitions=cells,
        code_version="2",
        settings=_SIZES,
    ),
    "observation_statistics": Shape(
        "environments",
        frozenset({"numba"}),
        {"environment_catalog": Take.WHOLE, "line_profile": Take.WHOLE, "disturbance_table": Take.ALL},
        settings=_SIZES,
    ),
    "production_feedback": Shape("feedback", frozenset({"parquet"}), {"feedback_inbox": Take.WHOLE}, partitions=days),
    "policy_checkpoint": Shape(
        "learning",
        frozenset({"pytorch"}),
        {"trajectories": Take.ALL, "observation_statistics": Take.WHOLE, "production_feedback": Take.DAY},
        partitions=candidates,
        code_version="3",
        settings=("*",),
    ),
    "holdout_evaluation": Shape(
        "evaluation",
        frozenset({"pytorch", "parquet"}),
        {"policy_checkpoint": Take.SAME},
        partitions=candidates,
        settings=("*",),
    ),
    "failure_attribution": Shape(
        "evaluation",
        frozenset({"numba", "parquet"}),
        {"holdout_evaluation": Take.SAME},
        partitions=candidates,
        settings=("*",),
    ),
    "policy_drift": Shape(
        "evaluation",
        frozenset({"pytorch"}),
        {"policy_checkpoint": Take.SAME},
        partitions=candidates,
        code_version="2",
        settings=("*",),
    ),
    "weekly_drift_report": Shape(
        "evaluation",
        _python,
        {"policy_drift": Take.WEEK_OF_CANDIDATES, "production_feedback": Take.WEEK},
        partitions=weeks,
        code_version="2",
        settings=("gates", "seed", "feedback.minimum_labels"),
    ),
    "triton_bundle": Shape(
        "deployment",
        frozenset({"onnx"}),
        {
            "policy_checkpoint": Take.SAME,
            "holdout_evaluation": Take.SAME,
            "failure_attribution": Take.SAME,
            "policy_drift": Take.SAME,
        },
        partitions=candidates,
        settings=("*",),
    ),
    "bundle_server_check": Shape(
        "deployment",
        frozenset({"onnx"}),
        {"triton_bundle": Take.SAME, "triton_server": Take.WHOLE},
        partitions=candidates,
    ),
    "publish": Shape(
        "deployment",
        _python,
        {"triton_bundle": Take.SAME, "bundle_server_check": Take.SAME},
        partitions=candidates,
        code_version="3",
        settings=("*", "serving.skipped_check_allowed"),
    ),
    "champion_evaluation": Shape(
        "evaluation",
        frozenset({"pytorch", "parquet"}),
        {"champion": Take.WHOLE, "disturbance_table": Take.ALL, "line_profile": Take.WHOLE},
        settings=_SIZES,
    ),
}


@dataclass(frozen=True)
class External:
    """What comes from outside, or leads outside."""

    group: str
    description: str
    deps: tuple[str, ...] = ()
    partitions: dg.PartitionsDefinition[Any] | None = None


EXTERNAL: dict[str, External] = {
    "table_source": External(
        "environments",
        "The disturbance table that an engineer edits: the copy in the home, or the file that a setting names. The "
        "data version of a cell covers its own rows.",
        partitions=cells,
    ),
    "machine_history": External(
        "environments",
        "A machine-history table given with `--machine-history`; without one the project's own line profile is used.",
    ),
    "feedback_inbox": External(
        "feedback",
        "Decisions of the running policy and what people said of them: files dropped into the home's inbox, or a Redis "
        "stream.",
    ),
    "triton_server": External(
        "deployment",
        "The Triton that bundles are checked in: the one at `AGENTPIPE_TRITON_URL`, else the one that "
        "`agentpipe bundle install-triton` installs. Without one checks are skipped and nothing is promoted.",
    ),
    "champion": External(
        "deployment",
        "The policy that is in use: one pointer, moved by compare-and-set. It closes the loop outside the graph, since "
        "nightly and incremental trainings start from it.",
        deps=("publish",),
    ),
    "agent_incidents": External(
        "deployment",
        "Repair reports of the agents at their lines: what was lost, what it did to decisions, what was done, what to "
        "do by hand. One event a report, and one more when it is over.",
        deps=("champion",),
    ),
    "agent_shadow": External(
        "deployment",
        "A candidate that decides beside the champion without acting: agreement, KL and latency, by segment.",
        deps=("champion",),
    ),
}

_MAPPINGS: dict[Take, dg.PartitionMapping | None] = {
    Take.SAME: None,
    Take.WHOLE: None,
    Take.ALL: dg.AllPartitionMapping(),
    Take.DAY: dg.MultiToSingleDimensionPartitionMapping("day"),
    Take.WEEK: dg.TimeWindowPartitionMapping(allow_nonexistent_upstream_partitions=True),
    Take.WEEK_OF_CANDIDATES: dg.MultiToSingleDimensionPartitionMapping("day"),
}


def specification(name: str) -> dict[str, Any]:
    """The keyword arguments of ``@dg.asset`` for the asset ``name``."""
    shape = SHAPES[name]
    return {
        "name": name,
        "group_name": shape.group,
        "owners": ["team:agentpipe"],
        "kinds": set(shape.kinds),
        "code_version": shape.code_version,
        "partitions_def": shape.partitions,
        "deps": [dg.AssetDep(up, partition_mapping=_MAPPINGS[take]) for up, take in shape.consumes.items()],
    }


def external_assets() -> list[dg.AssetSpec]:
    """The assets of :data:`EXTERNAL`, which nothing here materialises."""
    return [
        dg.AssetSpec(
            name,
            deps=list(external.deps),
            group_name=external.group,
            description=external.description,
            owners=["team:agentpipe"],
            kinds={"file"},
            partitions_def=external.partitions,
        )
        for name, external in EXTERNAL.items()
    ]
