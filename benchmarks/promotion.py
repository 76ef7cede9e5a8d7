"""How often a candidate is promoted: ``python -m benchmarks.promotion``, a simulation of the comparison's bound.

A candidate and the champion play the same episodes of 3,000 environments. In a share of the episodes their outcomes
differ, each way as often as it takes for the candidate to lack a given success; in a quarter of the environments all
episodes have the same outcomes, so that episodes are no independent draws. It is promoted where the lower bound of the
difference is above minus the margin; a cell's veto, which is another test, is left out. Everything is seeded.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from agentpipe.evaluation.challenge_statistics import Limits, paired_bound
from benchmarks.measure import results_folder, stamp, store

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

ENVIRONMENTS, ALIKE, EPISODES = 3_000, 0.25, (4, 8)
LIMITS = Limits()
DIFFERENT = (0.02, 0.05, 0.1, 0.2)
"""share of the episodes with different outcomes"""
TRIALS, SMOKE_TRIALS = 2_000, 4


def differences(lacks: float, different: float, episodes: int, random: np.random.Generator) -> Floats:
    """f64[ENVIRONMENTS], mean difference of each environment in one trial."""
    won, lost = (different - lacks) / 2, (different + lacks) / 2
    drawn = random.random((ENVIRONMENTS, episodes))
    alike = random.random(ENVIRONMENTS) < ALIKE
    drawn[alike] = drawn[alike, :1]
    outcome = (drawn < won).astype(np.float64) - (drawn > 1 - lost)
    mean: Floats = outcome.mean(axis=1)
    return mean


def student_low(values: Floats, alpha: float) -> float:
    """The usual bound, to hold ours against."""
    error = float(values.std(ddof=1)) / math.sqrt(values.size)
    quantile = float(stdtrit(values.size - 1, 1 - alpha))
    return float(values.mean()) - quantile * error


def promoted(lacks: float, different: float, episodes: int, trials: int) -> dict[str, Any]:
    """Shares of the trials in which a candidate that lacks ``lacks`` is promoted, by our bound and by Student's."""
    random = np.random.Generator(np.random.PCG64([int(lacks * 1e4), int(different * 1e4), episodes]))
    ours = usual = 0
    for _ in range(trials):
        values = differences(lacks, different, episodes, random)
        ours += paired_bound(values, LIMITS.alpha).low > -LIMITS.margin
        usual += student_low(values, LIMITS.alpha) > -LIMITS.margin
    row = {"lacks": lacks, "different": different, "episodes": episodes}
    return {**row, "ours": ours / trials, "student": usual / trials}


def section(content: dict[str, Any]) -> str:
    """The Markdown section of ``RESULTS.md``."""
    text = (
        f"{content['trials']:,} comparisons each of {ENVIRONMENTS:,} environments, in a quarter of them all episodes"
        f" alike; margin {LIMITS.margin:g}, α = {LIMITS.alpha:g}. *Promoted*: the lower bound of the paired difference"
        " is above minus the margin. A candidate that lacks just the margin should be promoted in at most 5 %."
    )
    head = (
        "| lacks | episodes with different outcomes | episodes an environment | promoted | by the usual t bound |",
        "|---:|---:|---:|---:|---:|",
    )
    rows = (
        f"| {row['lacks']:.1%} | {row['different']:.0%} | {row['episodes']} |"
        f" {row['ours']:.1%} | {row['student']:.1%} |"
        for row in content["rows"]
    )
    return "\n".join([text, "", *head, *rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.promotion``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.promotion", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few trials: shows that it works")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    trials = SMOKE_TRIALS if chosen.smoke else TRIALS
    rows = [
        promoted(lacks, different, episodes, trials)
        for lacks in (0.0, LIMITS.margin)
        for different in DIFFERENT
        for episodes in EPISODES
    ]
    content = {"trials": trials, "rows": rows, "smoke": chosen.smoke}
    out = results_folder(chosen.out, smoke=chosen.smoke)
    store("promotion", stamp("python -m benchmarks.promotion", ("numpy", "scipy")), [], out, **content)
    print(section(content))


if __name__ == "__main__":
    main()
