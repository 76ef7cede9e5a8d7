"""Gate 1 (pool health) and the generalisation bound of the catalogue."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.gates import specs
from agentpipe.defs.graph import SHAPES
from agentpipe.defs.resources import Workspace

if TYPE_CHECKING:
    from agentpipe.evaluation.gates import GateResult
    from agentpipe.settings import GateSettings

HEALTH = ("reset_p99", "start_success", "slow_resets")
REDIS = {
    "redis_round_trip": "The Redis that distributes the table answers quickly.",
    "redis_connections": "The Redis that distributes the table has connections left.",
}


def _redis_is_set() -> bool:
    """Whether this process's environment names a Redis: only then do the checks of one exist."""
    return any(os.environ.get(name) for name in ("AGENTPIPE_REDIS_URL", "REDIS_URL"))


def health_specs() -> list[dg.AssetCheckSpec]:
    """The checks of ``environment_pool_health``; those of Redis only where one is set."""
    return [*specs("environment_pool_health", HEALTH), *(_redis_specs() if _redis_is_set() else ())]


def _redis_specs() -> list[dg.AssetCheckSpec]:
    return [
        dg.AssetCheckSpec(
            name,
            asset="environment_pool_health",
            description=f"Gate 1. {claim}",
            partitions_def=SHAPES["environment_pool_health"].partitions,
            metadata={"gate": 1},
        )
        for name, claim in REDIS.items()
    ]


DECLARED = frozenset(spec.name for spec in health_specs())
"""The checks that the asset was defined with: Dagster wants a result for each, and for no other."""


def health_gates(figures: Mapping[str, Any], gates: "GateSettings") -> "list[GateResult]":
    """Gate 1 over the figures of one cell; what does not apply is not judged."""
    from agentpipe.evaluation.gates import pool_gate

    return [judged for judged in pool_gate(figures, gates) if judged.name in (*HEALTH, *REDIS)]


def declared(judged: "Sequence[GateResult]", names: Collection[str] = DECLARED) -> "list[GateResult]":
    """The judgements of the declared checks; one that was declared and could not be measured warns and says so."""
    from agentpipe.evaluation.gates import GateResult

    found = {result.name: result for result in judged}
    remedy = "the server tells no maxclients, or the Redis URL was unset: set it again, or reload the definitions"
    missing = {name: GateResult(1, name, False, "warn", None, None, remedy, {"note": "not measured"}) for name in names}
    return [{**missing, **found}[name] for name in (*HEALTH, *REDIS) if name in names]


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
