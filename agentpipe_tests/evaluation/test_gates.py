import math

import pytest

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.gates import (
    CHECK_NAMES,
    GateResult,
    blocking,
    buffer_gate,
    bundle_gate,
    evaluation_gate,
    plateau_gain,
    pool_gate,
    rewards_gate,
    training_gate,
    warmup_gate,
)
from agentpipe.learning.aids.reward_checks import range_figures, sign_figure
from agentpipe.settings import GateSettings
from agentpipe.storage import canonical_json

GATES = GateSettings()
POOL = {"reset_p99_ms": 12.0, "start_success": 1.0, "slow_reset_share": 0.0}
WARMUP = {"actor_loss": 0.4, "critic_mae": 0.2, "gradient_norm_median": 0.5}
TRAINING = {"entropy": 0.5, "advantage_mean": 0.01, "validation_curve": [0.5, 0.6, 0.7, 0.8, 0.85, 0.88]}
REWARDS = (*range_figures(0.99, 0.01), sign_figure(1.0))
BUNDLE = {
    "checkpoint_bytes": 2e6, "champion_checkpoint_bytes": None, "latency_p99_ms": 0.5, "unsupported_operators": [],
    "parity_max_abs_diff": 1e-7, "parity_value_max_rel_diff": 1e-6,
}  # fmt: skip
BUFFER = {
    "write_bytes_per_second": 80e6, "coverage": 0.95, "bytes_per_episode": 8_000.0, "behaviour": "rules",
    "idle_share": 0.1,
}  # fmt: skip
ATTRIBUTED = {"attributed": 0.95, "ci95": [0.9, 0.98], "sampled": 300, "status": "OK"}


def evaluated(success=0.91, seconds=3.0, low=0.4):
    return {
        "players": {
            "policy": {
                "success": success, "ci95": [success - 0.01, success + 0.01], "episodes": 100,
                "decision_seconds": seconds, "decision_seconds_ci95": [seconds, seconds],
            }
        },
        "paired": {"policy-random": {"difference": low + 0.01, "ci95": [low, low + 0.02], "environments": 50}},
    }  # fmt: skip


def verdicts(results):
    return {result.name: (result.passed, result.severity) for result in results}


@pytest.mark.parametrize(
    ("gate", "results"),
    [
        (1, pool_gate(POOL, GATES)),
        (2, warmup_gate(WARMUP, GATES)),
        (3, buffer_gate(BUFFER, BUFFER, GATES)),
        (4, (*training_gate(TRAINING, GATES), rewards_gate(REWARDS))),
        (5, evaluation_gate(evaluated(), ATTRIBUTED, GATES)),
        (6, bundle_gate(BUNDLE, GATES)),
    ],
)
def test_good_figures_pass_every_named_check_and_each_has_a_remedy(gate, results):
    assert tuple(result.name for result in results) == CHECK_NAMES[gate]
    assert all(result.passed and result.remedy and result.gate == gate for result in results)
    assert not blocking(results)
    canonical_json([result.to_dict() for result in results])


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({"write_bytes_per_second": 47.9e6}, {"write_throughput"}),  # 40 % of 80 MB/s lost
        ({"write_bytes_per_second": 48.1e6}, set()),
        ({"write_bytes_per_second": None}, set()),
        ({"coverage": 0.84}, {"influence_coverage"}),
        ({"coverage": 0.86}, set()),
        ({"coverage": None}, {"influence_coverage"}),
        ({"bytes_per_episode": 8_241.0}, {"buffer_size"}),
        ({"bytes_per_episode": 7_759.0}, {"buffer_size"}),
        ({"bytes_per_episode": 8_239.0}, set()),
        ({"bytes_per_episode": 9_000.0, "behaviour": "champion 1"}, set()),
        ({"idle_share": 0.16}, {"idle_steps"}),
    ],
)
def test_the_buffer_gate_compares_with_the_cells_last_shard(changed, failing):
    results = buffer_gate({**BUFFER, **changed}, BUFFER, GATES)
    assert {result.name for result in results if not result.passed} == failing
    assert all(result.severity == "warn" for result in results)


def test_the_first_shard_of_a_cell_is_the_baseline_and_says_so():
    throughput, _, size, _ = buffer_gate(BUFFER, None, GATES)
    for result in (throughput, size):
        assert result.passed
        assert result.value is None
        assert "baseline" in result.metadata["note"]


