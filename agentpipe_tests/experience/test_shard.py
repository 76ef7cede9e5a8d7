"""Shards: what is damaged is named, what is sealed stays."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agentpipe.errors import CorruptError, VersionError
from agentpipe.experience import records as rec
from agentpipe.experience.shard import manifest_digest, open_shard
from agentpipe.serving.inputs import recorded_inputs


def rewrite_manifest(path, **changes):
    """Changes the manifest and its digest with it."""
    manifest = {**json.loads((path / "manifest.json").read_text()), **changes}
    (path / "manifest.json").write_text(json.dumps({**manifest, "digest": manifest_digest(manifest)}))


def test_a_sealed_shard_opens_equal_and_read_only(sealed):
    shard = open_shard(sealed.path)
    assert shard.digest == sealed.digest
    assert shard.quality == sealed.quality
    assert shard.cell == "sensor-1"
    shard.check()
    with pytest.raises(ValueError, match="read-only"):
        shard.records["action"] = 0


def test_records_are_little_endian_and_described_in_the_manifest(sealed):
    fields = {field["name"]: field for field in sealed.manifest["fields"]}
    assert fields["environment"] == {"name": "environment", "format": "<u4", "shape": [], "offset": 0}
    assert fields["mask"]["shape"] == [6]
    assert fields["observation"]["format"] == "<f4"
    assert all(field["format"][0] in "<|" for field in fields.values())
    assert sealed.manifest["record_bytes"] == sealed.records.dtype.itemsize


def test_the_checksum_is_crc32_of_all_bytes_before_it(sealed):
    raw = (sealed.path / "records.bin").read_bytes()
    size = sealed.manifest["record_bytes"]
    third = raw[2 * size : 3 * size]
    assert int.from_bytes(third[-4:], "little") == zlib.crc32(third[:-4])


@pytest.mark.parametrize("record", [0, 5, 11])
def test_one_flipped_bit_names_file_and_record(shard_copy, record):
    file = shard_copy / "records.bin"
    data = bytearray(file.read_bytes())
    size = len(data) // 12
    data[record * size + size // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        open_shard(shard_copy)
    assert caught.value.where == {"file": file, "record": record}
    shard = open_shard(shard_copy, check=False)
    with pytest.raises(CorruptError):
        shard.check()


def test_a_flipped_bit_in_the_episode_table_is_named(shard_copy):
    file = shard_copy / "episodes.bin"
    data = bytearray(file.read_bytes())
    data[3 * rec.EPISODE.itemsize] ^= 4
    file.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        open_shard(shard_copy)
    assert caught.value.where == {"file": file, "record": 3}


def test_truncation_at_every_byte_of_the_last_record_is_noticed(shard_copy):
    file = shard_copy / "records.bin"
    data = file.read_bytes()
    size = len(data) // 12
    for cut in range(1, size + 1):
        file.write_bytes(data[:-cut])
        with pytest.raises(CorruptError) as caught:
            open_shard(shard_copy, check=False)
        assert caught.value.where["record"] == 11
    file.write_bytes(data + b"\0")
    with pytest.raises(CorruptError, match="bytes instead of"):
        open_shard(shard_copy, check=False)


@pytest.mark.parametrize("name", ["manifest.json", "records.bin", "episodes.bin", "measurements.json"])
def test_a_missing_file_is_named(shard_copy, name):
    (shard_copy / name).unlink()
    with pytest.raises(CorruptError, match="missing") as caught:
        open_shard(shard_copy)
    assert caught.value.where["file"] == shard_copy / name


def test_a_changed_manifest_a_newer_format_and_nonsense_are_refused(shard_copy):
    file = shard_copy / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"t1"', '"t2"'))
    with pytest.raises(CorruptError, match="differs from its digest"):
        open_shard(shard_copy)
    file.write_text(text)
    rewrite_manifest(shard_copy, format=2)
    with pytest.raises(VersionError, match="shard format 2"):
        open_shard(shard_copy)
    file.write_text("[]")
    with pytest.raises(CorruptError, match="not a shard manifest"):
        open_shard(shard_copy)
    file.write_text(text)
    rewrite_manifest(shard_copy, observation_size=3)
    with pytest.raises(CorruptError, match="fields"):
        open_shard(shard_copy)


def test_a_checksum_that_fits_a_changed_record_still_fails_the_digest(shard_copy):
    file = shard_copy / "records.bin"
    dtype = open_shard(shard_copy).records.dtype
    records = np.fromfile(file, dtype=dtype)
    records["reward"][4] = 99.0
    rec.seal(records)
    records.tofile(file)
    with pytest.raises(CorruptError, match="differs from its digest"):
        open_shard(shard_copy)


@given(hnp.arrays(np.bool_, st.tuples(st.integers(0, 5), st.integers(1, 70))))
def test_packed_masks_come_back_as_they_were(mask):
    packed = rec.pack_masks(mask)
    assert packed.shape == (len(mask), -(-mask.shape[1] // 8))
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
