"""``agentpipe buffer``: looking after recorded experience."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentpipe.cli.buffer_output import (
    print_episodes,
    print_plan,
    print_report,
    print_shards,
    print_totals,
    shards_text,
    size_text,
)
from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import print_json, reporting, say
from agentpipe.cli.progress import showing
from agentpipe.errors import InputError

if TYPE_CHECKING:
    from agentpipe.experience.care.report import Report
    from agentpipe.settings import Settings

app = typer.Typer(name="buffer", help="Recorded experience: check, look, shrink, export.", no_args_is_help=True)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
Below = Annotated[
    str | None,
    typer.Option("--path", metavar="SHARD|DIR", help="A shard, or a folder that holds shards, instead of the home's."),
]
NAMED = "folder, name or end of the path as printed, or beginning of the digest"
Cell = Annotated[str | None, typer.Option("--cell", help="The current trajectories of this cell, such as sensor-3.")]
LOSS = 3
"""exit code of a repair that could not bring everything back"""
_TOLD = 3
"""further shards of an episode that are told one by one"""
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]


@app.callback()
def group() -> None:
    """Recorded experience: check, look, shrink, export."""


@app.command()
def check(
    path: Below = None,
    fix: Annotated[bool, typer.Option("--fix", help="Repair what can be repaired without inventing anything.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Cross-checks every shard, and whether materialisations, checkpoints and packages find what they refer to.

    --fix rebuilds what follows from the rest; episodes that are lost go to the home's quarantine, with the reasons.

    Exit code 0: whole, or repaired without loss. 1: something is wrong. 3: --fix could not bring everything back, and
    says what is lost.
    """
    with reporting(as_json):
        report = _check(path, fix, home)
        if as_json:
            print_json(report.to_json())
        else:
            print_report(report)
    if not report.ok:
        raise typer.Exit(LOSS if report.lost else 1)


