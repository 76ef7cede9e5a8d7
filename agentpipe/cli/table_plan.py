"""``agentpipe table plan``: what a change of the disturbance table would run."""

from __future__ import annotations

import os
from typing import Any

import typer

from agentpipe.cli.options import Home, Json, TableSource
from agentpipe.cli.output import print_json, reporting
from agentpipe.cli.table import app
from agentpipe.environments.parameters import CELLS


@app.command()
def plan(home: Home = None, table_source: TableSource = None, as_json: Json = False) -> None:
    """Shows which partitions a change would run, why, and about how long they take; runs nothing.

    The sensor `table_changes` launches exactly these. A change that was undone is no change.
    """
    with reporting(as_json):
        content = _plan(home, table_source)
        if as_json:
            print_json(content)
            return
        for item in content["partitions"]:
            name = f"{item['asset']}[{item['partition']}]" if item["partition"] else item["asset"]
            took = "" if item["seconds"] is None else f"  {item['seconds']:.0f} s last time"
            typer.echo(f"{name:<40} {item['why']}{took}")
        if content["never_made"]:
            typer.echo(f"not made yet, agentpipe run makes them: {', '.join(content['never_made'])}")
        if content["partitions"]:
            typer.echo(f"about {content['seconds']:.0f} s together, with the start of each run")
        elif len(content["never_made"]) < len(CELLS):
            typer.echo("nothing is due")


def _plan(home: Any, table_source: Any) -> dict[str, Any]:  # noqa: ANN401 - as typer gives them
    from agentpipe.settings import load_settings

    settings = load_settings(home=home, table_source=table_source)
    os.environ["AGENTPIPE_HOME"] = str(settings.home)  # the partitions of the definitions begin where the home says
    from agentpipe.defs.resources import Workspace
    from agentpipe.defs.table_plan import table_plan

    source = str(settings.table_source.resolve()) if settings.table_source else None
    return {"ok": True, **table_plan(Workspace(home=str(settings.home), table_source=source)).to_json()}
