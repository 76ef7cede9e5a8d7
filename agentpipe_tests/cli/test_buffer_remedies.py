"""A remedy is a whole line: typed as it stands it helps, whatever home or folder the shell knows."""

from __future__ import annotations

import json
import re
import shlex
import shutil

import pytest
from typer.testing import CliRunner

from agentpipe.cli.main import app
from agentpipe.errors import AgentpipeError
from agentpipe.experience.care.shrink import shrink
from agentpipe.experience.store.shard import open_shard
from agentpipe_tests.experience.care.homes import DTYPE, checkpoint, flip, make_home, package, record_line

TRAINING = "policy_checkpoint/2026-01-01_manual/feedfacefeedface/experience"
CURRENT = "trajectories/sensor-1/0123456789abcdef"
runner = CliRunner()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("made") / "home"
    shards = make_home(home)
    checkpoint(home, record_line(home / TRAINING / "updates-000001", purpose="TRAIN"))
    record_line(home / TRAINING / "running-000020", purpose="TRAIN", first_episode=60)
    package(home, *shards.values(), counted=2)
    return home


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    """The home under a name that a shell would take apart; the shell itself stands elsewhere and knows another."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("AGENTPIPE_HOME", str(tmp_path / "another"))
    return shutil.copytree(made, tmp_path / "a home")


def call(*words):
    result = runner.invoke(app, ["buffer", *(str(word) for word in words), "--json"])
    return result.exit_code, json.loads(result.stdout)


def typed(remedy):
    """What a line of a remedy does."""
    words = shlex.split(re.search(r"agentpipe buffer .*", remedy)[0])
    return runner.invoke(app, words[1:])


def lose_an_episode(shard):
    data = bytearray((shard / "records.bin").read_bytes())
    data[40 * DTYPE.itemsize : 41 * DTYPE.itemsize] = bytes(DTYPE.itemsize)
    (shard / "records.bin").write_bytes(data)


def test_the_remedy_of_a_damaged_home_repairs_that_home(home):
    flip(home / CURRENT / "records.bin", 7 * DTYPE.itemsize + 60)
    code, document = call("check", "--home", home)
    assert code == 1
    result = typed(document["problems"][0]["remedy"])
    assert (result.exit_code, "repaired" in result.stdout) == (0, True)
    assert call("check", "--home", home)[0] == 0


@pytest.mark.parametrize("outside", [False, True])
def test_the_remedy_of_a_checked_folder_repairs_that_folder(home, tmp_path, outside):
    folder = home / CURRENT
    if outside:
        folder = shutil.copytree(folder, tmp_path / "a copy" / "shard")
    flip(folder / "records.bin", 7 * DTYPE.itemsize + 60)
    code, document = call("check", "--path", folder)
    assert code == 1
    assert typed(document["problems"][0]["remedy"]).exit_code == 0
    assert call("check", "--path", folder)[0] == 0


def test_a_folder_of_a_home_is_repaired_with_the_table_and_quarantine_of_that_home(home):
    lose_an_episode(home / CURRENT)
    code, document = call("check", "--fix", "--path", home / CURRENT)
    assert code == 3
    assert document["lost"][0]["quarantine"].startswith(str(home / "quarantine/experience"))
    assert not (home / "trajectories/sensor-1/quarantine").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("export", "--cell", "sensor-1", "--out", "steps.parquet"),
        ("export", CURRENT, "--out", "steps.parquet"),
        ("compact", CURRENT, TRAINING + "/updates-000001"),
        ("show", "195:0.0", "--cell", "sensor-1"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize("file", ["index.bin", "manifest.json", "names.json"])
def test_the_error_of_any_command_on_a_damaged_shard_names_the_line_that_repairs_it(home, words, file):
    if words[0] == "compact":
        shutil.rmtree(home / "references/trajectories")
        shutil.rmtree(home / TRAINING.replace("experience", "package"))
        shutil.rmtree(home / TRAINING.replace("experience", "checkpoints"))
    data = (home / CURRENT / file).read_bytes()
    (home / CURRENT / file).write_bytes(data[: len(data) // 3 * 2])
    code, document = call(*words, "--home", home)
    if code == 0:  # show reads one episode, and it is whole
        assert words[0] == "show"
        return
    typed(document["error"]["remedy"])
    assert CURRENT not in [problem["shard"] for problem in call("check", "--home", home)[1]["problems"]]


def test_a_shrunk_shard_that_must_be_full_names_the_line_that_restores_it(home):
    shrink(home / TRAINING / "updates-000001", verify=False)
    with pytest.raises(AgentpipeError) as caught:
        open_shard(home / TRAINING / "updates-000001")
    result = typed(caught.value.remedy)
    assert (result.exit_code, "are back" in result.stdout) == (0, True)
    open_shard(home / TRAINING / "updates-000001")


def test_a_repair_that_loses_episodes_ends_with_3_and_says_what(home):
    digest = open_shard(home / CURRENT).digest
    lose_an_episode(home / CURRENT)
    result = runner.invoke(app, ["buffer", "check", "--fix", "--home", str(home)])
    assert result.exit_code == 3
    lost = next(line for line in result.stdout.splitlines() if line.startswith("lost "))
    assert lost.startswith(f"lost {CURRENT}: 1 of ")
    assert lost.endswith(f"as found it lies in {home}/quarantine/experience/{digest}")
    assert "whole and consistent" not in result.stdout
    code, document = call("check", "--home", home)
    assert (code, document["lost"]) == (1, [])
    named = [problem["message"] for problem in document["problems"]]
    assert named[0] == "the cell sensor-1 has no current trajectories"
    assert f"sensor-1 with the digest {digest[:16]}, and they are gone" in named[1]


def test_a_repair_without_loss_ends_with_0_and_says_so(home):
    (home / CURRENT / "index.bin").unlink()
    code, document = call("check", "--fix", "--home", home)
    assert (code, document["ok"], document["lost"]) == (0, True, [])
    assert document["repairs"] == [f"{CURRENT}: the index, from the episodes"]


def test_what_check_and_repair_call_a_shard_is_the_same_name(home):
    flip(home / CURRENT / "records.bin", 7 * DTYPE.itemsize + 60)
    problem = call("check", "--home", home)[1]["problems"][0]["shard"]
    repair = call("check", "--fix", "--home", home)[1]["repairs"][0]
    assert repair.startswith(f"{problem}: ")


def test_a_shard_that_is_set_aside_whole_is_lost_and_nothing_calls_it_repaired(home):
    (home / CURRENT / "manifest.json").write_text("{}")
    result = runner.invoke(app, ["buffer", "check", "--fix", "--home", str(home)])
    assert result.exit_code == 3
    assert "repaired" not in result.stdout
    assert f"lost {CURRENT}: all of it is lost (not a shard manifest); it is set aside whole" in result.stdout
    assert f"agentpipe run --home '{home}'" in result.stdout


def test_retention_that_misses_its_limit_says_who_uses_the_rest_and_what_can_be_done(home):
    result = runner.invoke(app, ["buffer", "retain", "--max-bytes", "0", "--dry-run", "--home", str(home)])
    assert result.exit_code == 1
    assert "within the limits" not in result.stdout
    assert "current: trajectories[sensor-1]" in result.stdout
    assert "in 2 shards: package of 2026-01-01_manual" in result.stderr
    assert "in 2 shards: current trajectories" in result.stderr
    assert f"agentpipe champion show --home '{home}'" in result.stderr


def test_what_is_too_old_and_in_use_is_listed_and_no_failure(home):
    code, document = call("retain", "--max-age", "0", "--dry-run", "--home", home)
    assert (code, document["over"]) == (0, 0)
    reasons = {action["shard"].removeprefix(f"{home}/"): action["reason"] for action in document["actions"]}
    assert reasons[CURRENT].endswith("days ago; current: trajectories[sensor-1]")
    words = runner.invoke(app, ["buffer", "retain", "--help"], env={"COLUMNS": "300"}).stdout.split()
    assert "and is no failure." in " ".join(words)


def test_a_shard_without_an_episode_lists_its_episodes_which_show_takes(home):
    result = runner.invoke(app, ["buffer", "show", "--path", "updates-000001", "--home", str(home)])
    assert result.exit_code == 0
    first = result.stdout.splitlines()[1].split()[0]
    shown = runner.invoke(app, ["buffer", "show", first, "--path", "updates-000001", "--home", str(home)])
    assert shown.exit_code == 0
    assert f"episode {first.split(':')[1].split('.')[0]} (" in shown.stdout
    code, document = call("show", "--path", "updates-000001", "--home", home)
    assert (code, len(document["episodes"])) == (0, len(open_shard(home / TRAINING / "updates-000001").episodes))
    assert call("show", "--home", home)[1]["error"]["message"] == "nothing to show"
