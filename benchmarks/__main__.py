"""``python -m benchmarks``: every benchmark, then ``RESULTS.md``; options as of each single one."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import report
from benchmarks.measure import ROOT

NAMES = ("simulator", "training", "buffer")


def main(arguments: list[str]) -> None:
    """Each benchmark in a process of its own: none inherits what another has imported or allocated."""
    for name in NAMES:
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=True, cwd=ROOT)
    print(report.main(arguments[arguments.index("--out") :][:2] if "--out" in arguments else []))


if __name__ == "__main__":
    main(sys.argv[1:])
