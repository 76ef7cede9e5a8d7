"""What the samplers are worth to training: environment steps to 85 % success, ``python -m benchmarks.buffer_learning``.

Within a seed every contestant starts from the same weights, a short warm-up, and learns in the same environments with
the same options; they differ in who draws the recorded quarter of each batch (or in having none).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measure import results_folder, stamp, store
from benchmarks.seeds import interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.layout import Purpose
    from agentpipe.environments.pool import LinePool
    from agentpipe.experience.store.shard import Shard
    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.policy.normalisation import ObservationStatistics
    from agentpipe.learning.policy.package import PolicyPackage

NONE = "none"
ARMS = (NONE, "uniform", "causal")
"""none: live samples only, as many a gradient step"""


@dataclass(frozen=True)
class Sizes:
    """How large the comparison is."""

    environments: int = 7_000
    validation: int = 245
    validation_episodes: int = 8
    warm_up_episodes: int = 80_000
    recorded_episodes: int = 1
    """of each environment, by the rules that act at random one time in five"""
    target: float = 0.85
    budget: int = 6_000_000
    validate_every: int = 2


SMOKE = Sizes(60, 15, 1, 300, 1, 0.2, 3_000, 1)


class Scene:
    """Environments, table and profile of one seed."""

    def __init__(self, seed: int, sizes: Sizes, threads: int) -> None:
        from agentpipe.environments.catalog import load_catalog
        from agentpipe.environments.datafiles import data_dir
        from agentpipe.environments.line_profile import default_profile
        from agentpipe.environments.table import load_table

        self.seed, self.sizes, self.threads = seed, sizes, threads
        self.table, self.profile = load_table(data_dir() / "disturbances.csv"), default_profile()
        catalog = load_catalog()
        self.train = chosen_at_random(catalog.environments("train"), sizes.environments, seed)
        self.validation = chosen_at_random(catalog.environments("validation"), sizes.validation, seed)

    def pool(self, environments: Sequence[EnvironmentSpec], purpose: Purpose) -> LinePool:
        """A pool of this seed."""
        from agentpipe.environments.pool import build_pool

        return build_pool(environments, self.table, self.profile, seed=self.seed, purpose=purpose, threads=self.threads)

    def statistics(self) -> ObservationStatistics:
        """Of observations under the rules."""
        from agentpipe.environments.layout import Purpose
        from agentpipe.environments.rules import RulesPlayer
        from agentpipe.learning.policy.normalisation import gather_statistics

        return gather_statistics(self.pool(self.train, Purpose.STATISTICS), RulesPlayer(self.profile), steps=64)

    def recorded(self, folder: Path) -> Shard:
        """What the rules have recorded, before training begins."""
        from agentpipe.environments.layout import Purpose
        from agentpipe.environments.rules import RulesPlayer
        from agentpipe.experience.behaviour import epsilon_player
        from agentpipe.experience.record import record_trajectories

        return record_trajectories(
            lambda some: self.pool(some, Purpose.COLLECT),
            epsilon_player(RulesPlayer(self.profile), 0.2),
            environments=self.train,
            table=self.table,
            episodes_per_env=self.sizes.recorded_episodes,
            out_dir=folder,
            cell="all",
            policy_version="rules",
            durability="process",
        )

    def validate(self, package: PolicyPackage) -> float:
        """Greedy success on the validation split."""
        from agentpipe.environments.layout import Purpose
        from agentpipe.evaluation.rollout import play_first_episodes
        from agentpipe.learning.policy.player import PolicyPlayer

        pool = self.pool(self.validation, Purpose.VALIDATION)
        names = [environment.environment_id for environment in self.validation]
        played = play_first_episodes(pool, PolicyPlayer(package), self.sizes.validation_episodes, environment_ids=names)
        return float(played["success"].mean())


def chosen_at_random(environments: Sequence[EnvironmentSpec], count: int, seed: int) -> list[EnvironmentSpec]:
    """``count`` of them, in their order; every so-and-so-manieth would be of the same cells."""
    rows = np.random.default_rng(seed).permutation(len(environments))[:count]
    return [environments[row] for row in sorted(rows)]


def options(scene: Scene) -> TrainingOptions:
    """The standard profile's, but for sizes; the learning rate does not fall, so that the budget decides nothing."""
    from agentpipe.learning.options import training_options
    from agentpipe.settings import Settings

    chosen = training_options(Settings.model_construct(threads=scene.threads, seed=scene.seed))
    assert chosen.warm_up is not None
    return dataclasses.replace(
        chosen,
        ppo=dataclasses.replace(chosen.ppo, schedule="constant", final_entropy_share=1.0, minibatch=8_192),
        warm_up=dataclasses.replace(chosen.warm_up, episodes=scene.sizes.warm_up_episodes),
        stream=None,
        target=scene.sizes.target,
        patience=None,
        budget_steps=scene.sizes.budget,
        validate_every=scene.sizes.validate_every,
        checkpoint_every=10**9,
    )


