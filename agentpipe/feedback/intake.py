"""Taking feedback in: every row of every dropped file lands in exactly one place, however often this runs."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.errors import CorruptError, FeedbackError
from agentpipe.feedback.batch import Batch
from agentpipe.feedback.block import Refused
from agentpipe.feedback.inbox import REFUSED, TAKEN, Dropped, listing, opened, put_away, reader, refused_digest, shown
from agentpipe.feedback.index import writing
from agentpipe.feedback.jsonl import UnfinishedError
from agentpipe.feedback.parts import crowded, day_folder, merge, sweep
from agentpipe.feedback.rows import FaultError
from agentpipe.feedback.rules import Rules
from agentpipe.feedback.schema import FeedbackShape, day_number
from agentpipe.feedback.store import DayState, day_state
from agentpipe.storage import typed_os_errors

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

BUILT_IN: Final = FeedbackShape(OBSERVATION_SIZE, ACTION_COUNT)


@dataclass(frozen=True)
class Intake:
    """What one intake did.

    ``files_waiting`` and ``files_refused`` say why, by name. ``rows_already`` counts rows that an earlier intake had
    taken from the same content. ``quarantined`` counts rows and files by reason.
    """

    files_taken: tuple[str, ...] = ()
    files_waiting: dict[str, str] = field(default_factory=dict)
    files_refused: dict[str, str] = field(default_factory=dict)
    rows_taken: int = 0
    rows_already: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: Intake) -> Intake:
        """Both together."""
        counts = Counter(self.quarantined) + Counter(other.quarantined)
        return Intake(
            files_taken=(*self.files_taken, *other.files_taken),
            files_waiting={**self.files_waiting, **other.files_waiting},
            files_refused={**self.files_refused, **other.files_refused},
            rows_taken=self.rows_taken + other.rows_taken,
            rows_already=self.rows_already + other.rows_already,
            quarantined=dict(sorted(counts.items())),
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**asdict(self), "files_taken": list(self.files_taken)}


@dataclass(frozen=True)
class IntakeReport:
    """One UTC day after an intake, and what the intake did. ``folder`` holds the day's parts."""

    state: DayState
    intake: Intake
    folder: Path

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        state = {**asdict(self.state), "unlabelled": self.state.unlabelled}
        return {**state, **self.intake.to_json(), "folder": str(self.folder)}


def rules_for(
    *,
    now: dt.datetime | None = None,
    shape: FeedbackShape | None = None,
    late_days: int | None = None,
    versions: Collection[str] | None = None,
) -> Rules:
    """What rows are held against; see :class:`agentpipe.feedback.rules.Rules`.

    Args:
        now: Aware present time (for tests); the clock when None.
        shape: Sizes of a decision; the built-in line's when None.
        late_days: Days after which a row is too late; None: never.
        versions: Known policy versions; None: any.

    Raises:
        FeedbackError: ``now`` has no zone.
    """
    present = now or dt.datetime.now(dt.UTC)
    if present.utcoffset() is None:
        raise FeedbackError("the present time needs a zone", field="now", remedy="pass an aware time")
    known = None if versions is None else frozenset(versions)
    return Rules(shape or BUILT_IN, present, late_days, known)


def take_in(
    inbox: Path,
    day: dt.date,
    store: Path,
    *,
    now: dt.datetime | None = None,
    shape: FeedbackShape | None = None,
    late_days: int | None = None,
    versions: Collection[str] | None = None,
) -> IntakeReport:
    """Takes every file of ``inbox``, then reports ``day``; see :func:`take` and :func:`rules_for`."""
    rules = rules_for(now=now, shape=shape, late_days=late_days, versions=versions)
    return report_day(store, day, take(inbox, store, rules))


def report_day(store: Path, day: dt.date, intake: Intake) -> IntakeReport:
    """What ``day`` amounts to after ``intake``; its folder is made where the day has no rows."""
    folder = day_folder(store, day_number(day))
    with typed_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return IntakeReport(day_state(store, day), intake, folder)


