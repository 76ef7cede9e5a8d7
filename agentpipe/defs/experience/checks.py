"""Gate 3: the trajectory buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.defs.gates import specs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import dagster as dg

    from agentpipe.evaluation.gates import GateResult
    from agentpipe.settings import GateSettings

BUFFER = ("write_throughput", "influence_coverage", "buffer_size", "idle_steps")


def buffer_specs() -> list[dg.AssetCheckSpec]:
    """The checks of ``trajectories``."""
    return specs("trajectories", BUFFER)


def buffer_gates(figures: Mapping[str, Any], before: Mapping[str, Any] | None, gates: GateSettings) -> list[GateResult]:
    """Gate 3 over one shard; the reference of an earlier format has no such figures and is nothing to compare with."""
    from agentpipe.evaluation.gates import buffer_gate

    comparable = before if before is not None and "bytes_per_episode" in before else None
    return list(buffer_gate(figures, comparable, gates))
