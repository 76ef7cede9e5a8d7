"""Columns of a Parquet file as columns of a block: by the type of each field, with what does not fit said by row."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentpipe.feedback.block import MISSING, Block
from agentpipe.feedback.rows import KEPT_OF_LONG, LONGEST_LINE
from agentpipe.feedback.schema import EPOCH, FIELDS, utc_microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from agentpipe.feedback.schema import Field, Type

_LONG: Final = 4_096
"""characters of a text beyond which it is not even looked at: no field has so many"""
_FIRST, _LAST = utc_microseconds("0001-01-01T00:00:00Z"), utc_microseconds("9999-12-31T23:59:59Z")
_TYPES: Final = {name: field.type for fields in FIELDS.values() for name, field in fields.items()}
_UNITS: Final = {"s": (1_000_000, 1), "ms": (1_000, 1), "us": (1, 1), "ns": (1, 1_000)}


class _Faults:
    """Row → reason and detail, of a whole batch; the first that is found counts."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[str, str]] = {}

    def mark(self, wrong: npt.NDArray[np.bool_], reason: str, detail: str) -> None:
        for row in np.flatnonzero(wrong).tolist():
            self.found.setdefault(row, (reason, detail))


class _Column(NamedTuple):
    """One column that is there, with its name and where it is null."""

    name: str
    array: pa.Array
    null: npt.NDArray[np.bool_]


def block_of_batch(kind: str, batch: pa.RecordBatch, lines: Sequence[int]) -> Block:
    """Rows of one kind as a block; rows that do not fit the types of their fields are marked in it."""
    faults = _Faults()
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if name not in FIELDS[kind] and name != "kind":
            faults.mark(~_null(array), "unknown_field", f"{name!r} is no field of a {kind}")
    columns = {name: _converted(name, field, batch, faults) for name, field in FIELDS[kind].items()}
    sources = np.zeros(batch.num_rows, dtype=np.int64)
    return Block(kind, columns, sources, lines, lambda row: json_of_row(batch, row), faults.found)


def _converted(name: str, field: Field, batch: pa.RecordBatch, faults: _Faults) -> Any:  # noqa: ANN401 - see Block
    place = batch.schema.get_field_index(name)
    array = batch.column(place) if place >= 0 else pa.nulls(batch.num_rows)
    column = _Column(name, array, _null(array))
    if not field.optional:
        faults.mark(column.null, "missing_field", f"{name} is missing")
    return _CONVERT[field.type](column, faults)


def json_of_row(batch: pa.RecordBatch, row: int) -> bytes:
    """A row as a JSON object, without what is null; a NaN stays ``NaN``, and what is far too long is cut."""
    content: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        scalar = column[row]
        if scalar.is_valid:
            content[name] = _plain(scalar, _TYPES.get(name))
    text = json.dumps(content, default=str, ensure_ascii=False).encode(errors="backslashreplace")
    return text if len(text) <= LONGEST_LINE else text[:KEPT_OF_LONG]


