"""The gap to the oracle as Markdown: from the stored figures, without playing anything."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from agentpipe.environments.physics import MISHAP_PROBABILITY
from benchmarks.gap.players import PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence

BEGIN, END = "<!-- gap: written by benchmarks/gap -->", "<!-- end of gap -->"
TITLES: Final = {
    "oracle": "oracle: declares the truth at once, closes after the first repair that cannot be deepened",
    "truth at once": "the truth, at once; what a mishap left undone is ordered again",
    "truth": "the policy measures, the truth names and does the rest",
    "told, every packet": "… an observer names that is told the disturbance and remembers every packet",
    "untold, every packet": "… that has to infer the disturbance",
    "untold, means": "… and remembers only the historian's means",
    "policy names": "the policy measures and names, the truth does the rest",
    "policy": "policy",
    "told, means": "the policy measures, an observer names that is told the disturbance, remembers only the means",
    "rule measures, truth": "the demonstrator's rule measures, the truth does the rest",
    "rule measures, policy names": "the demonstrator's rule measures, the policy names, the truth does the rest",
}
ASSUMPTIONS: Final = """The observers apply Bayes' rule to the simulator's own model: prevalences, signatures and their
spread along the line, scatter of operating points, process noise, growth, decay of false alarms, sensor noise, lag,
drift, ripple, gain steps, impulses and repeated readings, and the AR(2) load with its spikes. One that is *told* also
knows the disturbance's parameters, the ripple's phase, the sensor suite and every machine's gain, which no player is
told; the *untold* one knows the disturbance table and infers the rest. So what no player can know, with these
measurements, is at least what the told one misses and at most what the untold one misses. Approximate are: six
severities instead of a range, a fault that grows as in the mean, mixtures from steps and impulses replaced by one
normal after each reading; for means, a normal throughout. How often an observer is right should equal how sure it is:
both stand in the tables step by step (`benchmarks/RESULTS.md`). A policy with a memory may keep more than means: of
such a one the rows on packets and on the cause count together."""
INTRODUCTION: Final = """`python -m benchmarks.gap` prints it for the champion of a home (with `--holdout 1500` also for
held-out environments): from the oracle to the policy, what each player of a ladder loses to the one before. It knows
less, or the policy does one part more. A negative loss is a gain; where the interval holds zero, none can be told."""
SHARED_WORK: Final = """Which part of the policy's work costs what, in points of success; the policy measures
throughout, the truth does the other parts (Shapley values over the 16 ways to share the work, so they add up):"""
NETWORKS: Final = """Networks that learn machine and cause from labelled moments of training environments, at which the
policy first declares, and are asked at such moments of the environments played. *Plain*: two layers of 256 over the
observation. *Shared*: the same weights for every machine, over what is seen of it, the sums over its neighbours and the
whole line, then one exchange between neighbours. *Shared, remembering*: with a robust mean, the spread, the first
reading and the later mean of every channel, and the load that each machine's packets came with. *Tends to*: where the
shares go if every further factor of examples gains the same part of the gain before."""


def share(value: float | None, digits: int = 1) -> str:
    """A share in per cent."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def bracketed(figure: dict[str, Any] | None, *, points: bool = False) -> str:
    """An estimate and its interval, in per cent or in points."""
    if figure is None:
        return "–"
    value, low, high = (None if figure[key] is None else 100 * figure[key] for key in ("value", "low", "high"))
    inside = "" if low is None or high is None else f" [{low:.1f}, {high:.1f}]"
    return f"{value:.1f}{'' if points else ' %'}{inside}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def names(content: dict[str, Any]) -> list[str]:
    """The groups that were played."""
    return [group["name"] for group in content["groups"]]


def short_table(content: dict[str, Any]) -> str:
    """The gap in eight lines."""
    groups = names(content)
    first = [bracketed(content["ladder"][name][0]["success"]) for name in groups]
    last = [bracketed(content["ladder"][name][-1]["success"]) for name in groups]
    rows = [["oracle", *first]]
    for index, step in enumerate(content["short"][groups[0]]):
        losses = [bracketed(content["short"][name][index]["lost"], points=True) for name in groups]
        rows.append([f"− {step['what']}", *losses])
    return table(["success, and what it loses (points)", *groups], [*rows, ["= policy", *last]])


def ladder_table(content: dict[str, Any], name: str) -> str:
    """Every player of the ladder in one group."""
    rows = []
    for row in content["ladder"][name]:
        lost, right = bracketed(row["lost"], points=True), bracketed(row["right"])
        rows.append([TITLES[row["player"]], bracketed(row["success"]), lost, right, share(row["claimed"])])
    return table(["who does what", "success", "lost, points", "first diagnosis right", "sure of it"], rows)


