"""How everything here is measured: contestants take turns, so that what else the machine does hits all alike."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentpipe.storage import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("gymnasium", "numba", "numpy", "torch")


@dataclass(frozen=True)
class Contestant:
    """One thing that is measured."""

    name: str
    steps: int
    """environment steps of one turn"""
    turn: Callable[[], float]
    """does its work once; returns the seconds of the timed part"""
    size: int = 0
    """environments side by side"""
    notes: Callable[[], Mapping[str, Any]] = dict
    """figures of its last turn that are worth keeping"""


@dataclass(frozen=True)
class Figure:
    """What a contestant reached in all its turns."""

    name: str
    size: int
    cores: int
    steps: int
    rates: tuple[float, ...]
    """environment steps a second, one a turn, in order"""
    median: float
    best: float
    worst: float
    notes: Mapping[str, Any] = field(default_factory=dict)


def take_turns(contestants: Sequence[Contestant], cores: int, repeats: int) -> list[Figure]:
    """Round after round every contestant does its work once; a first round of everyone is not counted."""
    rates: dict[int, list[float]] = {index: [] for index in range(len(contestants))}
    for round_ in range(repeats + 1):
        for index, contestant in enumerate(contestants):
            seconds = contestant.turn()
            if round_:
                rates[index].append(contestant.steps / seconds)
            print(f"  {contestant.name} N={contestant.size}: {contestant.steps / seconds:,.0f}/s", file=sys.stderr)
    return [
        Figure(
            contestant.name,
            contestant.size,
            cores,
            contestant.steps,
            tuple(rates[index]),
            statistics.median(rates[index]),
            max(rates[index]),
            min(rates[index]),
            dict(contestant.notes()),
        )
        for index, contestant in enumerate(contestants)
    ]


def machine() -> dict[str, Any]:
    """Processor, cores that may be used, memory and the load before the run."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {
        "processor": model,
        "cores": len(usable_cores()),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def usable_cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python, of the simulator and of the installed ones among ``packages``."""
    from agentpipe.environments.layout import SIMULATOR_VERSION

    found = {"python": platform.python_version(), "simulator": SIMULATOR_VERSION}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def seconds_worked() -> tuple[float, float]:
    """Processor seconds of all cores since the machine started: by everything, and by this process's ended children."""
    own = os.times()
    stat = Path("/proc/stat")
    if not stat.exists():
        return float("nan"), own.children_user + own.children_system
    user, nice, system, _, _, irq, softirq, steal = (int(word) for word in stat.read_text().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK"), own.children_user + own.children_system


def revision() -> str:
    """The git revision of the checkout, marked where tracked files of the package or the benchmarks differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        paths = ["agentpipe", "benchmarks/*.py", "data"]
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", *paths],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with uncommitted changes" if changed.stdout.strip() else "")


def stamp(command: str, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Where, when and on what a benchmark ran; call before it starts."""
    return {
        "made": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "revision": revision(),
        "machine": machine(),
        "versions": versions(packages),
    }


def results_folder(out: Path | None, *, smoke: bool) -> Path:
    """Where results go: ``out`` where it is given, else the committed ones, but a folder of its own for a smoke run.

    A smoke run says so, and where it writes, on standard error: its figures mean nothing.
    """
    chosen = out
    if chosen is None:
        chosen = Path(tempfile.mkdtemp(prefix="agentpipe-smoke-")) if smoke else RESULTS
    if smoke:
        print(f"A smoke run: its figures mean nothing. Results: {chosen}", file=sys.stderr)
    return chosen


def store(name: str, origin: Mapping[str, Any], figures: Sequence[Figure], out: Path, **more: Any) -> Path:  # noqa: ANN401
    """Writes what one benchmark found as ``<out>/<name>.json``."""
    path = out / f"{name}.json"
    write_json(path, {"benchmark": name, **origin, "figures": [asdict(figure) for figure in figures], **more})
    return path
