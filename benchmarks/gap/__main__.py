"""Where the points between a policy and the oracle are lost: ``python -m benchmarks.gap --home FOLDER``.

Explains the champion of a home, or another policy by its package. See :mod:`benchmarks.gap.explain`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from agentpipe.environments.catalog import load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.layout import A_MACHINE, ACTION_COUNT, ACTION_NAMES, OBSERVATION_NAMES, OBSERVATION_SIZE
from agentpipe.environments.line_profile import default_profile
from agentpipe.environments.table import load_table
from agentpipe.errors import InputError
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.succession.champion import ChampionStore
from agentpipe.storage import write_bytes
from benchmarks.difficulty import DOCUMENT, Line
from benchmarks.gap.explain import SMOKE, Sizes, explain
from benchmarks.gap.report import filled, section
from benchmarks.measure import RESULTS, results_folder, stamp, store

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL: Final = NetworkOptions(hidden=(8,), perception=8, memory=4)


def champion_of(home: Path) -> PolicyPackage:
    """The champion's package.

    Raises:
        InputError: the home has no champion.
    """
    current = ChampionStore(home / "champion").current()
    if current is None:
        remedy = "train one with `agentpipe run`, or give --package"
        raise InputError("this home has no champion", file=home, remedy=remedy)
    return PolicyPackage.load(home / current.package)


def untrained(options: NetworkOptions = SMALL) -> PolicyPackage:
    """A policy that knows nothing and measures nothing, for a smoke run."""
    network = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, options)
    network.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.actor_head.bias[:A_MACHINE] = -10.0
    return PolicyPackage(network, ObservationStatistics.empty(OBSERVATION_NAMES), OBSERVATION_NAMES, ACTION_NAMES)


def main(arguments: Sequence[str] | None = None) -> Path:
    """``python -m benchmarks.gap``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gap", description=__doc__)
    parser.add_argument("--home", type=Path, default=Path(".agentpipe"), help="whose champion is explained")
    parser.add_argument("--package", type=Path, help="folder of the policy's package, instead of a champion")
    parser.add_argument("--train", type=int, default=Sizes.train, help="training environments, 2 episodes of each")
    parser.add_argument("--validation", type=int, default=Sizes.validation, help="8 episodes of each")
    parser.add_argument("--holdout", type=int, default=0, help="held-out environments to report on, 1 episode of each")
    parser.add_argument("--no-curve", action="store_true", help="no classifiers")
    parser.add_argument("--seed", type=int, default=0, help="root seed")
    parser.add_argument("--smoke", action="store_true", help="small sizes: shows that it works, measures nothing")
    parser.add_argument("--out", type=Path, help="folder of gap.json")
    given = parser.parse_args(arguments)
    out = results_folder(given.out, smoke=given.smoke)
    origin = stamp("python -m benchmarks.gap")
    sizes = SMOKE if given.smoke else Sizes(train=given.train, validation=given.validation, holdout=given.holdout)
    if given.no_curve:
        sizes = dataclasses.replace(sizes, examples=(), passes=())
    line = Line(load_catalog(), load_table(data_dir() / "disturbances.csv"), default_profile(), given.seed)
    if given.package is not None:
        package = PolicyPackage.load(given.package)
    else:
        package = untrained() if given.smoke else champion_of(given.home)
    content = explain(package, line, sizes, lambda text: print(text, file=sys.stderr, flush=True))
    path = store("gap", origin, [], out, smoke=given.smoke, **content)
    if out == RESULTS and not given.smoke and DOCUMENT.exists():
        write_bytes(DOCUMENT, filled(DOCUMENT.read_text(), content).encode())
    print(section(content))
    return path


if __name__ == "__main__":
    print(main())
