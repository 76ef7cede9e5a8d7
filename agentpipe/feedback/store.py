"""Feedback on disk: one Parquet file a kind and UTC day, and beside them what could not be taken, with the reason.

::

    <store>/<YYYY-MM-DD>/decisions.parquet, labels.parquet
    <store>/quarantine/<digest of the file>.jsonl
"""

from __future__ import annotations

import datetime as dt
import io
import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentpipe.errors import CorruptError
from agentpipe.feedback.schema import KINDS
from agentpipe.storage import write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

QUARANTINE: Final = "quarantine"


def day_path(store: Path, day: dt.date, kind: str) -> Path:
    """Where the rows of ``kind`` (decision, label) of a UTC day lie."""
    return store / day.isoformat() / f"{kind}s.parquet"


def read_kind(store: Path, day: dt.date, kind: str) -> pa.Table:
    """The day's rows, sorted by id; an empty table with the schema when there are none.

    Raises:
        CorruptError: the file is damaged or has another schema.
    """
    path = day_path(store, day, kind)
    schema = KINDS[kind][2]
    if not path.exists():
        return schema.empty_table()
    try:
        # One thread: pyarrow's pool may abort the process at its exit.
        table = pq.ParquetFile(io.BytesIO(path.read_bytes()), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise CorruptError(f"cannot be read: {error}", file=path, remedy="restore it from a copy") from error
    if not table.schema.equals(schema):
        raise CorruptError("the columns are not those of this format", file=path, remedy="restore it from a copy")
    return table


def write_kind(store: Path, day: dt.date, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds ``rows`` to the day's file, which is replaced at once and keeps its rows sorted by id."""
    _, key, schema = KINDS[kind]
    table = pa.concat_tables([read_kind(store, day, kind), pa.Table.from_pylist(list(rows), schema=schema)])
    buffer = io.BytesIO()
    ordered = table.take(pc.sort_indices(table, sort_keys=[(key, "ascending")]))
    pq.write_table(ordered, buffer, compression="zstd", write_page_checksum=True)
    write_bytes(day_path(store, day, kind), buffer.getvalue())


def days(store: Path) -> list[dt.date]:
    """Every UTC day that has a folder, ascending."""
    found = []
    for path in store.glob("????-??-??") if store.is_dir() else ():
        try:
            found.append(dt.date.fromisoformat(path.name))
        except ValueError:
            continue
    return sorted(found)


def known_ids(store: Path, kind: str) -> dict[str, tuple[str, int]]:
    """Every id ever taken, with the digest of the file and the line that it came from."""
    key = KINDS[kind][1]
    known: dict[str, tuple[str, int]] = {}
    for day in days(store):
        table = read_kind(store, day, kind)
        columns = (table.column(name).to_pylist() for name in (key, "source", "line"))
        known.update({identifier: (source, line) for identifier, source, line in zip(*columns, strict=True)})
    return known


def quarantine_path(store: Path, digest: str) -> Path:
    """Where the refused rows of the file with this digest lie."""
    return store / QUARANTINE / f"{digest}.jsonl"


def write_quarantine(store: Path, digest: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the refused rows of one file, all at once; equal rows give the equal file."""
    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    write_bytes(quarantine_path(store, digest), text.encode())


def labelled(decisions: pa.Table, labels: Mapping[str, Any]) -> int:
    """How many of ``decisions`` have an entry in ``labels`` (keyed by decision id)."""
    ids = pa.array(list(labels), type=pa.string())
    return int(pc.sum(pc.is_in(decisions.column("decision_id"), value_set=ids)).as_py() or 0)
