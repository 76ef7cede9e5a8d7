"""``python -m benchmarks``: every benchmark not run alone, then ``RESULTS.md``; options as of each single one."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.measure import ROOT, results_folder

NAMES = ("simulator", "training", "buffer", "drift")
"""share their options"""
PLAIN = ("table_redis", "feedback_intake", "feedback_learning", "promotion", "serving")
"""know --smoke and --out only"""
ALONE = {
    "claims": "hours, in pieces: --plan, --minutes",
    "peers": "hours, in pieces, on a quiet machine: --plan, --minutes",
    "gap": "half an hour and more; needs a home with a champion",
}
"""take too long, or need too much, to be run with the others, and why"""


def main(arguments: list[str]) -> None:
    """Each benchmark in a process of its own: none inherits what another has imported or allocated."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Runs every benchmark and writes RESULTS.md.",
        epilog=f"Other options go to {', '.join(NAMES)}; see python -m benchmarks.NAME --help. Run alone: "
        + "; ".join(f"benchmarks.{name} ({why})" for name, why in ALONE.items()),
    )
    parser.add_argument("--smoke", action="store_true", help="small sizes: shows that it works, measures nothing")
    parser.add_argument("--out", type=Path, help="folder of the results")
    given, _ = parser.parse_known_args(arguments)
    out = results_folder(given.out, smoke=given.smoke)
    plain = ["--smoke"] if given.smoke else []
    for name in (*NAMES, *PLAIN):
        options = plain if name in PLAIN else arguments
        command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--out", str(out.absolute())]
        subprocess.run(command, check=True, cwd=ROOT)
    print(report.main(["--out", str(out.absolute())]))


if __name__ == "__main__":
    main(sys.argv[1:])
