"""What ``agentpipe buffer`` prints for people."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import typer

from agentpipe.cli.output import percent, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agentpipe.experience.care.inventory import ShardFigures
    from agentpipe.experience.care.report import Report
    from agentpipe.experience.care.retention import Plan


def size_text(size: float) -> str:
    """Bytes with a decimal unit, such as ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1_000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1_000
    return f"{size:.1f} TB"


def print_report(report: Report) -> None:
    """Problems first, then what a repair did, then the sums and the verdict."""
    for problem in report.problems:
        typer.echo(str(problem))
    for repair in report.repairs:
        typer.echo(f"repaired {repair}")
    for text in report.unrepaired:
        typer.echo(f"not repaired {text}")
    for loss in report.lost:
        typer.echo(f"lost {loss}")
    for shard, holder in report.held.items():
        typer.echo(f"{shard}: held by {holder}; its LevelDB was not looked at")
    counts = f"{report.episodes:,} episodes, {report.steps:,} steps, {size_text(report.bytes)}"
    typer.echo(f"{shards_text(report.shards)}, {counts}: {_verdict(report)}")


def _verdict(report: Report) -> str:
    parts = [f"{len(report.lost):,} loss(es)"] if report.lost else []
    parts += [f"{len(report.problems):,} problem(s)"] if report.problems else []
    if not parts:
        return "repaired without loss, whole and consistent" if report.repairs else "whole and consistent"
    return ", ".join(parts) + ("" if report.problems else "; what is left is whole and consistent")


def print_episodes(shard: Path, episodes: Sequence[Mapping[str, Any]]) -> None:
    """The episodes of one shard; what the first column says can be given to ``show`` with the same ``--path``."""
    rows = [
        (
            f"{one['environment'] or one['index']}:{one['episode']}.0",
            str(one["row"]),
            f"{one['steps']:,}",
            f"{one['minutes']:.2f}",
            f"{one['return']:+.3f}",
            one["outcome"],
            one["mode"],
        )
        for one in episodes
    ]
    columns = ("episode", "row", "steps", "min", "return", "outcome", "true fault")
    table(columns, rows, left=("episode", "outcome", "true fault"))
    typer.echo(f"{shard}: {len(episodes):,} episodes")


def print_shards(shards: Sequence[ShardFigures]) -> None:
    """One line a shard."""
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
    table(columns, rows, left=("of", "shard", "state"))


def print_totals(total: dict[str, Any], budget: int | None) -> None:
    """The sums, and how much of the budget they are."""
    used = "" if not budget else f", {percent(total['bytes'] / budget)} of the budget of {size_text(budget)}"
    states = ", ".join(f"{total[state]} {state}" for state in ("sealed", "shrunk", "open", "damaged") if total[state])
    counts = f"{total['episodes']:,} episodes, {total['steps']:,} steps"
    typer.echo(f"{shards_text(total['shards'])} ({states or 'none yet'}), {counts}, {size_text(total['bytes'])}{used}")


def print_plan(plan: Plan, home: Path, dry_run: bool) -> None:
    """What happens to each shard and why; where a limit is missed, what is in use and what can be done."""
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
    columns = ("action", "of", "shard", "size", "after", "reason")
    table(columns, rows, left=("action", "of", "shard", "reason"))
    freed = size_text(plan.bytes_before - plan.bytes_after)
    verb = "would be freed" if dry_run else "freed"
    typer.echo(f"{size_text(plan.bytes_before)} → {size_text(plan.bytes_after)}: {freed} {verb}")
    if plan.over:
        say(f"{size_text(plan.over)} above the limit. What stays is in use:")
        for entry in plan.in_use():
            say(f"  {size_text(entry['bytes'])} in {shards_text(entry['shards'])}: {entry['by']}")
        say(
            "Raise the limit. Or remove a training whose policy nobody needs, package, checkpoints and rollouts "
            "together: its folder policy_checkpoint/DAY_TRIGGER/KEY and its reference "
            "references/policy_checkpoint/DAY_TRIGGER.json. Not that of the champion, which this names: "
            + shlex.join(["agentpipe", "champion", "show", "--home", str(home.resolve())])
        )


def shards_text(count: int) -> str:
    """A number of shards."""
    return f"{count:,} shard" if count == 1 else f"{count:,} shards"


def _range(ordinals: Sequence[int]) -> str:
    """The behaviour policies of a shard, by ordinal."""
    if not ordinals:
        return "–"
    return str(ordinals[0]) if len(ordinals) == 1 else f"{ordinals[0]} to {ordinals[-1]}"


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: Sequence[str]) -> None:
    """Plain columns, those in ``left`` flush left: nothing is wrapped or cut, whatever reads it."""
    lines = [columns, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        cells = [
            text.ljust(width) if columns[place] in left else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())
