"""Sealed shards: what is damaged is named, what is sealed stays."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agentpipe.errors import CorruptError, ShrunkError, VersionError
from agentpipe.experience.store import checksum
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.audit import audit
from agentpipe.experience.store.content import content_digest
from agentpipe.experience.store.index import SEALED
from agentpipe.experience.store.manifest import complete, manifest_digest, read_manifest
from agentpipe.experience.store.shard import is_open, is_shrunk, open_shard
from agentpipe.experience.store.writer import ShardWriter
from agentpipe.serving.inputs import recorded_inputs
from agentpipe_tests.experience.fakes import header, make_episodes, write_shard

from .contract import content, split

FILES = (
    "manifest.json",
    "records.bin",
    "episodes.bin",
    "finals.bin",
    "graph.bin",
    "index.bin",
    "names.json",
    "measurements.json",
)


def change(path, name, place, bits=1):
    """Flips bits of one byte of a file."""
    data = bytearray((path / name).read_bytes())
    data[place] ^= bits
    (path / name).write_bytes(data)


def damage(path, **options):
    with pytest.raises(CorruptError) as caught:
        open_shard(path, **options)
    return caught.value.where


def rewrite(path, *, shrunk=False, **changes):
    """Changes the manifest and its digests with it."""
    manifest = {**json.loads((path / "manifest.json").read_text()), **changes}
    whole = complete(manifest, manifest["sealed"]["files"], shrunk=shrunk)
    (path / "manifest.json").write_text(json.dumps(whole))


def test_a_sealed_shard_holds_these_files_and_no_others(random_shard):
    assert sorted(path.name for path in random_shard.path.iterdir()) == sorted(FILES)


def test_a_sealed_shard_opens_equal_and_read_only(random_shard):
    shard = open_shard(random_shard.path)
    assert shard.digest == random_shard.digest
    assert shard.cell == "sensor-1"
    assert shard.quality is None
    assert shard.names == {100 + number: f"t{100 + number:04d}.sensor-1" for number in range(5)}
    assert [policy["ordinal"] for policy in shard.policies] == [0, 3]
    assert shard.manifest["reasons"] == ["success", "failure"]
    assert shard.measurements["write_seconds"] > 0
    with pytest.raises(ValueError, match="read-only"):
        shard.records["action"] = 0


def test_records_are_little_endian_and_described_in_the_manifest(random_shard):
    fields = {field["name"]: field for field in random_shard.manifest["fields"]}
    assert fields["environment"] == {"name": "environment", "format": "<u4", "shape": [], "offset": 16}
    assert fields["mask"]["shape"] == [4]
    assert fields["observation"]["format"] == "<f4"
    assert all(field["format"][0] in "<|" for field in fields.values())
    assert random_shard.manifest["record_bytes"] == random_shard.records.dtype.itemsize


@pytest.mark.parametrize("name", rec.step_dtype(4, 6).names)
def test_one_changed_byte_of_a_step_names_file_record_and_field(shard_copy, name):
    dtype = rec.step_dtype(4, 6)
    change(shard_copy, "records.bin", 5 * dtype.itemsize + dtype.fields[name][1], 64)
    assert damage(shard_copy) == {"file": shard_copy / "records.bin", "record": 5, "field": name}
    assert [found.record for found in audit(open_shard(shard_copy, check=False))] == [5]


@pytest.mark.parametrize("name", rec.EPISODE.names)
def test_one_changed_byte_of_an_episode_row_names_file_record_and_field(shard_copy, name):
    change(shard_copy, "episodes.bin", 3 * rec.EPISODE.itemsize + rec.EPISODE.fields[name][1], 64)
    assert damage(shard_copy) == {"file": shard_copy / "episodes.bin", "record": 3, "field": name}


def test_one_changed_byte_of_a_final_record_names_file_record_and_field(shard_copy):
    dtype = rec.final_dtype(4, 6)
    change(shard_copy, "finals.bin", 2 * dtype.itemsize + dtype.fields["observation"][1] + 5)
    assert damage(shard_copy) == {"file": shard_copy / "finals.bin", "record": 2, "field": "observation"}


def test_one_changed_byte_of_a_graph_names_the_episode_and_the_step(shard_copy):
    shard = open_shard(shard_copy)
    row = int(np.argmax(shard.episodes["steps"] > 5))
    change(shard_copy, "graph.bin", 8 * (int(shard.episodes["graph"][row]) + 4))
    assert damage(shard_copy) == {"file": shard_copy / "graph.bin", "record": row, "field": "parents of step 4"}


@pytest.mark.parametrize("field", ["key", "time_ns", "row"])
def test_one_changed_byte_of_the_index_names_row_and_field(shard_copy, field):
    change(shard_copy, "index.bin", 4 * SEALED.itemsize + SEALED.fields[field][1])
    assert damage(shard_copy) == {"file": shard_copy / "index.bin", "record": 4, "field": field}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_change_of_any_byte_of_any_file_is_noticed(random_shard, tmp_path, data):
    path = tmp_path / "copy"
    shutil.copytree(random_shard.path, path, dirs_exist_ok=True)
    name = data.draw(st.sampled_from(FILES))
    size = (path / name).stat().st_size
    place = data.draw(st.integers(0, size - 1))
    before_text = (path / name).read_bytes()
    change(path, name, place, data.draw(st.integers(1, 255)))
    if same_json(path / name, before_text):
        return  # one kind of white space for another
    with pytest.raises((CorruptError, VersionError)) as caught:
        open_shard(path)
    assert caught.value.where["file"] == path / name


def same_json(file, before):
    if file.name != "manifest.json":
        return False
    try:
        return json.loads(file.read_text()) == json.loads(before)
    except ValueError:
        return False


def test_several_changed_bytes_name_a_field_that_became_impossible(shard_copy):
    dtype = rec.step_dtype(4, 6)
    start = 5 * dtype.itemsize
    data = bytearray((shard_copy / "records.bin").read_bytes())
    data[start + 44 : start + 48] = np.float32(np.nan).tobytes()
    (shard_copy / "records.bin").write_bytes(data)
    assert damage(shard_copy)["field"] == "log_probability"
    data[start + 16 : start + dtype.itemsize] = bytes(dtype.itemsize - 16)
    (shard_copy / "records.bin").write_bytes(data)
    assert damage(shard_copy) == {"file": shard_copy / "records.bin", "record": 5, "field": "action"}


def test_damage_that_cannot_be_told_apart_is_named_content(shard_copy):
    dtype = rec.step_dtype(4, 6)
    start = 5 * dtype.itemsize + dtype.fields["observation"][1]
    change(shard_copy, "records.bin", start)
    change(shard_copy, "records.bin", start + 4)
    assert damage(shard_copy)["field"] == "content"


@pytest.mark.parametrize("name", ["records.bin", "episodes.bin", "finals.bin", "graph.bin", "index.bin"])
def test_truncation_at_every_byte_of_the_last_record_is_noticed(shard_copy, name):
    whole = (shard_copy / name).read_bytes()
    shard = open_shard(shard_copy)
    sizes = {
        "records.bin": shard.records.itemsize,
        "episodes.bin": rec.EPISODE.itemsize,
        "finals.bin": shard.finals.itemsize,
        "graph.bin": 8,
        "index.bin": SEALED.itemsize,
    }
    last = len(whole) // sizes[name] - 1
    for cut in range(1, sizes[name] + 1):
        os.truncate(shard_copy / name, len(whole) - cut)
        assert damage(shard_copy, check=False) == {"file": shard_copy / name, "record": last}
    (shard_copy / name).write_bytes(whole + b"\0")
    assert "record" in damage(shard_copy, check=False)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(shard_copy, name):
    (shard_copy / name).unlink()
    assert damage(shard_copy)["file"] == shard_copy / name


@pytest.mark.parametrize("name", ["manifest.json", "names.json", "measurements.json"])
@pytest.mark.parametrize("text", ["", "[]", "nonsense", "\ud800", '{"a": 1}'])
def test_nonsense_in_place_of_json_is_named(shard_copy, name, text):
    (shard_copy / name).write_text(text, errors="surrogatepass")
    assert damage(shard_copy)["file"] == shard_copy / name


def test_a_changed_manifest_says_which_part(shard_copy):
    file = shard_copy / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"t1"', '"t2"'))
    assert damage(shard_copy, check=False)["field"] == "digest"
    file.write_text(text.replace('"made_at": "2', '"made_at": "3'))
    assert damage(shard_copy, check=False)["field"] == "sealed"
    file.write_text(text)
    rewrite(shard_copy, observation_size=3)
    assert damage(shard_copy, check=False)["field"] == "fields"
    file.write_text(text)
    rewrite(shard_copy, steps=-1)
    assert damage(shard_copy, check=False)["field"] == "steps"


@pytest.mark.parametrize(
    ("found", "remedy"), [(4, "use the agentpipe that wrote it"), (1, "record it again"), ("x", "record it again")]
)
def test_another_format_is_a_version_error_with_a_remedy(shard_copy, found, remedy):
    rewrite(shard_copy, format=found)
    with pytest.raises(VersionError, match="this program reads 2 and 3") as caught:
        open_shard(shard_copy)
    assert remedy in caught.value.remedy


def test_shrunk_and_open_shards_are_not_read_as_sealed_ones(shard_copy, tmp_path):
    assert not is_shrunk(shard_copy)
    digest = read_manifest(shard_copy / "manifest.json")["digest"]
    rewrite(shard_copy, shrunk=True)
    assert is_shrunk(shard_copy)
    assert read_manifest(shard_copy / "manifest.json")["digest"] == digest
    with pytest.raises(ShrunkError, match="only seeds and actions"):
        open_shard(shard_copy)
    with ShardWriter.open(tmp_path / "open", header()):
        assert is_open(tmp_path / "open")
        with pytest.raises(CorruptError, match="not sealed"):
            open_shard(tmp_path / "open")
    assert not is_open(shard_copy)


def test_a_checksum_that_fits_a_changed_record_still_fails_the_digest(shard_copy):
    records = open_shard(shard_copy).records.copy()
    records["reward"][4] = 99.0
    checksum.fill(records)
    records.tofile(shard_copy / "records.bin")
    assert damage(shard_copy) == {"file": shard_copy / "manifest.json", "field": "content"}


def test_a_nan_whose_checksum_fits_is_named(shard_copy):
    records = open_shard(shard_copy).records.copy()
    records["observation"][4, 1] = np.nan
    checksum.fill(records)
    records.tofile(shard_copy / "records.bin")
    assert damage(shard_copy) == {"file": shard_copy / "records.bin", "record": 4, "field": "observation"}


def test_records_that_changed_places_are_named(shard_copy):
    records = open_shard(shard_copy).records.copy()
    records[[4, 30]] = records[[30, 4]]
    records.tofile(shard_copy / "records.bin")
    assert damage(shard_copy)["record"] == 4


def reference_digest(batches):
    """SHA-256 of the episodes one after another in the order of their keys, written without the kernel."""
    import hashlib

    digest = hashlib.sha256()
    episodes = [episode for batch in batches for episode in split(batch)]
    for steps, row, final, graph in sorted(episodes, key=lambda one: (one[1]["environment"], one[1]["episode"])):
        digest.update(row.tobytes()[rec.EPISODE.fields["environment"][1] :])
        digest.update((final is not None).to_bytes(8, "little"))
        for record in steps:
            digest.update(content(record))
        digest.update(b"" if final is None else content(final))
        digest.update(graph.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("max_steps", [1, 9, 200])
def test_the_digest_depends_on_the_episodes_alone(tmp_path, max_steps):
    rng = np.random.default_rng(5)
    batches = [make_episodes(rng, 8, max_steps=max_steps, first_episode=10 * k, cut_share=0.3) for k in range(3)]
    shard = write_shard(tmp_path / "a", *batches)
    assert shard.manifest["content"] == reference_digest(batches)
    for steps, _, finals, _ in batches:
        steps["time_ns"] += 12345
        finals["time_ns"] += 1
    other = write_shard(tmp_path / "b", *batches[::-1])
    assert other.digest == shard.digest
    assert other.manifest["sealed"] != shard.manifest["sealed"]
    batches[1][0]["reward"][0] += 1
    assert write_shard(tmp_path / "c", *batches).digest != shard.digest


def test_the_digest_is_the_same_in_blocks_of_any_size(random_shard, monkeypatch):
    parts = random_shard.records, random_shard.episodes, random_shard.finals, random_shard.graph
    for size in (1, 50, 1000):
        monkeypatch.setattr("agentpipe.experience.store.content._BLOCK_WORDS", size)
        assert content_digest(*parts) == random_shard.manifest["content"]


def test_the_digest_of_the_manifest_covers_what_is_said_of_the_content(random_shard):
    manifest = dict(random_shard.manifest)
    assert manifest_digest(manifest) == random_shard.digest
    assert manifest_digest({**manifest, "sealed": {}, "shrunk": True}) == random_shard.digest
    for key in set(manifest) - {"digest", "sealed"}:
        assert manifest_digest({**manifest, key: "other"}) != random_shard.digest


def test_an_empty_shard_can_be_sealed_and_read(tmp_path):
    shard = write_shard(tmp_path / "shard", make_episodes(np.random.default_rng(0), 0))
    open_shard(tmp_path / "shard")
    assert len(shard.records) == len(shard.index) == 0
    assert shard.find(100, 0) is None


def test_a_reader_outlives_the_removal_of_the_shard(random_shard, tmp_path):
    path = shutil.copytree(random_shard.path, tmp_path / "copy")
    shard = open_shard(path)
    shutil.rmtree(path)
    shard.still_whole()
    np.testing.assert_array_equal(shard.records["reward"], random_shard.records["reward"])


def test_a_file_that_was_cut_under_its_reader_is_an_error_not_a_signal(shard_copy):
    shard = open_shard(shard_copy)
    os.truncate(shard_copy / "records.bin", 100)
    with pytest.raises(CorruptError) as caught:
        shard.still_whole()
    assert caught.value.where == {"file": shard_copy / "records.bin", "record": 1}
    with pytest.raises(CorruptError):
        shard.check()


def test_an_open_reader_costs_no_copy(random_shard):
    shard = open_shard(random_shard.path)
    assert not shard.records.flags.owndata
    assert shard.steps(3).base is not None


@given(hnp.arrays(np.bool_, st.tuples(st.integers(0, 5), st.integers(1, 70))))
def test_packed_masks_come_back_as_they_were(mask):
    packed = rec.pack_masks(mask)
    assert packed.shape == (len(mask), -(-mask.shape[1] // 32) * 4)
    np.testing.assert_array_equal(rec.unpack_masks(packed, mask.shape[1]), mask)


def test_recorded_inputs_are_rows_of_the_shard_and_reproducible(sealed):
    inputs = recorded_inputs([sealed.path], count=5, seed=1)
    again = recorded_inputs([sealed.path], count=5, seed=1)
    np.testing.assert_array_equal(inputs.observation, again.observation)
    assert len(inputs) == 5
    seen = set(sealed.records["observation"][:, 0].tolist())
    assert set(inputs.observation[:, 0].tolist()) <= seen
    assert inputs.mask[:, :3].all()
    assert not inputs.mask[:, 3:].any()
