"""The bound, the test and Holm's correction against textbooks, exact bounds and simulated error rates."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from agentpipe.errors import EvaluationError
from agentpipe.evaluation.challenge_statistics import (
    Limits,
    environments_needed,
    holm,
    paired_bound,
    worse_p_value,
)

DIFFERENCES = st.lists(st.sampled_from([-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0]), min_size=2, max_size=60)
ALPHAS = st.floats(0.001, 0.5)


def student_low(values, alpha):
    """The textbook's one-sided bound, by scipy."""
    return np.mean(values) - stats.t.ppf(1 - alpha, len(values) - 1) * stats.sem(values)


# -------------------------------------------------------------------------------------------------- bound


def test_bound_by_hand():
    # D = (-1, 0, 0, 0, 1, 0): mean 0, squares 2; t(0.95; 5) = 2.015048, r = ln 20 = 2.995732.
    # a = (2.995732 + sqrt(8.974412 + 4 * 4.060418 * 6 / 5 * 2)) / 2 = 4.961219; h = a / 6.
    bound = paired_bound([-1, 0, 0, 0, 1, 0], 0.05)
    assert (bound.difference, bound.environments) == (0.0, 6)
    assert (bound.low, bound.high) == pytest.approx((-0.8269, 0.8269), abs=2e-4)


@pytest.mark.parametrize("size", [10, 300, 3_000])
def test_without_any_difference_it_is_the_rule_of_three(size):
    bound = paired_bound(np.zeros(size), 0.05)
    assert bound.low == pytest.approx(-2.995732 / size, rel=1e-6)
    # Exact: with a loss in a share x of environments, none of G is seen with probability (1 - x)**G.
    assert -bound.low >= 1 - 0.05 ** (1 / size)


@pytest.mark.parametrize("losses", [1, 2, 3, 5, 10, 30, 100, 400])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_losses_only_agree_with_the_exact_poisson_bound(losses, alpha):
    size = 1_000_000
    bound = paired_bound(np.r_[-np.ones(losses), np.zeros(size - losses)], alpha)
    exact = stats.chi2.ppf(1 - alpha, 2 * losses + 2) / 2
    assert -bound.low * size == pytest.approx(exact, rel=0.02)


def test_with_many_differences_it_is_student_s():
    values = np.random.default_rng(0).uniform(-1, 1, 20_000)
    assert paired_bound(values, 0.05).low == pytest.approx(student_low(values, 0.05), abs=1e-4)


def test_one_environment_says_nothing():
    bound = paired_bound([0.5], 0.05)
    assert (bound.difference, bound.low, bound.high) == (0.5, -np.inf, np.inf)


@given(DIFFERENCES, ALPHAS)
def test_swapping_the_two_swaps_the_bounds(values, alpha):
    bound, swapped = paired_bound(values, alpha), paired_bound([-value for value in values], alpha)
    assert (swapped.difference, swapped.low, swapped.high) == pytest.approx(
        (-bound.difference, -bound.high, -bound.low), abs=1e-12
    )


@given(DIFFERENCES, ALPHAS)
def test_the_bound_is_never_above_student_s(values, alpha):
    assert paired_bound(values, alpha).low <= student_low(values, alpha) + 1e-12


@given(DIFFERENCES, st.permutations(range(60)), st.floats(0.001, 0.25))
def test_the_bound_knows_no_order_and_widens_with_confidence(values, order, alpha):
    bound = paired_bound(values, alpha)
    shuffled = [values[index] for index in order if index < len(values)]
    assert paired_bound(shuffled, alpha).low == pytest.approx(bound.low, abs=1e-12)
    assert paired_bound(values, alpha * 2).low >= bound.low


@given(st.floats(0.001, 1), ALPHAS)
def test_an_equal_candidate_is_not_inferior_exactly_from_the_environments_needed_on(margin, alpha):
    needed = environments_needed(margin, alpha)
    assert paired_bound(np.zeros(needed), alpha).low > -margin
    if needed > 2:
        assert not paired_bound(np.zeros(needed - 1), alpha).low > -margin + 1e-12


def test_environments_needed():
    assert environments_needed(0.01, 0.05) == 300
    assert environments_needed(0.05, 0.05) == 60
    assert environments_needed(0.0, 0.05) == 2
    assert environments_needed(1.0, 0.5) == 2


@pytest.mark.parametrize("values", [[], [[0.0]], [0.0, np.nan], [0.0, 1.5], [-np.inf]])
def test_what_is_no_difference_is_refused(values):
    with pytest.raises(EvaluationError):
        paired_bound(values, 0.05)
    with pytest.raises(EvaluationError):
        worse_p_value(values, 0.05)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, np.nan, -0.1])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(EvaluationError, match="alpha"):
        paired_bound([0.0, 0.0], alpha)
    with pytest.raises(EvaluationError, match="alpha"):
        Limits(alpha=alpha)


@pytest.mark.parametrize("margin", [-0.01, np.nan, 1.5])
def test_margins_out_of_range_are_refused(margin):
    for name in ("margin", "cell_margin"):
        with pytest.raises(EvaluationError, match=name):
            Limits(**{name: margin})


# --------------------------------------------------------------------------------------------- error rates


def differences(generator, environments, episodes, wins, losses, alike):
    """D f64[environments]: episodes won, lost or neither; in a share ``alike`` of environments all alike."""
    drawn = generator.random((environments, episodes))
    same = generator.random((environments, 1)) < alike
    drawn = np.where(same, drawn[:, :1], drawn)
    return ((drawn < wins) * 1.0 - (drawn > 1 - losses)).mean(axis=1)


