"""Origin: what plays a shard's episodes again, and what is said where something of it is gone."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.environments.layout import SIMULATOR_VERSION, Purpose
from agentpipe.errors import CatalogError, InputError, TableError, VersionError
from agentpipe.experience.origin import home_pools, is_built_in, origin
from agentpipe_tests.environments.line import make_pool, profile, table

from .care.homes import SEED, make_home, specs

NAMES = {spec.index: spec.environment_id for spec in specs()}


def manifest(**changes):
    content = {
        "simulator_version": SIMULATOR_VERSION,
        "table_version": table().version,
        "origin": origin(SEED, "TRAIN", profile().digest),
    }
    return {**content, **changes}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home") / "home"
    make_home(home, cells=())
    return home


def test_the_pool_is_that_of_the_recording(home):
    pool = home_pools(home)(manifest(), NAMES)
    expected = make_pool(specs(), seed=SEED, purpose=Purpose.TRAIN)
    assert pool.names == expected.names == tuple(NAMES.values())
    for _ in range(5):
        np.testing.assert_array_equal(pool.observation, expected.observation)
        for one in (pool, expected):
            one.step(one.mask.argmax(axis=1))


@pytest.mark.parametrize(
    ("changes", "names", "error", "message"),
    [
        ({"origin": None}, NAMES, InputError, "not episodes of the built-in line"),
        (
            {"simulator_version": "9"},
            NAMES,
            VersionError,
            f"recorded by simulator 9, this program has {SIMULATOR_VERSION}",
        ),
        ({"table_version": "f" * 64}, NAMES, TableError, "unknown version"),
        ({"origin": origin(0, "TRAIN", "0" * 64)}, NAMES, InputError, "no line profile 0000"),
        ({}, {1: "nowhere.sensor-1"}, CatalogError, "unknown environment"),
        ({}, {7: next(iter(NAMES.values()))}, InputError, "has index 195 in the catalogue, not 7"),
    ],
    ids=["own", "simulator", "table", "profile", "environment", "index"],
)
def test_what_is_gone_or_another_is_named(home, changes, names, error, message):
    with pytest.raises(error, match=message):
        home_pools(home)(manifest(**changes), names)


def test_only_the_built_in_line_of_this_version_can_be_played_again():
    assert is_built_in(manifest())
    assert not is_built_in(manifest(simulator_version="0"))
    assert not is_built_in({"simulator_version": SIMULATOR_VERSION})


def test_damaged_profiles_in_the_home_are_passed_over(home):
    (home / "line_profile" / "000.json").write_text("{")
    assert home_pools(home)(manifest(), NAMES).size == len(NAMES)