def take(inbox: Path, store: Path, rules: Rules) -> Intake:
    """Takes every file of ``inbox`` that is complete, all of them in one commit. The caller holds the home's lock.

    A row goes to the parts of its own UTC day, or to quarantine with its reason. A file that was taken moves to
    ``inbox/taken``; one that cannot be read at all moves to ``inbox/refused``, with the reason in quarantine; one that
    is still being written waits. A crash at any instant leaves everything as it was, or everything taken and some files
    still in the inbox: the next call sees by their content that they were taken, and moves them.

    Args:
        inbox: Where files are dropped; created when missing.
        store: Root of the feedback store; created when missing.
        rules: What rows are held against.

    Raises:
        StoreError: the store cannot be read or written, or the disk is full; nothing was taken then.
    """
    with typed_os_errors(inbox):
        inbox.mkdir(parents=True, exist_ok=True)
        paths = listing(inbox)
    if not paths:
        return Intake()
    broken: dict[Path, FaultError] = {}
    while True:
        visit = _Visit(inbox, broken)
        try:
            with committing(store, rules) as batch:
                for path in paths:
                    visit.look(path, batch)
            break
        except _BrokenOffError as error:  # nothing was taken: once more, without that file
            broken[error.path] = error.fault
    visit.tidy()
    return Intake(
        files_taken=tuple(visit.taken),
        files_waiting=visit.waiting,
        files_refused=visit.refused,
        rows_taken=batch.taken,
        rows_already=batch.already,
        quarantined=dict(sorted(batch.quarantined.items())),
    )


@contextlib.contextmanager
def committing(store: Path, rules: Rules) -> Iterator[Batch]:
    """A batch: what it took counts all together when the body ends, and nothing of it when the body raises."""
    with writing(store) as connection:
        _tidy_parts(connection, store)
        batch = Batch(connection, store, rules)
        try:
            yield batch
            batch.finish()
        except BaseException:
            batch.abandon()
            raise


def _tidy_parts(connection: sqlite3.Connection, store: Path) -> None:
    """Removes what a killed writer left, and makes one part of many; a damaged part is for its readers to report."""
    sweep(connection, store)
    for day, kind, numbers in crowded(connection):
        with contextlib.suppress(CorruptError, FileNotFoundError):
            merge(connection, store, day, kind, numbers)


class _BrokenOffError(Exception):
    """A file that was checked could not be read to its end; some of its rows are in the batch already."""

    def __init__(self, path: Path, fault: FaultError) -> None:
        super().__init__(str(fault))
        self.path, self.fault = path, fault


class _Visit:
    """One round through the inbox; files that are known to be ``broken`` are refused without another look."""

    def __init__(self, inbox: Path, broken: Mapping[Path, FaultError]) -> None:
        self.inbox = inbox
        self._broken = broken
        self.taken: list[str] = []
        self.waiting: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self._leaving: list[tuple[Path, str, int | None]] = []

    def look(self, path: Path, batch: Batch) -> None:
        """Takes one file into the batch, or says why not."""
        name = shown(path.name)
        try:
            if path in self._broken:
                raise self._broken[path]
            with opened(path) as dropped:
                source, known = batch.source(dropped.digest, path.name)
                if known:
                    batch.count_already(source)
                else:
                    self._add(batch, source, dropped)
                self._leaving.append((path, dropped.digest, dropped.size))
            self.taken.append(name)
        except UnfinishedError as unfinished:
            self.waiting[name] = str(unfinished)
        except FaultError as fault:
            digest = refused_digest(path, fault)
            batch.refuse(batch.source(digest, path.name)[0], Refused(fault.reason, fault.detail))
            self.refused[name] = f"{fault.reason}: {fault.detail}"
            self._leaving.append((path, digest, None))

    def _add(self, batch: Batch, source: int, dropped: Dropped) -> None:
        try:
            batch.add(source, reader(dropped.path).read(dropped.file))
        except FaultError as fault:
            fault.digest = dropped.digest
            raise _BrokenOffError(dropped.path, fault) from fault

    def tidy(self) -> None:
        """Moves the files out of the inbox; one that has grown meanwhile stays, and is looked at again."""
        for path, digest, size in self._leaving:
            put_away(path, self.inbox / (REFUSED if size is None else TAKEN), digest, size)
