"""Reading while another writes."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from agentpipe.errors import CorruptError, VersionError
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.writer import ShardWriter
from agentpipe_tests.experience.fakes import header, make_episodes, names, write_shard


def batch(number, count=20, **options):
    return make_episodes(np.random.default_rng(number), count, first_episode=100 * number, **options)


@pytest.fixture
def writer(tmp_path):
    with ShardWriter.open(tmp_path / "open", header(), capacity=16) as opened:
        yield opened


def test_a_view_shows_what_counted_when_it_was_opened(writer):
    assert len(open_live(writer.directory).episodes) == 0
    writer.append(*batch(0))
    view = open_live(writer.directory)
    writer.append(*batch(1))
    assert len(view.episodes) == 20
    assert len(open_live(writer.directory).episodes) == 40
    assert view.digest == ""
    assert view.cell == "sensor-1"
    view.check()


def test_a_view_keeps_what_it_showed_while_files_grow_and_the_shard_is_sealed(writer, tmp_path):
    writer.append(*batch(0))
    view = open_live(writer.directory)
    before = view.records.tobytes(), view.graph.tobytes(), view.finals.tobytes()
    for number in range(1, 30):
        writer.append(*batch(number))
    writer.seal(tmp_path / "shard", names=names(), reasons=[])
    shutil.rmtree(tmp_path / "shard")
    view.still_whole()
    view.check()
    assert (view.records.tobytes(), view.graph.tobytes(), view.finals.tobytes()) == before
    assert view.find(100, 0) is not None


def test_what_was_written_but_not_counted_is_not_shown(writer):
    writer.append(*batch(0))
    broken = batch(1)
    broken[0]["reward"][-1] = np.nan
    with pytest.raises(Exception, match="nan"):
        writer.append(*broken)
    assert len(open_live(writer.directory).episodes) == 20


def test_a_reader_needs_neither_the_lock_nor_the_index(writer):
    writer.append(*batch(0))
    shutil.rmtree(writer.directory / "index")
    assert len(open_live(writer.directory).episodes) == 20


def test_what_is_sealed_is_shown_as_the_sealed_shard(tmp_path):
    shard = write_shard(tmp_path / "shard")
    assert open_live(tmp_path / "shard").digest == shard.digest


def test_damage_in_what_counts_is_named(writer):
    writer.append(*batch(0))
    file = writer.directory / "graph.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        open_live(writer.directory).check()
    assert caught.value.where == {"file": file, "record": 0, "field": "parents of step 0"}


@pytest.mark.parametrize("name", ["records.bin", "episodes.bin", "graph.bin", "counter.bin", "header.json"])
def test_a_missing_file_is_named(writer, name):
    writer.append(*batch(0))
    (writer.directory / name).unlink()
    with pytest.raises(CorruptError) as caught:
        open_live(writer.directory)
    assert caught.value.where["file"] == writer.directory / name


def test_a_file_shorter_than_what_counts_is_named(writer):
    writer.append(*batch(0))
    writer.close()
    os.truncate(writer.directory / "records.bin", writer.dtype.itemsize * 7 + 1)
    with pytest.raises(CorruptError) as caught:
        open_live(writer.directory)
    assert caught.value.where == {"file": writer.directory / "records.bin", "record": 7}


def test_no_shard_and_another_format_are_typed_errors(tmp_path, writer):
    with pytest.raises(CorruptError, match="no open shard"):
        open_live(tmp_path / "none")
    file = writer.directory / "header.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 7'))
    with pytest.raises(VersionError, match="format 7"):
        open_live(writer.directory)
    file.write_text('{"format": 2, "header": {}}')
    with pytest.raises(CorruptError, match="not the header"):
        open_live(writer.directory)
