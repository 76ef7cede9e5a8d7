"""``agentpipe champion``: the policy that is in use."""

from __future__ import annotations

import dataclasses

import typer

from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import percent, print_json, reporting

app = typer.Typer(name="champion", help="The policy that is in use.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """The policy that is in use."""


@app.command()
def show(home: Home = None, as_json: Json = False) -> None:
    """Shows the champion and how it became one; says so where there is none yet."""
    with reporting(as_json):
        from agentpipe.learning.champion import ChampionStore
        from agentpipe.settings import load_settings

        store = ChampionStore(load_settings(home=home).home / "champion")
        history = [dataclasses.asdict(champion) for champion in store.history()]
        if as_json:
            print_json({"ok": True, "champion": history[-1] if history else None, "history": history})
            return
        if not history:
            typer.echo("No champion yet: the first promotable bundle whose gates pass becomes it.")
            return
        current = history[-1]
        typer.echo(f"{current['digest'][:16]}  since {current['at']}")
        typer.echo(f"package {current['package']}, promoted by {current['who']}: {current['reason']}")
        if "success" in current["figures"]:
            typer.echo(f"hold-out success {percent(current['figures']['success'])}")
