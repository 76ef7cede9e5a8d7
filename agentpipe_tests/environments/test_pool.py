"""A pool's bytes depend on seed, purpose, environment and episode, and on nothing else."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, Purpose
from agentpipe.environments.players import RandomPlayer
from agentpipe.errors import ActionError, NonFiniteError, SimulationError
from agentpipe_tests.environments.line import assert_same_bytes, catalog, make_pool, record, table

STEPS = 90


@pytest.fixture(scope="module")
def thousands():
    """The first 90 steps of random play of all 7,000 training environments, on one thread."""
    return record(make_pool(catalog().environments("train")), RandomPlayer(), STEPS, compact=True)


@pytest.mark.parametrize("row", [0, 1, 3456, 6999])
def test_an_environment_alone_has_the_bytes_it_has_among_thousands(thousands, row):
    alone = record(make_pool([catalog().environments("train")[row]]), RandomPlayer(), STEPS, compact=True)
    assert_same_bytes(alone, thousands, rows_second=slice(row, row + 1))


def test_any_subset_in_any_order_has_the_same_bytes(thousands):
    rows = [5000, 17, 3, 6400, 17]
    environments = [catalog().environments("train")[row] for row in rows]
    assert_same_bytes(record(make_pool(environments), RandomPlayer(), STEPS, compact=True), thousands, rows_second=rows)


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bytes(thousands, threads):
    pool = make_pool(catalog().environments("train"), threads=threads)
    assert_same_bytes(record(pool, RandomPlayer(), STEPS, compact=True), thousands)
    pool.close()


def test_a_snapshot_goes_on_bit_for_bit_in_a_pool_built_anew():
    player, pool = RandomPlayer(), make_pool()
    record(pool, player, 23)
    snapshot = pool.snapshot()
    expected = record(pool, player, STEPS)
    other = make_pool(threads=2)
    other.restore(snapshot)
    found = record(other, player, STEPS)
    for step, (one, two) in enumerate(zip(expected, found, strict=True)):
        skip = ("final_", "result_") if step == 0 else ()  # outcomes of earlier episodes are not part of a snapshot
        assert all(one[k].tobytes() == two[k].tobytes() for k in one if not k.startswith(skip))
    other.close()


def test_snapshot_is_a_copy():
    pool = make_pool()
    snapshot = pool.snapshot()
    before = {name: array.copy() for name, array in snapshot.items()}
    record(pool, RandomPlayer(), 5)
    assert all(np.array_equal(snapshot[name], before[name]) for name in before)
    pool.restore(before)
    assert all(np.array_equal(pool.snapshot()[name], before[name]) for name in before)


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_a_snapshot_that_does_not_fit_changes_nothing(damage):
    pool = make_pool()
    snapshot = pool.snapshot()
    record(pool, RandomPlayer(), 3)
    before = pool.snapshot()
    bad = snapshot["plant.elapsed"]
    snapshot["plant.elapsed"] = {"missing": None, "shape": bad[:-1], "dtype": bad.astype(np.float32)}[damage]
    with pytest.raises(SimulationError, match=r"plant\.elapsed"):
        pool.restore(snapshot)
    assert all(np.array_equal(before[name], array) for name, array in pool.snapshot().items())


def test_reset_to_an_episode_equals_playing_up_to_it():
    played, jumped = make_pool(), make_pool()
    while (played.episode < 3).any():
        played.step(RandomPlayer().act(played).actions)
        row = np.flatnonzero((played.episode == 3) & (played.terminated | played.truncated))
        if len(row):
            jumped.reset(3)
            assert played.observation[row].tobytes() == jumped.observation[row].tobytes()
            assert played.mask[row].tobytes() == jumped.mask[row].tobytes()


def test_first_episode_and_per_row_episodes():
    later, rows = make_pool(first_episode=7), make_pool()
    rows.reset(np.full(rows.size, 7))
    assert later.observation.tobytes() == rows.observation.tobytes()
    numbers = np.arange(rows.size)
    rows.reset(numbers)
    assert rows.episode.tolist() == numbers.tolist()
    with pytest.raises(SimulationError, match="start at 0"):
        rows.reset(-1)


def test_seed_purpose_and_episode_all_make_other_episodes():
    pools = [make_pool(), make_pool(seed=6), make_pool(purpose=Purpose.REPORT), make_pool(first_episode=1)]
    assert len({pool.observation.tobytes() for pool in pools}) == 4


def test_one_environment_twice_is_twice_the_same():
    frames = record(make_pool([catalog().environments("train")[9]] * 3), RandomPlayer(), 60)
    assert_same_bytes(frames, frames, rows_first=slice(0, 1), rows_second=slice(2, 3))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [-1, ACTION_COUNT, 2**40, 45], ids=["negative", "too large", "huge", "close at once"])
def test_an_illegal_action_changes_nothing_anywhere(bad, threads):
    pool = make_pool(threads=threads)
    record(pool, RandomPlayer(), 2)
    before = pool.snapshot()
    actions = RandomPlayer().act(pool).actions
    row = int(np.flatnonzero(~pool.mask[:, 45])[-1])
    actions[row] = bad
    with pytest.raises(ActionError, match=pool.names[row]) as caught:
        pool.step(actions)
    assert caught.value.where["step"] == 2
    assert all(np.array_equal(before[name], array) for name, array in pool.snapshot().items())
    pool.close()


@pytest.mark.parametrize("actions", [np.zeros(3, np.int64), np.zeros(245, np.int32), np.zeros((245, 1), np.int64)])
def test_actions_of_another_shape_or_type_are_refused(actions):
    with pytest.raises(ActionError, match=r"expected int64\[245\]"):
        make_pool().step(actions)


def test_a_nan_is_named_by_environment_feature_and_step():
    pool = make_pool()
    record(pool, RandomPlayer(), 2)
    pool.check_finite()
    pool.observation[3, 17] = np.nan
    pool.observation[9, 1] = np.inf
    with pytest.raises(NonFiniteError) as caught:
        pool.check_finite()
    assert caught.value.where == {"environment": pool.names[3], "field": OBSERVATION_NAMES[17], "step": 2}


def test_closing_ends_the_threads():
    def running():
        return [thread for thread in threading.enumerate() if thread.name.startswith("pool")]

    before = len(running())
    pool = make_pool(catalog().environments("train")[:600], threads=2)
    pool.step(RandomPlayer().act(pool).actions)
    assert len(running()) > before
    pool.close()
    pool.close()
    assert len(running()) == before


@pytest.mark.parametrize(
    ("options", "field"),
    [({"seed": -1}, "seed"), ({"seed": 2**63}, "out of range"), ({"off": frozenset({"weather"})}, "weather")],
)
def test_a_pool_that_cannot_be_is_refused(options, field):
    with pytest.raises(SimulationError, match=field):
        make_pool(**options)


def test_a_pool_without_environments_or_threads_is_refused():
    with pytest.raises(SimulationError, match="at least one environment"):
        make_pool([])
    with pytest.raises(SimulationError, match="at least one thread"):
        make_pool(threads=0)


def test_a_pool_names_the_disturbance_of_each_environment_as_its_table_does():
    specifications = catalog().environments("train")[::500]
    pool = make_pool(specifications)
    expected = [int(table().fingerprint(one.environment_id).crc32, 16) for one in specifications]
    assert pool.fingerprints.tolist() == expected
    assert len(set(expected)) > 5
