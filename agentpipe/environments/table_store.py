"""The store of disturbance-table versions: one home, one writer, any number of readers without a lock (S3).

Below ``<home>/table``::

    source.csv               what an engineer edits (unless a file of the user's own is set as the source)
    versions/<version>.parquet   every version ever published, content-addressed
    audit/<number>.json      one file a change, never rewritten: who, why, when, what, and its predecessor's digest
    current.json             the pointer: the current version and the number of its audit entry

A change writes the version, then the audit entry, then the pointer, then the source, each aside, flushed and renamed. A
reader follows the pointer. What a killed writer left undone is completed by the next one. A source that a person saves
while a change is made is not overwritten (:mod:`~agentpipe.environments.table_source`).
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from agentpipe.environments import table_files, table_source
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.parameters import CELLS, PARAMETER_INDEX
from agentpipe.environments.table import (
    DisturbanceTable,
    Fingerprint,
    TableDiff,
    TableRow,
    check_value,
    diff_tables,
    load_table,
    table_from_rows,
    table_to_csv,
)
from agentpipe.environments.table_source import SourceEditedError
from agentpipe.environments.where import parse_where
from agentpipe.errors import CorruptError, InputError, LockHeldError, TableError
from agentpipe.storage import digest_bytes, home_lock, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

POINTER_FORMAT = 1
LOCK_PATIENCE_S = 10.0
_LEDGER_REMEDY = "restore <home>/table from a backup"
_PREFIX_MIN = 6


@dataclass(frozen=True)
class AuditEntry:
    """One change: ``action`` is import, edit, set or rollback; ``previous`` is the digest of the entry before."""

    number: int
    at: str
    who: str
    why: str
    action: str
    before: str | None
    after: str
    cells: tuple[str, ...]
    values: int
    detail: dict[str, Any]
    previous: str | None

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**asdict(self), "cells": list(self.cells)}


class Change(NamedTuple):
    """Outcome of a change: the version now current, what differs, and its audit entry (``None``: nothing changed)."""

    version: str
    diff: TableDiff
    entry: AuditEntry | None


class EnvironmentChange(NamedTuple):
    """A change as one environment saw it: the row it has since then and that row's fingerprint."""

    entry: AuditEntry
    row: TableRow
    fingerprint: Fingerprint


class _Pointer(NamedTuple):
    version: str
    number: int
    source_pending: bool  # the source file has still to be rewritten


