"""What every store of episodes keeps: one class of tests for open shards, live views, sealed and regenerated ones.

A back end is a subclass whose ``keep`` stores batches of episodes and gives something to read them from: with
``episodes``, ``steps(row)``, ``final(row)``, ``parents(row)``, ``find`` and ``find_step``.
"""

from __future__ import annotations

import abc
import contextlib

import numpy as np
import pytest

from agentpipe.experience.store import checksum
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.index import step_id
from agentpipe_tests.experience.fakes import make_episodes

MADE_BY_THE_STORE = ("checksum", "time_ns", "first", "graph", "graph_checksum", "final")


def split(batch):
    """The episodes of a batch, each as ``(steps, row, final or None, parents)``."""
    steps, episodes, finals, parents = batch
    at = word = 0
    for row in episodes:
        length = int(row["steps"])
        width = rec.graph_words(length)
        own = (
            []
            if finals is None
            else finals[(finals["environment"] == row["environment"]) & (finals["episode"] == row["episode"])]
        )
        graph = parents[word : word + width].reshape(length, -1)
        yield steps[at : at + length], row, own[0] if len(own) else None, graph
        at, word = at + length, word + width


def content(record):
    """The bytes of one record but for checksum and time stamp."""
    return record.tobytes()[rec.PREFIX :]


class EpisodeStoreContract(abc.ABC):
    """Derive from it, and give ``keep``."""

    batches = staticmethod(
        lambda: [
            make_episodes(np.random.default_rng(1), 7, cut_share=0.3),
            make_episodes(np.random.default_rng(2), 1, first_episode=50, cut_share=0),
            make_episodes(np.random.default_rng(3), 30, first_episode=100, max_steps=90, cut_share=0.3),
        ]
    )
    """what is stored, one append each"""

    @abc.abstractmethod
    def keep(self, tmp_path, batches):
        """A context manager: stores ``batches`` and gives the reader."""

    @pytest.fixture
    def stored(self, tmp_path):
        batches = self.batches()
        keeping = self.keep(tmp_path, batches)
        with keeping if hasattr(keeping, "__exit__") else contextlib.nullcontext(keeping) as reader:
            yield reader, [episode for batch in batches for episode in split(batch)]

    def test_every_episode_is_found_where_it_is(self, stored):
        reader, episodes = stored
        assert len(reader.episodes) == len(episodes)
        found = [reader.find(int(row["environment"]), int(row["episode"])) for _, row, _, _ in episodes]
        assert sorted(found) == list(range(len(episodes)))
        for row, (_, expected, _, _) in zip(found, episodes, strict=True):
            for name in set(rec.EPISODE.names) - set(MADE_BY_THE_STORE):
                np.testing.assert_array_equal(reader.episodes[row][name], expected[name])

    def test_steps_finals_and_graphs_come_back_byte_for_byte(self, stored):
        reader, episodes = stored
        for steps, row, final, graph in episodes:
            at = reader.find(int(row["environment"]), int(row["episode"]))
            assert [content(record) for record in reader.steps(at)] == [content(record) for record in steps]
            np.testing.assert_array_equal(reader.steps(at)["time_ns"], steps["time_ns"])
            np.testing.assert_array_equal(reader.parents(at), graph)
            assert (reader.final(at) is None) == (final is None)
            assert final is None or content(reader.final(at)) == content(final)
            assert reader.episodes["time_ns"][at] == steps["time_ns"][0]

    def test_every_record_has_its_checksum(self, stored):
        reader, _ = stored
        for row in range(len(reader.episodes)):
            assert not checksum.wrong(reader.steps(row)).any()
            words = np.ascontiguousarray(reader.parents(row)).reshape(-1)
            assert checksum.xxh64(words.tobytes()) == reader.episodes["graph_checksum"][row]
        assert not checksum.wrong(reader.episodes).any()

    def test_every_step_is_found_from_its_full_key(self, stored):
        reader, episodes = stored
        for steps, row, _, _ in episodes:
            environment, episode = int(row["environment"]), int(row["episode"])
            first = int(reader.episodes["first"][reader.find(environment, episode)])
            for step, time_ns in enumerate(steps["time_ns"].tolist()):
                key = environment, step_id(episode, step)
                assert reader.find_step(*key) == reader.find_step(*key, time_ns) == first + step
                assert reader.find_step(*key, time_ns + 1) is None
            assert reader.find_step(environment, step_id(episode, len(steps))) is None

    def test_what_is_not_there_is_not_found(self, stored):
        reader, _ = stored
        for environment, episode in ((99, 0), (100, 2**31), (0, 0), (2**32 - 1, 2**32 - 1), (-1, 0), (100, -1)):
            assert reader.find(environment, episode) is None
            assert reader.find_step(environment, step_id(episode, 0)) is None

    def test_what_is_read_cannot_be_written(self, stored):
        reader, _ = stored
        for array in (reader.steps(0), reader.episodes, reader.parents(0)):
            with pytest.raises(ValueError, match="read-only"):
                array[:1] = array[:1]
