"""Files that grow, and readers of files that others grow, cut or remove."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from agentpipe.errors import CorruptError, DiskFullError
from agentpipe.experience.store import mapped
from agentpipe.experience.store.mapped import GrowingFile, map_records

WORD = np.dtype("<u8")


def test_a_file_grows_by_doubling_and_keeps_what_was_written(tmp_path):
    file = GrowingFile(tmp_path / "f", WORD, 1)
    capacity = file.capacity
    assert capacity == mmap.PAGESIZE // 8
    file.records[:3] = [1, 2, 3]
    file.reserve(capacity)
    assert file.capacity == capacity
    file.reserve(capacity + 1)
    assert file.capacity == 2 * capacity
    assert file.records[:4].tolist() == [1, 2, 3, 0]
    file.reserve(10 * capacity)
    assert file.capacity == 10 * capacity


def test_growth_at_once_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "LARGEST_STEP", 2 * mmap.PAGESIZE)
    file = GrowingFile(tmp_path / "f", WORD, 8 * mmap.PAGESIZE // 8)
    file.reserve(file.capacity + 1)
    assert file.capacity == 10 * mmap.PAGESIZE // 8


def test_room_is_allocated_not_only_promised(tmp_path):
    GrowingFile(tmp_path / "f", WORD, 100_000)
    assert (tmp_path / "f").stat().st_blocks * 512 >= 800_000


def test_without_room_for_plenty_there_may_be_room_for_enough(tmp_path, monkeypatch):
    file = GrowingFile(tmp_path / "f", WORD, 1)
    real = os.posix_fallocate

    def small_disk(descriptor, offset, size):
        if size > 4 * mmap.PAGESIZE:
            real(descriptor, offset, 5 * mmap.PAGESIZE)
            raise OSError(28, "No space left on device")
        real(descriptor, offset, size)

    file.reserve(3 * mmap.PAGESIZE // 8)
    monkeypatch.setattr(os, "posix_fallocate", small_disk)
    file.reserve(4 * mmap.PAGESIZE // 8)
    assert file.capacity == 4 * mmap.PAGESIZE // 8
    file.records[-1] = 7
    with pytest.raises(DiskFullError, match="the disk is full"):
        file.reserve(file.capacity + 1)
    assert (tmp_path / "f").stat().st_size == 4 * mmap.PAGESIZE
    assert file.records[-1] == 7


def test_cutting_leaves_what_was_asked_for(tmp_path):
    file = GrowingFile(tmp_path / "f", WORD, 100)
    file.records[:5] = range(5)
    file.cut(3, sync=True)
    assert np.fromfile(tmp_path / "f", WORD).tolist() == [0, 1, 2]
    GrowingFile(tmp_path / "f", WORD, 100, counted=3).cut(0, sync=False)
    assert map_records(tmp_path / "f", WORD, 0).records.tolist() == []


def test_a_writer_notices_that_its_file_was_cut(tmp_path):
    file = GrowingFile(tmp_path / "f", WORD, 1000)
    os.truncate(tmp_path / "f", 5000)
    with pytest.raises(CorruptError, match="cut the file short"):
        file.reserve(1)


def test_a_file_shorter_than_what_counts_is_named_with_its_record(tmp_path):
    (tmp_path / "f").write_bytes(bytes(8 * 5 + 3))
    with pytest.raises(CorruptError) as caught:
        GrowingFile(tmp_path / "f", WORD, 100, counted=6)
    assert caught.value.where == {"file": tmp_path / "f", "record": 5}


def test_a_reader_keeps_a_file_that_is_removed_and_notices_one_that_is_cut(tmp_path):
    np.arange(1000, dtype=WORD).tofile(tmp_path / "f")
    reader, second = (map_records(tmp_path / "f", WORD, 1000) for _ in range(2))
    with pytest.raises(ValueError, match="read-only"):
        reader.records[0] = 1
    os.truncate(tmp_path / "f", 7999)
    with pytest.raises(CorruptError) as caught:
        reader.still_whole()
    assert caught.value.where == {"file": tmp_path / "f", "record": 999}
    os.truncate(tmp_path / "f", 8000)
    (tmp_path / "f").unlink()
    second.still_whole()
    assert second.records[998] == 998


@pytest.mark.parametrize(("size", "exact", "fits"), [(80, True, True), (81, True, False), (81, False, True)])
def test_a_mapped_file_is_as_long_as_it_should_be(tmp_path, size, exact, fits):
    (tmp_path / "f").write_bytes(bytes(size))
    if fits:
        assert len(map_records(tmp_path / "f", WORD, 10, exact=exact).records) == 10
    else:
        with pytest.raises(CorruptError, match="81 bytes instead of 80"):
            map_records(tmp_path / "f", WORD, 10, exact=exact)


def test_what_is_no_file_is_a_typed_error(tmp_path):
    with pytest.raises(CorruptError, match="missing"):
        map_records(tmp_path / "none", WORD, 1)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CorruptError):
        map_records(tmp_path / "folder", WORD, 1)
