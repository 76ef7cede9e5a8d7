"""Gate 5: hold-out evaluation, and the failures that are attributed to a cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from agentpipe.defs.gates import for_information, specs

if TYPE_CHECKING:
    from agentpipe.evaluation.gates import GateResult
    from agentpipe.settings import GateSettings

HOLDOUT = ("beats_random", "success", "success_target", "decision_time")
ATTRIBUTION = ("failures_attributed",)


def evaluation_specs() -> list[dg.AssetCheckSpec]:
    """The checks of ``holdout_evaluation``."""
    return specs("holdout_evaluation", HOLDOUT)


def attribution_specs() -> list[dg.AssetCheckSpec]:
    """The checks of ``failure_attribution``."""
    return specs("failure_attribution", ATTRIBUTION)


def evaluation_gates(
    summary: Mapping[str, Any], attribution: Mapping[str, Any] | None, gates: GateSettings
) -> list[GateResult]:
    """Gate 5; what a profile does not judge is computed all the same and marked as information."""
    from agentpipe.evaluation.gates import evaluation_gate

    judged = list(evaluation_gate(summary, attribution, gates))
    everything = evaluation_gate(summary, attribution, gates.model_copy(update={"beats_random_only": False}))
    names = {result.name for result in judged}
    judged += for_information([result for result in everything if result.name not in names])
    wanted = HOLDOUT if attribution is None else ATTRIBUTION
    return [result for result in judged if result.name in wanted]
