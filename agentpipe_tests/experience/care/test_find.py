"""Showing an episode of a damaged shard: a typed error that names the file, never "no such episode"."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from agentpipe.errors import AgentpipeError, CorruptError, InputError
from agentpipe.experience.care.find import find_episode
from agentpipe.experience.care.shrink import shrink
from agentpipe.experience.origin import home_pools
from agentpipe.experience.show import describe, render
from agentpipe.experience.store.shard import open_shard

from .homes import flip, make_home

PLACE = "trajectories/sensor-1/0123456789abcdef"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("find") / "home"
    make_home(home, cells=("sensor-1",))
    return home


@pytest.fixture(params=["full", "shrunk"])
def home(made, tmp_path, request):
    home = shutil.copytree(made, tmp_path / "home")
    if request.param == "shrunk":
        shrink(home / PLACE, home_pools(home))
    return home


def whole(made):
    return {(int(row["environment"]), int(row["episode"])) for row in open_shard(made / PLACE).episodes}


@pytest.mark.parametrize("name", ["episodes.bin", "index.bin", "names.json", "manifest.json"])
def test_an_episode_of_a_shard_that_cannot_be_read_is_not_called_missing(made, home, name):
    environment, episode = min(whole(made))
    (home / PLACE / name).unlink()
    with pytest.raises(CorruptError) as caught:
        find_episode(f"{environment}:{episode}.0", home)
    assert name in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_byte_is_changed_an_episode_is_shown_as_it_was_or_an_error(made, home, seed):
    rng = np.random.default_rng(seed)
    shard = home / PLACE
    for file in sorted(shard.glob("*.bin")):
        data = file.read_bytes()
        for place in rng.integers(0, len(data), 6).tolist() if data else ():
            flip(file, place, 1 << int(rng.integers(0, 8)))
            for environment, episode in sorted(whole(made))[:4]:
                try:
                    found = find_episode(f"{environment}:{episode}.0", home)
                except AgentpipeError:
                    continue
                row = found.shard.episodes[found.row]
                assert (int(row["environment"]), int(row["episode"])) == (environment, episode)
                assert describe(found.shard, found.row)["steps"]
                assert render(found.shard, found.row)
            file.write_bytes(data)


def test_a_number_of_thousands_of_digits_is_no_environment(home):
    with pytest.raises(InputError, match="no episode"):
        find_episode("9" * 5000, home)
