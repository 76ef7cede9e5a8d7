"""The section of ``RESULTS.md`` on what breaks, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.evaluation.statistics import wilson

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = {
    "triton": "Triton killed",
    "network": "network to Triton",
    "line": "network to the line",
    "sensor": "sensor frozen",
    "disk": "disk full",
    "sigkill": "agent killed",
}
TEXT = """Faults at random instants while an agent works at {stations} stations of simulated lines at once, a probe of
each part every {every:g} s; three failed probes in a row are a lost part. *Lost* are decisions that a line acted on and
that are not in the journal, *twice* those that are there more than once, *other* those recorded with another action.
*Missed* are deadlines that the line saw pass; while its own network is cut nothing can arrive. *Degraded* counts from
the fault until the agent said so, *back* from the cure until it said that; of a killed agent, until it answered again,
and until it had found Triton again."""


def section(content: dict[str, Any]) -> str:
    """The Markdown of a stored run."""
    text = TEXT.replace("\n", " ").format(every=content["probe_every_s"], stations=content.get("stations", 4))
    parts = [text, "", *_faults(content["kinds"])]
    if content["success"]:
        parts += ["", "Orders that ended well, with a 95 % interval (Wilson):", "", *_success(content["success"])]
    return "\n".join(parts)


def _faults(kinds: Sequence[dict[str, Any]]) -> list[str]:
    rows = ["| fault | times | decisions | lost | twice | other | missed | degraded, s: median (most) | back, s |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kind in kinds:
        counts = " | ".join(f"{kind[name]:,}" for name in ("times", "taken", "lost", "twice", "other", "missed"))
        rows.append(
            f"| {NAMES[kind['kind']]} | {counts} | {_times(kind['degraded_s'])} | {_times(kind['recovered_s'])} |"
        )
    return rows


def _times(found: dict[str, float] | None) -> str:
    return f"{found['median']:.2f} ({found['most']:.2f})" if found else "–"


def _success(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| Triton | sensors | orders | success | |", "|---|---|---:|---:|---|"]
    for row in rows:
        interval = wilson(row["successes"], row["orders"])
        share = row["successes"] / row["orders"]
        triton, sensors = "there" if row["triton"] else "away", "one frozen" if row["frozen"] else "all"
        lines.append(
            f"| {triton} | {sensors} | {row['orders']} | {share:.1%} | [{interval.low:.1%}, {interval.high:.1%}] |"
        )
    return lines
