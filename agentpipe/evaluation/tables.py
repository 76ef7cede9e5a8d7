"""Small tables of an evaluation for people: rows for the UI and Markdown of at most 16 KB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.environments.layout import SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT = 16_000
"""Most bytes of one table in an event."""


def percent(share: float | None) -> str:
    """A share as a percentage with one decimal; a dash where there is none."""
    return "–" if share is None else f"{100 * share:.1f} %"


def interval(ci95: Sequence[float | None]) -> str:
    """A confidence interval of a share, as percentages."""
    return f"{percent(ci95[0])} – {percent(ci95[1])}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table of at most :data:`LIMIT` bytes; a last line says how many rows were left out."""
    head = f"| {' | '.join(header)} |\n|{'---|' * len(header)}"
    lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    room = LIMIT - len(head.encode()) - 80
    kept: list[str] = []
    for line in lines:
        room -= len(line.encode()) + 1
        if room < 0:
            return "\n".join([head, *kept, "", f"… and {len(lines) - len(kept)} more rows in the Parquet file"])
        kept.append(line)
    return "\n".join([head, *kept])


def scoreboard(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a player: success with interval, decision time, episodes; best first."""
    rows = [
        {
            "player": name,
            "success": figures["success"],
            "ci95_low": figures["ci95"][0],
            "ci95_high": figures["ci95"][1],
            "decision_seconds": figures["decision_seconds"],
            "mean_steps": figures["mean_steps"],
            "episodes": figures["episodes"],
            "environments": figures["environments"],
        }
        for name, figures in summary["players"].items()
    ]
    return sorted(rows, key=lambda row: (-row["success"], row["player"]))


def scoreboard_markdown(summary: Mapping[str, Any]) -> str:
    """The scoreboard as Markdown."""
    rows = [
        [
            row["player"],
            percent(row["success"]),
            interval([row["ci95_low"], row["ci95_high"]]),
            f"{row['decision_seconds']:.2f} s",
            f"{row['mean_steps']:.1f}",
            f"{row['episodes']:,}",
            f"{row['environments']:,}",
        ]
        for row in scoreboard(summary)
    ]
    return markdown_table(
        ["player", "success", "95 % interval", "simulated decision time", "steps", "episodes", "environments"], rows
    )


def slice_rows(summary: Mapping[str, Any], player: str, by: str) -> list[dict[str, Any]]:
    """One row a slice of ``by`` (cell, kind, intensity, mode, topology) for one player; ``KeyError`` when unknown."""
    slices = summary["players"][player][f"by_{by}"]
    return [
        {
            by: label,
            "success": figures["success"],
            "ci95_low": figures["ci95"][0],
            "ci95_high": figures["ci95"][1],
            "episodes": figures["episodes"],
            "environments": figures["environments"],
        }
        for label, figures in slices.items()
    ]


def slices_markdown(summary: Mapping[str, Any], by: str) -> str:
    """Success of every player (columns) in every slice of ``by`` (rows) as Markdown."""
    players = list(summary["players"])
    slices = {name: summary["players"][name][f"by_{by}"] for name in players}
    rows: list[list[str]] = []
    for label, first in slices[players[0]].items():
        cells = [f"{percent(slices[name][label]['success'])}" for name in players]
        rows.append([label, *cells, f"{first['episodes']:,}"])
    return markdown_table([by, *players, "episodes"], rows)


def failures_markdown(summary: Mapping[str, Any], player: str) -> str:
    """How one player's failures divide over segments and over reasons, as Markdown."""
    figures = summary["players"][player]
    total = figures["failures"]
    if not total:
        return f"No failures in {figures['episodes']:,} episodes."
    segments = [
        ["segment", name, figures["failures_by_segment"][name], percent(figures["failures_by_segment"][name] / total)]
        for name in SEGMENTS
    ]
    reasons = sorted(figures["failures_by_reason"].items(), key=lambda item: -item[1])
    rows = [*segments, *(["reason", name, count, percent(count / total)] for name, count in reasons)]
    return markdown_table(["of", "name", "failures", "share"], rows)
