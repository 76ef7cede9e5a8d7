"""Promises of the project as a whole: pins, sizes of files, nothing that belongs to one machine."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from agentpipe_tests.strategies import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def plain(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def tracked(*patterns: str) -> list[str]:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


def test_every_dependency_is_pinned() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]
    assert {plain(requirement) for requirement in wanted} <= pinned
    assert "uv" in pinned


def test_pins_name_no_build_of_one_machine() -> None:
    assert "+" not in "".join(
        line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )


def test_every_rule_that_is_switched_off_has_its_reason_beside_it() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    rules = [line for line in text.splitlines() if re.match(r'\s+"[A-Z]+\d*",', line)]
    assert len(rules) > 20
    assert [line for line in rules if "#" not in line] == []


def test_no_file_is_long() -> None:
    long = {name: len((REPOSITORY / name).read_text().splitlines()) for name in tracked("*.py")}
    assert {name: lines for name, lines in long.items() if lines > 500} == {}


def test_everything_listens_on_the_loopback_address_only() -> None:
    everywhere = ".".join("0000")
    offenders = [
        name
        for name in tracked("*.py", "*.yaml", "Makefile", "docker/*", ".ci/*")
        if everywhere in (REPOSITORY / name).read_text()
    ]
    assert offenders == []


def test_the_workspace_of_the_checkout_is_the_one_of_a_home() -> None:
    from agentpipe.cli.ui import WORKSPACE

    assert (REPOSITORY / "workspace.yaml").read_text() == WORKSPACE
