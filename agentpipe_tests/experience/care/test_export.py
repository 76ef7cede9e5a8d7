"""Export: one row a step, equal to what the shard holds."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentpipe.environments.layout import REASONS
from agentpipe.errors import DiskFullError, HomeError, InputError
from agentpipe.experience.care import export as exporting
from agentpipe.experience.care.columns import COLUMNS
from agentpipe.experience.care.export import export_steps
from agentpipe.experience.show import describe
from agentpipe_tests.experience.fakes import make_episodes, write_shard

from .homes import record_line


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    episodes = make_episodes(np.random.default_rng(5), 60, max_steps=80, cut_share=0.3)
    return write_shard(tmp_path_factory.mktemp("shard") / "shard", episodes)


def read(path):
    if path.suffix == ".arrow":
        with pa.OSFile(str(path)) as file:
            return pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(use_threads=False)).read_all()
    return pq.ParquetFile(path).read(use_threads=False)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_every_step_is_a_row_and_says_what_the_shard_says(shard, tmp_path, suffix):
    out = tmp_path / f"steps{suffix}"
    assert export_steps([shard], out, group_steps=300) == len(shard.records)
    table, records = read(out), shard.records
    lengths = shard.episodes["steps"]
    for name in ("episode", "step", "segment", "time", "action", "last_action", "log_probability", "value", "reward"):
        np.testing.assert_array_equal(table[name].to_numpy(), records[name])
    for name in ("terminated", "truncated", "earned"):
        assert table[name].to_pylist() == records[name].astype(bool).tolist()
    assert table["environment"].to_pylist() == [shard.names[index] for index in records["environment"].tolist()]
    assert table["policy"].to_pylist() == [shard.policies[index]["version"] for index in records["policy"].tolist()]
    assert table["observation"].to_pylist() == records["observation"].tolist()
    assert table["mask"].to_pylist() == shard.unpack_masks(records["mask"]).tolist()
    assert table["time_ns"].cast(pa.int64()).to_pylist() == records["time_ns"].tolist()
    for name in ("success", "cut"):
        assert table[name].to_pylist() == np.repeat(shard.episodes[name] == 1, lengths).tolist()
    assert table["reason"].to_pylist() == np.repeat(shard.episodes["reason"], lengths).tolist()
    expected = []
    for row in range(len(shard.episodes)):
        for step in shard.parents(row):
            bits = "".join(f"{word:064b}"[::-1] for word in step.tolist())
            expected.append([place for place, bit in enumerate(bits) if bit == "1"])
    assert table["parents"].to_pylist() == expected


def test_types_are_explicit_and_times_are_utc(shard, tmp_path):
    export_steps([shard], tmp_path / "steps.arrow")
    schema = read(tmp_path / "steps.arrow").schema
    assert schema.field("observation").type == pa.list_(pa.float32(), 4)
    assert schema.field("mask").type == pa.list_(pa.bool_(), 6)
    assert schema.field("parents").type == pa.list_(pa.uint16())
    assert schema.field("time_ns").type == pa.timestamp("ns", "UTC")
    assert schema.field("dependents").type == pa.uint32()
    assert schema.metadata[b"shards"].decode() == shard.digest
    first = read(tmp_path / "steps.arrow")["time_ns"].cast(pa.timestamp("us", "UTC"))[0].as_py()
    assert first == dt.datetime.fromtimestamp(shard.records["time_ns"][0] / 1e9, dt.UTC)


def test_the_last_step_of_a_cut_episode_has_what_would_have_come_next_and_no_other(shard, tmp_path):
    export_steps([shard], tmp_path / "steps.parquet", group_steps=100)
    finals = read(tmp_path / "steps.parquet")["final_observation"].to_pylist()
    last = np.cumsum(shard.episodes["steps"]) - 1
    for row, place in enumerate(last.tolist()):
        final = shard.final(row)
        assert finals[place] == (None if final is None else final["observation"].tolist())
    assert sum(value is not None for value in finals) == (shard.episodes["cut"] == 1).sum() > 5


def test_memory_is_bounded_by_row_groups(shard, tmp_path):
    export_steps([shard], tmp_path / "steps.parquet", group_steps=200)
    file = pq.ParquetFile(tmp_path / "steps.parquet")
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    assert sum(sizes) == len(shard.records)
    assert len(sizes) > 5
    assert max(sizes) < 200 + 80


def test_several_shards_follow_each_other(shard, tmp_path):
    other = write_shard(tmp_path / "other")
    assert export_steps([shard, other], tmp_path / "steps.parquet") == len(shard.records) + len(other.records)
    rewards = read(tmp_path / "steps.parquet")["reward"].to_numpy()
    np.testing.assert_array_equal(rewards, np.concatenate([shard.records["reward"], other.records["reward"]]))


def test_another_suffix_no_shard_and_different_shapes_are_refused(shard, tmp_path):
    with pytest.raises(InputError, match=r"cannot write \.csv"):
        export_steps([shard], tmp_path / "steps.csv")
    with pytest.raises(InputError, match="no shard"):
        export_steps([], tmp_path / "steps.arrow")
    wide = write_shard(tmp_path / "wide", make_episodes(np.random.default_rng(0), 3, observation_size=9))
    with pytest.raises(InputError, match="different shapes"):
        export_steps([shard, wide], tmp_path / "steps.arrow")


def test_a_failure_leaves_what_was_there(shard, tmp_path, monkeypatch):
    out = tmp_path / "steps.parquet"
    out.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "_batch", full)
    with pytest.raises(DiskFullError):
        export_steps([shard], out)
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["steps.parquet"]
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError):
        export_steps([shard], tmp_path / "file" / "steps.arrow")
    with pytest.raises(HomeError):
        export_steps([shard], Path("/proc/steps.arrow"))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_every_column_says_its_unit_and_meaning_and_the_page_lists_them(shard, tmp_path, suffix):
    export_steps([shard], tmp_path / f"steps.{suffix}")
    schema = read(tmp_path / f"steps.{suffix}").schema
    page = (Path(__file__).parents[3] / "docs/how-to/buffer.md").read_text()
    assert schema.names == list(COLUMNS)
    for field in schema:
        told = {key.decode(): value.decode() for key, value in field.metadata.items() if key != b"PARQUET:field_id"}
        unit, meaning = COLUMNS[field.name]
        assert told == {**({"unit": unit} if unit else {}), "meaning": meaning}
        shown = f"list of {field.type.value_type}" if hasattr(field.type, "value_type") else field.type
        assert f"| `{field.name}` | {shown} | {unit} | {meaning} |" in page


def test_numbers_of_the_line_are_named_in_the_schema(tmp_path):
    line = record_line(tmp_path / "line")
    export_steps([line], tmp_path / "steps.parquet")
    table = read(tmp_path / "steps.parquet")
    names = {
        key: json.loads(table.schema.metadata[key.encode()]) for key in ("segments", "actions", "tokens", "reasons")
    }
    shown = describe(line, 0)
    for row, step in enumerate(shown["steps"]):
        assert names["actions"][table["action"][row].as_py()] == step["action"]
        assert names["segments"][table["segment"][row].as_py()] == step["segment"]
        made = table["produced"][row].as_py()
        assert [name for bit, name in enumerate(names["tokens"]) if made >> bit & 1] == step["made"]
    assert len(json.loads(table.schema.metadata[b"features"])) == len(table["observation"][0])
    finished = [row for row in range(table.num_rows) if table["reason"][row].as_py() >= 0]
    assert names["reasons"][table["reason"][finished[0]].as_py()] in REASONS


def test_shards_whose_numbers_mean_different_things_are_not_mixed(shard, tmp_path):
    other = write_shard(tmp_path / "other", make_episodes(np.random.default_rng(0), 3))
    other.manifest["reasons"].append("another")
    with pytest.raises(InputError, match="mean different things"):
        export_steps([shard, other], tmp_path / "steps.arrow")
