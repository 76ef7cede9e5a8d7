"""The buffer's section of the page of results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GROUPS = {
    "Writing": ("Writing", "transitions"),
    "Uniform": ("Sampling uniformly", "transitions"),
    "Prioritised": ("Sampling by priority", "transitions"),
    "Prioritised, with update": ("Sampling by priority, and new priorities for what was drawn", "transitions"),
    "Causal": ("Sampling by influence", "transitions"),
    "Line": ("Writing the production line's episodes", "episodes"),
}
TEXT = """
**A transition** has 60 float32, an action, a reward and a flag; agentpipe's record of it also has mask, probability,
value, time stamp, policy, checksum and more, written in episodes of ten steps with their graph and index entry, and
everybody is handed {chunk:,} transitions at a time. torchrl maps its storage into memory as agentpipe does, cpprb keeps
its own in memory. Every sampler returns the same four fields of each transition as contiguous arrays. Figures in a
group were measured in turns.
"""


def section(content: dict[str, Any], human: Callable[[float], str]) -> str:
    """All tables."""
    from benchmarks.buffer_own import CHUNK

    figures = content["figures"]
    parts = [TEXT.format(chunk=CHUNK).strip()]
    for group, (title, unit) in GROUPS.items():
        chosen = [figure for figure in figures if figure["name"].partition(":")[0] == group]
        if chosen:
            parts.append(f"### {title}\n\n{rates(chosen, unit, human)}")
    facts = [figure for figure in figures if figure["name"].partition(":")[0] not in GROUPS]
    crashes = [figure for figure in facts if figure["rates"]]
    if crashes:
        parts.append(f"### kill -9\n\n{listed(crashes, human)}")
    drawn = [figure for figure in facts if not figure["rates"]]
    if drawn:
        parts.append(f"### What is drawn\n\n{WORDS}")
        sources = dict.fromkeys(figure["notes"]["source"] for figure in drawn)
        parts += [shares([one for one in drawn if one["notes"]["source"] == source], human) for source in sources]
    return "\n\n".join(parts)


WORDS = """Key-fault steps are those of episodes that failed or whose fault mode is among the rarest quarter; idle ones
have no dependents and a reward that is the running cost of time alone (strictly: zero). Coverage: share of the ten most
influential steps of each episode that one epoch draws at least once, an epoch having as many draws as there are steps;
stratified draws reach the most that the probabilities allow. All are exact for each shard, nothing is simulated;
brackets are 95 % t intervals over shards."""


def shares(figures: Sequence[dict[str, Any]], human: Callable[[float], str]) -> str:
    """Shares of draws, and coverage."""
    first = figures[0]
    rows = [
        (
            f"**{first['notes']['source'].capitalize()}**: {first['notes']['shards']} shards of"
            f" {human(first['steps'])} steps in all."
        ),
        "",
    ]
    rows += ["| share of draws | uniform | causal | causal ÷ uniform |", "|---|---:|---:|---:|"]
    for figure in figures:
        kind, _, name = figure["name"].partition(": ")
        said = figure["notes"]
        if kind == "Shares":
            rows.append(f"| {name} | {said['uniform']} | {said['causal']} | {said['causal_over_uniform']} |")
        else:
            rows += ["", "| coverage in one epoch | uniform | causal |", "|---|---:|---:|"]
            for way in ("stratified", "independent"):
                rows.append(f"| {way} draws | {said[f'uniform_{way}']} | {said[f'causal_{way}']} |")
    return "\n".join(rows)


def rates(figures: Sequence[dict[str, Any]], unit: str, human: Callable[[float], str]) -> str:
    """One table; the first row is agentpipe's."""
    rows = [f"| | {unit}/s | first row ÷ this | |", "|---|---:|---:|---|"]
    for figure in figures:
        rate = f"{human(figure['median'])} ({human(figure['worst'])} – {human(figure['best'])})"
        quotient = f"{figures[0]['median'] / figure['median']:.3g}"
        rows.append(f"| {figure['name'].partition(': ')[2]} | {rate} | {quotient} | {notes(figure)} |")
    return "\n".join(rows)


def listed(figures: Sequence[dict[str, Any]], human: Callable[[float], str]) -> str:
    """Figures that stand alone."""
    rows = ["| | steps | |", "|---|---:|---|"]
    rows += [f"| {figure['name']} | {human(figure['steps'])} | {notes(figure)} |" for figure in figures]
    return "\n".join(rows)


def notes(figure: dict[str, Any]) -> str:
    """Its notes in words."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figure["notes"].items())
