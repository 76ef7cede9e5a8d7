"""The contract of stores, against every one of them."""

from __future__ import annotations

import contextlib

from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.shard import open_shard
from agentpipe.experience.store.writer import ShardWriter
from agentpipe_tests.experience.fakes import header, write_shard

from .contract import EpisodeStoreContract


class Reader:
    """An open shard as its own writer sees it: records from the files, places from the table of keys and LevelDB."""

    def __init__(self, writer):
        view = writer.view()
        self.episodes, self.steps, self.final, self.parents = writer.recorded, view.steps, view.final, view.parents
        self.find, self.find_step = writer.find, writer.find_step


@contextlib.contextmanager
def opened(path, batches, **options):
    with ShardWriter.open(path, header(), capacity=16, **options) as writer:
        for batch in batches:
            writer.append(*batch)
        writer.flush()
        yield writer


class TestOpenShardThatSurvivesItsProcess(EpisodeStoreContract):
    @contextlib.contextmanager
    def keep(self, tmp_path, batches):
        with opened(tmp_path / "open", batches) as writer:
            yield Reader(writer)


class TestOpenShardThatSurvivesAPowerCut(EpisodeStoreContract):
    @contextlib.contextmanager
    def keep(self, tmp_path, batches):
        with opened(tmp_path / "open", batches, durability="power", group=4) as writer:
            yield Reader(writer)


class TestOpenShardThatWasTakenUpAgain(EpisodeStoreContract):
    @contextlib.contextmanager
    def keep(self, tmp_path, batches):
        for batch in batches:
            with opened(tmp_path / "open", [batch]):
                pass
        with opened(tmp_path / "open", []) as writer:
            yield Reader(writer)


class TestLiveView(EpisodeStoreContract):
    @contextlib.contextmanager
    def keep(self, tmp_path, batches):
        with opened(tmp_path / "open", batches):
            yield open_live(tmp_path / "open")


class TestSealedShard(EpisodeStoreContract):
    def keep(self, tmp_path, batches):
        return open_shard(write_shard(tmp_path / "shard", *batches).path)
