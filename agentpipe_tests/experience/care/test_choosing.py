"""Whatever a command prints as the name of a shard, every command takes."""

from __future__ import annotations

import shutil

import pytest

from agentpipe.errors import InputError
from agentpipe.experience.care.choosing import choose, choose_folder, open_chosen
from agentpipe.experience.care.operations import compact_shards, restore_shards
from agentpipe.experience.care.shrink import shrink
from agentpipe.experience.store.shard import open_shard

from .homes import make_home, record_line

TRAINING = "policy_checkpoint/2026-01-01_manual/feedfacefeedface/experience"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("named") / "home"
    make_home(home)
    for number in (1, 11):
        record_line(home / TRAINING / f"updates-{number:06d}", purpose="TRAIN", first_episode=60 * number)
    return home


@pytest.fixture
def home(made, tmp_path):
    return shutil.copytree(made, tmp_path / "home")


@pytest.mark.parametrize(
    "text",
    [
        "updates-000011",
        f"{TRAINING}/updates-000011",
        "experience/updates-000011",
        "2026-01-01_manual/updates-000011",
        "{home}/" + f"{TRAINING}/updates-000011",
        "{digest}",
        "{digest6}",
    ],
)
def test_the_name_of_a_shard_as_it_is_printed_is_understood(made, text):
    wanted = made / TRAINING / "updates-000011"
    digest = open_shard(wanted).digest
    written = text.format(home=made, digest=digest, digest6=digest[:6])
    assert choose(made, written) == wanted
    assert choose_folder(made, written) == wanted


def test_a_name_of_several_shards_lists_them(made):
    with pytest.raises(InputError, match="2 shards are '0123456789abcdef'") as caught:
        choose(made, "0123456789abcdef")
    assert "trajectories/load-2/0123456789abcdef, trajectories/sensor-1/0123456789abcdef" in caught.value.remedy
    assert choose(made, "sensor-1/0123456789abcdef") == made / "trajectories/sensor-1/0123456789abcdef"


@pytest.mark.parametrize("text", ["", "updates", "/", "..", "fffff", "trajectories"])
def test_what_is_no_shard_names_the_line_that_lists_them(made, text):
    with pytest.raises(InputError) as caught:
        choose(made, text)
    assert caught.value.remedy.endswith(f"agentpipe buffer stats --home {made}")


def test_a_folder_of_the_working_directory_does_not_hide_a_shard_of_that_name(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "updates-000011").mkdir()
    assert choose(made, "updates-000011") == made / TRAINING / "updates-000011"


def test_a_shrunk_shard_is_opened_by_playing_it_again(home):
    full = open_shard(home / TRAINING / "updates-000011")
    records = full.records.copy()
    shrink(full.path, verify=False)
    (opened,) = open_chosen(home, "updates-000011", None)
    assert opened.digest == full.digest
    assert opened.records.tobytes() == records.tobytes()


def test_a_full_shard_is_not_restored_and_says_so(home):
    shrink(home / TRAINING / "updates-000011", verify=False)
    restored = restore_shards(home, ["updates-000001", "updates-000011"])
    assert [one.changed for one in restored] == [False, True]


def test_a_training_that_does_not_exist_is_refused_with_those_that_do(home):
    with pytest.raises(InputError, match=r"no training '2026-01-09\|manual'") as caught:
        compact_shards(home, [], partition="2026-01-09|manual")
    assert caught.value.remedy == "there are: 2026-01-01|manual"
    shutil.rmtree(home / "policy_checkpoint")
    with pytest.raises(InputError) as caught:
        compact_shards(home, [], partition="2026-01-09|manual")
    assert caught.value.remedy == "there are none in this home"


def test_a_training_with_shrunk_rollouts_says_how_they_become_full_again(home):
    shrink(home / TRAINING / "updates-000011", verify=False)
    with pytest.raises(InputError, match=r"1 sealed shards of .*, 1 shrunk") as caught:
        compact_shards(home, [], partition="2026-01-01|manual")
    line = f"agentpipe buffer restore {home}/{TRAINING}/updates-000011 --home {home}"
    assert caught.value.remedy.endswith(line)
    restore_shards(home, ["updates-000011"])
    merged = compact_shards(home, [], partition="2026-01-01|manual")
    assert merged.path == home / TRAINING / "updates-000001-compact"
