"""How a version of the disturbance table is written in Redis: JSON, verified by digest on reading.

``{"columns": ["kind", "intensity", "variant", …], "format": 1, "rows": [["sensor", 1, 0, …], …]}`` with sorted keys and
shortest decimals, so that equal versions have equal bytes.
"""

from __future__ import annotations

import json
from typing import Any

from agentpipe.environments.table import COLUMNS, TABLE_FORMAT, DisturbanceTable, TableRow, table_from_rows
from agentpipe.errors import CorruptError, TableError, VersionError
from agentpipe.storage import canonical_json

_REMEDY = "publish the version again: materialise disturbance_table, or agentpipe table rollback to it"
_KEYS = 3


def encode_table(table: DisturbanceTable) -> bytes:
    """The bytes of a version; equal content gives equal bytes."""
    rows = [[*row.key, *row.values] for row in table.rows]
    return canonical_json({"format": TABLE_FORMAT, "columns": list(COLUMNS), "rows": rows})


def decode_table(data: bytes, version: str, place: str) -> DisturbanceTable:
    """Reads the bytes of a version and checks that they hold what its name says.

    Args:
        data: as of :func:`encode_table`.
        version: the name that it is kept under, the digest of its content.
        place: where it comes from, for messages.

    Raises:
        CorruptError: damaged, or not what the name says.
        VersionError: written with other columns, by another agentpipe.
    """
    try:
        content = json.loads(data)
        found = content["format"], tuple(content["columns"])
        rows = content["rows"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise _damaged("is not what agentpipe publishes", version, place) from error
    if found != (TABLE_FORMAT, COLUMNS):
        message = "the version was published with other columns"
        raise VersionError(message, server=place, version=version, remedy="use the agentpipe that published it")
    try:
        table = table_from_rows([_row(row) for row in rows], place)
    except (TableError, TypeError, OverflowError) as error:
        raise _damaged("holds rows that no table has", version, place) from error
    if table.version != version:
        raise _damaged(f"has the digest {table.version[:12]}, not that of its name", version, place)
    return table


def _row(fields: Any) -> TableRow:  # noqa: ANN401 - whatever JSON holds
    if not isinstance(fields, list) or [type(field) for field in fields[:_KEYS]] != [str, int, int]:
        raise TypeError("not the key of a row")
    values = fields[_KEYS:]
    if not set(map(type, values)) <= {int, float}:
        raise TypeError("not a number")
    kind, intensity, variant = fields[:_KEYS]
    return TableRow(kind, intensity, variant, tuple(map(float, values)))


def _damaged(what: str, version: str, place: str) -> CorruptError:
    return CorruptError(f"the published version {what}", server=place, version=version, remedy=_REMEDY)
