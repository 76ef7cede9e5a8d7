"""How far a policy's decisions are from a champion's, on the reference observations of the present table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentpipe.defs.players import rules
from agentpipe.defs.scene import scene

if TYPE_CHECKING:
    from agentpipe.defs.resources import Workspace
    from agentpipe.evaluation.drift import DriftResult
    from agentpipe.evaluation.reference import ReferenceObservations
    from agentpipe.learning.champion import Champion

REFERENCE_ROWS = 20_000


def reference_observations(workspace: Workspace) -> ReferenceObservations:
    """What the rule-based player meets in training environments: the same rows for every pair of policies."""
    from agentpipe.evaluation.reference import collect_reference

    setting = scene(workspace)
    return collect_reference(
        setting.catalog.environments("train"),
        setting.table,
        setting.profile,
        rules(setting.profile),
        seed=setting.seed,
        rows=REFERENCE_ROWS,
        threads=setting.threads,
    )


def drift_from(workspace: Workspace, package: Path, champion: Champion | None) -> DriftResult:
    """KL(candidate ‖ champion); says NO_CHAMPION where there is none."""
    from agentpipe.evaluation import drift
    from agentpipe.learning.package import PolicyPackage

    return drift.policy_drift(
        PolicyPackage.load(package),
        PolicyPackage.load(workspace.root / champion.package) if champion else None,
        reference_observations(workspace),
        limit=workspace.settings.gates.drift_kl_review,
    )
