import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.statistics import (
    group_by,
    mean_interval,
    paired_difference,
    ratio_interval,
    rounded,
    student_quantile,
    success_interval,
    wilson,
)


def test_wilson_matches_the_textbook():
    # 81 of 263: Newcombe 1998, Statistics in Medicine 17, table I, method 3.
    interval = wilson(81, 263)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)


def test_wilson_stays_inside_at_the_ends():
    # 0 of 29 and 1 of 29 in the same table: 0.0000 to 0.1170, 0.0061 to 0.1718.
    assert (wilson(0, 29).low, round(wilson(0, 29).high, 4)) == (0.0, 0.1170)
    assert (round(wilson(1, 29).low, 4), round(wilson(1, 29).high, 4)) == (0.0061, 0.1718)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 4), (5, 4), (float("nan"), 4), (1, float("nan"))])
def test_wilson_refuses_nonsense(successes, n):
    with pytest.raises(EvaluationError):
        wilson(successes, n)


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062), (4, 2.7764), (30, 2.0423)])
def test_student_quantile_matches_the_table(degrees, quantile):
    assert student_quantile(degrees) == pytest.approx(quantile, abs=1e-4)


def test_ratio_matches_a_calculation_by_hand():
    # Clusters a: 2/1+1, b: 6/1, c: 4/2. A = (2, 6, 4), B = (2, 1, 2), R = 12/5 = 2.4; e = (-2.8, 3.6, -0.8);
    # var = 3/2 * (7.84 + 12.96 + 0.64) / 25 = 1.2864.
    estimate = ratio_interval([1, 6, 1, 4], [1, 1, 1, 2], ["a", "b", "a", "c"])
    half = 4.302653 * np.sqrt(1.2864)
    assert estimate.value == pytest.approx(2.4)
    assert (estimate.low, estimate.high) == pytest.approx((2.4 - half, 2.4 + half), abs=1e-5)
    assert (estimate.observations, estimate.clusters, estimate.method) == (4, 3, "clustered_t")


def test_one_cluster_says_nothing_of_its_spread():
    estimate = mean_interval([1.0, 2.0, 3.0], [7, 7, 7])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, -np.inf, np.inf)


def test_success_of_identical_twins_counts_each_pair_once():
    # Copying every episode within its cluster must not narrow the interval.
    success, cluster = np.array([1, 0, 1, 1, 0, 1, 1, 1], bool), np.arange(8)
    once = success_interval(success, cluster)
    four_times = success_interval(np.repeat(success, 4), np.repeat(cluster, 4))
    assert four_times.low == pytest.approx(once.low, abs=0.02)
    assert four_times.high == pytest.approx(once.high, abs=0.02)
    pretending = success_interval(np.repeat(success, 4))  # negative control: ignoring clusters is too sure
    assert pretending.high - pretending.low < 0.7 * (four_times.high - four_times.low)


def test_success_without_clusters_is_wilson():
    estimate = success_interval(np.arange(263) < 81)
    assert (round(estimate.low, 4), round(estimate.high, 4), estimate.method) == (0.2553, 0.3662, "wilson")


@pytest.mark.parametrize("outcome", [True, False])
def test_unanimous_success_is_not_certain(outcome):
    estimate = success_interval(np.full(40, outcome), np.repeat(np.arange(10), 4))
    bound = wilson(10 if outcome else 0, 10)
    assert (estimate.low, estimate.high) == (bound.low, bound.high)


def test_success_interval_covers_the_truth_19_times_in_20():
    rng, covered, trials = np.random.default_rng(5), 0, 600
    cluster = np.repeat(np.arange(60), 4)
    for _ in range(trials):
        # beta(4.5, 0.5) per environment: mean 0.9 and strong likeness within an environment
        chance = np.repeat(rng.beta(4.5, 0.5, size=60), 4)
        estimate = success_interval(rng.random(240) < chance, cluster)
        covered += estimate.low <= 0.9 <= estimate.high
    assert 0.925 <= covered / trials <= 0.975


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=60))
def test_success_interval_contains_the_share_and_ignores_order(rows):
    success, cluster = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    estimate = success_interval(success, cluster)
    assert 0 <= estimate.low <= success.mean() + 1e-12
    assert success.mean() - 1e-12 <= estimate.high <= 1
    order = np.random.default_rng(len(rows)).permutation(len(rows))
    again = success_interval(success[order], cluster[order])
    assert again.low == pytest.approx(estimate.low)


def test_paired_difference_is_that_of_environment_means():
    a, b = np.array([1, 1, 1, 0, 1, 1], bool), np.array([1, 0, 0, 0, 1, 0], bool)
    estimate = paired_difference(a, b, [0, 0, 1, 1, 2, 2])
    # per environment 0.5, 0.5, 0.5: no spread at all
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.5, 0.5)
    wider = paired_difference(a, b, [0, 1, 2, 3, 4, 5])  # differences 0 1 1 0 0 1: mean 0.5, standard error 0.2236
    assert (wider.low, wider.high) == pytest.approx((0.5 - 2.570582 * 0.2236068, 0.5 + 2.570582 * 0.2236068), abs=1e-5)


def test_pairing_is_sharper_than_two_separate_intervals():
    rng = np.random.default_rng(0)
    hard = rng.random(2000)
    a, b = hard < 0.8, hard < 0.78
    paired = paired_difference(a, b, np.arange(2000))
    alone = success_interval(a, np.arange(2000))
    assert paired.low > 0
    assert paired.high - paired.low < alone.high - alone.low


@pytest.mark.parametrize("bad", [[], [[1.0]], [np.nan], [np.inf, 1.0]])
def test_empty_and_non_finite_values_are_refused(bad):
    for function in (mean_interval, success_interval):
        with pytest.raises(EvaluationError):
            function(bad, np.zeros(np.size(bad)))


def test_the_row_of_the_first_bad_value_is_named():
    with pytest.raises(EvaluationError, match="row 2"):
        mean_interval([1.0, 2.0, np.nan, np.nan], np.zeros(4))


def test_lengths_must_agree_and_denominators_be_positive():
    with pytest.raises(EvaluationError, match="expected 2"):
        ratio_interval([1, 2], [1], [0, 0])
    with pytest.raises(EvaluationError, match="cluster has shape"):
        success_interval([True, False], [0])
    with pytest.raises(EvaluationError, match="more than zero"):
        ratio_interval([1, 2], [0, 0], [0, 1])


def test_group_by_keeps_every_row_once_in_order():
    groups = group_by(np.array(["b", "a", "b", "c"]))
    assert {name: rows.tolist() for name, rows in groups.items()} == {"a": [1], "b": [0, 2], "c": [3]}
    assert group_by(np.empty(0, dtype=str)) == {}


def test_rounded_makes_json_of_anything():
    assert rounded({"a": np.float32(0.5), "b": [np.inf, (1.23456789,)], "c": np.int64(3), "d": "x", "e": True}) == {
        "a": 0.5, "b": [None, [1.234568]], "c": 3, "d": "x", "e": True,
    }  # fmt: skip
