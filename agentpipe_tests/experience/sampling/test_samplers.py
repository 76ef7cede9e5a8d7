"""Claims that every sampler keeps, then what is special of each."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from agentpipe.experience.sampling.causal import CausalSampler
from agentpipe.experience.sampling.draw import SamplingError
from agentpipe.experience.sampling.prioritised import LEAST_ERROR, PrioritisedSampler
from agentpipe.experience.sampling.uniform import UniformSampler

from .naive import exact_causal


def influence(size):
    return np.where(np.arange(size) % 3 == 0, np.arange(size), 0.0)


def prioritised(size, seed):
    sampler = PrioritisedSampler(size, seed=seed)
    sampler.update(np.arange(size), influence(size) + 0.01)
    return sampler


KINDS = {
    "uniform": lambda size, seed: UniformSampler(size, seed=seed, stratified=False),
    "uniform, stratified": lambda size, seed: UniformSampler(size, seed=seed),
    "causal": lambda size, seed: CausalSampler(influence(size), seed=seed, stratified=False),
    "causal, stratified": lambda size, seed: CausalSampler(influence(size), seed=seed),
    "prioritised": prioritised,
}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def test_frequencies_are_the_probabilities(make):
    sampler, size, draws = make(60, 11), 60, 3_000
    counts = np.bincount(np.concatenate([sampler.draw(60).ids for _ in range(draws)]), minlength=size)
    expected = sampler.probabilities() * draws * 60
    assert expected.min() > 0
    assert chisquare(counts, expected).pvalue > 0.001  # stratified draws vary less: they pass all the more


def test_ids_and_weights_have_their_types_and_range(make):
    draw = make(37, 1).draw(500)
    assert (draw.ids.dtype, draw.weights.dtype) == (np.int64, np.float32)
    assert draw.ids.shape == draw.weights.shape == (500,)
    assert draw.ids.min() >= 0
    assert draw.ids.max() < 37
    assert (draw.weights > 0).all()
    assert np.isfinite(draw.weights).all()


def test_the_same_seed_draws_the_same_and_another_does_not(make):
    first, again, other = make(1_000, 5), make(1_000, 5), make(1_000, 6)
    drawn = [sampler.draw(400).ids.tolist() for sampler in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert first.draw(400).ids.tolist() != drawn[0]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(1, 90), max_size=6), st.integers(0, 2**63 - 1))
def test_a_restored_sampler_goes_on_as_if_nothing_had_happened(kind, counts, seed):
    sampler, fresh = KINDS[kind](50, seed), KINDS[kind](50, seed)
    for count in counts:
        sampler.draw(count)
    fresh.restore(sampler.state())
    ours, theirs = sampler.draw(120), fresh.draw(120)
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.weights.tolist() == theirs.weights.tolist()


def test_no_step_starves(make):
    sampler = make(30, 2)
    drawn = np.concatenate([sampler.draw(60).ids for _ in range(3_000)])
    assert len(np.unique(drawn)) == 30


def test_an_empty_set_and_an_empty_draw_are_refused(make):
    with pytest.raises(SamplingError, match="no steps"):
        make(0, 1)
    with pytest.raises(SamplingError, match="draw of 0"):
        make(3, 1).draw(0)
    with pytest.raises(SamplingError, match="seed"):
        make(3, -1)


@pytest.mark.parametrize("change", [{"name": "other"}, {"seed": 2}, {"size": 31}])
def test_a_state_of_another_sampler_is_refused(make, change):
    with pytest.raises(SamplingError, match=next(iter(change))):
        make(30, 1).restore({**make(30, 1).state(), **change})


@settings(deadline=None)
@given(st.sampled_from([name for name in KINDS if name != "prioritised"]), st.lists(st.integers(1, 40), min_size=1))
def test_how_draws_are_divided_into_calls_does_not_matter(kind, counts):
    whole = KINDS[kind](23, 9).draw(sum(counts)).ids
    sampler = KINDS[kind](23, 9)
    assert np.concatenate([sampler.draw(count).ids for count in counts]).tolist() == whole.tolist()


def test_an_epoch_of_uniform_draws_is_a_permutation():
    sampler = UniformSampler(1_000, seed=4)
    first, second = sampler.draw(1_000), sampler.draw(1_000)
    assert sorted(first.ids) == sorted(second.ids) == list(range(1_000))
    assert first.ids.tolist() != second.ids.tolist()
    assert first.weights.tolist() == [1.0] * 1_000


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e20), min_size=1, max_size=50), st.floats(1e-6, 1))
def test_causal_probabilities_are_those_of_the_definition(values, floor):
    found = CausalSampler(values, seed=0, floor=floor, alpha=1.0).probabilities()
    exact = exact_causal(values, floor)
    assert all(abs(Fraction(p) - q) <= Fraction(3, 2**32) for p, q in zip(found.tolist(), exact, strict=True))


def test_causal_sampling_without_any_influence_is_uniform():
    sampler = CausalSampler(np.zeros(8), seed=0)
    assert sampler.probabilities().tolist() == [1 / 8] * 8
    assert sampler.draw(8).weights.tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (1.0, [0.65, 0.25, 0.05, 0.05]),  # 0.8 x 3 : 1, and a floor of 0.2 over four
        (0.5, [0.05 + 0.8 * 2 / 3, 0.05 + 0.8 / 3, 0.05, 0.05]),  # influence 4 : 1 has roots 2 : 1
        (0.0, [0.45, 0.45, 0.05, 0.05]),  # whatever has influence is alike; what has none keeps the floor
    ],
)
def test_the_exponent_tempers_influence(alpha, expected):
    influences = [4.0, 1.0, 0.0, 0.0] if alpha == 0.5 else [3.0, 1.0, 0.0, 0.0]
    found = CausalSampler(influences, seed=0, floor=0.2, alpha=alpha).probabilities()
    assert found.tolist() == pytest.approx(expected, abs=1e-8)


def test_causal_weights_undo_the_preference():
    """floor 0.5, influence 3 : 1 : 0 : 0 gives n p = 2, 1, 0.5, 0.5, and weights 1 / (n p) with mean 1 over draws."""
    sampler = CausalSampler([3.0, 1.0, 0.0, 0.0], seed=1, floor=0.5, alpha=1.0)
    draw = sampler.draw(4_000)
    by_id = {int(step): float(weight) for step, weight in zip(draw.ids, draw.weights, strict=True)}
    assert by_id == pytest.approx({0: 0.5, 1: 1.0, 2: 2.0, 3: 2.0}, rel=1e-6)
    assert draw.weights.mean() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_causal_weights_have_mean_one_over_draws(beta):
    sampler = CausalSampler(influence(100), seed=1, beta=beta)
    assert sampler.draw(200_000).weights.mean(dtype=np.float64) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    "arguments",
    [
        {"floor": 0.0},
        {"floor": 1.1},
        {"beta": -0.1},
        {"beta": 1.1},
        {"floor": np.nan},
        {"beta": np.nan},
        {"alpha": -0.1},
        {"alpha": 1.1},
        {"alpha": np.nan},
    ],
)
def test_causal_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(SamplingError, match=next(iter(arguments))):
        CausalSampler([1.0], seed=0, **arguments)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_influence_that_is_none_is_refused(bad):
    with pytest.raises(SamplingError, match="influence"):
        CausalSampler([1.0, bad], seed=0)


def test_prioritised_probabilities_are_those_of_the_paper():
    sampler = PrioritisedSampler(3, seed=0)
    sampler.update([0, 1, 2], [1.0, -2.0, 4.0])
    powers = np.array([1.0, 2.0, 4.0]) ** 0.6
    np.testing.assert_allclose(sampler.probabilities(), powers / powers.sum(), rtol=1e-6)
    draw = sampler.draw(10_000)
    weights = (3 * powers / powers.sum()) ** -0.4
    np.testing.assert_allclose(draw.weights, (weights / weights.max())[draw.ids], rtol=1e-5)


def test_a_step_never_updated_has_the_largest_priority_there_ever_was():
    sampler = PrioritisedSampler(2, seed=0)
    assert sampler.priorities().tolist() == [1.0, 1.0]
    sampler.update([0], [100.0])
    sampler.update([0], [0.0])
    sampler.grow(20)
    largest = (100.0 + LEAST_ERROR) ** 0.6
    np.testing.assert_allclose(sampler.priorities(), [LEAST_ERROR**0.6, 1.0] + [largest] * 18, rtol=1e-12)
    with pytest.raises(SamplingError, match="19 steps"):
        sampler.grow(19)


def test_a_step_learned_perfectly_can_still_come():
    sampler = PrioritisedSampler(4, seed=0)
    sampler.update(np.arange(4), np.zeros(4))
    assert set(sampler.draw(100).ids.tolist()) == {0, 1, 2, 3}


def test_prioritised_draws_take_one_from_each_equal_part():
    sampler = PrioritisedSampler(1_000, seed=3)
    assert (sampler.draw(1_000).ids == np.arange(1_000)).all()


def test_weights_follow_an_annealed_beta():
    sampler = PrioritisedSampler(2, seed=0, alpha=1.0)
    sampler.update([0, 1], [1.0, 3.0])
    sampler.beta = 1.0
    assert sorted(set(sampler.draw(100).weights.tolist())) == pytest.approx([1 / 3, 1.0], rel=1e-4)
    sampler.beta = 0.0
    assert set(sampler.draw(100).weights.tolist()) == {1.0}


@pytest.mark.parametrize(
    ("ids", "errors"),
    [([0, 3], [1, 1]), ([0, -1], [1, 1]), ([0, 1], [1, np.nan]), ([0, 1], [1, np.inf]), ([0], [1, 2]), ([[0]], [[1]])],
)
def test_updates_that_make_no_sense_change_nothing(ids, errors):
    sampler = PrioritisedSampler(3, seed=0)
    with pytest.raises(SamplingError):
        sampler.update(ids, errors)
    assert sampler.priorities().tolist() == [1.0, 1.0, 1.0]
    assert sampler.largest == 1.0


@pytest.mark.parametrize("arguments", [{"alpha": -0.1}, {"alpha": 1.1}, {"beta": 2.0}, {"beta": np.nan}])
def test_prioritised_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(SamplingError, match=next(iter(arguments))):
        PrioritisedSampler(3, seed=0, **arguments)


@pytest.mark.parametrize("change", [{"priorities": [1.0, 0.0]}, {"priorities": [1.0]}, {"largest": 0.0}, {"calls": -1}])
def test_an_incomplete_state_is_refused(change):
    with pytest.raises(SamplingError):
        PrioritisedSampler(2, seed=0).restore({**PrioritisedSampler(2, seed=0).state(), **change})
