"""Memory: made from recordings, looked up by resemblance, loaded when it is needed, and choosing nothing."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from agentpipe.environments.layout import SEGMENTS, Purpose
from agentpipe.environments.players import RandomPlayer
from agentpipe.errors import CorruptError, InputError, VersionError
from agentpipe.experience.record import record_trajectories
from agentpipe.experience.store.shard import open_shard
from agentpipe.serving.agent.journal import Journal
from agentpipe.serving.agent.memory import CASE, SIZE, Embedding, Memory, unit
from agentpipe.serving.agent.recall import ALPHA, BETA, Recall, Trace, open_memory
from agentpipe.serving.agent.remember import memory_folder, recorded_shards, remember
from agentpipe.serving.agent.vocabulary import BUILT_IN
from agentpipe_tests.environments.line import catalog, make_pool, table
from agentpipe_tests.serving.agent.lines import wait_for
from agentpipe_tests.serving.agent.questions import LINE, SMALL, answer, ended, line_frame


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """A few episodes of the random player."""
    home = tmp_path_factory.mktemp("home")
    path = home / "trajectories" / "sensor-1" / "k"
    record(path)
    return path


def record(path):
    record_trajectories(
        lambda environments: make_pool(environments, seed=1, purpose=Purpose.COLLECT),
        RandomPlayer(),
        environments=catalog().environments("train", "sensor-1")[:20],
        table=table(),
        episodes_per_env=1,
        out_dir=path,
        cell="sensor-1",
        policy_version="random-1",
        durability="process",
    )


@pytest.fixture(scope="module")
def folder(shard, tmp_path_factory):
    made = tmp_path_factory.mktemp("memory") / "m"
    remember([shard], made, LINE)
    return made


def test_a_remembered_step_is_its_own_best_match(shard, folder):
    memory = Memory(folder, LINE)
    records = open_shard(shard).records
    assert memory.rows == len(records)
    assert memory.loaded == ()
    for row in (0, len(records) // 2, len(records) - 1):
        step = records[row]
        query = memory.embedding(step["observation"][None])[0]
        best = memory.search(int(step["segment"]), query, 3)
        assert best[0].similarity == pytest.approx(1.0, abs=1e-5)
        found = [case for case in best if (case.environment, case.episode) == (step["environment"], step["episode"])]
        assert int(step["action"]) in {case.action for case in found}
        assert [case.similarity for case in best] == sorted((case.similarity for case in best), reverse=True)
    assert set(memory.loaded) <= set(range(len(SEGMENTS))), "partitions are loaded when they are looked into"


def test_the_search_is_that_of_a_naive_one(folder):
    memory = Memory(folder, LINE)
    query = unit(np.random.default_rng(0).normal(size=SIZE).astype(np.float32))
    embeddings = np.load(folder / "embeddings-0.npy")
    naive = sorted(-float(row @ query) for row in embeddings)[:5]
    assert [-case.similarity for case in memory.search(0, query, 5)] == pytest.approx(naive, abs=1e-6)
    assert len(memory.search(0, query, 10**6)) == len(embeddings)
    assert memory.search(9, query, 3) == []


def test_an_equal_recording_gives_an_equal_memory_and_a_long_one_is_thinned(shard, tmp_path):
    made = [remember([shard], tmp_path / name, LINE) for name in "ab"]
    assert made[0] == made[1]
    assert remember([shard], tmp_path / "a", LINE, most=10)["rows"] == 10
    assert sum(map(len, (np.load(path) for path in (tmp_path / "a").glob("cases-*.npy")))) == 10


def test_success_is_that_of_the_episode(shard, folder):
    ended_well = {(int(e["environment"]), int(e["episode"])): int(e["success"]) for e in open_shard(shard).episodes}
    for path in folder.glob("cases-*.npy"):
        for case in np.load(path):
            assert case["success"] == ended_well[int(case["environment"]), int(case["episode"])]


def test_nothing_recorded_is_said(tmp_path):
    with pytest.raises(InputError, match="nothing recorded"):
        remember([], tmp_path / "m", LINE)
    assert open_memory(tmp_path, LINE) is None


def test_shards_are_found_in_a_home(shard):
    home = shard.parents[2]
    assert recorded_shards(home) == [shard]
    assert memory_folder(home, LINE).parent == home / "memory"


@pytest.mark.parametrize("name", ["statistics.npy", "embeddings-0.npy", "cases-0.npy"])
def test_a_changed_byte_is_found_before_it_is_used(folder, tmp_path, name):
    copy = shutil.copytree(folder, tmp_path / "copy")
    data = bytearray((copy / name).read_bytes())
    data[-1] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(CorruptError, match="not what the manifest says"):
        Memory(copy, LINE).search(0, np.zeros(SIZE, np.float32), 1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": 2}, VersionError),
        ({"observation_digest": "x"}, CorruptError),
        ({"partitions": [{"rows": 1}]}, CorruptError),
    ],
)
def test_a_memory_of_another_format_or_line_is_refused(folder, tmp_path, change, error):
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(error):
        Memory(copy, LINE)
    with pytest.raises(CorruptError):
        Memory(folder, SMALL)


def test_an_embedding_has_length_one_and_survives_what_is_not_finite():
    generator = np.random.default_rng(3)
    statistics = np.stack([generator.normal(size=7), np.array([1.0, 2.0, 0.0, 1e-9, 5.0, 1.0, 1.0])])
    embed = Embedding(statistics)
    rows = generator.normal(size=(50, 7)).astype(np.float32)
    rows[0, 1] = np.nan
    rows[1, 2] = 1e30
    found = embed(rows)
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(50), abs=1e-5)
    assert CASE.itemsize == 24


def test_the_trace_predicts_a_straight_course():
    """Holt's method with the equations written out."""
    generator = np.random.default_rng(1)
    start, direction = generator.normal(size=(2, SIZE)).astype(np.float32)
    trace, level, trend = Trace(), None, np.zeros(SIZE)
    for t in range(40):
        x = start + t * direction
        predicted = trace.follow(x.astype(np.float32))
        if level is None:
            level = x
        else:
            before, level = level, ALPHA * x + (1 - ALPHA) * (level + trend)
            trend = BETA * (level - before) + (1 - BETA) * trend
        assert predicted == pytest.approx(unit((level + trend).astype(np.float32)), abs=1e-5)
    coming = unit(start + 40 * direction)
    assert float(predicted @ coming) > 0.9999