def compare(seed: int, sizes: Sizes, threads: int, folder: Path, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each contestant of one seed."""
    from agentpipe.environments.demonstrator import DemonstratorPlayer
    from agentpipe.environments.layout import Purpose
    from agentpipe.learning.trainer import train

    scene = Scene(seed, sizes, threads)
    statistics, recorded, chosen = scene.statistics(), scene.recorded(folder / "recorded"), options(scene)
    start = train(
        scene.pool(scene.train, Purpose.TRAIN),
        statistics,
        dataclasses.replace(chosen, budget_steps=0),
        directory=folder / "start",
        expert=DemonstratorPlayer(),
        validate=scene.validate,
    )
    tell(f"seed {seed}: starts from {start.best_validation:.1%}")
    rows = []
    for arm in ARMS:
        replay = dataclasses.replace(chosen.replay, **({"share": 0.0} if arm == NONE else {"sampler": arm}))
        result = train(
            scene.pool(scene.train, Purpose.TRAIN),
            statistics,
            dataclasses.replace(chosen, warm_up=None, replay=replay),
            directory=folder / arm,
            initial=start.package,
            recorded=[recorded],
            validate=scene.validate,
        )
        row = {
            "seed": seed,
            "sampler": arm,
            "start": start.best_validation,
            "steps": result.environment_steps if result.reason == "target" else None,
            "best": result.best_validation,
            "curve": [list(point) for point in result.validations],
            "seconds": round(result.seconds, 1),
        }
        tell(f"seed {seed}, {arm}: {row['steps'] or 'not within the budget'}, best {row['best']:.1%}")
        rows.append(row)
    return rows


def section(content: dict[str, Any]) -> str:
    """The Markdown section of ``RESULTS.md``."""
    sizes = content["sizes"]
    parts = [
        (
            f"{sizes['environments']:,} training environments, the same weights to start from within a seed (cloned"
            f" from {sizes['warm_up_episodes']:,} expert episodes), learning rate constant, a look at"
            f" {sizes['validation']} validation environments × {sizes['validation_episodes']} episodes every"
            f" {sizes['validate_every']} updates;"
            f" steps until a look shows {sizes['target']:.0%}, live environment steps alone. Recorded:"
            f" {sizes['recorded_episodes']} episode(s) of each environment, by rules that act at random one time in"
            f" five. Budget {sizes['budget']:,} steps. Differences are paired by seed, with 95 % t intervals over"
            f" {content['seeds']} seeds."
        ),
        "",
        "| recorded quarter drawn | steps, each seed | mean | against none | start, each seed |",
        "|---|---|---:|---:|---|",
    ]
    rows: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in content["rows"]:
        rows[row["sampler"]][row["seed"]] = row
    for arm, by_seed in rows.items():
        steps = [row["steps"] for row in by_seed.values()]
        each = ", ".join("not reached" if value is None else f"{value / 1e6:.2f} M" for value in steps)
        mean = "–" if None in steps else f"{sum(steps) / len(steps) / 1e6:.2f} M"
        start = ", ".join(f"{row['start']:.1%}" for row in by_seed.values())
        parts.append(f"| {arm} | {each} | {mean} | {_against(by_seed, rows[NONE])} | {start} |")
    return "\n".join(parts)


def _against(mine: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> str:
    """Paired difference of steps in millions with its interval."""
    pairs = [(mine[seed]["steps"], base[seed]["steps"]) for seed in mine]
    if mine is base or any(value is None for value in itertools.chain(*pairs)):
        return "–"
    mean, low, high = interval([(one - other) / 1e6 for one, other in pairs])
    return f"{mean:+.2f} M [{low:+.2f}, {high:+.2f}]"


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.buffer_learning``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer_learning", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny: shows that it works")
    parser.add_argument("--out", type=Path, help="folder of the results; of a smoke run by default a temporary one")
    chosen = parser.parse_args(arguments)
    out = results_folder(chosen.out, smoke=chosen.smoke)
    sizes, origin = SMOKE if chosen.smoke else Sizes(), stamp("python -m benchmarks.buffer_learning")
    rows: list[dict[str, Any]] = []
    for seed in chosen.seeds:
        with tempfile.TemporaryDirectory(prefix="agentpipe-buffer-learning-") as folder:
            rows += compare(seed, sizes, chosen.threads, Path(folder), lambda text: print(text, file=sys.stderr))
    more = {"sizes": dataclasses.asdict(sizes), "rows": rows, "seeds": len(chosen.seeds), "smoke": chosen.smoke}
    store("buffer_learning", origin, [], out, **more)
    print(section({**more}))


if __name__ == "__main__":
    main()
