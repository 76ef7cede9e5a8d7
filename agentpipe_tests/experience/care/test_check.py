"""Check and repair: what is damaged is named, what is proven is put back, what is lost is set aside."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from agentpipe.errors import InputError, LockHeldError
from agentpipe.experience.care.check import check_folder, check_home
from agentpipe.experience.care.operations import check
from agentpipe.experience.care.shrink import shrink
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import fill, range_checksums
from agentpipe.experience.store.counter import COUNTER
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.shard import open_shard
from agentpipe.experience.store.writer import ShardWriter
from agentpipe.storage import home_lock
from agentpipe_tests.experience.fakes import make_episodes, write_shard

from .homes import DTYPE, checkpoint, flip, make_home, record_line, refer

PLACE = "trajectories/sensor-1/0123456789abcdef"
FILES = (
    rec.RECORDS,
    rec.EPISODES,
    rec.FINALS,
    rec.GRAPH,
    "index.bin",
    "names.json",
    "measurements.json",
    "manifest.json",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("made") / "home"
    make_home(home)
    return home


@pytest.fixture
def home(made, tmp_path):
    return shutil.copytree(made, tmp_path / "home")


@pytest.fixture
def shard(home):
    return home / PLACE


def only_the_cell_is_missing(report):
    """A repair with losses, after which nothing but the run of the cell is due."""
    messages = [problem.message for problem in report.problems]
    return messages == ["the cell sensor-1 has no current trajectories"] and bool(report.lost) and not report.ok


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_home_that_is_whole_says_so_and_counts(home):
    shards = [open_shard(path) for path in home.glob("trajectories/*/*")]
    report = check_home(home)
    assert report.to_json() == {
        "ok": True,
        "shards": 2,
        "episodes": sum(len(shard.episodes) for shard in shards),
        "steps": 480,
        "bytes": sum(file.stat().st_size for file in home.glob("trajectories/*/*/*")),
        "problems": [],
        "held": {},
        "repairs": [],
        "unrepaired": [],
        "lost": [],
    }


def test_a_home_without_shards_is_whole(tmp_path):
    assert check_home(tmp_path).to_json()["shards"] == 0
    assert check_home(tmp_path).ok


def test_a_flipped_byte_of_a_record_names_file_record_and_field_and_is_put_back(home, shard):
    before = content(shard)
    flip(shard / rec.RECORDS, 5 * DTYPE.itemsize + DTYPE.fields["reward"][1])
    problem = check_home(home).problems[0]
    assert (problem.shard, problem.file, problem.record, problem.field) == (PLACE, rec.RECORDS, 5, "reward")
    report = check(home, fix=True)
    assert report.ok
    assert report.repairs == [f"{PLACE}: 1 record(s) of records.bin: one changed byte each"]
    assert content(shard) == before


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("place", [0.0, 0.31, 0.7, 0.999])
def test_any_flipped_byte_of_any_file_is_noticed_and_put_back(home, shard, file, place):
    before = content(shard)
    offset = int(len(before[file]) * place)
    flip(shard / file, offset)
    problems = check_home(home).problems
    assert {problem.file for problem in problems} == {file}
    assert all(problem.field is not None or file == "manifest.json" for problem in problems)
    report = check(home, fix=True)
    assert report.ok, report.problems
    assert report.repairs
    assert content(shard) == before


@pytest.mark.parametrize("file", ["index.bin", "names.json", rec.GRAPH, rec.FINALS])
def test_what_follows_from_the_rest_is_made_again_where_it_is_gone(home, shard, file):
    before = content(shard)
    (shard / file).unlink()
    assert [problem.file for problem in check_home(home).problems] == [file]
    assert check(home, fix=True).ok
    assert content(shard) == before


def test_an_episode_of_the_line_is_played_again_where_its_actions_are_left(home, shard):
    before = content(shard)
    data = bytearray(before[rec.RECORDS])
    start = 40 * DTYPE.itemsize + DTYPE.fields["observation"][1]
    data[start : start + 200] = bytes(200)
    (shard / rec.RECORDS).write_bytes(data)
    assert check_home(home).problems[0].record == 40
    report = check(home, fix=True)
    assert report.ok
    assert "played again from its actions" in report.repairs[0]
    assert content(shard) == before


def test_an_episode_whose_actions_are_gone_is_set_aside_and_its_cell_materialised_again(home, shard):
    old = open_shard(shard)
    digest, rows = old.digest, old.episodes.copy()
    data = bytearray((shard / rec.RECORDS).read_bytes())
    data[40 * DTYPE.itemsize : 41 * DTYPE.itemsize] = bytes(DTYPE.itemsize)
    (shard / rec.RECORDS).write_bytes(data)
    report = check(home, fix=True)
    assert only_the_cell_is_missing(report)
    assert (report.lost[0].shard, report.lost[0].episodes) == (PLACE, 1)
    assert report.lost[0].quarantine == str(home / "quarantine/experience" / digest)
    assert "1 of" in report.lost[0].message
    assert not (home / "references/trajectories/sensor-1.json").exists()
    left = open_shard(shard)
    lost = int(np.searchsorted(rows["first"], 40, side="right")) - 1
    kept = np.sort(rows[np.arange(len(rows)) != lost], order=["environment", "episode"])
    for field in ("environment", "episode", "steps", "return", "cut"):
        np.testing.assert_array_equal(left.episodes[field], kept[field])
    assert left.digest != digest
    reasons = json.loads((home / "quarantine/experience" / digest / "reasons.json").read_text())
    assert reasons["digest"] == digest
    assert reasons["episodes"][0]["row"] == lost
    assert reasons["episodes"][0]["environment"] == rows["environment"][lost]
    assert "checksum" in reasons["episodes"][0]["reason"]


def test_a_truncated_file_loses_no_episode_that_is_whole(home, shard):
    count = len(open_shard(shard).episodes)
    data = (shard / rec.RECORDS).read_bytes()
    (shard / rec.RECORDS).write_bytes(data[: -3 * DTYPE.itemsize // 2])
    report = check(home, fix=True)
    assert only_the_cell_is_missing(report)
    assert len(open_shard(shard).episodes) == count - 1


def test_a_shard_without_a_readable_manifest_is_set_aside_whole(home, shard):
    before = content(shard)
    before["manifest.json"] = b"{}"
    (shard / "manifest.json").write_bytes(b"{}")
    report = check(home, fix=True)
    assert only_the_cell_is_missing(report)
    assert (report.repairs, report.lost[0].episodes) == ([], None)
    assert "set aside whole" in report.lost[0].message
    assert not shard.exists()
    assert content(home / "quarantine/experience/sensor-1-0123456789abcdef/shard") == before


def test_a_repair_writes_aside_so_that_readers_keep_what_they_have(home, shard):
    reader = open_shard(shard)
    rewards = reader.records["reward"].copy()
    data = bytearray((shard / rec.RECORDS).read_bytes())
    data[40 * DTYPE.itemsize : 41 * DTYPE.itemsize] = bytes(DTYPE.itemsize)
    (shard / "other.bin").write_bytes(data)
    (shard / "other.bin").replace(shard / rec.RECORDS)
    check(home, fix=True)
    reader.still_whole()
    np.testing.assert_array_equal(reader.records["reward"], rewards)


def test_repairs_wait_for_nobody_but_say_who_holds_the_home(home, shard):
    flip(shard / rec.RECORDS, 3_000)
    with home_lock(home, "agentpipe run"), pytest.raises(LockHeldError, match="agentpipe run"):
        check(home, fix=True)


# --------------------------------------------------------------------------------------------- beyond checksums


def forge(shard, file, dtype, record, **values):
    """Changes fields of a record and its checksum with them."""
    records = np.fromfile(shard / file, dtype)
    for field, value in values.items():
        records[field][record] = value
    fill(records)
    records.tofile(shard / file)


@pytest.mark.parametrize(
    ("file", "record", "field", "values"),
    [
        (rec.RECORDS, 3, "action", {"mask": 0}),
        (rec.RECORDS, 0, "terminated", {"terminated": 1}),
        (rec.RECORDS, 7, "reward", {"reward": np.nan}),
        (rec.RECORDS, 7, "step", {"step": 50}),
        (rec.RECORDS, 7, "environment", {"environment": 1}),
        (rec.RECORDS, 7, "policy", {"policy": 9}),
        (rec.EPISODES, 2, "cut", {"cut": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_records_whose_checksum_fits_are_held_against_the_rest(home, shard, file, record, field, values):
    forge(shard, file, DTYPE if file == rec.RECORDS else rec.EPISODE, record, **values)
    problem = check_home(home).problems[0]
    assert (problem.file, problem.record, problem.field) == (file, record, field)


def test_a_graph_that_is_not_what_its_steps_made_and_needed_is_named(home, shard):
    opened = open_shard(shard)
    row = int(opened.episodes["steps"].argmax())
    words, rows = np.array(opened.graph), opened.episodes.copy()
    first, steps = int(rows["graph"][row]), int(rows["steps"][row])
    words[first + steps - 1] ^= np.uint64(1)
    counts = rows["steps"].astype(np.int64)
    rows["graph_checksum"] = range_checksums(words, rows["graph"].astype(np.int64), counts)
    fill(rows)
    words.tofile(shard / rec.GRAPH)
    rows.tofile(shard / rec.EPISODES)
    problem = check_home(home).problems[0]
    assert (problem.file, problem.record, problem.field) == (rec.GRAPH, row, "parents")


# --------------------------------------------------------------------------------------------- open shards


def test_an_open_shard_that_is_being_written_is_checked_without_its_leveldb(home):
    folder = home / "policy_checkpoint/2026-01-01_manual/feedfacefeedface/experience/updates-000001"
    with record_line(folder, purpose="TRAIN", seal=False) as writer:
        report = check_home(home)
        assert report.ok
        assert report.steps == 480 + writer.steps
        assert next(iter(report.held.values())).startswith("a test (process ")
    assert check_home(home).held == {}


def test_leveldb_that_lost_an_entry_is_named_and_made_again(tmp_path):
    with record_line(tmp_path / "shard", seal=False) as writer:
        count = writer.episodes
    from agentpipe.experience.store.index import OpenIndex, encode_key, step_id

    row = open_live(tmp_path / "shard").episodes[3]
    index = OpenIndex(tmp_path / "shard/index")
    index._database.delete(encode_key(int(row["environment"]), step_id(int(row["episode"]), 0), int(row["time_ns"])))
    index.close()
    problem = check_folder(tmp_path).problems[0]
    assert (problem.file, problem.record, problem.message) == ("index", 3, "entry is missing")
    assert check(tmp_path / "nohome", folder=tmp_path, fix=True).ok
    assert len(open_live(tmp_path / "shard").episodes) == count


@pytest.mark.parametrize("damage", ["record", "counter", "index", "episode"])
def test_an_open_shard_is_repaired_and_goes_on(home, damage):
    folder = home / "trajectories/sensor-1/0123456789abcdef.open"
    with record_line(folder, seal=False) as writer:
        episodes, header = writer.episodes, writer.header
    expected = open_live(folder).records.tobytes()
    if damage == "record":
        flip(folder / rec.RECORDS, 10 * DTYPE.itemsize + 100)
    elif damage == "counter":
        flip(folder / COUNTER, 9)
        flip(folder / COUNTER, 73)
    elif damage == "index":
        for file in (folder / "index").glob("*"):
            file.write_bytes(b"nonsense")
    else:
        flip(folder / rec.EPISODES, rec.EPISODE.itemsize + 4)
    assert len(check_home(home).problems) >= 1
    report = check(home, fix=True)
    assert report.ok, report.problems
    shard = open_live(folder)
    assert len(shard.episodes) == episodes
    assert shard.records.tobytes() == expected
    with ShardWriter.open(folder, header) as writer:
        assert writer.episodes == episodes


@pytest.mark.parametrize(
    "left", [(), ("lock",), ("lock", "counter.bin"), ("lock", "counter.bin", "records.bin", "index")]
)
def test_what_a_writer_left_that_died_before_it_began_is_no_damage_unless_somebody_needs_it(home, shard, left):
    folder = home / "policy_checkpoint/2026-01-01_manual/feedfacefeedface/experience/updates-000001"
    with ShardWriter.open(folder, {"observation_size": 1, "action_count": 1, "policies": []}):
        pass
    for file in folder.iterdir():
        if file.name not in left:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert check_home(home).ok
    shutil.rmtree(shard)
    folder.rename(shard)
    assert not check_home(home).ok


def test_a_lost_episode_of_an_open_shard_is_set_aside(home):
    folder = home / "trajectories/sensor-1/0123456789abcdef.open"
    with record_line(folder, seal=False) as writer:
        episodes = writer.episodes
    data = bytearray((folder / rec.RECORDS).read_bytes())
    data[: DTYPE.itemsize] = bytes(DTYPE.itemsize)
    (folder / rec.RECORDS).write_bytes(data)
    report = check(home, fix=True)
    assert (report.problems, [loss.episodes for loss in report.lost]) == ([], [1])
    assert len(open_live(folder).episodes) == episodes - 1
    reasons = json.loads((home / "quarantine/experience/0123456789abcdef.open-1/reasons.json").read_text())
    assert [entry["row"] for entry in reasons["episodes"]] == [0]


# ------------------------------------------------------------------------------- shrunk, foreign, referred to


@pytest.mark.parametrize("file", ["compact.bin", rec.EPISODES, "index.bin", "names.json", "manifest.json"])
def test_a_shrunk_shard_is_checked_and_repaired_too(home, shard, file):
    shrink(shard, verify=False)
    before = content(shard)
    assert check_home(home).ok
    flip(shard / file, len(before[file]) // 2)
    assert check_home(home).problems[0].file == file
    assert check(home, fix=True).ok
    assert content(shard) == before


def test_a_shrunk_shard_that_lost_actions_is_published_with_the_episodes_that_are_left(home, shard):
    digest, rows = open_shard(shard).digest, open_shard(shard).episodes.copy()
    lost = int(np.searchsorted(rows["first"], 2, side="right")) - 1
    returns = {(int(row["environment"]), int(row["episode"])): float(row["return"]) for row in rows}
    shrink(shard, verify=False)
    data = bytearray((shard / "compact.bin").read_bytes())
    data[64:96] = bytes(32)
    (shard / "compact.bin").write_bytes(data)
    report = check(home, fix=True)
    assert only_the_cell_is_missing(report)
    left = open_shard(shard)
    assert len(left.episodes) == len(rows) - 1
    for row in left.episodes:
        assert returns[int(row["environment"]), int(row["episode"])] == row["return"]
    assert (home / "quarantine/experience" / digest / "compact.bin").stat().st_size == 32 * int(rows["steps"][lost])
    assert not (home / "references/trajectories/sensor-1.json").exists()


def test_a_shrunk_shard_that_cannot_be_played_here_stays_a_problem(home, shard):
    shrink(shard, verify=False)
    shutil.rmtree(home / "table")
    data = bytearray((shard / "compact.bin").read_bytes())
    data[64:96] = bytes(32)
    (shard / "compact.bin").write_bytes(data)
    report = check(home, fix=True)
    assert [(problem.file, problem.record) for problem in report.problems] == [("compact.bin", 2)]


def test_names_that_nothing_brings_back_stay_a_problem_and_are_left_as_they_are(tmp_path):
    shard = write_shard(tmp_path / "own")
    damaged = (shard.path / "names.json").read_bytes()[:30]
    (shard.path / "names.json").write_bytes(damaged)
    (shard.path / "index.bin").unlink()
    report = check(tmp_path / "nohome", folder=tmp_path, fix=True)
    assert [problem.file for problem in report.problems] == ["names.json"]
    assert report.repairs == ["own: the index, from the episodes"]
    assert (shard.path / "names.json").read_bytes() == damaged


def test_episodes_of_the_users_own_environments_are_set_aside_where_they_are_lost(tmp_path):
    shard = write_shard(tmp_path / "own", make_episodes(np.random.default_rng(2), 30))
    assert check_folder(tmp_path).ok
    size = shard.records.itemsize
    data = bytearray((shard.path / rec.RECORDS).read_bytes())
    data[20 * size : 21 * size] = bytes(size)
    (shard.path / rec.RECORDS).write_bytes(data)
    report = check(tmp_path / "nohome", folder=shard.path, fix=True)
    assert (report.problems, [loss.episodes for loss in report.lost]) == ([], [1])
    assert len(open_shard(shard.path).episodes) == 29
    assert (tmp_path / "quarantine/experience" / shard.digest / "reasons.json").exists()


@pytest.mark.parametrize("seed", range(12))
def test_no_damage_is_ever_more_than_a_problem(home, seed):
    """Anything may happen to any file: what is wrong is said, repairs end, and a second repair finds nothing to do."""
    rng = np.random.default_rng(seed)
    record_line(home / "trajectories/sensor-1/left.open", seal=False).close()
    shrink(home / "trajectories/load-2/0123456789abcdef", verify=False)
    files = sorted(
        path for path in home.glob("trajectories/**/*") if path.is_file() and path.name not in ("lock", "LOG")
    )
    for file in rng.choice(np.array(files, dtype=object), 3, replace=False):
        data = bytearray(file.read_bytes())
        start, length = int(rng.integers(0, len(data) + 1)), int(rng.integers(1, 2_000))
        match rng.integers(0, 4):
            case 0:
                data[start : start + length] = rng.bytes(len(data[start : start + length]))
            case 1:
                data = data[:start]
            case 2:
                data += rng.bytes(length)
            case _:
                data[start : start + length] = bytes(len(data[start : start + length]))
        file.write_bytes(data)
    report = check(home, fix=True)
    assert all("no current trajectories" in problem.message for problem in report.problems)
    again = check(home, fix=True)
    assert (again.repairs, again.lost) == ([], [])


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(InputError, match="no shard"):
        check_folder(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        check_folder(tmp_path / "gone")


def test_references_and_checkpoints_must_find_what_they_name(home, shard):
    rollouts = record_line(
        home / "policy_checkpoint/2026-01-01_manual/feedfacefeedface/experience/updates-000001", purpose="TRAIN"
    )
    checkpoint(home, rollouts)
    assert check_home(home).ok
    shutil.rmtree(rollouts.path)
    problem = check_home(home).problems[0]
    assert problem.field == "trajectory_index"
    assert problem.message == "checkpoint update-000020-abc of 2026-01-01_manual names it, and it is gone"
    assert (
        problem.file
        == "policy_checkpoint/2026-01-01_manual/feedfacefeedface/checkpoints/update-000020-abc/manifest.json"
    )
    shutil.rmtree(home / "policy_checkpoint")
    refer(home, "sensor-1", open_shard(home / "trajectories/load-2/0123456789abcdef"))
    shutil.rmtree(shard)
    assert check_home(home).ok  # load-2 is what the reference of sensor-1 names now
    shutil.rmtree(home / "trajectories/load-2")
    assert [problem.message for problem in check_home(home).problems] == ["trajectories[sensor-1] is gone"]


def test_a_reference_to_another_digest_and_an_unreadable_one_are_named(home):
    (home / "references/trajectories/load-2.json").write_text("{")
    reference = home / "references/trajectories/sensor-1.json"
    reference.write_text(json.dumps({**json.loads(reference.read_text()), "data_version": "f" * 64}))
    fields = [(problem.file, problem.field) for problem in check_home(home).problems]
    assert (str(home / "references/trajectories/load-2.json"), None) in fields
    assert ("references/trajectories/sensor-1.json", "data_version") in fields
