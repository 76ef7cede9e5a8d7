"""How hard the frozen line is: success of every player that needs no training of a policy.

``python -m benchmarks.difficulty`` plays training and validation environments, never the hold-out, and writes
``benchmarks/results/difficulty.md`` and the same figures into ``docs/difficulty.md``. Everything is seeded: a second
run prints the same (the diagnoser, on another machine, to within what its matrix products round).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentpipe.environments.catalog import Catalog, EnvironmentSpec, load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.demonstrator import DemonstratorPlayer
from agentpipe.environments.diagnoser import DiagnoserPlayer, fit_diagnosis
from agentpipe.environments.layout import MODES, REASONS, SIMULATOR_VERSION, Purpose
from agentpipe.environments.line_profile import LineProfile, default_profile
from agentpipe.environments.parameters import INTENSITIES, KINDS, cell_name
from agentpipe.environments.players import OraclePlayer, Player, RandomPlayer
from agentpipe.environments.pool import LinePool, build_pool
from agentpipe.environments.rules import RulesPlayer
from agentpipe.environments.table import DisturbanceTable, load_table
from agentpipe.evaluation.rollout import play_first_episodes
from agentpipe.evaluation.statistics import mean_interval, success_interval
from agentpipe.storage import write_bytes
from benchmarks.measure import RESULTS, ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Columns = dict[str, npt.NDArray[np.generic]]

DIAGNOSES = 3  # episodes of each training environment that the diagnoser learns from
DOCUMENT = ROOT / "docs" / "difficulty.md"
BEGIN, END = "<!-- figures: written by benchmarks/difficulty.py -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Line:
    """What is played."""

    catalog: Catalog
    table: DisturbanceTable
    profile: LineProfile
    seed: int

    def pool(self, environments: Sequence[EnvironmentSpec], purpose: Purpose) -> LinePool:
        """A pool with every disturbance on."""
        return build_pool(environments, self.table, self.profile, seed=self.seed, purpose=purpose)

    def players(self) -> list[Player]:
        """From the worst to the best; the diagnoser is trained on training environments."""
        labelled = self.pool(self.catalog.environments("train"), Purpose.TRAIN)
        diagnoser = DiagnoserPlayer(fit_diagnosis(labelled, DIAGNOSES, seed=self.seed))
        return [RandomPlayer(), RulesPlayer(self.profile), diagnoser, DemonstratorPlayer(), OraclePlayer()]


@dataclass(frozen=True)
class Played:
    """Results of one player on one split, a row an environment and a column an episode."""

    environments: Sequence[EnvironmentSpec]
    columns: Columns

    def success(self, chosen: npt.NDArray[np.bool_] | None = None) -> str:
        """Share and 95 % interval, clustered by environment, of the ``chosen`` bool[rows, episodes]."""
        won = self.columns["success"]
        chosen = np.ones(won.shape, np.bool_) if chosen is None else chosen
        rows = np.broadcast_to(np.arange(len(won))[:, None], won.shape)[chosen]
        found = success_interval(won[chosen], rows)
        return f"{100 * found.value:.1f} % [{100 * found.low:.1f}, {100 * found.high:.1f}]"

    def mean(self, column: str) -> str:
        """Mean of a result over all episodes."""
        values = self.columns[column].astype(np.float64)
        rows = np.broadcast_to(np.arange(len(values))[:, None], values.shape)
        return f"{mean_interval(values.ravel(), rows.ravel()).value:.1f}"

    def in_cell(self, cell: str) -> npt.NDArray[np.bool_]:
        """Where the environment is of ``cell``."""
        rows = np.array([environment.cell == cell for environment in self.environments])
        return np.broadcast_to(rows[:, None], self.columns["success"].shape)


def spread(environments: Sequence[EnvironmentSpec], count: int) -> list[EnvironmentSpec]:
    """``count`` of them, evenly spread; all where there are no more."""
    count = min(count, len(environments))
    return [environments[k * len(environments) // count] for k in range(count)]


def play(line: Line, player: Player, environments: Sequence[EnvironmentSpec], episodes: int) -> Played:
    """The first ``episodes`` episodes of each environment."""
    names = [environment.environment_id for environment in environments]
    pool = line.pool(environments, Purpose.VALIDATION)
    return Played(environments, play_first_episodes(pool, player, episodes, environment_ids=names))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def players_table(played: dict[str, dict[str, Played]]) -> str:
    """Success by player and split, and what its decisions cost."""
    rows = [
        [
            name,
            splits["train"].success(),
            splits["validation"].success(),
            splits["train"].mean("decisions"),
            splits["train"].mean("decision_seconds"),
        ]
        for name, splits in played.items()
    ]
    return table(["player", "success, training", "success, validation", "decisions", "decision seconds"], rows)


def cells_table(played: dict[str, dict[str, Played]]) -> str:
    """Success on training environments by disturbance kind and intensity."""
    names = [name for name in played if name != "demonstrator"]
    rows = []
    for kind in KINDS:
        for intensity in INTENSITIES:
            cell = cell_name(kind, intensity)
            each = [played[name]["train"] for name in names]
            rows.append([cell, *(one.success(one.in_cell(cell)) for one in each)])
    return table(["cell", *names], rows)


def modes_table(played: dict[str, dict[str, Played]], profile: LineProfile) -> str:
    """Success on training environments by true fault."""
    names = [name for name in played if name != "demonstrator"]
    rows = []
    called = [f"{slot} {mode.name}" for slot, mode in zip(MODES, profile.modes, strict=False)]
    for slot, mode in enumerate([*called, *MODES[len(called) :]]):
        each = [played[name]["train"] for name in names]
        rows.append([mode.replace("_", " "), *(one.success(one.columns["mode"] == slot) for one in each)])
    return table(["fault", *names], rows)


def reasons_table(played: dict[str, dict[str, Played]]) -> str:
    """Outcomes on training environments, in per cent of episodes."""
    rows = []
    for index, reason in enumerate(REASONS):
        shares = [100 * (splits["train"].columns["reason"] == index).mean() for splits in played.values()]
        rows.append([reason.replace("_", " "), *(f"{share:.1f}" for share in shares)])
    return table(["outcome, %", *played], rows)


def report(line: Line, train: int, episodes: int) -> str:
    """All figures as Markdown."""
    chosen = {
        "train": spread(line.catalog.environments("train"), train),
        "validation": list(line.catalog.environments("validation")),
    }
    counts = {"train": episodes, "validation": 4 * episodes}
    played = {
        player.name: {split: play(line, player, chosen[split], counts[split]) for split in chosen}
        for player in line.players()
    }
    origin = (
        f"Simulator {SIMULATOR_VERSION}, line profile `{line.profile.name}` ({line.profile.digest[:12]}), disturbance "
        f"table {line.table.version[:12]}, all disturbances on, seed {line.seed}: {len(chosen['train']):,} training "
        f"environments × {counts['train']} episodes, {len(chosen['validation'])} validation environments × "
        f"{counts['validation']} episodes (purpose `validation`). The diagnoser learned from {DIAGNOSES} episodes of "
        "each training environment (purpose `train`). Brackets: 95 % interval, clustered by environment. The hold-out "
        "split was not played."
    )
    parts = [
        origin,
        players_table(played),
        "By cell (training environments):",
        cells_table(played),
        "By true fault (training environments):",
        modes_table(played, line.profile),
        "How episodes end (training environments):",
        reasons_table(played),
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> Path:
    """``python -m benchmarks.difficulty``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.difficulty", description=__doc__)
    parser.add_argument("--train", type=int, default=1_500, help="training environments to play")
    parser.add_argument("--episodes", type=int, default=2, help="of each; four times as many in validation")
    parser.add_argument("--seed", type=int, default=0, help="root seed")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of difficulty.md")
    given = parser.parse_args(arguments)
    line = Line(load_catalog(), load_table(data_dir() / "disturbances.csv"), default_profile(), given.seed)
    figures = report(line, given.train, given.episodes)
    path: Path = given.out / "difficulty.md"
    write_bytes(path, f"## Difficulty of the line\n\n{figures}\n".encode())
    if given.out == RESULTS and DOCUMENT.exists():
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        write_bytes(DOCUMENT, f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}".encode())
    return path


if __name__ == "__main__":
    print(main())