class TableStore:
    """Versions of the disturbance table in one home.

    Args:
        home: The home directory; everything lies below ``home/table``.
        source: A file of the user's own to follow instead of the home's copy.
        default: What is copied on first use (``None``: the project's ``disturbances.csv``).
    """

    def __init__(self, home: Path, source: Path | None = None, default: Path | None = None) -> None:
        self.folder = home / "table"
        self.own_source = source is not None
        self.source_path = source.resolve() if source is not None else self.folder / "source.csv"
        self._default = default

    # ------------------------------------------------------------------------------------------- reading

    def started(self) -> bool:
        """Whether a version was published yet."""
        return self._pointer() is not None

    def current(self) -> DisturbanceTable:
        """The current version, without a lock and without looking at the source.

        Raises:
            TableError: nothing was published yet.
            CorruptError: the pointer or the version is damaged.
        """
        pointer = self._pointer()
        if pointer is None:
            remedy = "run: agentpipe table show, or materialise disturbance_table"
            raise TableError("there is no disturbance table yet", file=self.folder, remedy=remedy)
        return self.load(pointer.version)

    def load(self, version: str) -> DisturbanceTable:
        """A kept version by its name, by an unambiguous beginning of it (six characters or more), or as ``current``.

        Raises:
            TableError: no such version, or more than one.
            CorruptError: its content does not match its name.
        """
        return table_files.read(table_files.path_of(self.folder, self.resolve(version)))

    def resolve(self, version: str) -> str:
        """The full name of a version; raises ``TableError``."""
        if version == "current":
            return self.current().version
        names = table_files.names(self.folder)
        if version in names:
            return version
        found = [name for name in names if len(version) >= _PREFIX_MIN and name.startswith(version)]
        if len(found) != 1:
            problem = "ambiguous" if found else "unknown"
            remedy = "agentpipe table history lists the versions"
            raise TableError(f"{problem} version {version!r}", file=self.folder, field="version", remedy=remedy)
        return found[0]

    def diff(self, before: str, after: str) -> TableDiff:
        """What turns one kept version into another; names as for :meth:`load`."""
        return diff_tables(self.load(before), self.load(after))

    def history(self) -> list[AuditEntry]:
        """Every change that took effect, oldest first.

        Raises:
            CorruptError: an entry is missing or damaged, or does not follow its predecessor.
        """
        pointer = self._pointer()
        entries: list[AuditEntry] = []
        previous: str | None = None
        for number in range(1, (pointer.number if pointer else 0) + 1):
            path = self._audit_path(number)
            entry = _read_entry(path)
            if entry.number != number or entry.previous != previous:
                raise CorruptError("the audit entry does not follow its predecessor", file=path, remedy=_LEDGER_REMEDY)
            previous = digest_bytes(path.read_bytes())
            entries.append(entry)
        return entries

    def environment_history(self, environment_id: str) -> list[EnvironmentChange]:
        """The changes that gave an environment another disturbance, oldest first; the import comes first."""
        changes: list[EnvironmentChange] = []
        for entry in self.history():
            table = self.load(entry.after)
            index = table.row_for(environment_id)
            change = EnvironmentChange(entry, table.rows[index], table.row_fingerprint(index))
            if not changes or changes[-1].fingerprint != change.fingerprint:
                changes.append(change)
        return changes

    def unpublished(self) -> TableDiff | None:
        """What the source holds beyond the current version (``None``: nothing); a bad one raises ``TableError``."""
        if not self.source_path.exists() and not self.own_source:
            return None
        return diff_tables(self.current(), load_table(self.source_path)) or None

    # ------------------------------------------------------------------------------------------- writing

    def refresh(self, who: str = "", why: str = "the source was edited") -> DisturbanceTable:
        """Publishes the source when its content is not the current version, and returns the current version.

        On first use the project's table is copied to the source. Without ``who``, the owner of the file is recorded.

        Raises:
            TableError: the source is not valid; the current version stays.
            LockHeldError: another writer does not end.
        """
        pointer = self._pointer()
        if pointer is not None and not pointer.source_pending and self.source_path.exists():
            table = load_table(self.source_path)
            if table.version == pointer.version and table_files.path_of(self.folder, table.version).exists():
                return table
        with self._writing("refresh"):
            return self._absorb(who, why)[0]

    def set(self, where: str, assignments: Mapping[str, float], who: str, why: str) -> Change:
        """Gives every row that ``where`` selects new values, as a new version; the source is rewritten.

        Raises:
            TableError: malformed filter, unknown or out-of-range value, no row selected, no ``who`` or ``why``, or a
                source that is not valid; nothing is changed then.
            SourceEditedError: somebody saved the source meanwhile: it holds that, and the message says whether the
                change was made before.
            LockHeldError: another writer does not end.
        """
        _signed(who, why)
        condition = parse_where(where)
        if not assignments:
            raise TableError("nothing to set", field="column", remedy="give column=value")
        values = {column: check_value(column, value) for column, value in assignments.items()}
        detail = {"where": where, "set": values}

        def edit(table: DisturbanceTable) -> DisturbanceTable:
            rows = [_assigned(row, values) if condition(row) else row for row in table.rows]
            if not any(condition(row) for row in table.rows):
                remedy = "agentpipe table show lists the rows"
                raise TableError("the filter selects no row", filter=repr(where), remedy=remedy)
            return table_from_rows(rows)

        with self._writing("set"):
            before, seen = self._absorb("", "edited before a set")
            return self._publish(before, edit(before), seen, who, why, "set", detail)

    def rollback(self, version: str, who: str, why: str) -> Change:
        """Makes a kept version current again, as a new change; the source is rewritten.

        A source that is not valid is moved to ``rejected/`` first, so that a rollback is the way out of a bad edit.

        Raises:
            TableError: no such version, no ``who`` or ``why``.
            SourceEditedError: as in :meth:`set`.
            LockHeldError: another writer does not end.
        """
        _signed(who, why)
        with self._writing("rollback"):
            after = self.load(version)
            try:
                before, seen = self._absorb("", "edited before a rollback")
            except SourceEditedError:
                raise
            except InputError:
                before = self.current()
                self._mark_source_pending()
                if self.source_path.is_file():
                    table_source.set_aside(self.source_path, self.folder / "rejected")
                self._recover()
                seen = digest_bytes(table_to_csv(before))
            return self._publish(before, after, seen, who, why, "rollback", {"version": after.version})

    # ------------------------------------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Holds the store's lock (writers are quick, so it waits a little) after completing what a killed one left."""
        deadline = time.monotonic() + LOCK_PATIENCE_S
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(home_lock(self.folder, f"agentpipe table {what}"))
                    break
                except LockHeldError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.05)
            self._recover()
            yield

    def _recover(self) -> None:
        pointer = self._pointer()
        following = self._audit_path((pointer.number if pointer else 0) + 1)
        if following.exists():
            entry = _read_entry(following)
            self.load(entry.after)
            pointer = _Pointer(entry.after, entry.number, source_pending=entry.action in ("set", "rollback"))
            self._write_pointer(pointer)
        if pointer is not None and pointer.source_pending:
            self._finish_source(pointer)

    def _finish_source(self, pointer: _Pointer) -> None:
        """Rewrites the source after a writer was killed, unless a person has edited it since."""
        before = _read_entry(self._audit_path(pointer.number)).before
        found: str | None = None
        seen: str | None = None
        try:
            if self.source_path.exists():
                table, seen = table_source.read_source(self.source_path)
                found = table.version
        except InputError:
            found = "not valid"
        if found in (None, before):
            with contextlib.suppress(SourceEditedError):  # in this very moment
                self._write_source(self.load(pointer.version), seen)
        self._write_pointer(pointer._replace(source_pending=False))

    def _write_source(self, table: DisturbanceTable, seen: str | None) -> None:
        table_source.replace_source(self.source_path, table_to_csv(table), seen)

    def _absorb(self, who: str, why: str) -> tuple[DisturbanceTable, str]:
        """The source as the current version, published when it differs, and its digest. The lock is held."""
        pointer = self._pointer()
        if not self.source_path.exists() and not self.own_source:
            data = self._default_bytes() if pointer is None else table_to_csv(self.current())
            with contextlib.suppress(SourceEditedError):  # somebody put one there
                table_source.replace_source(self.source_path, data, None)
        table, seen = table_source.read_source(self.source_path)
        if pointer is None:
            self._commit(None, table, who or "agentpipe", "first use", "import", {"source": str(self.source_path)})
        elif table.version != pointer.version:
            who = who or _owner(self.source_path)
            self._commit(self.current(), table, who, why, "edit", {"source": str(self.source_path)})
        else:
            table_files.write(table_files.path_of(self.folder, table.version), table)  # heals a lost or damaged file
        return table, seen

    def _default_bytes(self) -> bytes:
        path = self._default if self._default is not None else data_dir() / "disturbances.csv"
        load_table(path)
        return path.read_bytes()

    def _publish(
        self,
        before: DisturbanceTable,
        after: DisturbanceTable,
        seen: str,
        who: str,
        why: str,
        action: str,
        detail: dict[str, Any],
    ) -> Change:
        """Publishes ``after`` and rewrites the source, whose digest is ``seen``."""
        difference = diff_tables(before, after)
        if not difference:
            return Change(after.version, difference, None)
        if table_source.digest_of(self.source_path) != seen:
            text, remedy = "the source was edited at this moment; nothing is changed", "run the command again"
            raise SourceEditedError(text, file=self.source_path, remedy=remedy)
        entry = self._commit(before, after, who, why, action, detail)
        edited: SourceEditedError | None = None
        try:
            self._write_source(after, seen)
        except SourceEditedError as error:
            edited = error
        self._write_pointer(_Pointer(entry.after, entry.number, source_pending=False))
        if edited is not None:
            text = (
                f"the source was edited while the change was made: that is version {entry.after[:12]}, and the source "
            )
            text += "holds the edit without it"
            remedy = "run the command again to have both: it publishes the edit and makes the change once more"
            raise SourceEditedError(text, **edited.where, remedy=remedy) from edited
        return Change(after.version, difference, entry)

    def _commit(
        self,
        before: DisturbanceTable | None,
        after: DisturbanceTable,
        who: str,
        why: str,
        action: str,
        detail: dict[str, Any],
    ) -> AuditEntry:
        """Version, audit entry, pointer: in this order."""
        pointer = self._pointer()
        number = (pointer.number if pointer else 0) + 1
        difference = diff_tables(before, after) if before is not None else None
        entry = AuditEntry(
            number=number,
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            who=who,
            why=why,
            action=action,
            before=before.version if before is not None else None,
            after=after.version,
            cells=difference.cells if difference is not None else CELLS,
            values=len(difference.changed) if difference is not None else len(after) * after.parameters.shape[1],
            detail=detail,
            previous=digest_bytes(self._audit_path(number - 1).read_bytes()) if number > 1 else None,
        )
        table_files.write(table_files.path_of(self.folder, after.version), after)
        write_json(self._audit_path(number), entry.to_json())
        self._write_pointer(_Pointer(after.version, number, source_pending=action in ("set", "rollback")))
        return entry

    def _mark_source_pending(self) -> None:
        pointer = self._pointer()
        if pointer is not None:
            self._write_pointer(pointer._replace(source_pending=True))

    def _audit_path(self, number: int) -> Path:
        return self.folder / "audit" / f"{number:06d}.json"

    def _pointer(self) -> _Pointer | None:
        path = self.folder / "current.json"
        if not path.exists():
            return None
        content = _checked(path, read_json(path), {"format", *_Pointer._fields})
        return _Pointer(str(content["version"]), int(content["number"]), bool(content["source_pending"]))

    def _write_pointer(self, pointer: _Pointer) -> None:
        write_json(self.folder / "current.json", {"format": POINTER_FORMAT, **pointer._asdict()})


def _read_entry(path: Path) -> AuditEntry:
    content = _checked(path, read_json(path), {item.name for item in fields(AuditEntry)})
    return AuditEntry(**{**content, "cells": tuple(content["cells"])})


def _checked(path: Path, content: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(content, dict) or set(content) != names:
        raise CorruptError("not what agentpipe table writes", file=path, remedy=_LEDGER_REMEDY)
    return content


def _assigned(row: TableRow, values: Mapping[str, float]) -> TableRow:
    changed = list(row.values)
    for column, value in values.items():
        changed[PARAMETER_INDEX[column]] = value
    return row._replace(values=tuple(changed))


def _signed(who: str, why: str) -> None:
    for name, value in (("who", who), ("why", why)):
        if not value.strip():
            raise TableError(f"a change needs {name}", field=name, remedy="give --who NAME and --why REASON")


def _owner(path: Path) -> str:
    try:
        return f"{path.owner()} (owner of the file)"
    except KeyError:
        return f"user {path.stat().st_uid} (owner of the file)"