def test_cases_are_noted_beside_the_decision_and_traces_end_with_their_order(folder, tmp_path):
    journal = Journal(tmp_path / "journal")
    recall = Recall(Memory(folder, LINE), BUILT_IN, journal)
    asked = [line_frame("identify", number) for number in range(3)]
    for each in asked:
        recall.decided(each, answer(0), 0.001)
    wait_for(lambda: recall.looked_up == 3)
    assert len(recall._traces) == 1
    recall.ended(ended())
    recall.close()
    assert recall._traces == {}
    journal.close()
    lines = (tmp_path / "journal" / "journal-00000001.log").read_text().splitlines()
    noted = [json.loads(line[9:]) for line in lines if '"k":"retrieved"' in line]
    assert [record["id"] for record in noted] == [each.decision_id for each in asked]
    assert len(noted[0]["cases"]) == 3
    assert set(noted[0]["cases"][0]) == {
        "similarity", "environment", "episode", "step", "action", "success", "reward"
    }  # fmt: skip
    again = Journal(tmp_path / "journal")
    assert again.backlog == 0
    again.close()


def test_a_damaged_partition_is_said_and_costs_no_decision(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "embeddings-0.npy").write_bytes(b"")
    journal = Journal(tmp_path / "journal")
    recall = Recall(Memory(copy, LINE), BUILT_IN, journal)
    recall.decided(line_frame("identify"), answer(0), 0.001)
    wait_for(lambda: recall.trouble)
    recall.close()
    journal.close()


def test_a_memory_that_is_made_anew_leaves_the_one_in_use_as_it_is(shard, tmp_path):
    made = tmp_path / "m"
    remember([shard], made, LINE)
    memory = Memory(made, LINE)
    query = unit(np.ones(SIZE, np.float32))
    before = memory.search(0, query, 5)
    remember([shard], made, LINE, most=4)
    assert memory.search(0, query, 5) == before
    assert Memory(made, LINE).rows == 4
