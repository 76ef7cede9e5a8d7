"""Fields of option records that say what they may hold, and one check of all of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from agentpipe.errors import SettingsError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Count = Annotated[int, Field(ge=1)]
"""1 or more"""
Size = Annotated[int, Field(ge=0)]
"""0 or more"""
Width = Annotated[int, Field(ge=1, le=16_384)]
"""units of a layer"""
WidthOrNone = Annotated[int, Field(ge=0, le=16_384)]
"""units of a layer; 0 = none"""
Positive = Annotated[float, Field(gt=0)]
"""above 0, finite"""
Weight = Annotated[float, Field(ge=0)]
"""0 or more, finite"""
Share = Annotated[float, Field(ge=0, le=1)]
"""from 0 to 1"""
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
"""from 0 to below 1"""
ShareAboveZero = Annotated[float, Field(gt=0, le=1)]
"""above 0, at most 1"""


def check_fields(options: DataclassInstance) -> None:
    """Holds each field of a record to its annotation: type (whole numbers are no shares of one), range, known names.

    Raises:
        SettingsError: the first that does not fit; names it.
    """
    for name, adapter in _adapters(type(options)).items():
        value = getattr(options, name)
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            remedy = first["msg"].replace("Input should", "it should")
            raise SettingsError(f"{name} is {value!r}", field=name, remedy=remedy) from error


@functools.cache
def _adapters(record: type[DataclassInstance]) -> dict[str, TypeAdapter[Any]]:
    hints, strict = get_type_hints(record, include_extras=True), ConfigDict(strict=True, allow_inf_nan=False)
    names = [field.name for field in dataclasses.fields(record)]
    plain = (name for name in names if not dataclasses.is_dataclass(hints[name]))  # a record has checked its own fields
    return {name: TypeAdapter(hints[name], config=strict) for name in plain}
