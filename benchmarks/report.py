"""Writes ``RESULTS.md`` from what the benchmarks stored: no figure in it was typed by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.storage import read_json, write_bytes
from benchmarks import (
    buffer_learning,
    buffer_report,
    chaos_report,
    claims,
    drift,
    feedback_intake,
    feedback_learning,
    peers_report,
    promotion,
    seeds,
    serving,
    table_redis,
)
from benchmarks.gap import report as gap_report
from benchmarks.measure import RESULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Section = Callable[[dict[str, Any]], str]

HEAD = """# Results

Written by `python -m benchmarks.report` from `benchmarks/results/`; run `python -m benchmarks` to make them again on
your machine. Rates are environment steps a second: the median of the counted turns, the slowest and the fastest in
brackets. Contestants of one table took turns in one process, pinned to that number of cores, so only ratios within a
table carry over to other machines.
"""
LINE_TEXT = """
**What a step is.** A step of the production line advances one of the catalogue's lines (7 or 8 machines with five
sensor channels each) by one decision: clock, faults, sensors, network, PLC, work order; it writes {features}
observation features and a mask of {actions} actions, and begins the next episode where one ends. All three disturbance
kinds are on. A step of CartPole is one Euler step of four numbers. The compiled CartPole loop stands for what calling
a compiled pool costs by itself. Gymnasium's pools use one core however many there are.
"""
TRAINING_TEXT = """
**What is timed.** For agentpipe one whole `train`: making the network, collecting, learning, TensorBoard events, checks
for non-finite values, the final checkpoint and package with their flushes to disk. For Stable-Baselines3 `learn` of a
model that was made before. For JAX one call of the program that holds all of a training, from new weights to the last
update; it was compiled before, in the `compile seconds` beside its rate, which no rate counts.

**The line** trains with the network, rollout and minibatch of the standard profile on all training environments,
without looks at the validation split. Its warm-up counts the steps of the expert that is cloned.

