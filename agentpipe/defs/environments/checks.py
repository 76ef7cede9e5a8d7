"""Gate 1 (pool health) and the generalisation bound of the catalogue."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.gates import specs
from agentpipe.defs.resources import Workspace

if TYPE_CHECKING:
    from agentpipe.evaluation.gates import GateResult
    from agentpipe.settings import GateSettings

HEALTH = ("reset_p99", "start_success", "slow_resets")


def health_specs() -> list[dg.AssetCheckSpec]:
    """The checks of ``environment_pool_health``."""
    return specs("environment_pool_health", HEALTH)


def health_gates(figures: Mapping[str, Any], gates: "GateSettings") -> "list[GateResult]":
    """Gate 1 over the figures of one cell."""
    from agentpipe.evaluation.gates import pool_gate

    return [judged for judged in pool_gate(figures, gates) if judged.name in HEALTH]


@dg.asset_check(
    asset="environment_catalog",
    name="generalisation_bound",
    description="N ≥ C·ln(1/δ)/ε² for the measured covering constant C: warns when the catalogue is smaller.",
    additional_deps=["disturbance_table"],
)
def generalisation_bound(workspace: Workspace) -> dg.AssetCheckResult:
    """Computes the bound from the catalogue and the table, and says what it gives; never blocks."""
    from agentpipe.environments.bound import bound_report

    table = workspace.table()
    report = bound_report(len(workspace.catalog().environments("train")), table)
    return dg.AssetCheckResult(
        passed=not report.short,
        severity=dg.AssetCheckSeverity.WARN,
        description=report.text,
        metadata={
            "covering_constant": report.constant,
            "delta": report.delta,
            "epsilon": report.epsilon,
            "required": report.required,
            "available": report.available,
            "table_version": table.version,
            "remedy": "add templates or variants, or accept a larger ε",
        },
    )
