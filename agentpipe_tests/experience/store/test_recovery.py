"""A damaged open shard: what is whole is saved, what is not goes to the quarantine."""

from __future__ import annotations

import os

import numpy as np
import pytest

from agentpipe.errors import CorruptError, LockHeldError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.recovery import recover
from agentpipe.experience.store.writer import ShardWriter
from agentpipe_tests.experience.fakes import header, make_episodes

from .contract import content, split

BATCH = 12


@pytest.fixture
def opened(tmp_path):
    """A closed writer's open shard of twelve episodes, and what they were."""
    batch = make_episodes(np.random.default_rng(0), BATCH, cut_share=0.4)
    with ShardWriter.open(tmp_path / "open", header(), capacity=16) as writer:
        writer.append(*batch)
    return tmp_path / "open", list(split(batch))


def saved(path, episodes, lost=()):
    """All but ``lost`` are there, byte for byte, and writing goes on."""
    with ShardWriter.open(path, header()) as writer:
        view = writer.view()
        for number, (steps, row, final, graph) in enumerate(episodes):
            at = writer.find(int(row["environment"]), int(row["episode"]))
            assert (at is None) == (number in lost)
            if at is not None:
                assert [content(record) for record in view.steps(at)] == [content(record) for record in steps]
                np.testing.assert_array_equal(view.parents(at), graph)
                assert (view.final(at) is None) == (final is None)
        writer.append(*make_episodes(np.random.default_rng(1), 3, first_episode=70))


def flip(path, place, bits=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


def test_a_whole_shard_is_left_alone(opened):
    path, episodes = opened
    before = (path / "records.bin").stat().st_ino
    found = recover(path)
    assert (found.kept, found.lost, found.quarantine) == (BATCH, 0, None)
    assert (path / "records.bin").stat().st_ino == before
    saved(path, episodes)


@pytest.mark.parametrize("file", ["records.bin", "episodes.bin", "graph.bin", "finals.bin"])
def test_one_damaged_episode_is_lost_and_no_other(opened, file):
    path, episodes = opened
    view = open_live(path)
    row = int(np.flatnonzero(view.episodes["final"] >= 0)[1])
    places = {
        "records.bin": int(view.episodes["first"][row]) * view.records.itemsize + 30,
        "episodes.bin": row * rec.EPISODE.itemsize + 20,
        "graph.bin": int(view.episodes["graph"][row]) * 8,
        "finals.bin": int(view.episodes["final"][row]) * view.finals.itemsize + 20,
    }
    flip(path / file, places[file], 128)
    found = recover(path)
    assert (found.kept, found.lost) == (BATCH - 1, 1)
    assert found.quarantine == path.parent / "quarantine" / "open-1"
    assert (found.quarantine / file).exists()
    saved(path, episodes, lost={row})


def test_a_file_cut_at_every_byte_of_its_last_record_loses_the_last_episode_only(opened):
    path, episodes = opened
    view = open_live(path)
    size, steps = view.records.itemsize, len(view.records)
    del view
    records = path / "records.bin"
    os.truncate(records, steps * size)
    whole = records.read_bytes()
    for cut in range(1, size + 1):
        records.write_bytes(whole[: steps * size - cut])
        with pytest.raises(CorruptError) as caught:
            ShardWriter.open(path, header())
        assert caught.value.where == {"file": records, "record": steps - 1}
    found = recover(path)
    assert (found.kept, found.lost) == (BATCH - 1, 1)
    saved(path, episodes, lost={BATCH - 1})


def test_what_does_not_count_can_be_cut_at_any_byte(opened):
    path, episodes = opened
    view = open_live(path)
    size, steps = view.records.itemsize, len(view.records)
    del view
    for beyond in (*range(size), 3 * size + 1):
        os.truncate(path / "records.bin", steps * size + beyond)
        with ShardWriter.open(path, header(), capacity=1) as writer:
            assert writer.episodes == BATCH
    saved(path, episodes)


@pytest.mark.parametrize("data", [bytes(128), b"", None])
def test_without_a_counter_every_whole_episode_counts(opened, data):
    path, episodes = opened
    if data is None:
        (path / "counter.bin").unlink()
    else:
        (path / "counter.bin").write_bytes(data)
    found = recover(path)
    assert (found.kept, found.lost) == (BATCH, 0)
    saved(path, episodes)


@pytest.mark.parametrize("file", ["records.bin", "episodes.bin", "graph.bin"])
def test_with_a_file_gone_nothing_is_left_and_it_says_so(opened, file):
    path, episodes = opened
    (path / file).unlink()
    found = recover(path)
    assert (found.kept, found.lost) == (0, BATCH)
    saved(path, episodes, lost=range(BATCH))


def test_damage_that_a_checksum_fits_is_found_too(opened):
    from agentpipe.experience.store import checksum

    path, episodes = opened
    rows = np.fromfile(path / "episodes.bin", rec.EPISODE)
    rows["environment"][4] = 9
    rows["first"][6] += 1
    checksum.fill(rows)
    rows.tofile(path / "episodes.bin")
    found = recover(path, path.parent / "bad")
    assert (found.kept, found.lost) == (BATCH - 2, 2)
    assert found.quarantine == path.parent / "bad" / "open-1"
    saved(path, episodes, lost={4, 6})


def test_a_shard_that_is_being_written_is_left_alone(opened):
    path, _ = opened
    with ShardWriter.open(path, header(), holder="someone"), pytest.raises(LockHeldError, match="someone"):
        recover(path)


def test_without_a_header_nothing_says_what_the_bytes_mean(opened):
    path, _ = opened
    (path / "header.json").write_text("{}")
    with pytest.raises(CorruptError, match="not the header"):
        recover(path)
    assert (path / "records.bin").exists()
