"""The episodes of a shard are listed whatever its condition."""

from __future__ import annotations

import shutil

import pytest

from agentpipe.errors import CorruptError, InputError
from agentpipe.experience.care.episodes import list_episodes
from agentpipe.experience.care.shrink import shrink
from agentpipe.experience.show import describe
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.shard import open_shard

from .homes import flip, record_line

SHARED = ("environment", "index", "episode", "row", "steps", "outcome", "success", "return", "mode")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return record_line(tmp_path_factory.mktemp("listed") / "shard")


def test_episodes_are_listed_as_show_describes_each(made):
    path, episodes = list_episodes(made.path)
    assert path == made.path
    assert len(episodes) == len(made.episodes)
    for row, episode in enumerate(episodes):
        shown = describe(made, row)["episode"]
        assert {name: episode[name] for name in SHARED} == {name: shown[name] for name in SHARED}
        assert episode["minutes"] == shown["elapsed_minutes"]


def test_a_shrunk_shard_and_an_open_one_list_the_same_episodes(made, tmp_path):
    expected = list_episodes(made.path)[1]
    copy = shutil.copytree(made.path, tmp_path / "copy")
    shrink(copy, verify=False)
    assert list_episodes(copy)[1] == expected
    with record_line(tmp_path / "open", seal=False):
        found = list_episodes(tmp_path / "open")[1]
    key = "index", "episode"
    wanted = sorted([one[name] for name in (*key, "steps", "return")] for one in expected)
    assert sorted([one[name] for name in (*key, "steps", "return")] for one in found) == wanted


def test_several_shards_and_a_damaged_table_are_refused(made, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(made.path, tmp_path / name)
    with pytest.raises(InputError, match="2 shards"):
        list_episodes(tmp_path)
    flip(tmp_path / "one" / rec.EPISODES, 30)
    with pytest.raises(CorruptError, match="checksum does not fit"):
        list_episodes(tmp_path / "one")
    assert open_shard(made.path).digest == made.digest