# One figure over its limit fails its own check and no other: (gate, figures, changed, check, severity).
LIMITS = [
    (pool_gate, POOL, {"reset_p99_ms": 800.1}, "reset_p99", "error"),
    (pool_gate, POOL, {"start_success": 0.9919}, "start_success", "error"),
    (pool_gate, POOL, {"slow_reset_share": 0.051}, "slow_resets", "warn"),
    (pool_gate, POOL, {"redis_round_trip_ms": 15.1}, "redis_round_trip", "warn"),
    (pool_gate, POOL, {"redis_connection_share": 0.86}, "redis_connections", "warn"),
    (pool_gate, POOL, {"cpu_share_deviation": 0.033}, "cpu_share", "warn"),
    (pool_gate, POOL, {"crash_rate": 0.0003}, "crash_rate", "error"),
    (warmup_gate, WARMUP, {"actor_loss": 0.86}, "actor_loss", "warn"),
    (warmup_gate, WARMUP, {"critic_mae": 0.33}, "critic_error", "warn"),
    (warmup_gate, WARMUP, {"gradient_norm_median": 5.1}, "gradient_norm", "warn"),
    (training_gate, TRAINING, {"entropy": 0.09}, "entropy", "warn"),
    (training_gate, TRAINING, {"advantage_mean": -0.6}, "advantage_mean", "warn"),
    (training_gate, TRAINING, {"validation_curve": [0.5, 0.8, 0.8, 0.8, 0.8, 0.8]}, "plateau", "warn"),
    (bundle_gate, BUNDLE, {"checkpoint_bytes": 851e6}, "checkpoint_size", "error"),
    (bundle_gate, BUNDLE, {"champion_checkpoint_bytes": 0.9e6}, "checkpoint_size", "error"),
    (bundle_gate, BUNDLE, {"latency_p99_ms": 10.1}, "latency", "warn"),
    (bundle_gate, BUNDLE, {"latency_p99_ms": 3801.0}, "latency", "error"),
    (bundle_gate, BUNDLE, {"unsupported_operators": ["aten::foo"]}, "operators", "error"),
    (bundle_gate, BUNDLE, {"parity_max_abs_diff": 1.1e-5}, "parity", "error"),
    (bundle_gate, BUNDLE, {"parity_value_max_rel_diff": 1.1e-5}, "parity", "error"),
]


def test_a_critic_without_rewards_to_learn_from_is_not_judged():
    results = {result.name: result for result in warmup_gate({**WARMUP, "critic_mae": None}, GATES)}
    critic = results.pop("critic_error")
    assert (critic.passed, critic.severity, critic.value, critic.metadata) == (False, "warn", None, {"judged": False})
    assert "no rewards" in critic.remedy
    assert all(result.passed for result in results.values())


@pytest.mark.parametrize(("gate", "figures", "changed", "check", "severity"), LIMITS)
def test_a_figure_beyond_its_limit_fails_its_check_alone(gate, figures, changed, check, severity):
    results = gate({**figures, **changed}, GATES)
    assert [(result.name, result.severity) for result in results if not result.passed] == [(check, severity)]
    assert blocking(results) == (severity == "error")


