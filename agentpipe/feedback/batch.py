"""One intake in the making: rows of many sources become parts, ids and quarantine, and count all together."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentpipe.feedback.block import Block, Refused, Row, blocks_of
from agentpipe.feedback.figures import Figures
from agentpipe.feedback.index import ORPHAN
from agentpipe.feedback.parts import PartWriter, begin_part, end_part, part_path
from agentpipe.feedback.rules import Accepted, Rules, judge
from agentpipe.feedback.schema import ERROR_TYPES, TABLES, VERDICTS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence
    from pathlib import Path

GATHERED: Final = 8_192
"""rows of row-wise formats that are judged together"""


class Batch:
    """Rows on their way into one store, within one transaction of its index.

    Args:
        connection: An open transaction (:func:`agentpipe.feedback.index.writing`).
        store: Root of the feedback store.
        rules: What rows are held against.
    """

    def __init__(self, connection: sqlite3.Connection, store: Path, rules: Rules) -> None:
        self.connection = connection
        self.store = store
        self.rules = rules
        self.taken = 0
        self.already = 0
        self.quarantined: Counter[str] = Counter()
        self.again: dict[tuple[int, int | str], int] = {}
        """places of rows that are judged once more, with their numbers in quarantine"""
        self._figures = Figures(connection)
        self._writers: dict[tuple[int, str], tuple[int, PartWriter]] = {}
        self._rows: list[Row] = []
        self._digests: dict[int, str] = {}
        self._taken_of: Counter[int] = Counter()

    # ------------------------------------------------------------------------------------------ sources

    def source(self, digest: str, name: str) -> tuple[int, bool]:
        """Number of a source, and whether it was there before; ``name`` is what it is called where it is shown."""
        found = self.connection.execute("SELECT number FROM sources WHERE digest = ?", (digest,)).fetchone()
        if found is None:
            shown = name.encode(errors="backslashreplace").decode()
            cursor = self.connection.execute(
                "INSERT INTO sources(digest, name, taken) VALUES (?, ?, 0)", (digest, shown)
            )
            assert cursor.lastrowid is not None
            self._digests[cursor.lastrowid] = digest
            return cursor.lastrowid, False
        self._digests[found[0]] = digest
        return found[0], True

    def count_already(self, source: int) -> None:
        """The source was taken before: its rows are not taken again."""
        self.flush()
        self.already += self.connection.execute("SELECT taken FROM sources WHERE number = ?", (source,)).fetchone()[0]
        self.already += self._taken_of[source]

    # ------------------------------------------------------------------------------------------ rows

    def add(self, source: int, items: Iterator[Row | Refused | Block]) -> None:
        """Everything that one source holds, in order."""
        for item in items:
            if isinstance(item, Row):
                self._rows.append(dataclasses.replace(item, source=source))
                if len(self._rows) >= GATHERED:
                    self.flush()
            elif isinstance(item, Refused):
                self.refuse(source, item)
            else:
                self.flush()
                self._judge(dataclasses.replace(item, sources=np.full(len(item), source, dtype=np.int64)))

    def flush(self) -> None:
        """Judges the rows that were gathered so far."""
        rows, self._rows = self._rows, []
        for block in blocks_of(rows):
            self._judge(block)

    def refuse(self, source: int, refused: Refused) -> None:
        """To quarantine, once; a row that stands there already gets the new reason."""
        number = self.again.get((source, refused.line))
        if number is not None:
            self.connection.execute(
                "UPDATE quarantine SET reason = ?, detail = ? WHERE number = ?",
                (refused.reason, refused.detail, number),
            )
        else:
            packed = zlib.compress(refused.raw, 1)
            cursor = self.connection.execute(
                "INSERT OR IGNORE INTO quarantine(reason, detail, source, line, raw) VALUES (?, ?, ?, ?, ?)",
                (refused.reason, refused.detail, source, refused.line, packed),
            )
            if not cursor.rowcount:
                return
        self.quarantined[refused.reason] += 1

    def _judge(self, block: Block) -> None:
        accepted, faults = judge(block, self.rules)
        new, repeated = self._sift(block, accepted)
        for row, (reason, detail) in sorted({**faults, **repeated}.items()):
            self.refuse(int(block.sources[row]), Refused(reason, detail, block.lines[row], block.raw(row)))
        self._take(block, accepted.take(new))

    def _sift(self, block: Block, accepted: Accepted) -> tuple[np.ndarray[Any, Any], dict[int, tuple[str, str]]]:
        """Which accepted rows are new, and what is wrong with those whose id came before.

        The same id from the same place of the same source is no duplicate: it was taken by an earlier intake.
        """
        origins = self._origins(block.kind, accepted.ids)
        new = np.ones(len(accepted.ids), dtype=np.bool_)
        repeated: dict[int, tuple[str, str]] = {}
        encoded = pc.dictionary_encode(pa.array(accepted.ids, type=pa.string())).indices.to_numpy(zero_copy_only=False)
        firsts = np.unique(encoded, return_index=True)[1]
        again = np.ones(len(accepted.ids), dtype=np.bool_)
        again[firsts] = False
        for place in sorted({*np.flatnonzero(again).tolist(), *origins}):
            row = int(accepted.rows[place])
            here = (int(block.sources[row]), block.lines[row])
            first = int(accepted.rows[firsts[encoded[place]]])
            origin = origins.get(place, (int(block.sources[first]), block.lines[first]))
            new[place] = False
            if origin == here:
                self.already += 1
            else:
                detail = f"{block.kind} {accepted.ids[place]} came {self._where(*origin)}"
                repeated[row] = ("duplicate", detail)
        return new, repeated

    def _origins(self, kind: str, ids: Sequence[str]) -> dict[int, tuple[int, int | str]]:
        """Place of each id that is in the index already, with the source and line that it came from."""
        execute = self.connection.execute
        execute("CREATE TEMP TABLE IF NOT EXISTS looked(id TEXT PRIMARY KEY, place INTEGER) WITHOUT ROWID")
        execute("DELETE FROM looked")
        places = sorted(zip(ids, range(len(ids)), strict=True))
        self.connection.executemany("INSERT OR IGNORE INTO looked VALUES (?, ?)", places)
        query = f"SELECT place, source, line FROM looked JOIN {kind}s USING (id)"  # noqa: S608 - one of two kinds
        known = {place: (source, line) for place, source, line in execute(query)}
        if not known:
            return {}
        of_id = {ids[place]: origin for place, origin in known.items()}
        return {place: of_id[identifier] for place, identifier in enumerate(ids) if identifier in of_id}

    def _where(self, source: int, line: int | str) -> str:
        name, digest = self.connection.execute(
            "SELECT name, digest FROM sources WHERE number = ?", (source,)
        ).fetchone()
        return f"in {name} ({digest[:12]}), line {line}"

    # ------------------------------------------------------------------------------------------ taking

    def _take(self, block: Block, accepted: Accepted) -> None:
        if not len(accepted.rows):
            return
        self.taken += len(accepted.rows)
        sources = block.sources[accepted.rows]
        lines = [block.lines[row] for row in accepted.rows.tolist()]
        table = accepted.table.append_column(
            "source", pa.array([self._digests[number] for number in sources.tolist()], type=pa.string())
        ).append_column("line", pa.array([str(line) for line in lines], type=pa.string()))
        table = table.cast(TABLES[block.kind])
        for day in np.unique(accepted.days).tolist():
            self._writer(day, block.kind).write(table.filter(pa.array(accepted.days == day)))
        if block.kind == "decision":
            self._index_decisions(accepted, sources, lines)
        else:
            self._index_labels(accepted, sources, lines)
        self._figures.add(block.kind, accepted.days, accepted.digests)
        for number, count in zip(*np.unique(sources, return_counts=True), strict=True):
            self._taken_of[int(number)] += int(count)
        for source, line in zip(sources.tolist(), lines, strict=True) if self.again else ():
            self.connection.execute("DELETE FROM quarantine WHERE number = ?", (self.again[source, line],))

    def _index_decisions(self, accepted: Accepted, sources: np.ndarray[Any, Any], lines: Sequence[int | str]) -> None:
        rows = zip(accepted.ids, accepted.days.tolist(), sources.tolist(), lines, strict=True)
        self.connection.executemany("INSERT INTO decisions VALUES (?, ?, ?, ?, 0)", sorted(rows))
        self._figures.touch_looked()

    def _index_labels(self, accepted: Accepted, sources: np.ndarray[Any, Any], lines: Sequence[int | str]) -> None:
        table = accepted.table
        decisions = table.column("decision_id").to_pylist()
        verdicts = [VERDICTS.index(verdict) for verdict in table.column("verdict").to_pylist()]
        errors = [-1 if error is None else ERROR_TYPES.index(error) for error in table.column("error_type").to_pylist()]
        corrected = table.column("corrected_action").to_pylist()
        rows = zip(
            accepted.ids,
            decisions,
            accepted.days.tolist(),
            table.column("time").cast(pa.int64()).to_pylist(),
            verdicts,
            errors,
            table.column("confidence").to_pylist(),
            [-1 if action is None else action for action in corrected],
            sources.tolist(),
            lines,
            strict=True,
        )
        values = f"({', '.join('?' * 10)}, {ORPHAN})"
        self.connection.executemany(f"INSERT INTO labels VALUES {values}", sorted(rows))  # noqa: S608 - only marks
        self._figures.touch(decisions)

    def _writer(self, day: int, kind: str) -> PartWriter:
        if (day, kind) not in self._writers:
            number = begin_part(self.connection, day, kind)
            self._writers[day, kind] = number, PartWriter(part_path(self.store, day, kind, number), kind)
        return self._writers[day, kind][1]

    # ------------------------------------------------------------------------------------------ end

    def finish(self) -> None:
        """Everything on disk, and the figures of the days that changed; it counts once the transaction commits."""
        self.flush()
        for number, writer in self._writers.values():
            writer.finish()
            end_part(self.connection, number, writer.rows)
        self.connection.executemany(
            "UPDATE sources SET taken = taken + ? WHERE number = ?",
            [(count, source) for source, count in self._taken_of.items()],
        )
        self._figures.settle()

    def abandon(self) -> None:
        """Removes what was written so far."""
        for _, writer in self._writers.values():
            writer.abandon()
