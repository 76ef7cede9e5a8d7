"""``docker/`` as data: the services of ``compose.yaml`` after interpolation, the last stage of the Dockerfile."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from dockerfile_parse import DockerfileParser

from agentpipe_tests.strategies import REPOSITORY

DOCKER = REPOSITORY / "docker"
PASSWORDS = {"POSTGRES_PASSWORD": "pg0123456789abcdef", "REDIS_PASSWORD": "rd0123456789abcdef"}
GIVEN = {**PASSWORDS, "TRITON_IMAGE": "tritonserver:24.10-py3"}
"""What somebody who starts the services must say."""
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?::([-?])([^}]*))?\})")


class MissingVariableError(Exception):
    """Raised when a variable that must be set is not, or empty."""


def interpolated(node: Any, variables: dict[str, str]) -> Any:
    """``node`` as Compose reads it: ``${X}``, ``${X:-default}``, ``${X:?message}`` and ``$$``."""
    if isinstance(node, dict):
        return {key: interpolated(value, variables) for key, value in node.items()}
    if isinstance(node, list):
        return [interpolated(value, variables) for value in node]
    return _VARIABLE.sub(lambda found: _value(found, variables), node) if isinstance(node, str) else node


def _value(found: re.Match[str], variables: dict[str, str]) -> str:
    dollar, name, kind, text = found.groups()
    if dollar:
        return "$"
    value = variables.get(name, "")
    if not value and kind == "?":
        raise MissingVariableError(f"{name}: {text}")
    return value or (text if kind == "-" else "")


def compose(variables: dict[str, str] | None = None) -> dict[str, Any]:
    """The whole file, interpolated with ``variables`` (by default with both passwords set)."""
    return interpolated(
        yaml.safe_load((DOCKER / "compose.yaml").read_text()), GIVEN if variables is None else variables
    )


@cache
def services() -> dict[str, dict[str, Any]]:
    """Every service, also those of profiles."""
    return compose()["services"]


@dataclass(frozen=True)
class Image:
    """The last stage of the Dockerfile."""

    command: list[str]
    health: list[str]
    user: str
    environment: dict[str, str]
    copies: list[tuple[str, list[str], str]] = field(default_factory=list)
    """stage that is copied from or "", sources, target; of all stages"""
    instructions: tuple[tuple[str, str], ...] = ()
    """of all stages"""


@cache
def image() -> Image:
    """What ``docker/Dockerfile`` says."""
    parser = DockerfileParser(str(DOCKER / "Dockerfile"), cache_content=True)
    found = [(entry["instruction"], entry["value"]) for entry in parser.structure if entry["instruction"] != "COMMENT"]
    last = found[max(number for number, (name, _) in enumerate(found) if name == "FROM") :]
    of = dict(last)
    return Image(
        command=_words(of["CMD"]),
        health=_words(of["HEALTHCHECK"].partition("CMD ")[2]),
        user=of["USER"],
        environment=dict(
            pair.partition("=")[::2] for name, value in last if name == "ENV" for pair in shlex.split(value)
        ),
        copies=[_copy(value) for name, value in found if name == "COPY"],
        instructions=tuple(found),
    )


def _words(text: str) -> list[str]:
    return json.loads(text) if text.startswith("[") else ["sh", "-c", text]


def _copy(value: str) -> tuple[str, list[str], str]:
    words = shlex.split(value)
    stage = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), "")
    *sources, target = [word for word in words if not word.startswith("--")]
    return stage, sources, target


def own(service: dict[str, Any]) -> bool:
    """True for a service of this project's image."""
    return "build" in service


def command(service: dict[str, Any]) -> list[str]:
    """The words of a service's command; the image's own where the service names none."""
    return list(service.get("command") or image().command)


def health(service: dict[str, Any]) -> list[str]:
    """The words of a service's health check, empty where it has none."""
    check = service.get("healthcheck")
    if check is None:
        return image().health if own(service) else []
    kind, *words = check.get("test", ["NONE"])
    return {"CMD": words, "CMD-SHELL": ["sh", "-c", *words], "NONE": []}[kind]


def programs(words: list[str]) -> list[str]:
    """The programs that a command starts, those of a shell's script included."""
    if words[:2] != ["sh", "-c"]:
        return words[:1]
    script = words[2].partition("<<END")[0]
    found = []
    for part in re.split(r"&&|\|", script):
        plain = [word for word in shlex.split(part) if word != "exec" and not re.match(r"[A-Z_]+=", word)]
        found.append(plain[0])
    return ["sh", *found]


def replaced(text: str, by: dict[str, str]) -> str:
    """``text`` with each key of ``by`` replaced, the longest first."""
    for old in sorted(by, key=len, reverse=True):
        text = text.replace(old, by[old])
    return text


def path_in_checkout(target: str) -> Path | None:
    """The file of the checkout that lies at ``target`` in the image; ``None`` for what is made there."""
    for stage, sources, folder in image().copies:
        for source in sources:
            if not stage and folder + Path(source).name == target:
                return REPOSITORY / source
    return None
