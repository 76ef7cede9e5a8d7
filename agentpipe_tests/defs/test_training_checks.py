"""Gate 4 looks at what a training learned from, and at the newest shard of its live rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentpipe.defs.learning.checks import TRAINING, WARM_UP, candidate_gates
from agentpipe.learning.aids.reward_checks import RewardReport
from agentpipe.learning.gates import at_most
from agentpipe.settings import GateSettings

UPDATE = {
    "losses/entropy": 0.5,
    "losses/advantage_mean": 0.0,
    "rewards/inside_ten": 1.0,
    "rewards/advantage_signs": 0.9,
    "rewards/clamped_share": 0.0,
}
GRADIENT = "reward gradient of lead minute"


def trained(**changes: Any) -> Any:
    content = {
        "update_log": (UPDATE,), "validations": (), "warm_up": None, "reason": "budget", "explanation": "done",
        "shards": ("old", "new"), **changes
    }  # fmt: skip
    return SimpleNamespace(**content)


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Shards that are shrunk; each of the others has a term that deviates by a fifth."""
    shrunk: set[str] = set()
    report = RewardReport((at_most("4", GRADIENT, 0.2, 0.15, 9.0, "correct the reward"),), (), ("signs: 0.40",))
    monkeypatch.setattr("agentpipe.experience.store.shard.is_shrunk", shrunk.__contains__)
    monkeypatch.setattr("agentpipe.experience.store.shard.open_shard", lambda path: path)
    monkeypatch.setattr("agentpipe.learning.aids.reward_checks.check_shard", lambda _: report)
    return shrunk


def rewards(result: Any) -> Any:
    judged = {gate.name: gate for gate in candidate_gates(result, None, GateSettings())}
    assert set(judged) == {*WARM_UP, *TRAINING}
    return judged["rewards"]


def test_a_deviating_reward_gradient_warns_and_is_named(shards: set[str]) -> None:
    judged = rewards(trained())
    assert (judged.passed, judged.severity, judged.value) == (False, "warn", 1.0)
    assert (judged.metadata["short"], judged.metadata[GRADIENT]) == (GRADIENT, 0.2)
    assert judged.metadata["signs"] == "0.40"
    assert judged.remedy == f"{GRADIENT}: correct the reward"


def test_without_full_records_gradients_are_not_judged_and_that_is_said(shards: set[str]) -> None:
    shards.update({"old", "new"})
    judged = rewards(trained())
    assert judged.passed
    assert judged.metadata["reward gradients"] == "not measured, no live shard holds its full records"


def test_a_training_without_an_update_has_no_rewards_to_judge(shards: set[str]) -> None:
    assert not rewards(trained(update_log=({"losses/entropy": 0.5, "losses/advantage_mean": 0.0},), shards=())).passed
