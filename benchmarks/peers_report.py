"""The page of the race: success at equal steps, at equal seconds, and what was tried."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.peers_settings import CLIP, CONTESTANTS, DISCOUNT, GAE_LAMBDA, HIDDEN, OURS, OURS_WARM
from benchmarks.seeds import interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Row = Mapping[str, Any]
    Points = dict[int, Mapping[str, Any]]
    """by seed"""


def best_of(rows: Sequence[Row]) -> tuple[int, str]:
    """Number of the setting and way of playing of the most successful trial; the earlier one of equals."""
    tried = [(number, play, success) for number, row in enumerate(rows) for play, success in row["success"].items()]
    number, play, _ = max(tried, key=lambda one: one[2])
    return number, play


def _in_order(by_name: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Contestants in the order of the settings, whatever order a file has them in."""
    return [(one.name, by_name[one.name]) for one in CONTESTANTS if one.name in by_name]


def points(rows: Sequence[Row], axis: str, at: float) -> Points:
    """Of each seed, what a contestant had at ``at`` steps or seconds."""
    found: Points = {}
    for row in rows:
        for point in row["curve"]:
            if point["axis"] == axis and point["at"] == at:
                found[row["seed"]] = {**point, "steps_per_second": row["steps_per_second"]}
    return found


def section(content: dict[str, Any]) -> str:
    """The Markdown section of ``RESULTS.md``."""
    sizes = content["sizes"]
    lines = [_what_was_done(content)]
    for axis, title, at in (
        ("steps", f"At {sizes['steps']:,} environment steps", sizes["steps"]),
        ("seconds", f"At {sizes['seconds']:g} seconds of training", sizes["seconds"]),
    ):
        lines += ["", f"### {title}", "", *_table(content, axis, at), "", _verdict(content, axis, at)]
    lines += ["", "### What was tried", "", *_tried(content)]
    for name, why in content["skipped"].items():
        lines += ["", f"Not measured: {name} ({why})."]
    if content["left"]:
        lines += ["", f"Trainings that are missing: {content['left']}."]
    revisions = content["origins"]["revisions"]
    if len(revisions) > 1:
        lines += ["", f"Trainings of several revisions: {', '.join(revisions)}."]
    return "\n".join(lines)


def _what_was_done(content: dict[str, Any]) -> str:
    sizes = content["sizes"]
    return (
        f"All on {content['cores']} cores, on the same lines ({sizes['environments']:,} training environments, of which"
        " a setting takes as many as it has side by side), the same random numbers of the simulator, 192"
        " observed numbers normalised by the same statistics, rewards scaled and clamped alike, masks where one"
        f" knows them; two hidden layers of {HIDDEN[0]}, discount {DISCOUNT:g}, λ {GAE_LAMBDA:g}, clip range {CLIP:g}"
        " (*agentpipe, cloned first*: that of each segment). Peers get the line through Gymnasium's vector interface,"
        " agentpipe its own pool. *agentpipe* starts from random weights, learns from live samples alone and has no"
        " warm-up: what its peers know. It also reads the last action and the time, which the environment tells in its"
        " infos; settings with the last action are among those tried for the peers. *agentpipe, cloned first* is"
        " `agentpipe run`'s training, all its parts shrunk alike to fit: what it records by rule and what it clones"
        " counts as steps and as seconds, and a run beyond either is made again, smaller."
        " Stable-Baselines3's PPO knows no masks: a forbidden action is replaced by the"
        " lowest allowed one, the environment's default, and the credit goes to the action that was sampled.\n\n"
        "Seconds are of training alone, on a clock that stands still while weights are copied; observation statistics"
        " and judging count for nobody. Compared are the last weights that were there at that many steps or seconds."
        f" Greedy play, {sizes['holdout']:,} held-out environments × {sizes['holdout_episodes']} episodes. Mean over"
        " seeds with 95 % t intervals; differences are paired by seed."
    )