@app.command()
def show(
    environment: Annotated[
        str | None,
        typer.Argument(
            metavar="[ENV[:STEP]]",
            help="Environment id or catalogue index; STEP is EPISODE.STEP or a number. Without it: the episodes of "
            "the shard that --path names.",
        ),
    ] = None,
    cell: Cell = None,
    path: Below = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Shows one episode as a readable graph: what was done, what it needed, and what came of it."""
    with reporting(as_json):
        from agentpipe.experience.care.find import find_episode
        from agentpipe.experience.show import describe, render

        place, folder = _place(home, path)
        if environment is None:
            _list_episodes(folder, as_json)
            return
        found = find_episode(environment, place, folder=folder, cell=cell)
        if as_json:
            others = [str(other) for other in found.others]
            print_json({"ok": True, **describe(found.shard, found.row, found.step), "others": others})
            return
        typer.echo(render(found.shard, found.row, found.step))
        for other in found.others[:_TOLD]:
            say(f"also in {other}")
        if len(found.others) > _TOLD:
            say(f"and in {len(found.others) - _TOLD} more; --json lists them")


@app.command()
def stats(home: Home = None, as_json: Json = False) -> None:
    """Lists every shard: its condition, size and figures, and who refers to it."""
    with reporting(as_json):
        from agentpipe.experience.care.inventory import inventory, totals

        settings = _settings(home)
        shards = inventory(settings.home)
        total, budget = totals(shards), _budget(settings, None)
        if as_json:
            listed = [shard.to_json() for shard in shards]
            print_json({"ok": True, "total": total, "budget_bytes": budget, "shards": listed})
            return
        print_shards(shards)
        print_totals(total, budget)


@app.command()
def retain(
    max_age: Annotated[float | None, typer.Option("--max-age", min=0, help="Days since sealing.")] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", help="Of one cell or training, such as 500MB.")
    ] = None,
    keep_policies: Annotated[
        int | None, typer.Option("--keep-policies", min=1, help="The newest so many behaviour policies.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Of all shards together, such as 20GB.", show_default="experience.budget_mb"),
    ] = None,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Also delete open shards that nobody writes to or refers to.")
    ] = False,
    dry_run: DryRun = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Deletes or shrinks shards by age, policy and size; what somebody refers to is never deleted.

    Shrunk shards keep seeds and actions, from which the built-in simulator makes every byte again. Exit code 1 where a
    limit of size cannot be met, or a shard could not be shrunk or deleted; what is older than --max-age or
    --keep-policies ask for and in use is listed with its reason, and is no failure.
    """
    with reporting(as_json):
        from agentpipe.experience.care.operations import retention
        from agentpipe.experience.care.retention import Rules

        settings = _settings(home)
        size = None if max_bytes is None else parse_size(max_bytes, "max_bytes")
        rules = Rules(max_age, keep_policies, size, _budget(settings, budget), leftovers)
        with showing("buffer") as progress:
            outcome = retention(settings.home, rules, dry_run=dry_run, progress=progress)
        ok = not outcome.plan.over and not outcome.failures
        if as_json:
            print_json({"ok": ok, "dry_run": dry_run, **outcome.to_json()})
        else:
            print_plan(outcome.plan, settings.home, dry_run)
            for place, error in outcome.failures.items():
                say(f"{place}: {error}")
    if not ok:
        raise typer.Exit(1)


@app.command()
def restore(
    shards: Annotated[list[str], typer.Argument(metavar="SHARD...", help=f"Each by {NAMED}.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Makes the full records of shrunk shards again, byte for byte."""
    with reporting(as_json):
        from agentpipe.experience.care.operations import restore_shards

        settings = _settings(home)
        with showing("buffer") as progress:
            restored = restore_shards(settings.home, shards, progress=progress)
        if as_json:
            listed = [
                {"shard": str(one.shard.path), "digest": one.shard.digest, "changed": one.changed} for one in restored
            ]
            print_json({"ok": True, "shards": listed})
            return
        for one in restored:
            counts = f"{len(one.shard.episodes):,} episodes, {len(one.shard.records):,} steps"
            typer.echo(f"{one.shard.path}: {counts} {'are back' if one.changed else 'were there: nothing to restore'}")


@app.command()
def compact(
    shards: Annotated[
        list[str] | None, typer.Argument(metavar="SHARD...", help=f"Sealed shards to merge, each by {NAMED}.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="All sealed rollouts of this training, such as 2026-01-31|manual.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the merged shard.", show_default="beside the first")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the shards that were merged.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Merges sealed shards of one cell or training into one, in order of environment and episode.

    Shards that a materialisation, a checkpoint or a policy package refers to are refused by name: the merged one has
    another digest. A home as `agentpipe run` leaves it has none to merge.
    """
    with reporting(as_json):
        from agentpipe.experience.care.operations import compact_shards

        shard = compact_shards(_settings(home).home, shards or [], partition=run, out=out, keep=keep)
        if as_json:
            figures = {"episodes": len(shard.episodes), "steps": len(shard.records)}
            print_json({"ok": True, "shard": str(shard.path), "digest": shard.digest, **figures})
            return
        typer.echo(
            f"{shard.path}: {len(shard.episodes):,} episodes, {len(shard.records):,} steps, digest {shard.digest[:16]}"
        )


@app.command()
def export(
    shard: Annotated[str | None, typer.Argument(help=f"A shard, by {NAMED}.")] = None,
    out: Annotated[Path, typer.Option("--out", help="FILE.parquet or FILE.arrow.")] = Path("experience.parquet"),
    cell: Cell = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Writes steps as a table, one row a step; without a shard or cell, the current trajectories of every cell.

    A shrunk shard is played again. The file's metadata say unit and meaning of every column.
    """
    with reporting(as_json):
        from agentpipe.experience.care.choosing import open_chosen
        from agentpipe.experience.care.export import export_steps

        chosen = open_chosen(_settings(home).home, shard, cell)
        steps = export_steps(chosen, out)
        if as_json:
            digests = [one.digest for one in chosen]
            print_json({"ok": True, "file": str(out), "steps": steps, "bytes": out.stat().st_size, "shards": digests})
            return
        typer.echo(f"{out}: {steps:,} steps of {shards_text(len(chosen))}, {size_text(out.stat().st_size)}")


# --------------------------------------------------------------------------------------------------- inside


def _settings(home: Path | None) -> Settings:
    """The settings, where the home is there and of a format that this program reads."""
    from agentpipe.experience.store.remedies import run_command
    from agentpipe.settings import load_settings
    from agentpipe.storage import check_home_format

    settings = load_settings(home=home)
    if not settings.home.is_dir():
        remedy = f"choose another with --home, or make it: {run_command(settings.home)}"
        raise InputError("there is no home yet", file=settings.home, remedy=remedy)
    check_home_format(settings.home)
    return settings


def _place(home: Path | None, path: str | None) -> tuple[Path, Path | None]:
    """The home, and the folder that ``--path`` names; a home is needed only without it.

    Where ``--home`` is not given the home is that which the folder lies in, if it lies in one.
    """
    if path is None:
        return _settings(home).home, None
    from agentpipe.experience.care.choosing import choose_folder
    from agentpipe.experience.store.remedies import home_of
    from agentpipe.settings import load_settings

    chosen = load_settings(home=home).home
    folder = choose_folder(chosen, path)
    return (home_of(folder) or chosen) if home is None else chosen, folder


def _list_episodes(folder: Path | None, as_json: bool) -> None:
    from agentpipe.experience.care.episodes import list_episodes

    if folder is None:
        remedy = "name an environment, or a shard with --path to list its episodes"
        raise InputError("nothing to show", field="ENV[:STEP]", remedy=remedy)
    shard, episodes = list_episodes(folder)
    if as_json:
        print_json({"ok": True, "shard": str(shard), "episodes": episodes})
    else:
        print_episodes(shard, episodes)


def parse_size(text: str, field: str) -> int:
    """``500MB``, ``1.5 GiB`` or a number of bytes as bytes.

    Raises:
        InputError: nothing of the kind.
    """
    import math

    from agentpipe.environments.csvio import parse_number

    upper = text.strip().upper().removesuffix("B")
    digits = upper.rstrip("KMGTI").strip()
    unit, number = upper[len(upper.rstrip("KMGTI")) :], parse_number(digits)
    size = -1.0 if number is None or unit not in _UNITS else number * _UNITS[unit]
    if not 0 <= size < math.inf:
        raise InputError(f"not a size: {text!r}", field=field, remedy="write it as 500MB, 20GB or 1.5GiB")
    return round(size)


def _budget(settings: Settings, given: str | None) -> int | None:
    if given is not None:
        return parse_size(given, "budget")
    megabytes = settings.experience.budget_mb
    return None if megabytes is None else megabytes * 10**6


def _check(path: str | None, fix: bool, home: Path | None) -> Report:
    from agentpipe.experience.care.operations import check

    place, folder = _place(home, path)
    with showing("buffer") as progress:
        return check(place, folder=folder, fix=fix, progress=progress)
