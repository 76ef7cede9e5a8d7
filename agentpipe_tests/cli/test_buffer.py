"""``agentpipe buffer`` as a person and as a script see it."""

from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentpipe.cli.buffer import parse_size
from agentpipe.cli.buffer_output import size_text
from agentpipe.cli.main import app
from agentpipe.errors import HomeError, InputError
from agentpipe.experience.store.shard import is_shrunk, open_shard
from agentpipe_tests.experience.care.homes import DTYPE, checkpoint, flip, make_home, record_line

COMMANDS = ("check", "show", "stats", "retain", "restore", "compact", "export")
ROLLOUTS = "policy_checkpoint/2026-01-01_manual/feedfacefeedface/experience"
CURRENT = "trajectories/sensor-1/0123456789abcdef"
runner = CliRunner()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("made") / "home"
    make_home(home)
    first = record_line(home / ROLLOUTS / "updates-000001", purpose="TRAIN", ordinal=1)
    record_line(home / ROLLOUTS / "updates-000020", purpose="TRAIN", ordinal=20, first_episode=60)
    record_line(home / "trajectories/sensor-1/earlier", first_episode=60)
    checkpoint(home, first)
    return home


@pytest.fixture
def home(made, tmp_path):
    return shutil.copytree(made, tmp_path / "home")


