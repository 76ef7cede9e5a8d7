"""Writers that die at any instant, and disks that are full."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time

import numpy as np
import pytest

from agentpipe.errors import DiskFullError, HomeError
from agentpipe.experience.store import intake
from agentpipe.experience.store.audit import audit
from agentpipe.experience.store.counter import Counter
from agentpipe.experience.store.index import OpenIndex
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.mapped import GrowingFile
from agentpipe.experience.store.shard import open_shard
from agentpipe.experience.store.writer import ShardWriter
from agentpipe_tests.experience.fakes import header, make_episodes, names

from .contract import content, split

BATCH = 5
KILLS = 20


def batch(number):
    return make_episodes(np.random.default_rng(number), BATCH, first_episode=number, cut_share=0.3)


def in_child(work):
    """Runs ``work`` in a fork of this process, which has everything imported and compiled; returns its id."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, pytest shall not run on in two processes
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return child


def code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def write_on(path, pipe, **options):
    """Appends batch after batch from where the shard ends, and acknowledges each that counts."""
    writer = ShardWriter.open(path, header(), capacity=16, **options)
    while True:
        writer.append(*batch(writer.episodes // BATCH))
        os.write(pipe, writer.episodes.to_bytes(8, "little"))


def whole(path):
    """Opens the shard again and looks at everything that counts; returns the writer."""
    writer = ShardWriter.open(path, header(), capacity=16)
    assert list(audit(writer.view())) == []
    assert list(writer._index.disagreements(writer.recorded)) == []
    assert len(writer.recorded) % BATCH == 0, "an append counts whole or not at all"
    return writer


def holds(reader, batches):
    for number in range(batches):
        for steps, row, final, graph in split(batch(number)):
            at = reader.find(int(row["environment"]), int(row["episode"]))
            assert [content(record) for record in reader.steps(at)] == [content(record) for record in steps]
            assert (final is None) == (reader.final(at) is None)
            np.testing.assert_array_equal(reader.parents(at), graph)


@pytest.mark.parametrize("options", [{}, {"durability": "power", "group": BATCH}], ids=["process", "power"])
def test_twenty_kills_at_random_instants_lose_nothing_that_was_acknowledged(quick_path, options):
    rng = np.random.default_rng(20)
    path, acknowledged = quick_path / "open", 0
    for _ in range(KILLS // (2 if options else 1)):
        reading, writing = os.pipe()
        child = in_child(lambda: write_on(path, writing, **options))  # noqa: B023 - the child runs at once
        os.close(writing)
        os.read(reading, 8)  # it has begun
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert code(child) == -signal.SIGKILL
        heard = b""
        while data := os.read(reading, 1 << 16):
            heard += data
        os.close(reading)
        if heard:
            acknowledged = int.from_bytes(heard[-8:], "little")
        assert len(open_live(path).episodes) >= acknowledged
        with whole(path) as writer:
            assert writer.episodes >= acknowledged
            writer.append(*batch(writer.episodes // BATCH))
            acknowledged = writer.episodes
    with whole(path) as writer:
        shard = writer.seal(quick_path / "shard", names=names(), reasons=[])
    assert len(shard.episodes) >= acknowledged
    holds(open_shard(shard.path), len(shard.episodes) // BATCH)


def dies(owner, name, *, afterwards):
    real = getattr(owner, name)

    def dying(*arguments, **options):
        if afterwards:
            real(*arguments, **options)
        os._exit(9)

    setattr(owner, name, dying)


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("afterwards", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (GrowingFile, "reserve"),
        (intake, "copy_steps"),
        (intake, "copy_graphs"),
        (OpenIndex, "put"),
        (Counter, "_write"),
    ],
)
def test_killed_between_any_two_steps_of_a_commit(quick_path, owner, name, afterwards, durability):
    path, options = quick_path / "open", {"durability": durability, "group": BATCH}
    with ShardWriter.open(path, header(), capacity=16, **options) as writer:
        for number in range(3):
            writer.append(*batch(number))

    def work():
        with ShardWriter.open(path, header(), **options) as writer:
            dies(owner, name, afterwards=afterwards)
            writer.append(*batch(3))

    assert code(in_child(work)) == 9
    counted = 4 if name == "_write" and afterwards else 3
    with whole(path) as writer:
        assert writer.episodes == counted * BATCH
        for number in range(counted, 6):
            writer.append(*batch(number))
    with whole(path) as writer:
        holds(writer.seal(quick_path / "shard", names=names(), reasons=[]), 6)


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_full_disk_is_a_typed_error_and_writing_goes_on_when_there_is_room(tmp_path, durability):
    path, limit = tmp_path / "open", 60_000

    def work():
        with ShardWriter.open(path, header(), capacity=16, durability=durability, group=BATCH) as writer:
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            fits_until_full(writer)
            counted = writer.episodes
            view = writer.view()
            assert list(audit(view)) == []
            for _ in range(3):
                with pytest.raises(DiskFullError):
                    writer.append(*batch(counted // BATCH))
            assert writer.episodes == counted
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            for number in range(counted // BATCH, counted // BATCH + 20):
                writer.append(*batch(number))
            assert list(writer._index.disagreements(writer.recorded)) == []

    assert code(in_child(work)) == 0
    with whole(path) as writer:
        batches = writer.episodes // BATCH
        holds(writer.seal(tmp_path / "shard", names=names(), reasons=[]), batches)


def fits_until_full(writer):
    for number in range(10_000):
        try:
            writer.append(*batch(number))
        except DiskFullError as error:
            assert error.where["file"].parent == writer.directory  # noqa: PT017 - the loop ends with it
            return
    raise AssertionError("the disk was never full")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder])


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_disk_that_is_really_full(small_disk, durability):
    path, filler = small_disk / "open", small_disk / "filler"
    filler.write_bytes(bytes(200_000))
    with ShardWriter.open(path, header(), capacity=16, durability=durability, group=BATCH) as writer:
        fits_until_full(writer)
        assert writer.episodes
        assert list(audit(writer.view())) == []
    with pytest.raises(DiskFullError):
        ShardWriter.open(small_disk / "other", header())
    filler.unlink()
    with whole(path) as writer:
        holds(writer.seal(small_disk / "shard", names=names(), reasons=[]), writer.episodes // BATCH)


def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HomeError):
        ShardWriter.open(tmp_path / "file" / "open", header())
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "records.bin").mkdir()
    with pytest.raises(HomeError):
        ShardWriter.open(tmp_path / "open", header())


def test_a_read_only_file_system_is_a_typed_error(small_disk):
    with ShardWriter.open(small_disk / "open", header(), capacity=16) as writer:
        writer.append(*batch(0))
    if subprocess.run(["mount", "-o", "remount,ro", small_disk], capture_output=True).returncode:
        pytest.skip("a file system cannot be made read-only here")
    with pytest.raises(HomeError):
        ShardWriter.open(small_disk / "open", header())
    with pytest.raises(HomeError):
        ShardWriter.open(small_disk / "other", header())
    assert len(open_live(small_disk / "open").episodes) == BATCH
