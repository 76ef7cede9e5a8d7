"""What counts as a standstill: gate 4's word for it, and a return that no longer rises."""

import numpy as np
import pytest

from agentpipe.learning.aids.plateau import RETURN, Plateau
from agentpipe_tests.learning.aids.told import warning


def complaints(returns, window=10):
    plateau = Plateau(window)
    return [bool(plateau.hear({RETURN: float(value)}, ())) for value in returns]


def test_nothing_is_said_before_two_windows_are_full():
    assert complaints(np.zeros(19)) == [False] * 19


def test_a_constant_return_stands_still():
    assert complaints(np.zeros(25))[19:] == [True] * 6


@pytest.mark.parametrize("slope", [1e-6, 1.0, 1e6])
def test_an_even_rise_is_none_however_slow(slope):
    assert not any(complaints(slope * np.arange(60)))


def test_a_fall_is_one():
    assert all(complaints(-np.arange(30))[19:])


def test_noise_about_a_level_is_found_in_most_updates_and_a_clear_rise_in_few():
    """By the definition five of six updates, and one of forty for a rise of three standard errors (0.03 sqrt(10 / 2)
    a window); windows overlap, so that the shares of 4,000 updates scatter by some hundredths."""
    noise = np.random.default_rng(3).normal(size=4_000)
    level = np.mean(complaints(noise)[19:])
    rising = np.mean(complaints(noise + 3 * np.sqrt(2 / 10) / 10 * np.arange(4_000))[19:])
    assert 0.76 < level < 0.90
    assert rising < 0.10


def test_updates_without_an_episode_count_for_nothing():
    plateau = Plateau(2)
    told = [plateau.hear({}, ()) for _ in range(9)]
    assert told == [""] * 9
    assert plateau.returns == []


def test_figures_of_gate_4_are_handed_on():
    plateau = Plateau(10)
    heard = (warning("entropy", 0.05, 0.1), warning("advantage mean", 0.9, 0.5), warning("plateau gain", 0.001, 0.005))
    expected = "gate 4: entropy 0.05 short of 0.1; gate 4: plateau gain 0.001 short of 0.005"
    assert plateau.hear({}, heard) == expected