@pytest.mark.parametrize(
    ("gate", "figures", "name"),
    [(pool_gate, POOL, n) for n in POOL]
    + [(warmup_gate, WARMUP, n) for n in WARMUP]
    + [(training_gate, TRAINING, n) for n in ("entropy", "advantage_mean")]
    + [
        (bundle_gate, BUNDLE, n)
        for n in ("checkpoint_bytes", "latency_p99_ms", "parity_max_abs_diff", "parity_value_max_rel_diff")
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_is_always_an_error(gate, figures, name, value):
    results = gate({**figures, name: value}, GATES)
    assert blocking(results)
    canonical_json([result.to_dict() for result in results])


def test_rewards_that_keep_no_discipline_warn_and_are_named():
    short = rewards_gate((*range_figures(0.9, 0.01), sign_figure(1.3)), ["reward gradient of step: not measured"])
    assert (short.passed, short.severity, short.value, short.threshold) == (False, "warn", 2.0, 0.0)
    assert short.remedy == "rewards within 10: scale the environment's reward down"
    assert short.metadata == {
        "rewards within 10": 0.9,
        "clamped rewards": 0.01,
        "positive to negative advantages": 1.3,
        "reward gradient of step": "not measured",
        "short": "rewards within 10, positive to negative advantages",
    }


def test_rewards_that_are_no_numbers_are_an_error_and_none_at_all_are_not_good():
    assert blocking([rewards_gate((sign_figure(math.nan),))])
    nothing = rewards_gate(())
    assert (nothing.passed, nothing.severity, nothing.value) == (False, "warn", None)


def test_a_validation_that_is_not_finite_is_an_error():
    assert blocking(training_gate({**TRAINING, "validation_curve": [0.5, math.nan]}, GATES))


def test_what_does_not_apply_is_listed_and_never_passed():
    results = pool_gate({**POOL, "crash_rate": None}, GATES)
    assert "crash_rate" not in verdicts(results)
    assert "crash_rate" in results[0].metadata["not_applicable"]
    assert "redis_round_trip_ms" in results[0].metadata["not_applicable"]


def test_a_gate_without_figures_is_an_error_not_a_pass():
    for gate in (pool_gate, warmup_gate, training_gate, bundle_gate):
        with pytest.raises(EvaluationError):
            gate({}, GATES)


@pytest.mark.parametrize(("loss", "level"), [(0.85, "good"), (0.86, "short"), (1.2, "short"), (1.21, "alarming")])
def test_the_warm_up_says_how_far_off_it_is(loss, level):
    result = warmup_gate({**WARMUP, "actor_loss": loss}, GATES)[0]
    assert (result.metadata["level"], result.passed) == (level, loss <= 0.85)


def test_plateau_needs_six_looks_and_reads_the_last_third():
    assert plateau_gain([0.1] * 5) is None
    assert plateau_gain([0.1, 0.2, 0.3, 0.4, 0.45, 0.2]) == pytest.approx(0.05)
    assert training_gate({**TRAINING, "validation_curve": [0.5] * 5}, GATES)[2].passed


def test_resting_at_the_target_is_no_plateau():
    result = training_gate({**TRAINING, "validation_curve": [0.9] * 9}, GATES)[2]
    assert result.passed
    assert result.metadata["target_reached"]


@pytest.mark.parametrize(
    ("success", "expected"),
    [
        (0.91, {"success": True, "success_target": True}),
        (0.80, {"success": True, "success_target": False}),
        (0.74, {"success": False, "success_target": False}),
    ],
)
def test_success_is_judged_against_floor_and_target(success, expected):
    results = evaluation_gate(evaluated(success), ATTRIBUTED, GATES)
    found = {result.name: result.passed for result in results if result.name in expected}
    assert found == expected
    assert blocking(results) == (success < 0.75)


@pytest.mark.parametrize(("success", "stalled"), [(0.68, False), (0.70, True), (0.745, True), (0.76, False)])
def test_a_stall_around_72_is_named(success, stalled):
    results = evaluation_gate(evaluated(success), None, GATES)
    assert results[1].metadata["stalled"] is stalled


@pytest.mark.parametrize(
    ("seconds", "passed", "level"), [(5.0, True, "good"), (5.1, False, "short"), (6.3, False, "alarming")]
)
def test_decision_time_warns_and_does_not_block(seconds, passed, level):
    results = evaluation_gate(evaluated(seconds=seconds), ATTRIBUTED, GATES)
    result = next(item for item in results if item.name == "decision_time")
    assert (result.passed, result.metadata["level"], blocking(results)) == (passed, level, False)


@pytest.mark.parametrize(
    ("share", "passed", "level"),
    [(0.95, True, "good"), (0.85, True, "short"), (0.5, False, "short"), (0.2, False, "alarming")],
)
def test_attribution_warns_and_does_not_block(share, passed, level):
    results = evaluation_gate(evaluated(), {**ATTRIBUTED, "attributed": share}, GATES)
    assert (results[-1].passed, results[-1].metadata["level"], blocking(results)) == (passed, level, False)


def test_no_failures_need_no_attribution():
    none = {"attributed": None, "status": "NO_FAILURES", "ci95": [None, None], "sampled": 0}
    assert evaluation_gate(evaluated(), none, GATES)[-1].passed
    unplayable = {**none, "status": "NOT_REPLAYABLE"}
    assert not evaluation_gate(evaluated(), unplayable, GATES)[-1].passed


@pytest.mark.parametrize(
    ("low", "passed"), [(0.051, True), (0.05, False), (0.005, False), (-0.1, False), (None, False)]
)
def test_the_policy_must_surely_beat_random(low, passed):
    summary = evaluated()
    summary["paired"]["policy-random"]["ci95"][0] = low
    assert evaluation_gate(summary, None, GATES)[0].passed is passed


def test_the_demo_must_only_beat_random():
    demo = GateSettings(beats_random_only=True)
    assert verdicts(evaluation_gate(evaluated(0.3, seconds=9.0), None, demo)) == {"beats_random": (True, "error")}
    assert blocking(evaluation_gate(evaluated(0.3, low=-0.1), None, demo))


def test_an_evaluation_without_random_cannot_be_judged():
    with pytest.raises(EvaluationError, match="no comparison"):
        evaluation_gate({**evaluated(), "paired": {}}, None, GATES)


def test_only_errors_block():
    def result(passed, severity):
        return GateResult(1, "x", passed, severity, 0.0, 0.0, "r")

    assert not blocking([result(True, "error"), result(False, "warn")])
    assert blocking([result(True, "warn"), result(False, "error")])
    assert not blocking([])
