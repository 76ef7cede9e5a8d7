"""The command ``agentpipe``."""

from __future__ import annotations

import io
import sys

import typer
from typer.exceptions import TyperException

from agentpipe.cli import agent, buffer, bundle, champion, feedback, table, table_plan  # noqa: F401 - the last adds to table
from agentpipe.cli.evaluate import evaluate
from agentpipe.cli.output import print_json, say
from agentpipe.cli.run import run
from agentpipe.cli.settings import settings
from agentpipe.cli.ui import ui

app = typer.Typer(
    name="agentpipe",
    help=(
        "Industrial maintenance agents: trained in thousands of disturbed production lines, judged on lines they have "
        "never seen, exported to Triton.\n\n"
        "Start with `agentpipe run --profile demo`, then look at it with `agentpipe ui`."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a decorated traceback of a deep stack takes minutes and gigabytes
)
app.command()(run)
app.command()(evaluate)
app.command()(settings)
app.command()(ui)
app.add_typer(agent.app)
app.add_typer(agent.line_app)
app.add_typer(buffer.app)
app.add_typer(bundle.app)
app.add_typer(champion.app)
app.add_typer(feedback.app)
app.add_typer(table.app)


def main() -> None:
    """Entry point of the console script; with ``--json`` a command line that makes no sense is a JSON document too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? for what it lacks
    if "--json" not in sys.argv:
        app()
    try:
        code = app(standalone_mode=False)
    except TyperException as error:
        message, remedy = error.format_message(), "add --help to the command"
        print_json({"ok": False, "error": {"type": "UsageError", "message": message, "where": {}, "remedy": remedy}})
        say(f"{message} - {remedy}")
        code = error.exit_code
    sys.exit(code)
