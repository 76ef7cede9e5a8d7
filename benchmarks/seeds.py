"""Success of a profile over several seeds: ``python -m benchmarks.seeds --seeds 0 1 2``.

Each seed is one whole main job in an empty home of its own. With ``--read`` the documents of earlier runs
(``agentpipe run --json > FILE``) are summarised instead.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy.stats import t as student

from benchmarks.measure import RESULTS, stamp, store

if TYPE_CHECKING:
    from collections.abc import Sequence


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % t interval over seeds; the ends are NaN for fewer than two."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, float("nan"), float("nan")
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def run(seed: int, profile: str) -> dict[str, Any]:
    """One main job in an empty home; its JSON document, with the peak memory of its process in GB."""
    with tempfile.TemporaryDirectory(prefix="agentpipe-seed-") as home:
        command = [sys.executable, "-m", "agentpipe", "run", "--home", home, "--profile", profile]
        done = subprocess.run([*command, "--seed", str(seed), "--json"], check=True, stdout=subprocess.PIPE)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
    return {**json.loads(done.stdout), "peak_gb": round(peak, 2)}


def summarise(documents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a player: success of each seed, mean and interval over seeds, mean simulated seconds a decision."""
    rows = []
    for player in documents[0]["players"]:
        figures = [document["players"][player] for document in documents]
        mean, low, high = interval([figure["success"] for figure in figures])
        rows.append(
            {
                "player": player,
                "success": mean,
                "low": None if math.isnan(low) else low,
                "high": None if math.isnan(high) else high,
                "by_seed": [figure["success"] for figure in figures],
                "within": [figure["ci95"] for figure in figures],
                "decision_seconds": statistics.fmean(figure["decision_seconds"] for figure in figures),
            }
        )
    return sorted(rows, key=lambda row: -row["success"])


def section(content: dict[str, Any]) -> str:
    """The Markdown section of ``RESULTS.md``."""
    text = (
        f"{content['environments']:,} held-out environments of templates never trained on,"
        f" {content['episodes'] // content['environments']} episodes each, greedy policy. Mean over"
        f" {content['seeds']} seeds (training, play and evaluation all reseeded) with its 95 % t interval; then each"
        " seed with its own interval, clustered by environment."
    )
    header = ("| player | success | over seeds | each seed | simulated s a decision |", "|---|---:|---|---|---:|")
    lines = [text, "", *header]
    for row in content["players"]:
        over = "" if row["low"] is None else f"{row['low']:.1%} – {row['high']:.1%}"
        seeds = ", ".join(
            f"{value:.1%} [{low:.1%}, {high:.1%}]"
            for value, (low, high) in zip(row["by_seed"], row["within"], strict=True)
        )
        lines.append(f"| {row['player']} | {row['success']:.1%} | {over} | {seeds} | {row['decision_seconds']:.2f} |")
    if not content["peak_gb"]:
        lines += [
            "",
            "Summarised from the documents of runs made before, some by an earlier revision of the same line.",
        ]
    else:
        seconds = ", ".join(f"{wall:.0f}" for wall in content["wall_seconds"])
        lines += [
            "",
            f"Wall seconds of the main job, by seed: {seconds}. Peak memory: {max(content['peak_gb']):.2f} GB.",
            *_training(content.get("training", [])),
        ]
    return "\n".join(lines)


def _training(by_seed: Sequence[dict[str, Any]]) -> list[str]:
    """How long the trainings took, and how fast their policy gradients were with everything that a main job does."""

    def listed(name: str) -> str:
        return ", ".join(f"{one[name]:.0f}" if name in one else "never" for one in by_seed)

    if not by_seed:
        return []
    rates = ", ".join(f"{one['steps_per_second'] / 1e3:.1f} k" for one in by_seed)
    return [
        "",
        (
            f"Seconds of training, by seed: {listed('training_seconds')}; of these until a look at the validation split"
            f" showed 89.7 %, cloning included: {listed('seconds_to_target')}. Environment steps a second of the policy"
            f" gradient, with replay and recording: {rates}."
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.seeds``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--profile", default="standard")
    parser.add_argument("--read", type=Path, nargs="+", default=[], help="documents of earlier runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    documents = [json.loads(path.read_text()) for path in chosen.read]
    documents = documents or [run(seed, chosen.profile) for seed in chosen.seeds]
    policy = documents[0]["players"]["policy"]
    content = {
        "seeds": len(documents),
        "simulator_version": documents[0]["simulator_version"],
        "table_version": documents[0]["table_version"],
        "environments": policy["environments"],
        "episodes": policy["episodes"],
        "players": summarise(documents),
        "wall_seconds": [document["wall_seconds"] for document in documents],
        "training": [document["training"] for document in documents],
        "peak_gb": [document["peak_gb"] for document in documents if "peak_gb" in document],
    }
    store("seeds", stamp(f"python -m benchmarks.seeds{' --read' if chosen.read else ''}"), [], chosen.out, **content)
    print(section(content))


if __name__ == "__main__":
    main()
