"""Counter-based random numbers against a naive reference, published values, and what randomness must look like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from agentpipe.environments import rng
from agentpipe.environments.layout import Purpose
from agentpipe_tests.environments.line import (
    GOLDEN,
    make_pool,
    ref_bits,
    ref_fold,
    ref_mix,
    ref_normal,
    ref_uniform,
)

WORDS = st.integers(0, 2**64 - 1)
COUNT = 1 << 17


def many_bits(key: int, start: int = 0, count: int = COUNT) -> np.ndarray:
    """The stream of one key in numpy's wrapping arithmetic; held against the compiled one below."""
    with np.errstate(over="ignore"):
        x = np.uint64(key) + np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def normals(words: np.ndarray) -> np.ndarray:
    halves = words >> np.uint64(32)
    cell, share = (halves >> np.uint64(20)).astype(int), (halves & np.uint64((1 << 20) - 1)) / 2.0**20
    return rng.NORMAL_TABLE[cell] + (rng.NORMAL_TABLE[cell + 1] - rng.NORMAL_TABLE[cell]) * share


def test_stream_is_splitmix64_as_published():
    """The first outputs of SplitMix64 from state 1234567, as in the public reference implementation."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [int(rng.bits(np.uint64(1234567), 0, channel)) for channel in range(5)] == published
    assert many_bits(1234567, count=5).tolist() == published


def test_literal_keys():
    assert int(rng.root_key(0, Purpose.COLLECT)) == ref_fold(0, 0)
    assert int(rng.stable_hash("abc")) == 0xBA7816BF8F01CFEA  # SHA-256 test vector of FIPS 180-4
    assert int(rng.mix(np.uint64(1))) == 6238072747940578789


@settings(max_examples=60, deadline=None)
@given(WORDS, WORDS, st.integers(0, 64), st.integers(0, 2047), st.integers(0, 2**40))
def test_equals_the_naive_reference(key, word, step, channel, episode):
    k, w = np.uint64(key), np.uint64(word)
    assert int(rng.mix(k)) == ref_mix(key)
    assert int(rng.fold(k, w)) == ref_fold(key, word)
    assert int(rng.bits(k, step, channel)) == ref_bits(key, step, channel)
    assert int(rng.episode_key(k, w, episode)) == ref_fold(ref_fold(key, word), episode)
    assert rng.uniform(w) == ref_uniform(word)
    assert rng.normal_high(w) == ref_normal(word >> 32)
    assert rng.normal_low(w) == ref_normal(word & 0xFFFFFFFF)


def test_a_pools_keys_are_folded_from_seed_purpose_environment_and_episode():
    pool = make_pool(seed=77, purpose=Purpose.REPORT)
    pool.reset(3)
    root = ref_fold(77, int(Purpose.REPORT))
    expected = [ref_fold(ref_fold(root, int(rng.stable_hash(name))), 3) for name in pool.names]
    assert pool.hidden().key.tolist() == expected
    assert len(set(expected)) == pool.size


def test_players_uniforms_are_keyed_by_step_and_channel():
    pool = make_pool()
    keys = pool.hidden().key.tolist()
    assert pool.uniforms(3).tolist() == [ref_uniform(ref_bits(key, 1, 2003)) for key in keys]
    assert pool.uniforms(3).tolist() == pool.uniforms(3).tolist()
    assert (pool.uniforms(3) != pool.uniforms(4)).all()


def test_uniform_in_every_byte():
    words = many_bits(9)
    for shift in range(0, 64, 8):
        counts = np.bincount(((words >> np.uint64(shift)) & np.uint64(255)).astype(int), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("stride", [1, 16, 2048], ids=["neighbouring channels", "neighbouring machines", "steps"])
def test_neighbouring_draws_are_independent(stride):
    words = many_bits(42, count=COUNT + stride)
    first, second = (words[:-stride] >> np.uint64(60)).astype(int), (words[stride:] >> np.uint64(60)).astype(int)
    counts = np.bincount(first * 16 + second, minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_neighbouring_episodes_and_environments_are_independent():
    episodes = np.array([ref_fold(11, episode) for episode in range(5_000)], dtype=np.uint64)
    values = (episodes >> np.uint64(11)) / 2.0**53
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(5_000)


def test_one_flipped_bit_flips_half_of_the_outcome():
    flips = [
        (ref_bits(key ^ (1 << bit), 5, 7) ^ ref_bits(key, 5, 7)).bit_count()
        for key in (0, 3, 2**63 + 12345)
        for bit in range(64)
    ]
    assert 30 < np.mean(flips) < 34
    assert min(flips) > 12


def test_normals_have_the_moments_of_a_normal():
    z = normals(many_bits(5))
    assert abs(z.mean()) < 4 / np.sqrt(COUNT)
    assert abs(z.var() - 1) < 0.012  # the table's tails end at 3.67
    assert abs(stats.skew(z)) < 0.03
    assert abs(stats.kurtosis(z)) < 0.1
    assert np.abs(z).max() <= np.abs(rng.NORMAL_TABLE).max() < 3.68
    for point in (-2.0, -1.0, 0.0, 0.5, 1.5):
        assert abs((z < point).mean() - stats.norm.cdf(point)) < 0.005


def test_both_halves_of_a_word_are_independent_normals():
    words = many_bits(6)
    high, low = normals(words), normals(words << np.uint64(32))
    assert abs(np.corrcoef(high, low)[0, 1]) < 4 / np.sqrt(COUNT)
    assert abs(np.corrcoef(high**2, low**2)[0, 1]) < 4 / np.sqrt(COUNT)