def _table(content: dict[str, Any], axis: str, at: float) -> list[str]:
    shares = [number / content["sizes"]["grid"] for number in range(1, content["sizes"]["grid"])]
    head = " | ".join(f"{share:.0%}" for share in shares)
    lines = [
        f"| | success | each seed | agentpipe − this, points | on the way: {head} | steps | seconds | steps/s |",
        f"|---|---:|---|---:|{'---:|' * len(shares)}---:|---:|---:|",
    ]
    ours = points(content["rows"].get(OURS, []), axis, at)
    for name, rows in _in_order(content["rows"]):
        found = points(rows, axis, at)
        if not found:
            continue
        way = [points(rows, axis, share * at) for share in shares]
        lines.append(_line(name, found, {} if name == OURS else ours, way))
    return lines


def _line(name: str, found: Points, ours: Points, way: Sequence[Points]) -> str:
    success = [point["success"] for point in found.values()]
    middle = [f"{statistics.fmean(p['success'] for p in there.values()):.1%}" if there else "–" for there in way]
    steps, seconds, rate = (
        statistics.fmean(point[key] for point in found.values()) for key in ("steps", "seconds", "steps_per_second")
    )
    each = ", ".join(f"{value:.1%}" for value in success)
    return (
        f"| {name} | {_interval(success, '{:.1%}')} | {each} | {_interval(_lead(found, ours), '{:+.1f}')} |"
        f" {' | '.join(middle)} | {steps / 1e6:.2f} M | {seconds:.0f} | {rate / 1e3:.1f} k |"
    )


def _lead(found: Points, ours: Points) -> list[float]:
    return [100 * (ours[seed]["success"] - found[seed]["success"]) for seed in sorted(set(found) & set(ours))]


def _interval(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    mean, low, high = interval(values)
    if form.endswith("%}"):  # of a share, which lies within 0 and 1
        low, high = max(low, 0.0), min(high, 1.0)
    return form.format(mean) + (f" [{form.format(low)}, {form.format(high)}]" if len(values) > 1 else "")


def _verdict(content: dict[str, Any], axis: str, at: float) -> str:
    """Where agentpipe, from random weights, is ahead, where it is not, and where nobody can say."""
    ours = points(content["rows"].get(OURS, []), axis, at)
    words: dict[str, list[str]] = {"ahead of": [], "behind": [], "not told apart from": []}
    for name, rows in _in_order(content["rows"]):
        lead = _lead(points(rows, axis, at), ours)
        if name in (OURS, OURS_WARM) or len(lead) < 2:
            continue
        mean, low, high = interval(lead)
        word = "ahead of" if low > 0 else "behind" if high < 0 else "not told apart from"
        words[word].append(f"{name} ({mean:+.1f} points)")
    told = [f"{word} {', '.join(names)}" for word, names in words.items() if names]
    return f"From random weights agentpipe is {'; '.join(told)}." if told else "Too few runs to compare."


def _tried(content: dict[str, Any]) -> list[str]:
    sizes = content["sizes"]
    lines = [
        (
            f"Each setting trained for {sizes['trial_seconds']:g} seconds under a seed that is none of the race's;"
            f" success on {sizes['validation']} validation environments × {sizes['validation_episodes']} episodes"
            " chose. A falling learning rate falls over those seconds."
        ),
        "",
        "| | setting | success, validation | steps/s | |",
        "|---|---|---|---:|---|",
    ]
    for name, rows in _in_order(content["tried"]):
        if not rows:
            continue
        chosen, play = best_of(rows)
        for number, row in enumerate(rows):
            several = len(row["success"]) > 1
            success = ", ".join(f"{v:.1%}" + (f" ({way})" if several else "") for way, v in row["success"].items())
            threads = "" if name == OURS else f", {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
            mark = "chosen" + (f" ({play})" if several else "") if number == chosen else ""
            lines.append(
                f"| {name} | {row['setting']}{threads} | {success} | {row['steps_per_second'] / 1e3:.1f} k | {mark} |"
            )
    return lines