**CartPole: equal** are cores, sizes of network (two hidden layers of 64, tanh, actor and critic apart), rollout and
minibatch, epochs, learning rate, discount, λ, clip range, gradient norm, optimiser (Adam, ε 1e-5) and precision
(float32, no accelerator). **Different** are: agentpipe adds an embedding of the last action (width 1), one sine and
cosine of time, an action mask, a running scale of rewards, normalisation of advantages over the rollout instead of the
minibatch, and events and checkpoints; its gradient is written out instead of recorded by autograd, and it spreads over
threads by itself. Stable-Baselines3 is measured with torch on one thread and on all, and gets fewer updates a turn
since a rate needs no more: mean returns compare at equal updates only. The PPO in JAX is written for this table as
PureJaxRL does it (Lu et al., 2022), and is not that package: it has an environment of its own, with the same equations
in float32; an episode that reaches the step limit counts as ended, and its last state is not bootstrapped; the loss of
the value is clipped, and half as large as that of Stable-Baselines3 (agentpipe's is so too). It writes no files; XLA
spreads it over as many threads as there are cores.
"""


def table(figures: Sequence[dict[str, Any]], reference: int = 0) -> str:
    """One table: the rate of each contestant, and that of the one at ``reference`` over it."""
    base = figures[reference]["median"]
    rows = ["| | steps/s | first row ÷ this | |", "|---|---:|---:|---|"]
    for figure in figures:
        rate = f"{human(figure['median'])} ({human(figure['worst'])} – {human(figure['best'])})"
        notes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figure["notes"].items())
        rows.append(f"| {figure['name']} | {rate} | {base / figure['median']:.3g} | {notes} |")
    return "\n".join(rows)


def human(rate: float) -> str:
    """Three digits and a unit: ``1.43 M``, ``96.2 k``."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            scaled = rate / size
            return f"{scaled:.{max(0, 2 - len(str(int(scaled))) + 1)}f} {unit}"
    return f"{rate:.0f}"


def origin(content: dict[str, Any]) -> str:
    """The paragraph that says where, when, on what."""
    machine = content["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    where = (
        f"`{content['command']}`, {content['made']}, revision `{content['revision']}`. {machine['processor']},"
        f" {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}; load before the run"
        f" {machine['load_before']}. {versions}."
    )
    lines = [where]
    if content.get("smoke"):
        lines.append("**A smoke run: it shows that the benchmark works; its figures mean nothing.**")
    for cores, busy in content.get("others", {}).items():
        lines.append(f"While {cores} core{'s were' if cores != '1' else ' was'} measured on, others kept {busy} busy.")
    lines += [f"Not measured: {what} ({why})." for what, why in content.get("skipped", {}).items()]
    return "\n\n".join(lines)


def grouped(content: dict[str, Any], groups: Sequence[tuple[str, Any]]) -> str:
    """A table for each number of cores and each group of contestants that has figures."""
    parts = []
    for title, belongs in groups:
        for cores in sorted({figure["cores"] for figure in content["figures"]}):
            figures = [figure for figure in content["figures"] if figure["cores"] == cores and belongs(figure)]
            if figures:
                parts.append(f"### {title}, {cores} core{'s' if cores > 1 else ''}\n\n{table(figures)}")
    return "\n\n".join(parts)


def simulator_section(content: dict[str, Any]) -> str:
    """The simulator beside Gymnasium's pools."""
    sizes = sorted({figure["size"] for figure in content["figures"]})
    groups = [(f"{size:,} environments", lambda figure, size=size: figure["size"] == size) for size in sizes]
    text = LINE_TEXT.format(features=OBSERVATION_SIZE, actions=ACTION_COUNT)
    return f"## Simulator\n\n{origin(content)}\n{text}\n{grouped(content, groups)}"


def training_section(content: dict[str, Any]) -> str:
    """The trainer on the line, and beside Stable-Baselines3 and PPO in JAX."""
    lines = [figure for figure in content["figures"] if "production line" in figure["name"]]
    others = [figure for figure in content["figures"] if figure not in lines]
    groups: list[tuple[str, Any]] = [("The line", lambda figure: figure in lines)]
    groups += [
        (f"CartPole, {size:,} environments", lambda figure, size=size: figure in others and figure["size"] == size)
        for size in sorted({figure["size"] for figure in others})
    ]
    return f"## Training\n\n{origin(content)}\n{TRAINING_TEXT}\n{grouped(content, groups)}"


def titled(title: str, section: Section) -> Section:
    """``section`` under its heading and where its figures come from."""

    def page(content: dict[str, Any]) -> str:
        return f"## {title}\n\n{origin(content)}\n\n{section(content)}"

    return page


SECTIONS: dict[str, Section] = {
    "seeds": titled("Success of the standard profile", seeds.section),
    "gap": titled("The gap to the oracle", gap_report.section),
    "claims": titled("What each technique is worth", claims.section),
    "peers": titled("Beside other PPOs", peers_report.section),
    "simulator": simulator_section,
    "training": training_section,
    "buffer": titled("Buffer", lambda content: buffer_report.section(content, human)),
    "buffer_learning": titled("What the samplers are worth to training", buffer_learning.section),
    "drift": titled("Drift", drift.section),
    "table_redis": titled("The disturbance table through Redis", table_redis.section),
    "feedback_intake": titled("Intake of feedback", feedback_intake.section),
    "feedback_learning": titled("What labels teach", feedback_learning.section),
    "promotion": titled("How often a candidate is promoted", promotion.section),
    "serving": titled("Serving", serving.section),
    "chaos": titled("What breaks", chaos_report.section),
}


def results(folder: Path) -> str:
    """The whole page, from the files in ``folder``."""
    parts = [HEAD]
    for name, section in SECTIONS.items():
        stored = folder / f"{name}.json"
        parts.append(
            section(read_json(stored))
            if stored.exists()
            else f"## {name.capitalize().replace('_', ' ')}\n\nNot run yet."
        )
    difficulty = folder / "difficulty.md"
    if difficulty.exists():
        parts.append(difficulty.read_text().strip())
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> Path:
    """``python -m benchmarks.report``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the stored results")
    folder: Path = parser.parse_args(arguments).out
    path = folder.parent / "RESULTS.md" if folder == RESULTS else folder / "RESULTS.md"
    write_bytes(path, results(folder).encode())
    return path


if __name__ == "__main__":
    print(main())
