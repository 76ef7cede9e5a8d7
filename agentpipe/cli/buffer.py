"""``agentpipe buffer``: looking after recorded experience."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentpipe.cli.options import Home, Json
from agentpipe.cli.output import percent, print_json, reporting, say
from agentpipe.cli.progress import showing
from agentpipe.errors import InputError

if TYPE_CHECKING:
    from agentpipe.experience.care.check import Report
    from agentpipe.experience.care.inventory import ShardFigures
    from agentpipe.experience.care.retention import Plan
    from agentpipe.settings import Settings

app = typer.Typer(name="buffer", help="Recorded experience: check, look, shrink, export.", no_args_is_help=True)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
Below = Annotated[
    Path | None, typer.Option("--path", help="A shard, or a folder that holds shards, instead of the home's.")
]
Cell = Annotated[str | None, typer.Option("--cell", help="The current trajectories of this cell, such as sensor-3.")]
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
    """Cross-checks records, episodes, index, graph and manifest of every shard; exit code 1 where something is wrong.

    --fix rebuilds what follows from the rest; episodes that are lost go to the home's quarantine, with the reasons.
    """
    with reporting(as_json):
        report = _check(path, fix, _settings(home, path))
        if as_json:
            print_json(report.to_json())
        else:
            _print_report(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def show(
    environment: Annotated[
        str,
        typer.Argument(
            metavar="ENV[:STEP]", help="Environment id or catalogue index; STEP is EPISODE.STEP or a number."
        ),
    ],
    cell: Cell = None,
    path: Below = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Shows one episode as a readable graph: what was done, what it needed, and what came of it."""
    with reporting(as_json):
        from agentpipe.experience.care.find import find_episode
        from agentpipe.experience.show import describe, render

        found = find_episode(environment, _settings(home, path).home, folder=path, cell=cell)
        if as_json:
            others = [str(other) for other in found.others]
            print_json({"ok": True, **describe(found.shard, found.row, found.step), "others": others})
            return
        typer.echo(render(found.shard, found.row, found.step))
        for other in found.others:
            say(f"also in {other}")


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
        _print_shards(shards)
        _print_totals(total, budget)


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
    limit cannot be met.
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
            _print_plan(outcome.plan, dry_run)
            for place, error in outcome.failures.items():
                say(f"{place}: {error}")
    if not ok:
        raise typer.Exit(1)


@app.command()
def restore(
    shards: Annotated[list[str], typer.Argument(metavar="SHARD...", help="Folders, or beginnings of digests.")],
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
            print_json(
                {"ok": True, "shards": [{"shard": str(shard.path), "digest": shard.digest} for shard in restored]}
            )
            return
        for shard in restored:
            typer.echo(f"{shard.path}: {len(shard.episodes):,} episodes, {len(shard.records):,} steps are back")


@app.command()
def compact(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="DIR...", help="Sealed shards to merge.")] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="All rollouts of this training, such as 2026-01-31|manual.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the merged shard.", show_default="beside the first")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the shards that were merged.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Merges sealed shards of one cell or training into one, in order of environment and episode.

    Shards that a materialisation, a checkpoint or a policy package refers to are refused by name.
    """
    with reporting(as_json):
        from agentpipe.experience.care.operations import compact_shards

        shard = compact_shards(_settings(home).home, folders or [], partition=run, out=out, keep=keep)
        if as_json:
            figures = {"episodes": len(shard.episodes), "steps": len(shard.records)}
            print_json({"ok": True, "shard": str(shard.path), "digest": shard.digest, **figures})
            return
        typer.echo(
            f"{shard.path}: {len(shard.episodes):,} episodes, {len(shard.records):,} steps, digest {shard.digest[:16]}"
        )


@app.command()
def export(
    shard: Annotated[str | None, typer.Argument(help="A shard: its folder, or the beginning of its digest.")] = None,
    out: Annotated[Path, typer.Option("--out", help="FILE.parquet or FILE.arrow.")] = Path("experience.parquet"),
    cell: Cell = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Writes steps as a table, one row a step; without a shard or cell, the current trajectories of every cell."""
    with reporting(as_json):
        from agentpipe.experience.care.export import export_steps
        from agentpipe.experience.care.operations import open_chosen

        chosen = open_chosen(_settings(home).home, shard, cell)
        steps = export_steps(chosen, out)
        if as_json:
            digests = [one.digest for one in chosen]
            print_json({"ok": True, "file": str(out), "steps": steps, "bytes": out.stat().st_size, "shards": digests})
            return
        typer.echo(f"{out}: {steps:,} steps of {_shards(len(chosen))}, {size_text(out.stat().st_size)}")