@pytest.mark.parametrize(
    ("environments", "episodes", "wins", "losses", "alike", "margin"),
    [
        (300, 1, 0.0, 0.01, 0.0, 0.01),  # losses only, few: where Student's bound promotes one in five
        (480, 4, 0.0, 0.01, 1.0, 0.01),
        (400, 4, 0.02, 0.03, 1.0, 0.01),
        (1_000, 4, 0.05, 0.06, 0.3, 0.01),
        (60, 2, 0.1, 0.15, 0.5, 0.05),
    ],
)
def test_a_candidate_worse_by_the_margin_is_promoted_in_at_most_alpha_of_trials(
    environments, episodes, wins, losses, alike, margin
):
    generator, trials = np.random.default_rng(5), 2_000
    promoted = sum(
        paired_bound(differences(generator, environments, episodes, wins, losses, alike), 0.05).low > -margin
        for _ in range(trials)
    )
    # At most 5 %: 100 of 2,000, and at most 129 with probability 0.999 where it is just that.
    assert promoted <= stats.binom.ppf(0.999, trials, 0.05)


def test_it_holds_for_these_environments_however_alike_those_of_a_template_are():
    """Seven of 20 templates lose 0.15 of their episodes, the others win 0.065: the mean is just the margin."""
    generator, trials = np.random.default_rng(8), 1_000
    wins = np.repeat([0.0] * 7 + [0.065] * 13, 15)
    losses = np.repeat([0.149286] * 7 + [0.0] * 13, 15)
    mean = np.mean(wins - losses)
    promoted = 0
    for _ in range(trials):
        drawn = generator.random((300, 4))
        sample = ((drawn < wins[:, None]) * 1.0 - (drawn > 1 - losses[:, None])).mean(axis=1)
        promoted += paired_bound(sample, 0.05).low > mean
    assert mean == pytest.approx(-0.01, abs=1e-6)
    assert promoted <= 0.05 * trials


def test_student_s_bound_alone_would_not_keep_to_it():
    """The negative control of the test above."""
    generator, trials = np.random.default_rng(5), 500
    samples = (differences(generator, 300, 1, 0.0, 0.01, 0.0) for _ in range(trials))
    assert sum(student_low(sample, 0.05) > -0.01 for sample in samples) > 0.12 * trials


def test_an_equal_candidate_on_the_whole_hold_out_is_promoted():
    """Power: of 12,000 episodes 5 % differ, and in half of the environments all four alike."""
    generator, trials = np.random.default_rng(6), 200
    promoted = sum(
        paired_bound(differences(generator, 3_000, 4, 0.025, 0.025, 0.5), 0.05).low > -0.01 for _ in range(trials)
    )
    assert promoted >= 0.85 * trials


@pytest.mark.parametrize(("wins", "losses", "alike"), [(0.0, 0.05, 0.0), (0.1, 0.15, 1.0)])
def test_no_cell_worse_by_more_than_its_margin_is_vetoed_in_at_most_alpha_of_trials(wins, losses, alike):
    generator, trials, vetoed = np.random.default_rng(7), 300, 0
    for _ in range(trials):
        cells = [differences(generator, 200, 4, wins, losses, alike) for _ in range(15)]
        vetoed += bool((holm([worse_p_value(cell, 0.05) for cell in cells]) < 0.05).any())
    assert vetoed <= stats.binom.ppf(0.999, trials, 0.05)


# ---------------------------------------------------------------------------------------------------- cells


def test_the_test_of_a_cell_is_scipy_s():
    values = np.random.default_rng(1).uniform(-0.6, 0.4, 50)
    expected = stats.ttest_1samp(values, -0.05, alternative="less").pvalue
    assert worse_p_value(values, 0.05) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("values", "p"), [([-1.0, -1.0], 0.0), ([0.0, 0.0], 1.0), ([-0.25, -0.25], 1.0), ([0.5, 0.5], 1.0), ([-1.0], 1.0)]
)
def test_without_spread_a_cell_is_worse_or_not(values, p):
    assert worse_p_value(values, 0.25) == p


@given(DIFFERENCES, st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_wider_margin_makes_no_cell_worse(values, margin, more):
    assert worse_p_value(values, margin + more) >= worse_p_value(values, margin) - 1e-12


# ----------------------------------------------------------------------------------------------------- Holm


def test_holm_matches_the_example_of_the_paper_s_kind():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 = 0.02, 0.03, 0.06, 0.04; running maximum.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]).shape == (0,)
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=15)


def rejected_by_steps(p_values, alpha):
    """Holm's procedure as he tells it: from the smallest on, until one is too large."""
    rejected, left = set(), sorted(range(len(p_values)), key=lambda index: p_values[index])
    while left and p_values[left[0]] * len(left) < alpha:
        rejected.add(left.pop(0))
    return rejected


@given(P_VALUES, st.floats(0.001, 0.5))
def test_holm_rejects_what_the_procedure_rejects(p_values, alpha):
    adjusted = holm(p_values)
    assume(not np.isclose(adjusted, alpha, rtol=1e-12, atol=0).any())
    assert set(np.flatnonzero(adjusted < alpha)) == rejected_by_steps(p_values, alpha)


@given(P_VALUES)
def test_holm_lies_between_uncorrected_and_bonferroni_and_keeps_the_order(p_values):
    adjusted, raw = holm(p_values), np.array(p_values)
    assert (adjusted >= raw).all()
    assert (adjusted <= np.minimum(1, raw * raw.size)).all()
    assert (np.diff(adjusted[np.argsort(raw, kind="stable")]) >= 0).all()


@pytest.mark.parametrize("p_values", [[1.2], [-0.1], [np.nan], [[0.1]]])
def test_what_is_no_p_value_is_refused(p_values):
    with pytest.raises(EvaluationError):
        holm(p_values)
