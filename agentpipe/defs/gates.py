"""Milestone gates as asset checks: the judgement is a pure function of the domain, this is only its presentation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.graph import SHAPES
from agentpipe.errors import GateError

if TYPE_CHECKING:
    from agentpipe.evaluation.gates import GateResult

DESCRIPTIONS: dict[str, tuple[int, str]] = {
    "reset_p99": (1, "The 99th percentile of reset latency stays below its limit."),
    "start_success": (1, "Enough environments start and return a finite first observation."),
    "slow_resets": (1, "Few resets are slow."),
    "actor_loss": (2, "Behaviour cloning brings the masked cross-entropy down."),
    "critic_error": (2, "Behaviour cloning brings the critic's mean absolute error down."),
    "gradient_norm": (2, "The median gradient norm of the warm-up is not alarming."),
    "write_throughput": (3, "Writing is not much slower than for the cell's last shard."),
    "influence_coverage": (
        3,
        "One epoch of causal sampling draws nearly all of each episode's ten most influential steps.",
    ),
    "buffer_size": (3, "An episode takes as many bytes as in the cell's last shard of the same behaviour."),
    "idle_steps": (3, "Few steps are idle: no later step depends on them and they earn nothing."),
    "entropy": (4, "The policy still explores at the end of training."),
    "advantage_mean": (4, "The critic is not biased: raw advantages average near zero."),
    "circuit_breaker": (4, "Training was not broken off by a collapsing policy or an exploding value loss."),
    "plateau": (4, "Validation success still rose in its last third, or had reached the target."),
    "rewards": (
        4,
        "Rewards are of the right size, push and pull in balance, and change with what they are declared by.",
    ),
    "beats_random": (5, "On the same hold-out environments the policy beats random legal actions."),
    "success": (5, "Hold-out success reaches the limit below which no bundle is made."),
    "success_target": (5, "Hold-out success reaches the target."),
    "decision_time": (5, "A decision takes little simulated time."),
    "failures_attributed": (5, "Most failures are attributed to a cause."),
    "checkpoint_size": (6, "The policy is not too large, nor twice as large as the champion's."),
    "latency": (6, "One decision through ONNX Runtime is fast."),
    "operators": (6, "The exported graph holds no unsupported operator."),
    "parity": (6, "The exported graph and the policy give the same probabilities and values."),
    "server_available": (6, "There is a real Triton to check the bundle in; without one the check is skipped."),
    "server_loads": (6, "A real Triton takes the bundle."),
    "server_configuration": (6, "It has the configuration that was sent."),
    "server_values": (6, "Over HTTP and gRPC, 1, 7 and 64 rows in a request, it answers like the policy."),
    "server_empty_mask": (6, "A row that allows no action gets action -1."),
    "server_refusals": (6, "It refuses wrong shapes, dtypes and sizes."),
    "server_batching": (6, "It computes the rows of concurrent clients together."),
}
"""Check name → gate number and claim. Which asset carries it stands with the assets."""

INFORMATION = "not judged under this profile; shown for information"


def specs(asset: str, names: Sequence[str]) -> list[dg.AssetCheckSpec]:
    """The check specifications of one asset: all block what is downstream, when they fail as an error."""
    return [
        dg.AssetCheckSpec(
            name,
            asset=asset,
            description=f"Gate {DESCRIPTIONS[name][0]}. {DESCRIPTIONS[name][1]}",
            blocking=True,
            partitions_def=SHAPES[asset].partitions,
            metadata={"gate": DESCRIPTIONS[name][0]},
        )
        for name in names
    ]


def _finite(value: float | str) -> float | str:
    """A figure that JSON can hold: what is not finite becomes text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_result(judged: GateResult) -> dg.AssetCheckResult:
    """One judgement as the result of an asset check, with value, threshold and remedy."""
    shown = {name: value for name, value in judged.metadata.items() if value is not None}
    metadata: dict[str, Any] = {
        "gate": judged.gate,
        **{name: _finite(v) if isinstance(v, bool | int | float | str) else str(v) for name, v in shown.items()},
    }
    if judged.value is not None:
        metadata["value"] = _finite(float(judged.value))
    if judged.threshold is not None:
        metadata["threshold"] = _finite(float(judged.threshold))
    if not judged.passed:
        metadata["remedy"] = judged.remedy
    severity = dg.AssetCheckSeverity.ERROR if judged.severity == "error" else dg.AssetCheckSeverity.WARN
    return dg.AssetCheckResult(
        check_name=judged.name,
        passed=judged.passed,
        severity=severity,
        metadata=metadata,
        description=None if judged.passed else judged.remedy,
    )


def for_information(judged: Sequence[GateResult]) -> list[GateResult]:
    """The judgements, none of which blocks: where they do not pass they warn."""
    note = {"note": INFORMATION}
    return [dataclasses.replace(result, severity="warn", metadata={**result.metadata, **note}) for result in judged]


def figures(judged: Sequence[GateResult]) -> list[dict[str, Any]]:
    """The judgements as JSON, for the reference and the scoreboard."""
    return [result.to_dict() for result in judged]


def demand(judged: Sequence[dict[str, Any]], what: str) -> None:
    """Nothing is built on an error.

    Raises:
        GateError: one of the recorded judgements is an error that did not pass.
    """
    failed = [gate for gate in judged if not gate["passed"] and gate["severity"] == "error"]
    if failed:
        names = ", ".join(f"{gate['name']} (gate {gate.get('gate', '?')})" for gate in failed)
        raise GateError(f"{what}: {names} failed", remedy=str(failed[0].get("remedy", "")))
