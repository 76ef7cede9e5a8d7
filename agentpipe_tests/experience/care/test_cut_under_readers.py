"""A sealed file that someone cuts short while it is read: an error, neither a signal nor zeros."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from agentpipe.errors import CorruptError
from agentpipe.experience.care.check import check_folder
from agentpipe.experience.care.compaction import merge
from agentpipe.experience.care.export import export_steps
from agentpipe.experience.sampling.sets import SampleSet
from agentpipe.experience.store.shard import open_shard
from agentpipe.experience.store.writer import ShardWriter

from .homes import record_line

READERS = {
    "episode": lambda shard, _: SampleSet([shard]).episode,
    "episodes": lambda shard, _: SampleSet([shard]).episodes(np.arange(3)),
    "merge": lambda shard, folder: merge([shard], folder / "merged"),
    "export": lambda shard, folder: export_steps([shard], folder / "steps.arrow"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return record_line(tmp_path_factory.mktemp("cut") / "shard").path


@pytest.mark.parametrize("name", ["episodes.bin", "records.bin", "graph.bin"])
@pytest.mark.parametrize("size", [0, 100])
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_is_told(made, tmp_path, name, size, reader):
    shard = open_shard(shutil.copytree(made, tmp_path / "shard"))
    os.truncate(shard.path / name, size)
    process = os.fork()
    if not process:  # a signal would end the tests
        try:
            READERS[reader](shard, tmp_path)
        except CorruptError:
            os._exit(7)
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    assert not (tmp_path / "merged").exists()


def test_a_header_that_is_being_written_for_the_first_time_is_no_damage(tmp_path):
    folder = tmp_path / "shard"
    ShardWriter.open(folder, {"observation_size": 1, "action_count": 1, "policies": []}).close()
    (folder / "header.json").rename(folder / ".staging-abc")
    assert check_folder(tmp_path).ok
