"""``agentpipe settings``: every setting with its variable, its value here, its range and what it means."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

import typer

from agentpipe.cli.options import Json
from agentpipe.cli.output import print_json, reporting
from agentpipe.errors import SettingsError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from agentpipe.settings import Settings

_KINDS: Final[dict[object, str]] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    tuple: "JSON list of texts",
}
_LIMITS: Final = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_LOGIN: Final = re.compile(r"(?<=//)\S*@")
"""user and password of an address"""


@dataclass(frozen=True)
class Setting:
    """One setting, ready to be shown: nothing in it is secret."""

    name: str
    """dotted, as the documents write it"""
    variable: str
    type: str
    """kind and range in words"""
    default: Any
    """under the profile ``standard``; JSON"""
    value: Any
    """here; JSON, a secret masked"""
    source: Literal["default", "profile", "environment"]
    """who sets that value"""
    description: str

    @property
    def section(self) -> str:
        """The part before the dot; empty where there is none."""
        return self.name.rpartition(".")[0]


def settings(
    part: Annotated[
        str | None,
        typer.Argument(metavar="[PART]", help="Only those whose name holds this, such as gates or success_min."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="Show the values of this profile.", show_default="standard")
    ] = None,
    as_json: Json = False,
) -> None:
    """Lists every setting: its variable, its value here, its range, its default, and what it means.

    What the environment sets is marked with *. No secret is shown.
    """
    with reporting(as_json):
        from agentpipe.settings import load_settings

        present = load_settings(profile=profile)
        chosen = matching(list(every_setting(present, set_outside(profile))), part)
        if as_json:
            print_json({"ok": True, "profile": present.profile, "settings": [asdict(setting) for setting in chosen]})
        else:
            _show(chosen, present)


def set_outside(profile: str | None = None) -> frozenset[str]:
    """Dotted names of what the environment sets, by a variable of its own or by one of the whole section.

    Args:
        profile: Chosen by an option, which has the last word; ``None`` = not chosen.
    """
    from agentpipe.settings import Settings

    given = Settings()  # without the sizes that the profile demo adds; load_settings has found it sound
    names: set[str] = set()
    for name in given.model_fields_set:
        value = getattr(given, name)
        names |= {f"{name}.{inner}" for inner in value.model_fields_set} if _is_section(value) else {name}
    return frozenset(names if profile is None else names - {"profile"})


def every_setting(present: Settings, outside: frozenset[str]) -> Iterator[Setting]:
    """All settings in the order of the model, those without a section first.

    Args:
        present: Their values.
        outside: What :func:`set_outside` gives.
    """
    fields = type(present).model_fields
    sections = [name for name, field in fields.items() if _is_section(field.default)]
    for name, field in fields.items():
        if name not in sections:
            yield _setting(name, field, getattr(present, name), outside)
    for section in sections:
        values: BaseModel = getattr(present, section)
        for name, field in type(values).model_fields.items():
            yield _setting(f"{section}.{name}", field, getattr(values, name), outside)


def matching(found: Sequence[Setting], part: str | None) -> list[Setting]:
    """Those whose dotted name or variable holds ``part``, in small or capital letters.

    Raises:
        SettingsError: there is none.
    """
    wanted = (part or "").lower()
    chosen = [setting for setting in found if wanted in setting.name or wanted in setting.variable.lower()]
    if not chosen:
        raise SettingsError(f"no name of a setting holds {part!r}", remedy="agentpipe settings lists all of them")
    return chosen


def type_in_words(field: FieldInfo) -> str:
    """Kind and range, such as ``number, 0 to 1``; none where the setting may be left without a value."""
    parts = get_args(field.annotation) if NoneType in get_args(field.annotation) else (field.annotation,)
    kind = next(part for part in parts if part is not NoneType)
    if get_origin(kind) is Literal:
        *first, last = map(str, get_args(kind))
        text = f"{', '.join(first)} or {last}"
    else:
        text = _KINDS.get(get_origin(kind) or kind, "secret text")
    limits = {name: getattr(each, name) for name in _LIMITS for each in field.metadata if hasattr(each, name)}
    if {"ge", "le"} <= limits.keys():
        text += f", {limits['ge']} to {limits['le']}"
    elif limits:
        text += ", " + " and ".join(f"{_LIMITS[name]} {limit}" for name, limit in limits.items())
    return f"{text}, or none" if NoneType in parts else text


def _setting(name: str, field: FieldInfo, value: object, outside: frozenset[str]) -> Setting:
    source: Literal["default", "profile", "environment"] = "default" if value == field.default else "profile"
    return Setting(
        name=name,
        variable=f"AGENTPIPE_{name.replace('.', '__').upper()}",
        type=type_in_words(field),
        default=_plain(field.default),
        value=_plain(value),
        source="environment" if name in outside else source,
        description=field.description or "",
    )


def _is_section(value: object) -> bool:
    from pydantic import BaseModel

    return isinstance(value, BaseModel)


def _plain(value: object) -> Any:  # noqa: ANN401 - JSON
    """A value as JSON; a secret is what pydantic shows of it, and no address shows who logs in."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _LOGIN.sub("**********@", str(value))


def _show(chosen: Sequence[Setting], present: Settings) -> None:
    section = None
    for setting in chosen:
        if setting.section != section:
            section = setting.section
            typer.echo(f"{section}: {_purpose(getattr(present, section))}\n" if section else "Without a section:\n")
        mark = "*" if setting.source == "environment" else " "
        typer.echo(f"{mark} {setting.variable}  {_text(setting.value)}{_origin(setting, present)}")
        typer.echo(f"    {setting.type}: {setting.description}\n")
    changed = sum(setting.source == "environment" for setting in chosen)
    typer.echo(f"{len(chosen)} settings of the profile {present.profile}; the environment sets {changed} (*)")


def _origin(setting: Setting, present: Settings) -> str:
    who = {"default": "", "profile": f"the profile {present.profile}", "environment": "the environment"}[setting.source]
    return f"  (set by {who}; default {_text(setting.default)})" if who else ""


def _purpose(section: object) -> str:
    return (inspect.getdoc(type(section)) or "").partition("\n")[0].replace("``", "")


def _text(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
