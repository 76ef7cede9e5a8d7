import gymnasium
import numpy as np

from benchmarks import purejax
from benchmarks.cartpole import FEWEST, CartPolePool, advance


def test_steps_are_those_of_gymnasiums_cartpole():
    environment = gymnasium.make("CartPole-v1").unwrapped
    generator = np.random.default_rng(0)
    for _ in range(20):
        environment.reset(seed=int(generator.integers(1_000)))
        state, ended = np.array(environment.state, np.float64), False
        while not ended:
            action = int(generator.integers(2))
            _, _, ended, _, _ = environment.step(action)
            assert advance(state, action) == ended
            np.testing.assert_allclose(state, environment.state, rtol=1e-12, atol=1e-15)


def test_the_cartpole_for_jax_takes_the_same_steps():
    generator = np.random.default_rng(0)
    state, actions = generator.uniform(-1.0, 1.0, (200, 4)) * [2.5, 3.0, 0.25, 3.0], generator.integers(0, 2, 200)
    after, fallen = purejax.advance(np, state, actions)
    assert fallen.tolist() == [advance(row, action) for row, action in zip(state, actions, strict=True)]
    assert 0 < fallen.sum() < len(fallen)
    np.testing.assert_allclose(after, state, rtol=1e-12, atol=1e-15)


def test_an_episode_ends_and_the_next_begins_in_the_same_step():
    pool = CartPolePool(3)
    left = np.zeros(3, np.int64)
    for _ in range(20):
        pool.step(left)
        if pool.terminated.any():
            break
    row = int(np.argmax(pool.terminated))
    assert np.abs(pool.final_observation[row, 2]) > 0.2
    assert np.abs(pool.observation[row]).max() <= 0.05
    assert pool.episode[row] == 1
    assert pool.last_action[row] == 2
    assert pool.result_return[row] == pool.result_steps[row] > 5


def test_threads_do_not_change_a_byte():
    actions = np.random.default_rng(1).integers(0, 2, (100, 2 * FEWEST + 1))
    one, two = CartPolePool(2 * FEWEST + 1, seed=3), CartPolePool(2 * FEWEST + 1, seed=3, threads=2)
    for row in actions:
        one.step(row)
        two.step(row)
    two.close()
    assert one.episode.sum() > 0
    np.testing.assert_array_equal(one.observation, two.observation)
    np.testing.assert_array_equal(one.episode, two.episode)


def test_five_hundred_steps_truncate():
    pool = CartPolePool(1)
    pool.steps[0] = 499
    pool.step(np.zeros(1, np.int64))
    assert pool.truncated[0]
    assert not pool.terminated[0]
