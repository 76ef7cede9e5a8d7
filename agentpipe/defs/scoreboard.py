"""What a main job came to, as one JSON document: read from the references that its assets left."""

from __future__ import annotations

from typing import Any

from agentpipe.defs.graph import SHAPES
from agentpipe.defs.jobs import STAGES
from agentpipe.defs.main_job import Outcome, keys_of
from agentpipe.defs.references import Reference, References

_TRAINING = (
    "best_validation",
    "stopped_by",
    "updates",
    "environment_steps",
    "parent",
    "steps_per_second",
    "training_seconds",
    "seconds_to_target",  # there once a look at the validation split showed the gates' target
)


def document(outcome: Outcome, wall_seconds: float) -> dict[str, Any]:
    """The figures of the candidate of ``outcome``; see the command's help for what each means."""
    references = References(outcome.home)
    found = {
        asset: [references.load(asset, key) for key in keys_of(stage, outcome.day)]
        for stage in STAGES
        for asset in stage.assets
    }
    one = {asset: loaded[0] for asset, loaded in found.items()}
    checkpoint, bundle, checked = (
        one[asset] for asset in ("policy_checkpoint", "triton_bundle", "bundle_server_check")
    )
    return {
        "ok": True,
        "home": str(outcome.home),
        "partition": outcome.candidate,
        "configuration": checkpoint.configuration,
        "splits": {split: one["environment_catalog"].figures[split] for split in ("train", "validation", "holdout")},
        "simulator_version": checkpoint.figures["simulator_version"],
        "table_version": checkpoint.figures["table_version"],
        "line_profile": _line(one["line_profile"]),
        "players": one["holdout_evaluation"].figures["players"],
        "gates": gates(found),
        "training": {name: checkpoint.figures[name] for name in _TRAINING if name in checkpoint.figures},
        "attribution": {name: value for name, value in one["failure_attribution"].figures.items() if name != "gates"},
        "drift": one["policy_drift"].figures,
        "package": {"path": str(outcome.home / checkpoint.path), "digest": checkpoint.data_version},
        "bundle": {
            **{name: value for name, value in bundle.figures.items() if name != "gates"},
            "path": str(outcome.home / bundle.path),
            "server_check": {name: value for name, value in checked.figures.items() if name != "gates"},
        },
        "champion": one["publish"].figures,
        "runs": {"materialised": len(outcome.executed), "reused": len(outcome.reused)},
        "seconds": {asset: round(sum(reference.seconds for reference in found[asset]), 3) for asset in SHAPES},
        "wall_seconds": round(wall_seconds, 1),
        "ui": f"agentpipe ui --home {outcome.home}",
    }


def _line(profile: Reference) -> dict[str, Any]:
    report = profile.figures["report"]
    return {
        "name": profile.figures["name"],
        "digest": profile.data_version,
        "rows_used": report.get("rows_used", 0),
        "modes_fitted": report.get("modes_fitted", []),
        "rows_set_aside": report.get("rows_set_aside", []),
        "report": report,
    }


def gates(found: dict[str, list[Reference]]) -> dict[str, dict[str, Any]]:
    """Every gate by check name; of a check that each cell has, the cells that do not pass, and the worst of them."""
    result: dict[str, dict[str, Any]] = {}
    for references in found.values():
        for reference in references:
            for judged in reference.figures.get("gates", ()):
                entry = result.setdefault(judged["name"], {**judged, "failed_partitions": []})
                if not judged["passed"]:
                    failed = [*entry["failed_partitions"], reference.partition]
                    result[judged["name"]] = {**judged, "failed_partitions": failed}
    return result
