"""How far a policy's decisions are from a champion's, on the reference observations of the present table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentpipe.defs.players import rules
from agentpipe.defs.scene import scene

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.defs.resources import Workspace
    from agentpipe.evaluation.drift import DriftResult
    from agentpipe.evaluation.reference import ReferenceObservations
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.succession.champion import Champion

REFERENCE_ROWS = 20_000


def reference_observations(workspace: Workspace, policies: Sequence[PolicyPackage] = ()) -> ReferenceObservations:
    """What the rule-based player meets in training environments: the same rows for every pair of policies.

    Those of ``policies`` that have a memory watch it.
    """
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
        watching=[policy for policy in policies if policy.memory_size],
    )


def drift_from(workspace: Workspace, package: Path, champion: Champion | None) -> DriftResult:
    """KL(candidate ‖ champion); says NO_CHAMPION where there is none."""
    from agentpipe.evaluation import drift
    from agentpipe.learning.policy.package import PolicyPackage

    candidate = PolicyPackage.load(package)
    other = PolicyPackage.load(workspace.root / champion.package) if champion else None
    return drift.policy_drift(
        candidate,
        other,
        reference_observations(workspace, [candidate] if other is None else [candidate, other]),
        limit=workspace.settings.gates.drift_kl_review,
    )
