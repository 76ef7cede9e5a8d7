"""Taking feedback in: every row of every dropped file lands in exactly one place, however often this runs."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.errors import FeedbackError
from agentpipe.feedback.rows import Accepted, Refused, is_unfinished, parse_lines
from agentpipe.feedback.schema import KINDS, FeedbackShape, as_row
from agentpipe.feedback.store import (
    QUARANTINE,
    day_path,
    days,
    known_ids,
    labelled,
    read_kind,
    write_kind,
    write_quarantine,
)
from agentpipe.storage import canonical_json, digest_bytes, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

BUILT_IN: Final = FeedbackShape(OBSERVATION_SIZE, ACTION_COUNT)
TAKEN: Final = "taken"


@dataclass(frozen=True)
class IntakeReport:
    """One UTC day after an intake, and what the intake did.

    ``digest`` covers the day's rows only: it changes when the day's feedback does. ``files_waiting`` names files that
    are still being written. ``rows_already`` counts rows that an earlier intake had taken from the same content.
    ``labels`` and ``orphan_labels`` are the day's; a decision counts as labelled whenever its label came.
    """

    day: str
    digest: str
    decisions: int
    labels: int
    labelled_decisions: int
    unlabelled_decisions: int
    orphan_labels: int
    verdicts: dict[str, int]
    files_taken: tuple[str, ...]
    files_waiting: tuple[str, ...]
    rows_taken: int
    rows_already: int
    quarantined: dict[str, int]
    decisions_path: Path
    labels_path: Path
    quarantine_path: Path

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


def take_in(
    inbox: Path, day: dt.date, store: Path, *, now: dt.datetime | None = None, shape: FeedbackShape | None = None
) -> IntakeReport:
    """Takes every ``*.jsonl`` file of ``inbox`` whole, then reports ``day``.

    A row goes to the Parquet file of its own UTC day, or to quarantine with its reason. A file that was taken moves to
    ``inbox/taken``; one whose last line is half-written waits. A crash at any point leaves files that the next call
    takes again, with the same end: rows that are there already, from the same file content, are not doubled.

    Args:
        inbox: Where files are dropped; created when missing.
        day: The UTC day to report on.
        store: Root of the feedback store.
        now: Aware present time (for tests); the clock when None.
        shape: Sizes of a decision; the built-in line's when None.

    Raises:
        FeedbackError: a file of the inbox cannot be read, or ``now`` has no zone.
        CorruptError: a stored day is damaged.
    """
    present = now or dt.datetime.now(dt.UTC)
    if present.utcoffset() is None:
        raise FeedbackError("the present time needs a zone", field="now", remedy="pass an aware time")
    with typed_os_errors(inbox):
        inbox.mkdir(parents=True, exist_ok=True)
    intake = _Intake(store, shape or BUILT_IN, present)
    taken, waiting = [], []
    for path in sorted(inbox.glob("*.jsonl")):
        if not path.is_file():
            continue
        data = _read(path)
        if is_unfinished(data):
            waiting.append(path.name)
            continue
        intake.take(path.name, data)
        _move(path, inbox / TAKEN, digest_bytes(data))
        taken.append(path.name)
    for kind in KINDS:
        if not day_path(store, day, kind).exists():
            write_kind(store, day, kind, [])
    return _report(store, day, intake, taken, waiting)


def read_day(store: Path, day: dt.date) -> tuple[pa.Table, pa.Table]:
    """The day's decisions and labels, each sorted by id."""
    return read_kind(store, day, "decision"), read_kind(store, day, "label")


class _Intake:
    """Rows of many files on their way to one store."""

    def __init__(self, store: Path, shape: FeedbackShape, now: dt.datetime) -> None:
        self.store = store
        self.shape = shape
        self.now = now
        self.known = {kind: known_ids(store, kind) for kind in KINDS}
        self.taken = 0
        self.already = 0
        self.quarantined: Counter[str] = Counter()

    def take(self, name: str, data: bytes) -> None:
        """One file: its valid rows to their days, then the refused ones to quarantine."""
        source = digest_bytes(data)
        rows: dict[tuple[dt.date, str], list[dict[str, Any]]] = defaultdict(list)
        refused: list[dict[str, Any]] = []
        for result in parse_lines(data, self.shape, self.now):
            refusal = self._place(result, source, data, rows) if isinstance(result, Accepted) else result
            if refusal is not None:
                refused.append({**asdict(refusal), "file": name, "source": source})
        for (day, kind), entries in sorted(rows.items()):
            write_kind(self.store, day, kind, entries)
        if refused:
            write_quarantine(self.store, source, refused)
        self.quarantined.update(row["reason"] for row in refused)

    def _place(
        self, row: Accepted, source: str, data: bytes, rows: dict[tuple[dt.date, str], list[dict[str, Any]]]
    ) -> Refused | None:
        identifier = getattr(row.record, KINDS[row.kind][1])
        origin = self.known[row.kind].get(identifier)
        if origin == (source, row.line):
            self.already += 1
            return None
        if origin is not None:
            raw = data.split(b"\n")[row.line - 1].decode().rstrip("\r")
            detail = f"{row.kind} {identifier} came in file {origin[0][:12]}, line {origin[1]}"
            return Refused("duplicate", detail, row.line, raw)
        self.known[row.kind][identifier] = (source, row.line)
        rows[row.record.time.date(), row.kind].append(as_row(row.record, source, row.line))
        self.taken += 1
        return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        remedy = "make it readable, or take it out of the inbox"
        raise FeedbackError(f"cannot be read: {error.strerror}", file=path, remedy=remedy) from error


def _move(path: Path, folder: Path, digest: str) -> None:
    """Out of the inbox; named by content too, so that a later file of the same name does not replace it."""
    with typed_os_errors(folder):
        folder.mkdir(exist_ok=True)
        path.replace(folder / f"{path.stem}-{digest[:12]}.jsonl")


def _report(store: Path, day: dt.date, intake: _Intake, taken: Iterable[str], waiting: Iterable[str]) -> IntakeReport:
    decisions, labels = read_day(store, day)
    judged: dict[str, str] = {}
    for other in days(store):
        table = read_kind(store, other, "label")
        judged.update(zip(table.column("decision_id").to_pylist(), table.column("verdict").to_pylist(), strict=True))
    with_label = labelled(decisions, judged)
    known = intake.known["decision"]
    targets = labels.column("decision_id").to_pylist()
    return IntakeReport(
        day=day.isoformat(),
        digest=day_digest(decisions, labels),
        decisions=decisions.num_rows,
        labels=labels.num_rows,
        labelled_decisions=with_label,
        unlabelled_decisions=decisions.num_rows - with_label,
        orphan_labels=sum(target not in known for target in targets),
        verdicts=dict(sorted(Counter(labels.column("verdict").to_pylist()).items())),
        files_taken=tuple(taken),
        files_waiting=tuple(waiting),
        rows_taken=intake.taken,
        rows_already=intake.already,
        quarantined=dict(sorted(intake.quarantined.items())),
        decisions_path=day_path(store, day, "decision"),
        labels_path=day_path(store, day, "label"),
        quarantine_path=store / QUARANTINE,
    )


def day_digest(decisions: pa.Table, labels: pa.Table) -> str:
    """Digest of a day's rows, whatever files they came in."""
    content = []
    for table in (decisions, labels):
        rows = table.drop_columns(["source", "line"]).to_pylist()
        content.append([{**row, "time": row["time"].isoformat()} for row in rows])
    return digest_bytes(canonical_json(content))
