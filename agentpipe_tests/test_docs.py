"""What the documents name is there."""

import re
from pathlib import Path

import pytest
import typer.main

from agentpipe.cli.main import app
from agentpipe.defs.graph import EXTERNAL, SHAPES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = typer.main.get_command(app)


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http") and not target.endswith("benchmarks/RESULTS.md"):  # made by a run
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_and_their_options_exist(page):
    for line in re.findall(
        r"agentpipe ((?:run|evaluate|ui|bundle|champion|table|buffer|feedback)\b[^\n`]*)", page.read_text()
    ):
        words = line.split("#")[0].split()
        command = COMMAND
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts}
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", " ".join(words)):
            assert option in known, f"{line}: {option}"


def test_the_architecture_names_every_asset_and_draws_it():
    text = (ROOT / "docs/architecture.md").read_text()
    picture = text.split("```")[1]
    for asset in SHAPES:
        assert f"| `{asset}` |" in text, asset
        assert asset in picture, asset
    assert all(f"({external})" in picture for external in EXTERNAL)


def test_modules_that_the_documents_name_exist():
    for page in PAGES:
        for path in re.findall(r"`((?:environments|learning|evaluation|serving|defs)/\w+\.py)`", page.read_text()):
            assert (ROOT / "agentpipe" / path).exists(), f"{page.name}: {path}"
