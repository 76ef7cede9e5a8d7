"""The jobs: one for each stage of the main job, each of one kind of partition."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import dagster as dg


@dataclass(frozen=True)
class Stage:
    """Assets that are materialised together in one run, in the order in which they consume each other."""

    name: str
    assets: tuple[str, ...]
    bound: bool = False
    """The bound of the catalogue is computed as well: it needs the whole table."""
    description: str = ""


STAGES: tuple[Stage, ...] = (
    Stage("line", ("line_profile", "environment_catalog"), description="The line and the catalogue of environments."),
    Stage(
        "cell",
        ("disturbance_table", "environment_pool_health", "trajectories"),
        description="One cell: its table rows, the health of its pool, its trajectories.",
    ),
    Stage(
        "statistics",
        ("observation_statistics",),
        bound=True,
        description="Observation statistics over all cells, and the bound of the catalogue.",
    ),
    Stage("feedback_day", ("production_feedback",), description="Takes in the feedback of one day."),
    Stage(
        "candidate",
        (
            "policy_checkpoint",
            "holdout_evaluation",
            "failure_attribution",
            "policy_drift",
            "triton_bundle",
            "bundle_server_check",
            "publish",
        ),
        description="One candidate: trained, judged, exported, checked in a server and published.",
    ),
    Stage("champion", ("champion_evaluation",), description="The champion on the hold-out under the present table."),
    Stage("week", ("weekly_drift_report",), description="The drift report of one week."),
)


BOUND = dg.AssetCheckKey(dg.AssetKey("environment_catalog"), "generalisation_bound")


@functools.cache
def asset_jobs() -> list[dg.UnresolvedAssetJobDefinition]:
    """One job for each stage, so that each can be launched from the UI and by sensors as well."""
    return [
        dg.define_asset_job(stage.name, selection=_selection(stage), description=stage.description) for stage in STAGES
    ]


def _selection(stage: Stage) -> dg.AssetSelection:
    bound = dg.AssetSelection.checks(BOUND)
    selection = dg.AssetSelection.assets(*stage.assets)
    return selection | bound if stage.bound else selection - bound
