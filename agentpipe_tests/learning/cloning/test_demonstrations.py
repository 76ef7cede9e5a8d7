"""Recorded episodes are read from shards and from Parquet files, and refused with file and row where they are wrong."""

import dataclasses
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE, Purpose
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.pool import build_pool
from agentpipe.environments.rules import RulesPlayer
from agentpipe.environments.table import load_table
from agentpipe.errors import CorruptError, LearningError, NonFiniteError
from agentpipe.experience.record import record_trajectories
from agentpipe.experience.store.shard import open_shard
from agentpipe.feedback.schema import FeedbackShape
from agentpipe.learning.cloning.demonstrations import COLUMNS, read_demonstrations

SHAPE = FeedbackShape(OBSERVATION_SIZE, ACTION_COUNT)
EPISODES = 72


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """36 environments, two episodes each, played by the rules."""
    chosen = load_catalog().spread("train", 36)
    table, profile = load_table(data_dir() / "disturbances.csv"), default_profile()

    def build(some):
        return build_pool(some, table, profile, seed=0, purpose=Purpose.COLLECT)

    return record_trajectories(
        build,
        RulesPlayer(profile),
        environments=chosen,
        table=table,
        episodes_per_env=2,
        out_dir=tmp_path_factory.mktemp("recorded") / "shard",
        cell="all",
        policy_version="rules",
        durability="process",
    ).path