# --------------------------------------------------------------------------------------------------- inside


def _settings(home: Path | None, path: Path | None = None) -> Settings:
    """The settings, where the home is there and of a format that this program reads; not needed with ``path``."""
    from agentpipe.settings import load_settings
    from agentpipe.storage import check_home_format

    settings = load_settings(home=home)
    if path is None:
        if not settings.home.is_dir():
            remedy = "run `agentpipe run` first, or choose another with --home"
            raise InputError("there is no home yet", file=settings.home, remedy=remedy)
        check_home_format(settings.home)
    return settings


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


def size_text(size: float) -> str:
    """Bytes with a decimal unit, such as ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1_000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1_000
    return f"{size:.1f} TB"


def _budget(settings: Settings, given: str | None) -> int | None:
    if given is not None:
        return parse_size(given, "budget")
    megabytes = settings.experience.budget_mb
    return None if megabytes is None else megabytes * 10**6


def _check(path: Path | None, fix: bool, settings: Settings) -> Report:
    from agentpipe.experience.care.operations import check

    with showing("buffer") as progress:
        return check(settings.home, folder=path, fix=fix, progress=progress)


def _print_report(report: Report) -> None:
    for problem in report.problems:
        typer.echo(str(problem))
    for repair in report.repairs:
        typer.echo(repair if ": not repaired: " in repair else f"repaired {repair}")
    for shard, holder in report.held.items():
        typer.echo(f"{shard}: held by {holder}; its LevelDB was not looked at")
    typer.echo(
        f"{_shards(report.shards)}, {report.episodes:,} episodes, {report.steps:,} steps, {size_text(report.bytes)}: "
        + ("whole and consistent" if report.ok else f"{len(report.problems):,} problem(s)")
    )


def _print_shards(shards: list[ShardFigures]) -> None:
    rows = [
        (
            f"rollouts {shard.training}" if shard.training else shard.cell or "?",
            shard.path.name,
            shard.state if shard.holder is None else f"open, {shard.holder}",
            _number(shard.episodes),
            _number(shard.steps),
            size_text(shard.bytes),
            "–" if shard.bytes_per_step is None else f"{shard.bytes_per_step:.0f}",
            _range(shard.ordinals),
            percent(shard.idle_share),
            percent(shard.coverage),
            str(len(shard.claims)),
        )
        for shard in shards
    ]
    columns = (
        "of",
        "shard",
        "state",
        "episodes",
        "steps",
        "size",
        "bytes/step",
        "policies",
        "idle",
        "coverage",
        "claims",
    )
    _table(columns, rows, left=3)


def _print_totals(total: dict[str, Any], budget: int | None) -> None:
    used = "" if not budget else f", {percent(total['bytes'] / budget)} of the budget of {size_text(budget)}"
    states = ", ".join(f"{total[state]} {state}" for state in ("sealed", "shrunk", "open", "damaged") if total[state])
    counts = f"{total['episodes']:,} episodes, {total['steps']:,} steps"
    typer.echo(f"{_shards(total['shards'])} ({states or 'none yet'}), {counts}, {size_text(total['bytes'])}{used}")


def _print_plan(plan: Plan, dry_run: bool) -> None:
    rows = [
        (
            action.verb,
            action.candidate.group,
            action.candidate.path.name,
            size_text(action.candidate.bytes),
            size_text(action.bytes_after),
            action.reason,
        )
        for action in plan.actions
    ]
    _table(("action", "of", "shard", "size", "after", "reason"), rows, left=3)
    freed = size_text(plan.bytes_before - plan.bytes_after)
    verb = "would be freed" if dry_run else "freed"
    typer.echo(f"{size_text(plan.bytes_before)} → {size_text(plan.bytes_after)}: {freed} {verb}")
    if plan.over:
        say(f"{size_text(plan.over)} too much: the rest is in use. Raise the limit, or remove checkpoints.")


def _shards(count: int) -> str:
    return f"{count:,} shard" if count == 1 else f"{count:,} shards"


def _range(ordinals: Sequence[int]) -> str:
    """The behaviour policies of a shard, by ordinal."""
    if not ordinals:
        return "–"
    return str(ordinals[0]) if len(ordinals) == 1 else f"{ordinals[0]} to {ordinals[-1]}"


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: int) -> None:
    """Plain columns, the first ``left`` and the reason flush left: nothing is wrapped or cut, whatever reads it."""
    lines = [columns, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        cells = [
            text.ljust(width) if place < left or columns[place] == "reason" else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())
