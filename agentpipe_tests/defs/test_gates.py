from __future__ import annotations

import math

import dagster as dg
import pytest

from agentpipe.defs import gates
from agentpipe.errors import GateError
from agentpipe.evaluation.gates import CHECK_NAMES, GateResult


def judged(*, passed: bool, severity: str = "error", value: float | None = 0.5) -> GateResult:
    return GateResult(
        5, "success", passed, severity, value, 0.75, "train longer", {"episodes": 300, "ci95": [0.4, 0.6]}
    )


def test_a_failing_error_blocks_and_carries_value_threshold_and_remedy() -> None:
    result = gates.check_result(judged(passed=False))
    assert not result.passed
    assert result.severity is dg.AssetCheckSeverity.ERROR
    shown = {name: value.value for name, value in result.metadata.items()}
    assert shown == {
        "gate": 5,
        "episodes": 300,
        "ci95": "[0.4, 0.6]",
        "value": 0.5,
        "threshold": 0.75,
        "remedy": "train longer",
    }


def test_a_warning_never_blocks() -> None:
    assert gates.check_result(judged(passed=False, severity="warn")).severity is dg.AssetCheckSeverity.WARN
    gates.demand([judged(passed=False, severity="warn").to_dict()], "no bundle")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_shown_as_text(value: float) -> None:
    assert gates.check_result(judged(passed=False, value=value)).metadata["value"].value == str(value)


def test_nothing_is_built_on_an_error() -> None:
    with pytest.raises(GateError, match=r"no bundle: success \(gate 5\) failed - train longer"):
        gates.demand([judged(passed=True).to_dict(), judged(passed=False).to_dict()], "no bundle")


def test_what_a_profile_does_not_judge_is_shown_as_information_and_cannot_block() -> None:
    [shown] = gates.for_information([judged(passed=False)])
    assert (shown.severity, shown.passed, shown.metadata["note"]) == ("warn", False, gates.INFORMATION)


def test_every_judgement_of_the_domain_has_a_description() -> None:
    assert {name for names in CHECK_NAMES.values() for name in names} <= set(gates.DESCRIPTIONS)
    for number, names in CHECK_NAMES.items():
        assert {gates.DESCRIPTIONS[name][0] for name in names} == {number}