def call(*arguments):
    result = runner.invoke(app, ["buffer", *(str(argument) for argument in arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def text(*arguments):
    result = runner.invoke(app, ["buffer", *(str(argument) for argument in arguments)])
    return result.exit_code, result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_takes_home_and_json(command):
    result = runner.invoke(app, ["buffer", command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--home" in result.stdout
    assert "--json" in result.stdout


@pytest.mark.parametrize("command", [("check",), ("stats",), ("retain",), ("show", "1"), ("export",), ("restore", "x")])
def test_without_a_home_every_command_says_so_and_makes_none(tmp_path, command):
    code, document = call(*command, "--home", tmp_path / "none")
    assert (code, document["error"]["type"]) == (1, "InputError")
    assert document["error"]["where"] == {"file": str(tmp_path / "none")}
    assert not (tmp_path / "none").exists()


def test_check_counts_and_after_one_flipped_byte_names_it_and_exits_1(home):
    code, document = call("check", "--home", home)
    assert (code, document["ok"], document["shards"], document["problems"]) == (0, True, 5, [])
    assert document["steps"] == 5 * 240
    flip(home / CURRENT / "records.bin", 7 * DTYPE.itemsize + DTYPE.fields["value"][1])
    code, document = call("check", "--home", home)
    assert (code, document["ok"]) == (1, False)
    assert document["problems"] == [
        {
            "shard": CURRENT,
            "file": "records.bin",
            "record": 7,
            "field": "value",
            "message": "checksum does not fit",
            "remedy": f"agentpipe buffer check --fix --home {home}",
        }
    ]
    code, shown = text("check", "--home", home)
    assert code == 1
    assert f"{CURRENT}: checksum does not fit [file records.bin, record 7, field value]" in shown
    code, document = call("check", "--fix", "--home", home)
    assert (code, document["ok"], len(document["repairs"])) == (0, True, 1)
    assert call("check", "--home", home)[0] == 0


def test_check_of_a_folder_needs_no_home(home, tmp_path):
    code, document = call("check", "--path", home / "trajectories", "--home", tmp_path / "none")
    assert (code, document["shards"]) == (0, 3)
    assert call("check", "--path", tmp_path / "gone")[1]["error"]["type"] == "InputError"


def test_stats_lists_every_shard_and_who_refers_to_it(home):
    code, document = call("stats", "--home", home)
    assert code == 0
    assert document["total"]["shards"] == 5
    assert document["total"]["steps"] == 5 * 240
    listed = {shard["path"].removeprefix(f"{home}/"): shard for shard in document["shards"]}
    current = listed[CURRENT]
    assert (current["state"], current["cell"], current["claims"]) == ("sealed", "sensor-1", ["trajectories[sensor-1]"])
    assert listed[f"{ROLLOUTS}/updates-000001"]["training"] == "2026-01-01_manual"
    assert listed[f"{ROLLOUTS}/updates-000001"]["claims"] == ["checkpoint update-000020-abc of 2026-01-01_manual"]
    assert listed["trajectories/sensor-1/earlier"]["claims"] == []
    assert listed[f"{ROLLOUTS}/updates-000020"]["ordinals"] == [20]
    shown = text("stats", "--home", home)[1]
    assert "rollouts 2026-01-01_manual" in shown
    assert "5 shards (5 sealed)" in shown


def test_show_prints_the_episode_of_the_current_materialisation_first(home):
    shard = open_shard(home / CURRENT)
    environment = int(shard.episodes["environment"][0])
    code, document = call("show", environment, "--home", home)
    assert code == 0
    assert document["episode"]["shard"] == str(home / CURRENT)
    assert document["episode"]["index"] == environment
    assert len(document["others"]) == 3
    named = shard.names[environment]
    assert call("show", f"{named}:0.1", "--home", home)[1]["steps"] != document["steps"]
    code, shown = text("show", f"{named}:{0 << 16 | 1}", "--home", home)
    assert code == 0
    assert f"{named}, episode 0" in shown
    code, document = call("show", f"{named}:60.0", "--cell", "sensor-1", "--home", home)
    assert "no episode 60" in document["error"]["message"]
    assert call("show", f"{named}:60.0", "--home", home)[0] == 0


def test_show_plays_an_episode_of_a_shrunk_shard_again(home):
    full = call("show", "195:60.0", "--path", home / ROLLOUTS / "updates-000020", "--home", home)
    from agentpipe.experience.care.shrink import shrink

    shrink(home / ROLLOUTS / "updates-000020", verify=False)
    shrunk = call("show", "195:60.0", "--path", home / ROLLOUTS / "updates-000020", "--home", home)
    assert shrunk[0] == full[0] == 0
    assert shrunk[1]["steps"] == full[1]["steps"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "t9999.sensor-1"), "no episode of environment t9999.sensor-1"),
        (("show", "195:x"), "not an environment and step"),
        (("show", "195:0.63"), "the episode has no step 63"),
        (("export", "f00"), "no such shard"),
        (("export", "f00f00f00"), "no such shard"),
        (("export", "--cell", "load-5"), "the trajectories of load-5 are not materialised"),
        (("export", CURRENT, "--cell", "load-2"), "a shard and a cell at once"),
        (("retain", "--budget", "much"), "not a size: 'much'"),
        (("compact",), "fewer than two"),
        (("restore", "nothing"), "no such shard"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_a_typed_error_with_a_remedy(home, arguments, message):
    code, document = call(*arguments, "--home", home)
    assert code == 1
    assert message in document["error"]["message"]
    assert document["error"]["remedy"]


def test_retention_says_what_it_would_do_then_does_it(home):
    code, planned = call("retain", "--max-bytes", "0", "--dry-run", "--home", home)
    assert (code, planned["dry_run"]) == (1, True)
    assert call("check", "--home", home)[1]["shards"] == 5
    code, done = call("retain", "--max-bytes", "0", "--home", home)
    assert done["actions"] == planned["actions"]
    verbs = {action["shard"].removeprefix(f"{home}/"): action["action"] for action in done["actions"]}
    assert verbs == {
        CURRENT: "keep",
        "trajectories/load-2/0123456789abcdef": "keep",
        "trajectories/sensor-1/earlier": "delete",
        f"{ROLLOUTS}/updates-000001": "shrink",
        f"{ROLLOUTS}/updates-000020": "delete",
    }
    assert code == 1
    assert done["over"] > 0
    assert not (home / "trajectories/sensor-1/earlier").exists()
    assert is_shrunk(home / ROLLOUTS / "updates-000001")
    code, document = call("check", "--home", home)
    assert (code, document["shards"]) == (0, 3)


def test_retention_within_its_limits_exits_0_and_takes_the_budget_of_the_settings(home, monkeypatch):
    assert call("retain", "--budget", "1GB", "--max-age", "30", "--home", home)[0] == 0
    monkeypatch.setenv("AGENTPIPE_EXPERIENCE__BUDGET_MB", "1")
    code, document = call("retain", "--home", home, "--dry-run")
    assert code == 0
    assert document["bytes_before"] > 1_000_000 >= document["bytes_after"]
    assert "delete" in text("retain", "--home", home, "--dry-run")[1]


def test_nothing_is_deleted_while_a_checkpoint_cannot_be_read(home):
    file = home / ROLLOUTS.replace("experience", "checkpoints/update-000020-abc") / "manifest.json"
    file.write_text("{")
    code, document = call("retain", "--max-bytes", "0", "--home", home)
    assert (code, document["error"]["type"]) == (1, "CorruptError")
    assert document["error"]["where"]["file"] == str(file)
    assert call("check", "--home", home)[1]["shards"] == 5


def test_a_reader_outlives_a_retention_run(home):
    reader = open_shard(home / "trajectories/sensor-1/earlier")
    rewards = reader.records["reward"].copy()
    call("retain", "--max-bytes", "0", "--home", home)
    reader.still_whole()
    assert (reader.records["reward"] == rewards).all()


def test_a_home_in_use_is_named(home):
    from agentpipe.storage import home_lock

    with home_lock(home, "agentpipe run"):
        code, document = call("retain", "--max-bytes", "0", "--home", home)
    assert (code, document["error"]["type"]) == (1, "LockHeldError")
    assert "agentpipe run" in document["error"]["message"]


def test_restore_brings_shrunk_shards_back(home):
    call("retain", "--max-bytes", "0", "--home", home)
    digest = json.loads((home / ROLLOUTS / "updates-000001/manifest.json").read_text())["digest"]
    code, document = call("restore", digest[:12], "--home", home)
    assert (code, document["shards"][0]["digest"]) == (0, digest)
    assert open_shard(home / ROLLOUTS / "updates-000001").digest == digest
    assert document["shards"][0]["changed"] is True
    assert "nothing to restore" in text("restore", f"{ROLLOUTS}/updates-000001", "--home", home)[1]


def test_compact_merges_what_nobody_refers_to(home):
    record_line(home / "trajectories/sensor-1/later", first_episode=120)
    parts = [home / "trajectories/sensor-1" / name for name in ("earlier", "later")]
    code, document = call("compact", *parts, "--home", home)
    assert (code, document["steps"]) == (0, 480)
    assert not any(part.exists() for part in parts)
    assert call("check", "--home", home)[0] == 0
    code, document = call("compact", document["shard"], home / CURRENT, "--home", home)
    assert "trajectories[sensor-1] refers to it" in document["error"]["message"]


def test_export_writes_the_current_trajectories(home, tmp_path):
    code, document = call("export", "--out", tmp_path / "all.parquet", "--home", home)
    assert (code, document["steps"], len(document["shards"])) == (0, 480, 2)
    assert pq.ParquetFile(tmp_path / "all.parquet").metadata.num_rows == 480
    shown = text("export", "--cell", "load-2", "--out", tmp_path / "one.arrow", "--home", home)[1]
    assert "240 steps of 1 shard" in shown


@pytest.mark.parametrize(
    ("written", "size"),
    [("0", 0), ("1500", 1_500), ("500MB", 500_000_000), ("1.5 GiB", 1_610_612_736), ("2k", 2_000), ("7B", 7)],
)
def test_sizes_are_read_with_decimal_and_binary_units(written, size):
    assert parse_size(written, "budget") == size


@pytest.mark.parametrize("written", ["", "MB", "-1", "1XB", "1e400", "1e308GB", "nan", "5 M B", "1MMB"])
def test_what_is_no_size_is_refused(written):
    with pytest.raises(InputError):
        parse_size(written, "budget")


def test_sizes_are_shown_with_three_figures_or_four():
    assert [size_text(size) for size in (0, 999, 1_000, 12_345_678, 5e9, 2e13)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "12.3 MB",
        "5.0 GB",
        "20.0 TB",
    ]


@pytest.mark.parametrize("command", [("check",), ("stats",), ("show", "t0016.sensor-1")])
def test_a_home_that_cannot_be_written_can_still_be_read(home, monkeypatch, command):
    def refuse(_):
        raise HomeError("the home is not writable", file=home)

    monkeypatch.setattr("agentpipe.storage.prepare_home", refuse)
    code, document = call(*command, "--home", home)
    assert code == 0, document


@pytest.mark.parametrize(
    "name", ["records.bin", "episodes.bin", "graph.bin", "index.bin", "names.json", "manifest.json"]
)
def test_a_folder_in_place_of_a_file_does_not_keep_other_shards_from_repair(home, name):
    other = "trajectories/load-2/0123456789abcdef/records.bin"
    before = (home / other).read_bytes()
    (home / CURRENT / name).unlink()
    (home / CURRENT / name).mkdir()
    flip(home / other, 100)
    _, document = call("check", "--fix", "--home", home)
    assert {problem["shard"] for problem in document["problems"]} <= {CURRENT, "trajectories/sensor-1"}
    assert (home / other).read_bytes() == before
