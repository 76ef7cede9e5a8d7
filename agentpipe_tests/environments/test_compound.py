"""Another disturbance for the next episodes: from then on, there alone, in training alone, and never in part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.environments import physics
from agentpipe.environments.compound import (
    BACKGROUND,
    NONE,
    OWN,
    compound_code,
    describe_compound,
    levels_of,
)
from agentpipe.environments.fixed import build_fixed
from agentpipe.environments.layout import Purpose
from agentpipe.environments.parameters import PARAMETER_NAMES
from agentpipe.environments.players import RandomPlayer
from agentpipe.environments.pool import LinePool
from agentpipe.environments.table import TableRow, table_from_rows
from agentpipe.errors import SimulationError
from agentpipe_tests.environments.line import assert_same_bytes, catalog, make_pool, profile, record, table

TRAIN = catalog().environments("train")[::300]
SIZE = len(TRAIN)
HARSH = np.array([compound_code(5, 1), compound_code(4, 0), BACKGROUND], np.uint8)
CODES = st.sampled_from(
    [OWN, BACKGROUND, *(compound_code(level, place) for level in range(1, 6) for place in range(5))]
)


def composed(environment, codes):
    """The parameters of a compound by name, without the code under test."""
    rows = {(row.kind, row.intensity, row.variant): row.values for row in table().rows}
    own = table().rows[table().row_for(environment.environment_id)].values
    mildest = {"sensor": ("network", 1, 0), "network": ("load", 1, 0), "load": ("sensor", 1, 0)}
    values = []
    for index, name in enumerate(PARAMETER_NAMES):
        kind = name.split("_")[0]
        code = int(codes[("sensor", "network", "load").index(kind)])
        if code == OWN:
            values.append(own[index])
        elif code == BACKGROUND:
            values.append(rows[mildest[kind]][index])
        else:
            values.append(rows[kind, code % 8, code // 8][index])
    return tuple(values)


def by_hand(compounds, *, seed=5, **options):
    """A pool that was built with the parameters of ``compounds``."""
    fixed = build_fixed(TRAIN, table(), profile(), seed=seed, purpose=Purpose.TRAIN)
    pairs = zip(TRAIN, compounds, strict=True)
    parameters = np.array([composed(environment, codes) for environment, codes in pairs], np.float32)
    bandwidth, snr = (parameters[:, PARAMETER_NAMES.index(f"network_{name}")] for name in ("bandwidth_khz", "snr_db"))
    fixed = fixed._replace(parameters=parameters, capacity=physics.packets_a_cycle(bandwidth, snr, fixed.protocol))
    return LinePool(fixed, tuple(environment.environment_id for environment in TRAIN), **options)


@pytest.mark.parametrize("purpose", [purpose for purpose in Purpose if purpose is not Purpose.TRAIN])
def test_pools_of_any_other_purpose_refuse(purpose):
    pool = make_pool(TRAIN, purpose=purpose)
    with pytest.raises(SimulationError, match="only pools for training"):
        pool.override(np.arange(2), HARSH)
    assert_same_bytes(record(pool, RandomPlayer(), 40), record(make_pool(TRAIN, purpose=purpose), RandomPlayer(), 40))
    assert not pool.next_compound().any()


@pytest.mark.parametrize("split", ["validation", "holdout"])
def test_environments_of_another_split_are_refused_by_name(split):
    other = catalog().environments(split)[3]
    pool = make_pool([TRAIN[0], other])
    with pytest.raises(SimulationError, match="training split") as caught:
        pool.override(np.arange(2), HARSH)
    assert caught.value.where["environment"] == other.environment_id
    assert not pool.next_compound().any()
    pool.override(np.array([0]), HARSH)
    assert pool.next_compound().tolist() == [HARSH.tolist(), [0, 0, 0]]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_running_episode_stays_and_the_next_is_that_of_a_pool_built_so(threads):
    pool, plain, other = make_pool(TRAIN, threads=threads), make_pool(TRAIN), by_hand([HARSH] * SIZE, first_episode=1)
    pool.override(np.arange(SIZE), HARSH)
    player, compared = RandomPlayer(), 0
    frames = {name: record(one, player, 120) for name, one in (("pool", pool), ("plain", plain), ("other", other))}
    for row in range(SIZE):
        first = next(step for step, frame in enumerate(frames["plain"]) if frame["episode"][row] == 1)
        assert_same_bytes(frames["pool"][:first], frames["plain"][:first], slice(row, row + 1), slice(row, row + 1))
        length = next(step for step, frame in enumerate(frames["other"]) if frame["episode"][row] == 2)
        for step in range(length):
            for name in ("observation", "mask", "segment", "time"):
                got = frames["pool"][first + step][name][row]
                assert got.tobytes() == frames["other"][step][name][row].tobytes(), (row, step, name)
        compared += length
    assert compared > 5 * SIZE
    assert (pool.compound == HARSH).all()
    pool.close()


@given(st.lists(st.tuples(CODES, CODES, CODES), min_size=SIZE, max_size=SIZE))
@settings(max_examples=12, deadline=None)
def test_any_compound_is_what_its_rows_say_from_the_next_reset_on(compounds):
    pool, codes = make_pool(TRAIN), np.array(compounds, np.uint8)
    pool.override(np.arange(SIZE), codes)
    pool.reset(4)
    frames = record(pool, RandomPlayer(), 12)
    assert_same_bytes(frames, record(by_hand(codes, first_episode=4), RandomPlayer(), 12))
    for row, environment in enumerate(TRAIN):
        values = composed(environment, codes[row])
        made = table_from_rows([*(r for r in table().rows if r.key != ("load", 5, 4)), TableRow("load", 5, 4, values)])
        expected = made.row_fingerprint(len(made) - 1)
        assert pool.fingerprints[row] == int(expected.crc32, 16)
        assert pool.compounds.fingerprint(row, codes[row]) == expected


def test_giving_back_the_own_row_plays_as_if_nothing_had_been():
    pool = make_pool(TRAIN)
    pool.override(np.arange(SIZE), HARSH)
    pool.reset(2)
    pool.override(np.arange(SIZE), NONE)
    assert (pool.compound == HARSH).all()
    pool.reset(3)
    plain = make_pool(TRAIN, first_episode=3)
    assert_same_bytes(record(pool, RandomPlayer(), 60), record(plain, RandomPlayer(), 60))
    assert pool.fingerprints.tolist() == plain.fingerprints.tolist()


def test_asking_for_what_is_in_force_takes_back_what_waits():
    pool = make_pool(TRAIN)
    pool.override(np.arange(SIZE), HARSH)
    pool.override(np.arange(SIZE), NONE)
    pool.reset(1)
    assert not pool.compound.any()
    assert_same_bytes(record(pool, RandomPlayer(), 30), record(make_pool(TRAIN, first_episode=1), RandomPlayer(), 30))


def test_other_environments_are_not_touched():
    pool, some = make_pool(TRAIN), np.arange(0, SIZE, 3)
    others = np.setdiff1d(np.arange(SIZE), some)
    pool.override(some, HARSH)
    assert_same_bytes(record(pool, RandomPlayer(), 80), record(make_pool(TRAIN), RandomPlayer(), 80), others, others)


def test_a_snapshot_keeps_what_is_in_force_and_what_waits():
    pool, player = make_pool(TRAIN), RandomPlayer()
    pool.override(np.arange(SIZE), HARSH)
    record(pool, player, 25)
    pool.override(np.arange(0, SIZE, 2), np.array([OWN, compound_code(1), compound_code(5, 4)], np.uint8))
    snapshot = pool.snapshot()
    assert 0 < (pool.compound == HARSH).all(axis=1).sum() < SIZE
    expected = record(pool, player, 60)[1:]
    other = make_pool(TRAIN, threads=2)
    other.override(np.arange(SIZE), np.array([BACKGROUND] * 3, np.uint8))
    other.reset(7)
    other.restore(snapshot)
    assert_same_bytes(record(other, player, 60)[1:], expected)
    for name in ("compound", "fingerprints"):
        np.testing.assert_array_equal(getattr(other, name), getattr(pool, name))
    other.close()


@pytest.mark.parametrize("code", [7, 15, BACKGROUND + 8, compound_code(3, 5), compound_code(3, 31)])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_compound_that_the_table_does_not_have_is_refused_and_changes_nothing(code, kind):
    pool, codes = make_pool(TRAIN), HARSH.copy()
    pool.override(np.array([1]), HARSH)
    snapshot, codes[kind] = pool.snapshot(), code
    with pytest.raises(SimulationError, match="the table has no compound"):
        pool.override(np.array([0, 1]), np.stack([NONE, codes]))
    bad = pool.snapshot()
    bad["fixed.compound"] = np.tile(codes, (SIZE, 1))
    with pytest.raises(SimulationError, match="the table has no compound"):
        pool.restore(bad)
    assert all(np.array_equal(array, snapshot[name]) for name, array in pool.snapshot().items())


def test_what_is_switched_off_stays_off_under_any_compound():
    pool = make_pool(TRAIN, off=frozenset({"network"}))
    pool.override(np.arange(SIZE), np.array([compound_code(2), compound_code(5), compound_code(2)], np.uint8))
    pool.reset(1)
    alike = by_hand([[compound_code(2), OWN, compound_code(2)]] * SIZE)
    network = [index for index, name in enumerate(PARAMETER_NAMES) if name.startswith("network_")]
    neutral = [0.0, 0.0, 1_000.0, 40.0, 0.0, 0.0, 0.0, 1.0]
    np.testing.assert_array_equal(pool._fixed.parameters[:, network], [neutral] * SIZE)
    rest = np.setdiff1d(np.arange(len(PARAMETER_NAMES)), network)
    np.testing.assert_array_equal(pool._fixed.parameters[:, rest], alike._fixed.parameters[:, rest])


def test_levels_of_the_tables_own_rows():
    """A row's own kind has its intensity; variant 4 of the project's table disturbs the other two kinds as well."""
    environments = [catalog().environment(f"t0016.{cell}") for cell in ("sensor-3", "network-2", "load-5")]
    pool = make_pool(environments)
    rows = [table().rows[table().row_for(environment.environment_id)] for environment in environments]
    beside = {("sensor", 3): [3, 3, 3], ("network", 2): [2, 2, 2], ("load", 5): [3, 3, 5]}
    alone = {("sensor", 3): [3, 0, 0], ("network", 2): [0, 2, 0], ("load", 5): [0, 0, 5]}
    expected = [(beside if row.variant == 4 else alone)[row.kind, row.intensity] for row in rows]
    assert pool.compounds.own_levels.tolist() == expected
    assert pool.compounds.variants.tolist() == [[5] * 5] * 3


def test_names_of_compounds_and_their_bytes():
    codes = np.array([compound_code(3, 2), BACKGROUND, OWN], np.uint8)
    assert codes.tolist() == [19, 6, 0]
    assert describe_compound(codes) == "sensor-3.2 network-off load-own"
    assert describe_compound(codes, table()) == "sensor-3.2 network-off load-own"
    assert describe_compound(NONE) == ""
    assert describe_compound([7, 0, 0]) == "sensor-7 network-own load-own"
    assert levels_of(codes).tolist() == [3, 0, -1]
    assert compound_code(0, 9) == BACKGROUND
    for level, place in ((6, 0), (-1, 0), (1, 32), (1, -1)):
        with pytest.raises(SimulationError, match="levels are 0 to 5, places 0 to 31"):
            compound_code(level, place)
