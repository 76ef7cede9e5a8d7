"""What an arm's policy gradient begins with: cloned weights, those of a few demonstrations, or random ones."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.claims_run import decisive, recipe

if TYPE_CHECKING:
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.policy.normalisation import ObservationStatistics
    from agentpipe.learning.policy.package import PolicyPackage
    from benchmarks.buffer_learning import Scene
    from benchmarks.claims_run import Arm, Sizes


def starting_weights(
    arm: Arm, options: TrainingOptions, scene: Scene, statistics: ObservationStatistics, starts: Path, sizes: Sizes
) -> tuple[PolicyPackage | None, int]:
    """Weights, and how many steps of experts they cost; ``None`` for random ones."""
    if arm.demonstrations:
        return demonstrated_start(arm.demonstrations, options, scene, statistics)
    if options.warm_up is not None:
        return cloned_start(options, scene, statistics, sizes, starts)
    return None, 0


def demonstrated_start(
    episodes: int, options: TrainingOptions, scene: Scene, statistics: ObservationStatistics
) -> tuple[PolicyPackage, int]:
    """Weights cloned from one recorded episode of the expert in each of so many environments, and no more than that.

    They are learned from in several passes and judged on held-out ones, see
    :mod:`agentpipe.learning.cloning.demonstrated`.
    """
    from agentpipe.environments.demonstrator import DemonstratorPlayer
    from agentpipe.environments.layout import ACTION_COUNT, ACTION_NAMES, OBSERVATION_SIZE, SIMULATOR_VERSION, Purpose
    from agentpipe.experience.record import record_trajectories
    from agentpipe.feedback.schema import FeedbackShape
    from agentpipe.learning.aids.options import DemonstrationOptions
    from agentpipe.learning.cloning.demonstrated import clone_demonstrations
    from agentpipe.learning.cloning.demonstrations import read_demonstrations
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.state import TrainingState
    from agentpipe.learning.workers import Workers, single_threaded_torch
    from benchmarks.buffer_learning import chosen_at_random

    with tempfile.TemporaryDirectory(prefix="agentpipe-claims-demonstrations-") as name:
        folder = Path(name) / "recorded"
        record_trajectories(
            lambda some: scene.pool(some, Purpose.COLLECT),
            DemonstratorPlayer(),
            environments=chosen_at_random(scene.train, episodes, scene.seed),
            table=scene.table,
            episodes_per_env=1,
            out_dir=folder,
            cell="all",
            policy_version="demonstrator",
            durability="process",
        )
        shape = FeedbackShape(OBSERVATION_SIZE, ACTION_COUNT)
        found = read_demonstrations([folder], shape, least=episodes, successes_only=False)
    with single_threaded_torch(), Workers(1) as workers:
        state = TrainingState(statistics, ACTION_COUNT, len(scene.train), options)
        clone_demonstrations(found, state, DemonstrationOptions(), options.ppo, workers)
    names = statistics.names, ACTION_NAMES
    return PolicyPackage(state.network, statistics, *names, SIMULATOR_VERSION), int(found.length.sum())


def training_pool(scene: Scene, rows: int) -> LinePool:
    """``rows`` environments side by side; where there are fewer different ones, copies play later episodes of theirs.

    So arms with fewer environments have batches and updates of the same size.
    """
    from agentpipe.environments.fixed import build_fixed
    from agentpipe.environments.gym_env import COPY_STRIDE
    from agentpipe.environments.gym_line import copies
    from agentpipe.environments.layout import Purpose
    from agentpipe.environments.pool import LinePool

    train = scene.train
    if rows == len(train):
        return scene.pool(train, Purpose.TRAIN)
    chosen = [train[row % len(train)] for row in range(rows)]
    names = tuple(environment.environment_id for environment in chosen)
    first = COPY_STRIDE * copies(names)

    class Copied(LinePool):
        """Every reset goes to a copy's own episodes."""

        def reset(self, episode: Any = 0) -> None:  # noqa: ANN401 - as its base class: a number or an array
            super().reset(first + episode)

    fixed = build_fixed(chosen, scene.table, scene.profile, seed=scene.seed, purpose=Purpose.TRAIN)
    return Copied(fixed, names, threads=scene.threads)


def cloned_start(
    options: TrainingOptions, scene: Scene, statistics: ObservationStatistics, sizes: Sizes, starts: Path
) -> tuple[PolicyPackage, int]:
    """The weights that arms of this network and seed begin with, and how many expert steps they cost.

    What an arm changes of the policy gradient does not reach the cloning: it is the recipe's.
    """
    from agentpipe.environments.demonstrator import DemonstratorPlayer
    from agentpipe.environments.layout import SIMULATOR_VERSION
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.trainer import train
    from agentpipe.storage import canonical_json, digest_bytes, read_json, write_json

    plain = recipe(sizes, scene.seed, 1, cold=False)
    chosen = dataclasses.replace(plain, network=options.network, warm_up=options.warm_up, budget_steps=0)
    key = [decisive(chosen), len(scene.train), sizes.rows, SIMULATOR_VERSION]
    folder = starts / digest_bytes(canonical_json(key))[:24]
    if not (folder / "steps.json").exists():
        chosen = dataclasses.replace(chosen, threads=options.threads)
        with tempfile.TemporaryDirectory(prefix="agentpipe-claims-start-") as name:
            pool = training_pool(scene, sizes.rows)
            made = train(pool, statistics, chosen, directory=Path(name), expert=DemonstratorPlayer())
            pool.close()
        if made.reason == "interrupted":
            raise KeyboardInterrupt
        assert made.warm_up is not None
        made.package.save(folder / "package")
        write_json(folder / "steps.json", made.warm_up.samples)  # last: it says that the package is there
    return PolicyPackage.load(folder / "package"), int(read_json(folder / "steps.json"))
