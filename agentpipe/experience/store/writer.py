"""Writing a shard: whole episodes are appended, checksummed, entered in the index, and only then counted.

The order is: step records, final records, graphs, episode rows, LevelDB, counter. A process that dies anywhere in
between leaves an open shard that :meth:`ShardWriter.open` takes up again with everything that counted.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from agentpipe.closing import Closing
from agentpipe.errors import CorruptError, RecordError, StoreError
from agentpipe.experience.store import checksum, intake
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.audit import audit
from agentpipe.experience.store.counter import COUNTER, Counter, Counts
from agentpipe.experience.store.header import current_boot, take_up
from agentpipe.experience.store.index import OPEN_INDEX, STEP_BITS, open_index, sealed_rows
from agentpipe.experience.store.keys import EpisodeKeys, episode_keys
from agentpipe.experience.store.lock import WriterLock
from agentpipe.experience.store.mapped import GrowingFile
from agentpipe.experience.store.remedies import mend
from agentpipe.experience.store.shard import HEADER, WORD, Shard
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from agentpipe.experience.store.index import OpenIndex

Durability = Literal["process", "power"]
CAPACITY: Final = 65_536
GROUP: Final = 256
_NO_INDEX: Final = sealed_rows(np.zeros(0, rec.EPISODE))


class ShardWriter(Closing):
    """The one writer of an open shard.

    Args:
        directory: Where it lies; made where it is missing, taken up again where a writer left it.
        header: What the manifest says besides counts and digests. Must hold ``observation_size``, ``action_count`` and
            ``policies``; the same but for the policies when a shard is taken up again.
        durability: What survives what. ``process``: everything appended survives the end of this process, however it
            comes (kill -9 included); nothing is forced to disk, so a power cut may take what the system had not
            written yet, and what it tore is found by checksums. ``power``: episodes count in groups, each forced to
            disk before the counter is, so a power cut takes at most the last group, which did not count yet;
            :meth:`flush` ends a group early.
        holder: Who is writing, for the message that a second writer gets.
        capacity: Steps to make room for at once.
        group: Episodes that count together under ``power``.

    Attributes:
        directory: Where it lies.
        dtype: The step record.
        final_dtype: The final record.
        seconds: Time spent appending so far, by this process.

    Raises:
        LockHeldError: another writer holds it; the message names it.
        RecordError: it is sealed already, or another recording than ``header`` says.
        CorruptError: what counted is damaged.
        DiskFullError, HomeError: it cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        header: Mapping[str, Any],
        *,
        durability: Durability = "process",
        holder: str = "",
        capacity: int = CAPACITY,
        group: int = GROUP,
    ) -> None:
        self.directory = directory
        self.durability = durability
        self.seconds = 0.0
        self._sync = durability == "power"
        self._group = group if self._sync else 1
        self._files: list[GrowingFile] = []
        self._counts = self._written = Counts()
        self._counter: Counter | None = None
        self._index: OpenIndex | None = None
        with typed_os_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(directory, holder)
        try:
            self._header = take_up(directory, header)
            sizes = self._header.content["observation_size"], self._header.content["action_count"]
            self._layout = intake.Layout.of(*sizes)
            self.dtype, self.final_dtype = self._layout.steps, self._layout.finals
            self._open_files(capacity)
            self._verify()
            self._header.boot = current_boot()
            self._header.save()
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls,
        directory: Path,
        header: Mapping[str, Any],
        *,
        durability: Durability = "process",
        holder: str = "",
        capacity: int = CAPACITY,
        group: int = GROUP,
    ) -> Self:
        """Makes an open shard or takes one up again; arguments and errors as of the class."""
        return cls(directory, header, durability=durability, holder=holder, capacity=capacity, group=group)

    def _open_files(self, capacity: int) -> None:
        counter, begun = self.directory / COUNTER, (self.directory / HEADER).exists()
        if begun and not (counter.exists() and counter.stat().st_size):
            # Made before the header is: without it nothing would count any more.
            raise CorruptError("the counter is gone", file=counter, remedy=mend(counter))
        self._counter = Counter(self.directory / COUNTER)
        self._counts = self._written = self._counter.counts
        for name, dtype, room, counted in (
            (rec.RECORDS, self.dtype, capacity, self._counts.steps),
            (rec.FINALS, self.final_dtype, capacity // 128, self._counts.finals),
            (rec.GRAPH, WORD, capacity, self._counts.words),
            (rec.EPISODES, rec.EPISODE, capacity // 8, self._counts.episodes),
        ):
            self._files.append(GrowingFile(self.directory / name, dtype, room, counted))

    def _verify(self) -> None:
        """Looks at the latest group, or at everything where the machine was started anew since."""
        shard, count = self.view(), self.episodes
        for damage in audit(shard, start=0 if self._header.rebooted else max(count - GROUP, 0)):
            raise damage.error(self.directory)
        self._keys = EpisodeKeys()
        twice = self._keys.add(episode_keys(shard.episodes), 0)
        if twice is not None:
            path = self.directory / rec.EPISODES
            raise CorruptError("an episode stands there twice", file=path, record=twice, remedy=mend(path))
        self._index = open_index(self.directory / OPEN_INDEX, shard.episodes)

    # ------------------------------------------------------------------------------------------ what is there

    @property
    def steps(self) -> int:
        """Steps that count."""
        return self._counts.steps

    @property
    def appended(self) -> int:
        """Steps that count, and those of a group that does not yet."""
        return self._written.steps

    @property
    def episodes(self) -> int:
        """Episodes that count."""
        return self._counts.episodes

    @property
    def recorded(self) -> npt.NDArray[Any]:
        """The rows (``records.EPISODE``) of all episodes that count, read-only."""
        self._require_open()
        self._files[3].still_whole()
        return _read_only(self._files[3].records[: self.episodes])

    @property
    def header(self) -> dict[str, Any]:
        """What the manifest will say besides counts and digests, policies included."""
        return self._header.manifest()

    def view(self) -> Shard:
        """Everything that counts now, read-only, without an index of its own: ask the writer's :meth:`find`.

        Raises:
            CorruptError: someone has cut a file short.
        """
        self._require_open()
        for file in self._files:
            file.still_whole()
        counts = self._counts
        lengths = counts.steps, counts.finals, counts.words, counts.episodes
        arrays = [_read_only(file.records[:length]) for file, length in zip(self._files, lengths, strict=True)]
        records, finals, graph, episodes = arrays
        manifest = {
            **self.header,
            "format": rec.format_of(episodes),
            "steps": counts.steps,
            "episodes": counts.episodes,
        }
        return Shard(
            self.directory, manifest, records, episodes, finals, graph, _NO_INDEX, {}, None, {}, tuple(self._files)
        )

    def find(self, environment: int, episode: int) -> int | None:
        """The row of an episode that counts, or None."""
        row = self._keys.find(environment, episode)
        return row if row is not None and row < self.episodes else None

    def find_step(self, environment: int, step_id: int, time_ns: int | None = None) -> int | None:
        """The number of the record of a step that counts, or None, by way of LevelDB.

        Args:
            environment: Index in the catalogue.
            step_id: Episode × 2¹⁶ + step.
            time_ns: When it was taken; None = whenever.
        """
        latest = np.iinfo(np.int64).max if time_ns is None else time_ns
        try:
            entry = self._usable().find(environment, step_id, int(latest))
        except CorruptError:
            self._drop_index()
            shutil.rmtree(self.directory / OPEN_INDEX, ignore_errors=True)
            entry = self._usable().find(environment, step_id, int(latest))
        step = step_id & ((1 << STEP_BITS) - 1)
        if entry is None or step >= entry.steps:
            return None
        number = entry.first + step
        self._files[0].still_whole()
        return number if time_ns is None or int(self._files[0].records["time_ns"][number]) == time_ns else None

    # -------------------------------------------------------------------------------------------- what is added

    def policy(self, player: str, version: str, ordinal: int) -> int:
        """The index of a policy, for ``records["policy"]``; a new one is on disk when this returns.

        Args:
            player: What plays.
            version: Digest of its package, or its version.
            ordinal: Its place in the order of time; samplers count freshness in these.
        """
        self._usable()
        return self._header.policy(player, version, ordinal)

    def append(
        self,
        steps: npt.NDArray[Any],
        episodes: npt.NDArray[Any],
        finals: npt.NDArray[Any] | None = None,
        parents: npt.NDArray[np.uint64] | None = None,
    ) -> range:
        """Appends whole episodes, all or none; they count when this returns (``power``: when their group is full).

        Args:
            steps: Their records one after another (:attr:`dtype`); the checksums are made here.
            episodes: Their rows (``records.EPISODE``); checksums, time and places in the files are made here.
            finals: A record (:attr:`final_dtype`) for each cut one, and for any other that has one.
            parents: Words of their graphs one after another; None = each step depends on the one before.

        Returns:
            Their rows.

        Raises:
            NonFiniteError: a NaN or an infinity; names environment, episode, step and field.
            RecordError: another dtype, too long or without steps, lengths that do not add up, steps out of order, an
                episode that is there already, a graph that is none.
            DiskFullError: no room; what was there stays, and appending goes on when there is room again.
        """
        start = time.perf_counter()
        self._usable()
        batch = intake.prepare(self._layout, steps, episodes, finals, parents)
        before, first = self._written, self._written.episodes
        keys = batch.keys
        twice = self._keys.add(keys, first)
        if twice is not None:
            row = batch.rows[twice]
            place = {"environment": int(row["environment"]), "episode": int(row["episode"])}
            raise RecordError("this episode is recorded already", **place, remedy="record the ones that follow it")
        try:
            self._written = self._write(batch, before)
            if self._written.episodes - self._counts.episodes >= self._group:
                self._commit()
        except BaseException:
            if self._counts.episodes <= first:  # it was not counted after all
                self._written = before
                self._keys.undo(keys)
            raise
        self.seconds += time.perf_counter() - start
        return range(first, first + len(batch.rows))

    def _write(self, batch: intake.Batch, before: Counts) -> Counts:
        rows, lengths, words = batch.rows, batch.lengths, batch.words
        after = Counts(
            before.sequence,
            before.steps + len(batch.steps),
            before.episodes + len(rows),
            before.finals + len(batch.finals),
            before.words + int(words.sum()),
        )
        ends = after.steps, after.finals, after.words, after.episodes
        for file, end in zip(self._files, ends, strict=True):
            file.reserve(end)
        records, finals, graph, table = self._files
        target = checksum.as_words(records.records[before.steps : after.steps])
        intake.copy_steps(batch, target, self._layout, len(self._header.policies))
        _copy(batch.finals, finals.records[before.finals : after.finals])
        checksum.fill(finals.records[before.finals : after.finals])
        rows["graph_checksum"] = intake.copy_graphs(batch, graph.words[before.words : after.words])
        offsets = np.cumsum(lengths) - lengths
        rows["time_ns"] = batch.steps["time_ns"][offsets]
        rows["first"] = before.steps + offsets
        rows["graph"] = before.words + np.cumsum(words) - words
        rows["final"] = rec.NO_FINAL
        rows["final"][batch.final_rows] = np.arange(before.finals, after.finals)
        checksum.fill(rows)
        _copy(rows, table.records[before.episodes : after.episodes])
        return after

    def flush(self) -> None:
        """Makes everything appended count (under ``process`` it does already)."""
        self._usable()
        if self._written.episodes > self._counts.episodes:
            self._commit()

    def _commit(self) -> None:
        assert self._counter is not None
        first, end = self._counts.episodes, self._written.episodes
        try:
            if self._sync:
                for file in self._files:
                    file.sync()
            self._usable().put(self._files[3].records[first:end], first, sync=self._sync)
            self._counter.move(self._written, sync=self._sync)
        except BaseException:
            self._drop_index()  # it may be ahead of the counter: the next use makes it agree again
            raise
        finally:
            self._counts = self._counter.counts

    def _require_open(self) -> None:
        if not self._files:
            raise StoreError("this writer is closed", file=self.directory, remedy="open the shard again")

    def _usable(self) -> OpenIndex:
        """The index, opened again after a failure.

        Raises:
            StoreError: the writer is closed, or belongs to another process.
        """
        self._require_open()
        if self._lock.process != os.getpid():
            remedy = "open one shard in each process"
            raise StoreError(f"this writer belongs to process {self._lock.process}", file=self.directory, remedy=remedy)
        if self._index is None:
            self._index = open_index(self.directory / OPEN_INDEX, self.recorded)
        return self._index

    # ---------------------------------------------------------------------------------------------- the end

    def seal(
        self,
        final: Path,
        *,
        names: Mapping[int, str],
        reasons: Sequence[str],
        quality: Callable[[Shard], Mapping[str, Any]] | None = None,
        measurements: Mapping[str, float] | None = None,
    ) -> Shard:
        """Makes a sealed shard of everything appended and moves it to ``final``, in place of what is there.

        A process that dies on the way leaves the open shard, or the sealed one at ``final``.

        Args:
            final: Its path, on the same file system; may be the open shard's own.
            names: Id of each environment inside, by its index in the catalogue; others are left out.
            reasons: Names of the outcomes, by ``episodes["reason"]``.
            quality: Makes the figures of the content for the manifest.
            measurements: What else was measured; time and speed of writing are added.

        Raises:
            RecordError: an environment has no name.
            DiskFullError, HomeError: it cannot be written; the open shard stays.
        """
        from agentpipe.experience.store.seal import seal

        self.flush()
        measured = {"write_seconds": self.seconds, **(measurements or {})}
        try:
            return seal(self, final, names, reasons, quality, measured)
        finally:
            self.close()

    def cut(self) -> None:
        """Cuts the data files to what counts and closes them, for :func:`~agentpipe.experience.store.seal.seal`."""
        counts = self._counts
        for file, end in zip(self._files, (counts.steps, counts.finals, counts.words, counts.episodes), strict=True):
            file.cut(end, sync=self._sync)
        self._drop_index()

    def _drop_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None

    def close(self) -> None:
        """Gives files and lock back; the open shard stays, and what did not count yet is made to."""
        if self._lock.process != os.getpid():
            return  # a fork of the writer: everything here is still its parent's
        try:
            if self._files and self._written.episodes > self._counts.episodes:
                self._commit()
        finally:
            self._drop_index()
            for file in self._files:
                file.close()
            self._files = []
            if self._counter is not None:
                self._counter.close()
            self._lock.release()


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array[:]
    view.flags.writeable = False
    return view


def _copy(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    # As words: numpy copies structured rows field by field.
    checksum.as_words(target)[:] = checksum.as_words(source)