def decisions(path, *, paying=True):
    """The episodes of a shard as decision records, a line for each environment, as columns of lists."""
    shard = open_shard(path)
    rows = {name: [] for name in (*COLUMNS, "reward", "terminated")}
    for row in np.argsort(shard.episodes["first"]):
        for step in shard.steps(int(row)):
            rows["line_id"].append(f"line-{step['environment']}")
            rows["time"].append(int(step["time_ns"]) // 1_000)
            rows["observation"].append(step["observation"].tolist())
            rows["last_action"].append(int(step["last_action"]))
            rows["elapsed_minutes"].append(float(step["time"]))
            rows["mask"].append(shard.unpack_masks(step["mask"][None])[0].tolist())
            rows["action"].append(int(step["action"]))
            rows["reward"].append(float(step["reward"]))
            rows["terminated"].append(bool(step["terminated"]))
    return rows if paying else {name: rows[name] for name in COLUMNS}


TYPES = {
    "time": pa.timestamp("us", tz="UTC"),
    "observation": pa.list_(pa.float32()),
    "mask": pa.list_(pa.bool_()),
    "elapsed_minutes": pa.float32(),
    "reward": pa.float32(),
}


def write(path, rows):
    """A Parquet file of ``rows``."""
    columns = {
        name: values if isinstance(values, pa.Array) else pa.array(values, TYPES.get(name))
        for name, values in rows.items()
    }
    pq.write_table(pa.table(columns), path, write_page_checksum=True)
    return path


@pytest.fixture(scope="module")
def rows(recorded):
    return decisions(recorded)


def read(*paths, least=1, **changes):
    return read_demonstrations(paths, changes.pop("shape", SHAPE), least=least, **changes)


def test_a_shard_gives_all_its_steps(recorded):
    found, shard = read(recorded, successes_only=False), open_shard(recorded)
    order = np.argsort(shard.episodes["first"])
    assert len(found) == EPISODES
    assert found.left_out == {}
    np.testing.assert_array_equal(found.length, shard.episodes["steps"][order])
    for name in ("observation", "action", "last_action", "reward", "time"):
        np.testing.assert_array_equal(getattr(found, name), shard.records[name])
    np.testing.assert_array_equal(found.mask, shard.unpack_masks(shard.records["mask"]))
    np.testing.assert_array_equal(found.paid, shard.records["terminated"][np.cumsum(found.length) - 1] == 1)


def test_failures_are_left_out_and_counted(recorded):
    failures = int((open_shard(recorded).episodes["success"] == 0).sum())
    found = read(recorded)
    assert failures > 0
    assert found.left_out == {"failed": failures}
    assert len(found) == EPISODES - failures


def test_the_same_episodes_from_a_parquet_file_in_any_order_of_rows(recorded, rows, tmp_path):
    order = np.random.default_rng(0).permutation(len(rows["time"]))
    shuffled = {name: [values[place] for place in order] for name, values in rows.items()}
    found, expected = read(write(tmp_path / "a.parquet", shuffled)), read(recorded, successes_only=False)
    assert sorted(found.length.tolist()) == sorted(expected.length.tolist())
    assert found.reward.sum(dtype=np.float64) == pytest.approx(expected.reward.sum(dtype=np.float64))
    assert found.paid.sum() == expected.paid.sum()
    one = dataclasses.asdict(read(write(tmp_path / "b.parquet", rows)))
    assert all(np.array_equal(one[name], value) for name, value in dataclasses.asdict(found).items())


def test_without_rewards_there_is_no_return(rows, tmp_path):
    found = read(write(tmp_path / "human.parquet", {name: rows[name] for name in COLUMNS}))
    assert len(found) == EPISODES
    assert not found.paid.any()
    assert not found.reward.any()


def test_other_kinds_of_rows_are_passed_over(rows, tmp_path):
    mixed = {**rows, "kind": ["decision"] * (len(rows["time"]) - 1) + ["label"]}
    assert read(write(tmp_path / "mixed.parquet", mixed)).length.sum() == len(rows["time"]) - 1


def test_fewer_than_fifty_are_too_few(recorded, rows, tmp_path):
    first = np.flatnonzero(np.array(rows["last_action"]) == ACTION_COUNT)[49]
    path = write(tmp_path / "few.parquet", {name: values[:first] for name, values in rows.items()})
    with pytest.raises(LearningError, match="49 episodes to learn from, at least 50 are needed"):
        read(path, least=50)
    assert len(read(recorded, successes_only=False, least=50)) == EPISODES


def test_an_episode_that_is_there_twice_counts_once(recorded, rows, tmp_path):
    found = read(recorded, write(tmp_path / "again.parquet", rows), recorded, successes_only=False)
    assert len(found) == EPISODES
    assert found.left_out == {"there twice": 2 * EPISODES}
    with pytest.raises(LearningError, match="144 there twice"):
        read(recorded, recorded, recorded, successes_only=False, least=73)


@pytest.mark.parametrize("columns", [None, COLUMNS])
def test_rows_that_are_there_twice_count_once(rows, tmp_path, columns):
    kept = {name: values for name, values in rows.items() if columns is None or name in columns}
    once = read(write(tmp_path / "once.parquet", kept))
    twice = read(write(tmp_path / "twice.parquet", {name: [*values, *values] for name, values in kept.items()}))
    assert twice.digest == once.digest
    assert twice.left_out == {"there twice": EPISODES}


def test_a_row_that_differs_is_no_copy(rows, tmp_path):
    copied = {name: [*values, values[5]] for name, values in rows.items()}
    whole = read(write(tmp_path / "copied.parquet", copied))
    assert whole.length.sum() == len(rows["time"])
    copied["elapsed_minutes"][-1] += 1.0
    assert read(write(tmp_path / "other.parquet", copied)).left_out == {"with a step missing": 1}


def test_an_episode_does_not_go_on_after_its_end(rows, tmp_path):
    begins = np.flatnonzero(np.array(rows["last_action"]) == ACTION_COUNT)
    first = next(int(at) for at, then in itertools.pairwise(begins) if then - at > 2)
    ends = list(rows["terminated"])
    ends[first + 1] = True
    with pytest.raises(LearningError, match="goes on after its end") as caught:
        read(write(tmp_path / "a.parquet", {**rows, "terminated": ends}))
    assert caught.value.where["row"] == first + 2
    assert caught.value.where["field"] == "terminated"


@pytest.mark.parametrize(
    ("field", "kind", "value"),
    [
        ("time", pa.bool_(), True),
        ("time", pa.int64(), 3),
        ("time", pa.time64("us"), 3),
        ("time", pa.duration("us"), 3),
        ("time", pa.string(), "2026-01-01T00:00:00Z"),
        ("line_id", pa.int64(), 3),
        ("line_id", pa.struct([("a", pa.int64())]), {"a": 1}),
        ("line_id", pa.binary(), b"line"),
    ],
)
def test_a_column_of_another_type_is_refused(rows, tmp_path, field, kind, value):
    path = write(tmp_path / "a.parquet", rows)
    table = pq.read_table(path)
    odd = pa.array([value] * len(table), kind)
    pq.write_table(table.set_column(table.schema.get_field_index(field), field, odd), path)
    with pytest.raises(LearningError, match=f"{field} is of type") as caught:
        read(path)
    assert caught.value.where["field"] == field


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_lines_may_be_any_text(rows, tmp_path, kind):
    path = write(tmp_path / "a.parquet", rows)
    table = pq.read_table(path)
    lines = table.column("line_id").cast(kind)
    pq.write_table(table.set_column(table.schema.get_field_index("line_id"), "line_id", lines), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet").digest == read(path).digest


def test_no_episode_at_all_is_always_too_few():
    with pytest.raises(LearningError, match="0 episodes to learn from, at least 1 are needed"):
        read_demonstrations([], SHAPE, least=0)


def test_digest_tells_contents_apart(recorded):
    found = read(recorded)
    assert found.digest == read(recorded).digest
    other = dataclasses.replace(found, reward=found.reward + 1)
    assert other.digest != found.digest


def changed(rows, name, row, value):
    return {**rows, name: [value if place == row else old for place, old in enumerate(rows[name])]}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("action", ACTION_COUNT, f"unknown action {ACTION_COUNT}"),
        ("action", -3, "unknown action -3"),
        ("action", None, "action is empty"),
        ("action", 2.5, "action 2.5 is no whole number"),
        ("action", float("nan"), "action nan is no whole number"),
        ("elapsed_minutes", 1e7, "10000000.0 minutes since the start"),
        ("elapsed_minutes", 1e300, "not finite"),
        ("elapsed_minutes", -1.0, "-1.0 minutes since the start"),
        ("last_action", ACTION_COUNT + 1, f"unknown last action {ACTION_COUNT + 1}"),
        ("mask", [False] * ACTION_COUNT, "is not allowed by its mask"),
        ("mask", [True] * 5, f"mask has 5 values, the policy has {ACTION_COUNT}"),
        ("observation", [1.0] * 7, f"observation has 7 values, the policy has {OBSERVATION_SIZE}"),
        ("observation", [None] * OBSERVATION_SIZE, "observation has an empty value"),
        ("observation", [float("nan")] * OBSERVATION_SIZE, "not finite"),
        ("elapsed_minutes", float("inf"), "not finite"),
        ("reward", float("nan"), "not finite"),
        ("line_id", None, "line_id is empty"),
    ],
)
def test_a_wrong_row_is_refused_with_file_row_and_field(rows, tmp_path, name, value, text):
    path = write(tmp_path / "wrong.parquet", changed(rows, name, 17, value))
    with pytest.raises(LearningError if text != "not finite" else NonFiniteError, match=text) as caught:
        read(path)
    where = caught.value.where
    assert (where["file"], where["row"]) == (path, 18)
    fields = {"elapsed_minutes": "time", "mask": "action" if "allowed" in text else "mask"}
    assert where["field"] == fields.get(name, name)


