"""``agentpipe bundle``: looking after Triton bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import print_json, reporting

app = typer.Typer(name="bundle", help="Triton bundles.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Triton bundles."""


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="The bundle: a Triton model repository.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Checks a bundle again: every file's SHA-256, configuration against graph, decisions against the graph."""
    with reporting(as_json):
        from agentpipe.serving.verify import verify_bundle

        del home  # a bundle stands on its own
        report = verify_bundle(path)
        if as_json:
            print_json(report.to_json())
            return
        typer.echo(f"{path}: whole and consistent")
        for name, value in report.to_json().items():
            typer.echo(f"  {name}: {value}")
