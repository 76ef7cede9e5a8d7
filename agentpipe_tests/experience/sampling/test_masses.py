import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.experience.sampling.draw import SamplingError
from agentpipe.experience.sampling.masses import UNIT, alias_table, expected_cover, fill_epoch, integer_masses

from .naive import table_masses

weights = st.lists(
    st.floats(0, 1e30, allow_nan=False) | st.sampled_from([0.0, 1.0, 5e-324]), min_size=1, max_size=70
).filter(any)


@settings(deadline=None)
@given(weights)
def test_masses_sum_exactly_and_follow_the_weights(given_weights):
    masses = [int(mass) for mass in integer_masses(given_weights)]
    assert sum(masses) == len(masses) * UNIT
    total = sum(Fraction(weight) for weight in given_weights)
    for mass, weight in zip(masses, given_weights, strict=True):
        assert abs(mass - Fraction(weight) / total * len(masses) * UNIT) <= 2
        assert weight or not mass


def test_equal_weights_have_equal_masses():
    assert (integer_masses(np.full(100_003, 0.1)) - np.uint64(UNIT)).astype(np.int64).max() <= 1
    assert integer_masses(np.ones(100_003)).tolist() == [UNIT] * 100_003


@settings(deadline=None)
@given(weights)
def test_the_alias_table_gives_each_step_exactly_its_mass(given_weights):
    masses = integer_masses(given_weights)
    gained = table_masses(alias_table(masses))
    # a full column is written as all but one part of 2**32 for itself and the rest for itself
    assert gained == masses.tolist()


def epoch(masses, key=1, number=0):
    order = np.empty(len(masses), np.uint32)
    fill_epoch(masses, np.uint64(key), number, order)
    return order


@settings(deadline=None)
@given(weights, st.integers(0, 2**64 - 1), st.integers(0, 1_000))
def test_an_epoch_draws_each_step_floor_or_ceiling_of_its_expectation(given_weights, key, number):
    masses = integer_masses(given_weights)
    counts = np.bincount(epoch(masses, key, number), minlength=len(masses))
    for count, mass in zip(counts.tolist(), masses.tolist(), strict=True):
        assert math.floor(mass / Fraction(UNIT)) <= count <= math.ceil(mass / Fraction(UNIT))


def test_counts_of_epochs_are_unbiased():
    masses = integer_masses([0.1, 2.3, 0.6, 0.0, 3.0, 0.5])
    counts = sum(np.bincount(epoch(masses, 7, number), minlength=6) for number in range(20_000)) / 20_000
    np.testing.assert_allclose(counts, masses / UNIT, atol=0.015)  # 4 deviations of a Bernoulli count's mean


def test_an_epoch_comes_in_every_order():
    orders = [tuple(epoch(integer_masses([1, 1, 1]), 3, number)) for number in range(6_000)]
    found = np.array([orders.count(order) for order in sorted(set(orders))])
    assert len(found) == 6
    assert ((found - 1_000) ** 2 / 1_000).sum() < 20.5  # chi-square, 5 degrees of freedom, 0.1 %


@settings(max_examples=20, deadline=None)
@given(weights, st.booleans())
def test_cover_is_what_many_epochs_find(given_weights, stratified):
    masses = integer_masses(given_weights)
    cover, tries = expected_cover(masses, stratified=stratified), 2_000
    if stratified:
        drawn = [epoch(masses, 5, number) for number in range(tries)]
    else:
        drawn = np.random.default_rng(0).choice(
            len(masses), (tries, len(masses)), p=masses / masses.astype(np.float64).sum()
        )
    found = np.zeros(len(masses))
    for ids in drawn:
        found[np.unique(ids)] += 1
    np.testing.assert_allclose(found / tries, cover, atol=0.06)


def test_cover_of_a_single_step_is_certain():
    assert expected_cover(integer_masses([3.0]), stratified=False).tolist() == [1.0]


@pytest.mark.parametrize("bad", [[], [0.0, 0.0], [1.0, -1.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_weights_that_are_none_are_refused(bad):
    with pytest.raises(SamplingError):
        integer_masses(bad)
