"""A benchmark's own process on a given number of cores: pinned, and told so before any library counts the cores."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentpipe.storage import read_json, write_json
from benchmarks.measure import ROOT, Figure, results_folder, seconds_worked, stamp, store, usable_cores

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass
class Found:
    """What one pinned process brings home."""

    figures: list[Figure] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """what was not measured, and why"""
    versions: dict[str, str] = field(default_factory=dict)
    """of what the benchmark brought along itself"""
    others: dict[str, float] = field(default_factory=dict)
    """cores that other processes kept busy meanwhile, on average, by number of cores measured on"""


Body = Callable[[int, bool], Found]


def main(name: str, body: Body, arguments: Sequence[str] | None = None) -> Path | None:
    """The command line of one benchmark: starts a pinned process for each number of cores and stores what they found.

    Args:
        name: of the benchmark; ``python -m benchmarks.<name>`` runs it.
        body: given the cores and whether this is a smoke run, measures.
        arguments: of the command line.

    Returns:
        The file of results; nothing in the pinned process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--smoke", action="store_true", help="everything tiny and once: shows that it runs, no more")
    parser.add_argument("--cores", default="1,2", help="numbers of cores, comma-separated (default 1,2)")
    parser.add_argument("--out", type=Path, help="folder of the results; of a smoke run by default a temporary one")
    parser.add_argument("--pinned", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.pinned:
        found = body(given.pinned, given.smoke)
        write_json(given.out, {**vars(found), "figures": [vars(figure) for figure in found.figures]})
        return None
    out = results_folder(given.out, smoke=given.smoke)
    origin = stamp(f"python -m benchmarks.{name} --cores {given.cores}" + (" --smoke" if given.smoke else ""))
    together = Found()
    for cores in (int(text) for text in given.cores.split(",")):
        if cores > len(usable_cores()):
            together.skipped[f"{cores} cores"] = f"this machine lets us use {len(usable_cores())}"
            continue
        print(f"{name}, {cores} core{'s' if cores > 1 else ''}", file=sys.stderr)
        found = run_pinned(name, cores, smoke=given.smoke)
        together.figures += found.figures
        together.skipped |= found.skipped
        together.others |= found.others
        origin["versions"] |= found.versions
    more = {"skipped": together.skipped, "others": together.others, "smoke": given.smoke}
    return store(name, origin, together.figures, out, **more)


def run_pinned(name: str, cores: int, *, smoke: bool) -> Found:
    """Runs ``benchmarks.<name>`` in a process of its own on the first ``cores`` cores and returns what it found."""
    chosen = usable_cores()[:cores]

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, chosen)

    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(cores))}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--pinned", str(cores), "--out", str(out)]
        command += ["--smoke"] if smoke else []
        (all_before, own_before), began = seconds_worked(), time.monotonic()
        subprocess.run(command, check=True, cwd=ROOT, env=environment, preexec_fn=pin)
        (all_after, own_after), seconds = seconds_worked(), time.monotonic() - began
        content = read_json(out)
    figures = [Figure(**{**figure, "rates": tuple(figure["rates"])}) for figure in content["figures"]]
    others = ((all_after - all_before) - (own_after - own_before)) / seconds
    known = {str(cores): round(max(0.0, others), 2)} if math.isfinite(others) else {}
    return Found(figures, content["skipped"], content["versions"], known)
