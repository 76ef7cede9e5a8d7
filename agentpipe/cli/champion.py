"""``agentpipe champion``: the policy that is in use, who made it that, and candidates that wait for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import percent, print_json, reporting, say, typed

if TYPE_CHECKING:
    from pathlib import Path

    from agentpipe.learning.succession.champion import Champion, ChampionStore
    from agentpipe.learning.succession.promotion import Held, HoldStore

app = typer.Typer(
    name="champion", help="The policy that is in use, and candidates that wait for a person.", no_args_is_help=True
)

Who = Annotated[str, typer.Option("--who", help="Who decides.")]
Why = Annotated[str, typer.Option("--why", help="Why.")]
Candidate = Annotated[
    str,
    typer.Argument(metavar="CANDIDATE", help="A held candidate: its digest, or six or more of its first characters."),
]


@app.callback()
def group() -> None:
    """The policy that is in use, and candidates that wait for a person."""


@app.command()
def show(home: Home = None, as_json: Json = False) -> None:
    """Shows the champion and how it became one; says so where there is none yet."""
    with reporting(as_json):
        champions, holds = _stores(home)
        history = _listed(champions.history())
        if as_json:
            print_json({"ok": True, "champion": history[-1] if history else None, "history": history})
            return
        if history:
            _print_champion(history[-1])
        else:
            typer.echo("No champion yet: the first promotable bundle whose gates pass becomes it.")
        waiting = len(holds.waiting())
        if waiting:
            typer.echo(f"{waiting} candidate(s) wait for a person: {typed(home, 'champion', 'held')}")


@app.command()
def history(home: Home = None, as_json: Json = False) -> None:
    """Lists every champion: when, which, by whom and why; differences in success as measured, and their sum."""
    with reporting(as_json):
        from agentpipe.learning.succession.champion import summed_differences

        champions = _stores(home)[0].history()
        sums = summed_differences(champions)
        if as_json:
            listed = zip(_listed(champions), sums, strict=True)
            print_json({"ok": True, "history": [{**entry, "summed_difference": total} for entry, total in listed]})
            return
        if not champions:
            typer.echo("No champion yet.")
        else:
            say("Differences in hold-out success: to the champion before, and summed over all of them.")
        for entry, total in zip(champions, sums, strict=True):
            difference = entry.figures.get("difference")
            step = f"{100 * difference:+.2f} %" if entry.restores is None and difference is not None else "–"
            typer.echo(
                f"{entry.sequence:>4}  {entry.at}  {entry.kind:<9}  {entry.digest[:12]}  {step:>8}  "
                f"sum {100 * total:+.2f} %  {entry.who}: {entry.reason}"
            )


@app.command()
def rollback(
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="A champion: its number, or six or more first characters of its digest.",
            show_default="the one before",
        ),
    ] = None,
    who: Who = "",
    why: Why = "",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Brings an earlier champion back, as a new entry of the history; package and bundle are checked first.

    Production serves its bundle again.
    """
    with reporting(as_json):
        from agentpipe.learning.succession.promotion import roll_back
        from agentpipe.serving.verify import check_bundle

        entry = roll_back(_home(home), _target(to), who=who, reason=why, check_bundle=check_bundle)
        _serve(home)
        _report_champion(entry, as_json)


@app.command()
def held(
    every: Annotated[bool, typer.Option("--all", help="Also those that were decided.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Lists the candidates that wait for a person, and why; they change nothing until one decides."""
    with reporting(as_json):
        champions, holds = _stores(home)
        listed = holds.all() if every else holds.waiting()
        current = champions.current()
        if as_json:
            print_json({"ok": True, "held": [each.to_json() for each in listed]})
            return
        if not listed:
            typer.echo("Nothing waits." if not every else "Nothing was ever held.")
        for each in listed:
            _print_held(each, current)


@app.command()
def approve(candidate: Candidate, who: Who = "", why: Why = "", home: Home = None, as_json: Json = False) -> None:
    """Makes a held candidate the champion, if the champion still is the one that it was compared with.

    Its package and its bundle are checked first. Production serves the bundle.
    """
    with reporting(as_json):
        from agentpipe.learning.succession.promotion import approve_candidate
        from agentpipe.serving.verify import check_bundle

        entry = approve_candidate(_home(home), candidate, who=who, reason=why, check_bundle=check_bundle)
        _serve(home)
        _report_champion(entry, as_json)


@app.command()
def reject(candidate: Candidate, who: Who = "", why: Why = "", home: Home = None, as_json: Json = False) -> None:
    """Decides that a held candidate never becomes champion."""
    with reporting(as_json):
        from agentpipe.learning.succession.promotion import reject_candidate

        decided = reject_candidate(_home(home), candidate, who=who, reason=why)
        if as_json:
            print_json({"ok": True, "held": decided.to_json()})
            return
        _print_held(decided, None)


# --------------------------------------------------------------------------------------------------- inside


def _target(to: str | None) -> int | str | None:
    """Digits are a number of the history, unless they are enough to be a digest."""
    from agentpipe.learning.succession.champion import SHORTEST

    return int(to) if to is not None and to.isascii() and to.isdecimal() and len(to) < SHORTEST else to


def _home(home: Path | None) -> Path:
    from agentpipe.settings import load_settings

    return load_settings(home=home).home


def _serve(home: Path | None) -> None:
    """What production serves follows the champion."""
    from agentpipe.serving.deployment import follow_champion
    from agentpipe.settings import load_settings

    follow_champion(load_settings(home=home))


def _stores(home: Path | None) -> tuple[ChampionStore, HoldStore]:
    from agentpipe.learning.succession.promotion import champion_stores

    return champion_stores(_home(home))


def _listed(history: tuple[Champion, ...]) -> list[dict[str, Any]]:
    import dataclasses

    return [dataclasses.asdict(champion) for champion in history]


def _report_champion(champion: Champion, as_json: bool) -> None:
    (entry,) = _listed((champion,))
    if as_json:
        print_json({"ok": True, "champion": entry})
        return
    _print_champion(entry)


_VERBS = {"promotion": "promoted", "approval": "approved", "rollback": "brought back"}


def _print_champion(entry: dict[str, Any]) -> None:
    typer.echo(f"{entry['digest'][:16]}  since {entry['at']}")
    typer.echo(f"package {entry['package']}, {_VERBS[entry['kind']]} by {entry['who']}: {entry['reason']}")
    if "success" in entry["figures"]:
        typer.echo(f"hold-out success {percent(entry['figures']['success'])}")


def _print_held(held: Held, current: Champion | None) -> None:
    typer.echo(f"{held.candidate[:16]}  held since {held.at} by {held.who}: {'; '.join(held.reasons)}")
    typer.echo(f"  package {held.package}, bundle {held.bundle}, compared with {(held.compared_with or 'none')[:16]}")
    for name, value in sorted(held.figures.items()):
        if isinstance(value, int | float | str):
            typer.echo(f"  {name}: {value:.6g}" if isinstance(value, float) else f"  {name}: {value}")
    if held.decision is not None:
        typer.echo(f"  {held.decision.kind} by {held.decision.who} at {held.decision.at}: {held.decision.reason}")
    elif current is not None and current.digest != held.compared_with:
        typer.echo(f"  the champion is {current.digest[:16]} by now: it must be compared again before it is approved")