def parts_table(content: dict[str, Any]) -> str:
    """What each part of the policy's work costs."""
    groups = names(content)
    rows = [[part, *(bracketed(content["parts"][name][part], points=True) for name in groups)] for part in PARTS]
    return table(["part", *groups], rows)


def besides_table(content: dict[str, Any]) -> str:
    """Players beside the ladder."""
    groups = names(content)
    rows = []
    for index, row in enumerate(content["besides"][groups[0]]):
        title = TITLES.get(row["player"])
        title = title or f"policy, {row['player'].removeprefix('policy +')} more measurements of what it would declare"
        found = [content["besides"][name][index] for name in groups]
        cells = [f"{bracketed(one['success'])}, {bracketed(one['lost'], points=True)}" for one in found]
        rows.append([title, TITLES[row["against"]], *cells])
    return table(["who does what", "compared with", *(f"{name}: success, lost to it" for name in groups)], rows)


def split_table(rows: Sequence[dict[str, Any]], head: str) -> str:
    """First diagnoses that are right, by cell or by fault."""
    shown = ("untold, every packet", "untold, means", "policy names")
    body = [
        [row["label"].replace("_", " "), f"{row['episodes']:,}", *(share(row[name], 0) for name in shown)]
        for row in rows
    ]
    return table([head, "episodes", "untold, every packet", "untold, means", "policy"], body)


def extrapolated(right: Sequence[float]) -> float | None:
    """Share of right answers that a curve tends to (Aitken's delta-squared).

    None where its gains do not shrink, or shrink too little for a share: more examples would have to tell.

    Each further factor of examples is taken to gain the same part of the gain before.
    """
    if len(right) < 3:
        return None
    first, second = right[-2] - right[-3], right[-1] - right[-2]
    limit = right[-1] + second**2 / (first - second) if first > second > 0 else math.inf
    return limit if limit <= 1 else None


def curve_table(content: dict[str, Any]) -> str:
    """Classifiers of ever more labelled examples."""
    groups, rows = names(content), content["curve"]
    counts = sorted({row["examples"] for row in rows})
    body = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["examples"])
        for name in groups:
            right = [row["right"][name] for row in mine]
            plays = mine[-1]["plays"][name]
            success = [bracketed(plays["names"]), bracketed(plays["whole"]), bracketed(plays["gain"], points=True)]
            body.append([arm, name, *(share(value) for value in right), share(extrapolated(right)), *success])
    head = ["network", "", *(f"{count:,} examples" for count in counts), "tends to"]
    return table([*head, "it names, truth does the rest", "it names, policy does the rest", "gain on the policy"], body)


def chance(content: dict[str, Any]) -> str:
    """What chance alone takes."""
    parts = []
    for name in names(content):
        found = content["mishaps"][name]
        struck = "none of them" if found["struck"] is None else f"{bracketed(found['struck'])} of them"
        parts.append(
            f"{name}: {share(found['share'])} of episodes, {struck} won all the same; {bracketed(found['spared'])} of"
            " the others"
        )
    return (
        f"Of repairs that are right {share(MISHAP_PROBABILITY)} fail. With the truth known at once, no measuring and"
        f" every mishap ordered again while that is allowed: {'; '.join(parts)}. What the latter lack of 100 % are"
        " deadlines that cannot be met and faults that outgrow every repair."
    )


def document(content: dict[str, Any]) -> str:
    """The section of ``docs/difficulty.md``."""
    played = "; ".join(
        f"{group['name']}: {group['environments']:,} environments × {group['episodes']}" for group in content["groups"]
    )
    origin = (
        f"Policy {content['policy'][:12]}, seed {content['seed']}, episodes played: {played}. Brackets: 95 % interval,"
        " clustered by environment; differences are paired by episode. All players meet the same episodes."
    )
    return "\n\n".join([origin, short_table(content), ASSUMPTIONS, SHARED_WORK, parts_table(content), chance(content)])


def filled(page: str, content: dict[str, Any]) -> str:
    """``docs/difficulty.md`` with these figures between the markers.

    A page without markers gets the whole section at its end.
    """
    if BEGIN not in page:
        page = f"{page.rstrip()}\n\n## The gap to the oracle\n\n{INTRODUCTION}\n\n{BEGIN}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{document(content)}\n\n{END}{rest.partition(END)[2]}"


def section(content: dict[str, Any]) -> str:
    """The Markdown section of ``RESULTS.md``."""
    parts = [document(content)]
    for name in names(content):
        parts += [f"### Step by step, {name}", ladder_table(content, name)]
    parts += ["### Beside the ladder", besides_table(content)]
    parts += ["### First diagnosis right, by cell", split_table(content["cells"], "cell")]
    parts += ["### First diagnosis right, by fault", split_table(content["modes"], "fault")]
    if content["curve"]:
        parts += ["### What more labels, other weights and a memory would bring", NETWORKS, curve_table(content)]
    return "\n\n".join(parts)