def _plain(scalar: pa.Scalar, wanted: Type | None) -> Any:  # noqa: ANN401 - JSON
    if pa.types.is_timestamp(scalar.type):
        more, less = _UNITS[scalar.type.unit]
        try:
            time = EPOCH + dt.timedelta(microseconds=scalar.value * more // less)
        except OverflowError:  # outside the calendar
            return str(scalar.value)
        return (time if scalar.type.tz else time.replace(tzinfo=None)).isoformat()
    try:
        value = scalar.as_py()
    except (pa.ArrowException, ValueError, LookupError, ArithmeticError):  # a date outside the calendar, an odd zone
        return f"a value of type {scalar.type}"
    if isinstance(value, str):
        return value[: _LONG + 1]
    if isinstance(value, float) and wanted == "whole" and value.is_integer():
        return int(value)
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _null(array: pa.Array) -> npt.NDArray[np.bool_]:
    return array.is_null().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- types


def _texts(column: _Column, faults: _Faults) -> pa.Array:
    array, kind = column.array, column.array.type
    values = array.dictionary if pa.types.is_dictionary(kind) else array
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        faults.mark(~column.null, "invalid_field", f"{column.name}: {kind}, not text")
        return pa.nulls(len(array), pa.string())
    long = pc.fill_null(pc.greater(pc.utf8_length(_checked(column, values, faults)), _LONG), False)
    if pc.any(long).as_py():
        short = pc.if_else(long, None, values)
        far = long if values is array else pc.take(long, array.indices)
        wrong = pc.fill_null(far, False).to_numpy(zero_copy_only=False)
        faults.mark(wrong, "invalid_field", f"{column.name}: more than {_LONG} characters")
        array = short if values is array else pa.DictionaryArray.from_arrays(array.indices, short)
    plain = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    return plain.cast(pa.string())


def _checked(column: _Column, values: pa.Array, faults: _Faults) -> pa.Array:
    """``values``; all rows are refused where they are not UTF-8, which the format does not check by itself."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        faults.mark(~column.null, "not_utf8", f"{column.name}: a text among these rows is not UTF-8")
        return pa.nulls(len(values), pa.string())
    return values


def _times(column: _Column, faults: _Faults) -> npt.NDArray[np.int64]:
    name, array = column.name, column.array
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    found = np.zeros(len(array), dtype=np.int64)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        for row, text in enumerate(_texts(column, faults).to_pylist()):
            if text is not None:
                try:
                    found[row] = utc_microseconds(text)
                except ValueError as error:
                    faults.found.setdefault(row, ("invalid_time", f"{name}: {error}"))
    elif not pa.types.is_timestamp(kind):
        faults.mark(~column.null, "invalid_time", f"{name}: {kind} is no time stamp")
    elif kind.tz is None:
        detail = f"{name}: a time needs its zone; {kind} has none"
        faults.mark(~column.null, "invalid_time", detail)
    else:
        more, less = _UNITS[kind.unit]
        values = pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        outside = (values < _FIRST // more) | (values > _LAST // more)
        if less > 1:  # nanoseconds of 64 bits all lie between 1677 and 2262
            outside[:] = False
        faults.mark(outside & ~column.null, "invalid_time", f"{name}: a time outside the calendar")
        found = np.where(outside, 0, values) * more // less
    return found


def _wholes(column: _Column, faults: _Faults) -> npt.NDArray[np.int64]:
    name, array, kind = column.name, column.array, column.array.type
    found = np.full(len(array), MISSING, dtype=np.int64)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
        if pa.types.is_floating(kind):
            # tables with gaps often hold whole numbers in columns of this type
            fits = (np.abs(values) < 2.0**53) & (np.floor(values) == values)
            faults.mark(~fits & ~column.null, "invalid_field", f"{name}: not a whole number")
        else:
            fits = values.astype(np.int64) >= 0 if values.dtype == np.uint64 else np.ones(len(array), dtype=np.bool_)
            faults.mark(~fits & ~column.null, "number_out_of_range", f"{name}: more than 63 bits")
        usable = fits & ~column.null
        found[usable] = values[usable].astype(np.int64)
    else:
        faults.mark(~column.null, "invalid_field", f"{name}: {kind}, not a whole number")
    return found


def _numbers(column: _Column, faults: _Faults) -> npt.NDArray[np.float64]:
    name, array, kind = column.name, column.array, column.array.type
    if not _is_number(kind):
        faults.mark(~column.null, "invalid_field", f"{name}: {kind}, not a number")
        return np.full(len(array), np.nan)
    found: npt.NDArray[np.float64] = pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.float64)
    faults.mark(~np.isfinite(found), "number_out_of_range", f"{name}: not a finite number")
    found[column.null] = np.nan
    return found


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _lists(column: _Column, faults: _Faults, *, flags: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    name, array, kind = column.name, column.array, column.array.type
    empty: npt.NDArray[Any] = np.empty(0, np.bool_ if flags else np.float64)
    nothing = np.zeros(len(array), dtype=np.int64), empty
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        faults.mark(~column.null, "invalid_field", f"{name}: {kind}, not a list")
        return nothing
    inner = kind.value_type
    if pa.types.is_nested(inner):
        faults.mark(~column.null, "nested_list", f"{name}: {kind}: lists within the list")
        return nothing
    if not (pa.types.is_boolean(inner) if flags else _is_number(inner)):
        faults.mark(~column.null, "invalid_field", f"{name}: a list of {inner}")
        return nothing
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = pc.list_flatten(array)
    if values.null_count:
        parents = np.repeat(np.arange(len(array)), lengths)
        wrong = np.zeros(len(array), dtype=np.bool_)
        wrong[parents[_null(values)]] = True
        faults.mark(wrong, "invalid_field", f"{name}: an entry is null")
        values = pc.fill_null(values, False if flags else 0)
    return lengths, values.to_numpy(zero_copy_only=False)


_CONVERT: Final[Mapping[Type, Callable[[_Column, _Faults], Any]]] = {
    "id": _texts,
    "text": _texts,
    "time": _times,
    "whole": _wholes,
    "number": _numbers,
    "numbers": lambda column, faults: _lists(column, faults, flags=False),
    "flags": lambda column, faults: _lists(column, faults, flags=True),
}
