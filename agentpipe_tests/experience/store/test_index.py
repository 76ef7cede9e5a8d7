"""The index: keys sort as their numbers do, LevelDB agrees with the episode table, the sealed one finds everything."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentpipe.errors import LockHeldError, StoreError
from agentpipe.experience.store import index as module
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.index import (
    KEY_BYTES,
    OpenIndex,
    decode_key,
    encode_key,
    find_row,
    open_index,
    sealed_rows,
    step_id,
)
from agentpipe.experience.store.keys import EpisodeKeys, episode_keys

edges = [0, 1, 254, 255, 256, 257, 65535, 65536, 2**31, 2**32 - 1]
u32 = st.sampled_from(edges) | st.integers(0, 2**32 - 1)
u48 = u32 | st.integers(0, 2**48 - 1)
i64 = st.sampled_from([-(2**63), -1, 0, 254, 255, 256, 257, 65535, 65536, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1)
triples = st.tuples(u32, u48, i64)


@given(triples)
def test_a_key_comes_back_as_it_was(triple):
    assert len(encode_key(*triple)) == KEY_BYTES
    assert decode_key(encode_key(*triple)) == triple


@given(triples, triples)
@example((0, 0, 255), (0, 0, 256))
@example((0, 65535, 0), (0, 65536, 0))
@example((0, 0, -1), (0, 0, 0))
def test_keys_sort_as_their_numbers_do(first, second):
    assert (encode_key(*first) < encode_key(*second)) == (first < second)


def test_a_fork_of_a_process_whose_leveldb_has_compacted_waited_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_COMPACTS", 2)
    monkeypatch.setattr(module._Compaction, "begun", False)
    before = OpenIndex(tmp_path / "before")
    before.put(table([(1, 1), (1, 2)]), 0, sync=False)
    child = os.fork()
    if child == 0:
        try:
            OpenIndex(tmp_path / "after")
        except StoreError as error:
            os._exit(7 if "forkserver" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def table(pairs, first_step=0):
    rows = np.zeros(len(pairs), rec.EPISODE)
    rows["environment"], rows["episode"] = np.array(pairs, np.int64).reshape(-1, 2).T
    rows["steps"] = 3
    rows["first"] = first_step + 3 * np.arange(len(pairs))
    rows["time_ns"] = 1000 + 10 * np.arange(len(pairs))
    return rows


pairs = st.lists(st.tuples(u32, u32), unique=True, max_size=40)


@given(pairs, st.tuples(u32, u32))
def test_the_sealed_index_finds_every_episode_and_nothing_else(present, other):
    index = sealed_rows(table(present))
    assert index["key"].tolist() == sorted(index["key"].tolist())
    expected = {pair: row for row, pair in enumerate(present)}
    assert all(find_row(index, *pair) == row for pair, row in expected.items())
    assert find_row(index, *other) == expected.get(other)
    assert find_row(index, -1, 0) is find_row(index, 0, 2**32) is None


@given(pairs, pairs)
def test_the_table_of_keys_takes_all_or_none(first, second):
    keys = EpisodeKeys()
    naive = {}
    for batch in (first, second):
        fresh = episode_keys(table(batch))
        twice = keys.add(fresh, len(naive))
        repeated = [i for i, pair in enumerate(batch) if pair in naive]
        assert twice == (repeated[0] if repeated else None)
        if not repeated:
            naive |= {pair: len(naive) + i for i, pair in enumerate(batch)}
        assert {pair: keys.find(*pair) for pair in {*first, *second}} == {
            pair: naive.get(pair) for pair in {*first, *second}
        }


def test_keys_taken_back_are_gone_and_the_others_are_still_found():
    keys = EpisodeKeys()
    first, second = (episode_keys(table([(e, n) for n in range(3000)])) for e in (1, 2))
    keys.add(first, 0)
    keys.add(second, 3000)
    keys.undo(second)
    assert keys.find(2, 5) is None
    assert [keys.find(1, n) for n in (0, 1500, 2999)] == [0, 1500, 2999]
    assert keys.add(second, 3000) is None


@pytest.fixture
def index(tmp_path):
    opened = OpenIndex(tmp_path / "index")
    yield opened
    opened.close()


def test_any_step_is_found_from_its_full_key(index):
    rows = table([(5, 0), (5, 1), (4, 9), (6, 0)])
    index.put(rows, 0, sync=False)
    found = index.find(5, step_id(1, 2), 5000)
    assert (found.row, found.first, found.steps, found.time_ns) == (1, 3, 3, 1010)
    assert index.find(5, step_id(1, 0), 1010).row == 1
    assert index.find(5, step_id(1, 0), 1009) is None
    assert index.find(5, step_id(2, 0), 5000) is None
    assert index.find(4, step_id(8, 0), 5000) is None
    assert index.find(-1, 0, 0) is None


@pytest.mark.parametrize("entered", [0, 3, 5, 8])
def test_the_index_is_made_to_agree_with_what_counts(tmp_path, entered):
    rows = table([(1, n) for n in range(8)])
    index = OpenIndex(tmp_path / "index")
    if entered:
        index.put(rows[:entered], 0, sync=False)
    assert index.agree(rows[:5]) == abs(entered - 5)
    assert index.count() == 5
    assert [entry.row for entry in index.entries()] == [0, 1, 2, 3, 4]
    assert list(index.disagreements(rows[:5])) == []


def test_what_disagrees_is_named(index):
    rows = table([(1, n) for n in range(4)])
    index.put(rows, 0, sync=False)
    assert list(index.disagreements(rows[:3])) == [(3, "entry of an episode that does not count")]
    changed = rows.copy()
    changed["steps"][1] = 7
    assert list(index.disagreements(changed)) == [(1, "steps")]
    assert list(index.disagreements(table([(1, n) for n in range(5)]))) == [(4, "entry is missing")]


@pytest.mark.parametrize("file", ["CURRENT", "MANIFEST"])
def test_a_damaged_index_is_made_again(tmp_path, file):
    rows = table([(1, n) for n in range(5)])
    open_index(tmp_path / "index", rows).close()
    damaged = next((tmp_path / "index").glob(f"{file}*"))
    damaged.write_bytes(b"nonsense")
    index = open_index(tmp_path / "index", rows)
    assert list(index.disagreements(rows)) == []
    index.close()


def test_two_that_open_it_are_one_too_many(tmp_path, index):
    with pytest.raises(LockHeldError, match="open elsewhere"):
        OpenIndex(tmp_path / "index")