@pytest.mark.parametrize("name", [*COLUMNS, "terminated"])
def test_a_missing_column_is_named(rows, tmp_path, name):
    path = write(tmp_path / "lacks.parquet", {key: values for key, values in rows.items() if key != name})
    with pytest.raises(LearningError, match=f"column {name} is missing"):
        read(path)


def test_what_is_no_parquet_file_is_a_typed_error(tmp_path):
    (tmp_path / "text.parquet").write_text("not a table")
    for name in ("text.parquet", "missing.parquet"):
        with pytest.raises(LearningError, match="not a Parquet file of decisions"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("action", "start", "action is of type object, which is no int64"),
        ("action", True, "action is of type bool, which is no int64"),
        ("terminated", "false", "terminated is of type object, which is no bool"),
        ("terminated", 1, "terminated is of type int64, which is no bool"),
        ("reward", "1", "reward is of type object, which is no float32"),
        ("mask", [1] * ACTION_COUNT, "mask is of type int64, which is no bool"),
    ],
)
def test_columns_of_another_type_are_a_typed_error(rows, tmp_path, name, value, text):
    with pytest.raises(LearningError, match=text):
        read(write(tmp_path / "typed.parquet", {**rows, name: pa.array([value] * len(rows["action"]))}))


def test_torn_episodes_are_left_out(rows, tmp_path):
    """The first row of the file is gone, and one in the middle of the second episode."""
    second = int(np.flatnonzero(np.array(rows["last_action"]) == ACTION_COUNT)[1])
    torn = {
        name: [v for place, v in enumerate(values) if place not in (0, second + 2)] for name, values in rows.items()
    }
    found = read(write(tmp_path / "torn.parquet", torn))
    assert found.left_out == {"without its beginning": 1, "with a step missing": 1}
    assert len(found) == EPISODES - 2


@pytest.mark.parametrize("shape", [FeedbackShape(OBSERVATION_SIZE, 9), FeedbackShape(9, ACTION_COUNT)])
def test_a_shard_of_other_sizes_is_refused(recorded, shape):
    with pytest.raises(LearningError, match="the policy has 9"):
        read(recorded, shape=shape)


def test_a_damaged_shard_is_refused(recorded, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    with (copy / "records.bin").open("r+b") as file:
        file.seek(1_000)
        file.write(b"\xff\x00\xff\x00")
    with pytest.raises(CorruptError):
        read(copy)


def test_a_file_without_a_decision_has_too_few_episodes(rows, tmp_path):
    nothing = {name: values[:0] for name, values in rows.items()}
    labels = {**rows, "kind": ["label"] * len(rows["time"])}
    for name, some in (("empty", {**nothing, "line_id": pa.array([], pa.string())}), ("labels", labels)):
        with pytest.raises(LearningError, match="0 episodes to learn from, at least 50 are needed"):
            read(write(tmp_path / f"{name}.parquet", some), least=50)


def test_a_column_that_is_there_twice_is_named(rows, tmp_path):
    table = pq.read_table(write(tmp_path / "once.parquet", rows))
    pq.write_table(table.append_column("mask", table.column("mask")), tmp_path / "twice.parquet")
    with pytest.raises(LearningError, match="column mask is there twice"):
        read(tmp_path / "twice.parquet")
