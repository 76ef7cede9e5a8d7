"""Who refers to what cannot be told: then nothing is deleted, and nothing crashes."""

from __future__ import annotations

import json
import shutil

import pytest

from agentpipe.errors import CorruptError
from agentpipe.experience.care.check import check_home
from agentpipe.experience.care.claims import find_claims
from agentpipe.experience.care.inventory import inventory
from agentpipe.experience.care.operations import check, retention
from agentpipe.experience.care.retention import Rules
from agentpipe.storage import write_json

from .homes import checkpoint, edit_json, make_home, record_line

PLACE = "trajectories/sensor-1/0123456789abcdef"
EVERYTHING = Rules(max_age_days=0, budget=0, leftovers=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("claims") / "home"
    make_home(home, cells=("sensor-1",))
    folder = home / "policy_checkpoint/2026-01-01_manual/feedfacefeedface/experience/updates-000001"
    checkpoint(home, record_line(folder, purpose="TRAIN"))
    return home


@pytest.fixture
def home(made, tmp_path):
    return shutil.copytree(made, tmp_path / "home")


def refuses(home):
    before = sorted(home.rglob("*.bin"))
    with pytest.raises(CorruptError, match="it cannot be told what is referred to"):
        retention(home, EVERYTHING)
    assert sorted(home.rglob("*.bin")) == before
    assert not check_home(home).ok


def test_a_checkpoint_without_its_manifest_refers_to_who_knows_what(home):
    next(home.glob("policy_checkpoint/*/*/checkpoints/*/manifest.json")).unlink()
    refuses(home)


def test_a_package_without_its_manifest_refers_to_who_knows_what(home):
    (home / "policy_checkpoint/2026-01-01_manual/feedfacefeedface/package").mkdir()
    refuses(home)


@pytest.mark.parametrize("place", ["references", "references/trajectories", "policy_checkpoint/*/*/checkpoints"])
def test_a_file_in_the_place_of_a_folder_of_references_hides_no_claim(home, place):
    folder = next(home.glob(place))
    shutil.rmtree(folder)
    folder.write_text("x")
    refuses(home)


def test_a_checkpoint_whose_removal_was_cut_short_blocks_nothing(home):
    manifest = next(home.glob("policy_checkpoint/*/*/checkpoints/*/manifest.json"))
    write_json(manifest.parents[1] / "checkpoints.json", {"format": 1, "checkpoints": []})
    manifest.unlink()
    assert find_claims(home).unreadable == ()
    assert check_home(home).ok


def test_the_place_of_the_pointer_is_that_of_the_checkpoints():
    from agentpipe.experience.care import claims
    from agentpipe.learning import checkpoint as checkpoints

    assert claims._POINTER == checkpoints._POINTER


NONSENSE = {
    "not_a_number": lambda said: said["origin"].update(seed=float("nan")),
    "infinite": lambda said: said["origin"].update(seed=float("inf")),
    "half a character": lambda said: said.update(cell="\ud800"),
    "digest": lambda said: said.update(digest="0" * 64),
    "policies": lambda said: said["policies"][0].update(ordinal="x"),
    "quality": lambda said: said.update(quality=["x"]),
    "sealed": lambda said: said.update(sealed=["x"]),
    "time": lambda said: said["sealed"].update(made_at=10**30),
    "steps": lambda said: said.update(steps=10**400),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_shard_whose_manifest_is_altered_is_never_deleted_for_want_of_claims(home, what):
    path = home / "trajectories/sensor-1/other"
    record_line(path, first_episode=70)
    said = json.loads((path / "manifest.json").read_text())
    NONSENSE[what](said)
    (path / "manifest.json").write_text(json.dumps(said))
    verbs = {
        action.candidate.path.name: action.verb for action in retention(home, EVERYTHING, dry_run=True).plan.actions
    }
    assert verbs["other"] == "keep"
    assert not check_home(home).ok
    assert json.dumps([figures.to_json() for figures in inventory(home)], allow_nan=False)


@pytest.mark.parametrize("text", ['{"format": ' + "9" * 5000 + "}", "[" * 100_000, '{"format": 2, "steps": 1e999}'])
def test_a_manifest_that_no_parser_survives_is_a_problem_and_set_aside(home, text):
    (home / PLACE / "manifest.json").write_text(text)
    assert not check_home(home).ok
    assert len(inventory(home)) == 2
    assert check(home, fix=True).lost


@pytest.mark.parametrize("version", [1, 4, "2", True])
def test_a_shard_of_another_format_is_left_to_leftovers_whatever_the_budget(home, version):
    path = home / "trajectories/sensor-1/other"
    record_line(path, first_episode=70)
    edit_json(path / "manifest.json", format=version, steps="unknown", policies=None, quality=1)

    def verb(**rules):
        actions = retention(home, Rules(**rules), dry_run=True).plan.actions
        return next(action.verb for action in actions if action.candidate.path == path)

    assert verb(budget=0, max_age_days=0) == "keep"
    assert verb(leftovers=True) == "delete"
    assert len(inventory(home)) == 3
