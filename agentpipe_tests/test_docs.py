"""What the documents name is there."""

import re
from pathlib import Path

import pytest
import typer.main

from agentpipe.cli.main import app
from agentpipe.defs.graph import EXTERNAL, SHAPES
from agentpipe.serving.agent.interlocks import read_interlocks
from agentpipe.serving.agent.messages import FIELDS
from agentpipe.serving.agent.metrics import GAUGES, AgentMetrics
from agentpipe.serving.agent.stream_line import Mapped
from agentpipe.serving.agent.vocabulary import BUILT_IN
from agentpipe_tests.serving.agent.questions import LINE

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
        r"agentpipe ((?:run|evaluate|ui|bundle|champion|table|buffer|feedback|agent|line|settings)\b[^\n`]*)",
        page.read_text(),
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


# ------------------------------------------------------------------------------------------------ the agent's page

AGENT = (ROOT / "docs/how-to/agent.md").read_text()


def block(language):
    """The one fenced block of that language."""
    [found] = re.findall(rf"```{language}\n(.*?)```", AGENT, re.DOTALL)
    return found


def rows(heading):
    """The cells of the table below a header row that begins with ``heading``."""
    table = AGENT.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in table]


def test_the_example_of_interlocks_is_one(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text(block("toml"))
    limits = read_interlocks(path, BUILT_IN, LINE.action_count)
    assert [limit.at_most for limit in limits.interlocks] == [None, 2, None]


def test_the_example_of_a_mapping_is_one(tmp_path):
    path = tmp_path / "mapping.json"
    path.write_text(block("json"))
    assert Mapped(path, LINE).columns == {"order", "temperature", "minutes", "allowed", "result", "operator"}


def test_the_messages_of_a_line_and_their_fields_are_all_written_down():
    written = {}
    for name, fields, *_ in rows("from the line"):
        optional = set(re.findall(r"\[`(\w+)`\]", fields))
        written[name.strip("`")] = (set(re.findall(r"`(\w+)`", fields)) - optional, optional)
    assert written.pop("beat") == (set(), set())
    assert written.pop("displaced") == ({"by"}, set())
    assert written == FIELDS


def test_every_metric_is_written_down():
    metrics = AgentMetrics("a")
    metrics.policy("p")
    for name in GAUGES:
        metrics.gauge(name, lambda: 0.0)
    given = {f"{family.name}_total" if family.type == "counter" else family.name for family in metrics.collect()}
    assert set(re.findall(r"`(agentpipe_agent_\w+)`", AGENT)) == given
