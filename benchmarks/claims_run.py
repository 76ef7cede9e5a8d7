"""One arm under one seed: what it starts from, its training, and everything that is measured of the policy."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from benchmarks import claims_measures
from benchmarks.buffer_learning import Scene, chosen_at_random
from benchmarks.buffer_learning import Sizes as SceneSizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.policy.package import PolicyPackage

    Change = Callable[[TrainingOptions], TrainingOptions]


@dataclass(frozen=True)
class Sizes:
    """How large every run is."""

    rows: int = 7_000
    """environments side by side"""
    warm_up_episodes: int = 60_000
    """expert episodes cloned before the policy gradient"""
    budget: int = 2_100_000
    """steps of the policy gradient"""
    cold_rows: int = 256
    """side by side, from random weights"""
    cold_budget: int = 1_300_000
    """steps from random weights"""
    validation: int = 245
    validation_episodes: int = 8
    looks: int = 19
    """at the validation split, evenly over the budget"""
    holdout: int = 3_000
    holdout_episodes: int = 2
    sampled_steps: int = 256
    """of each validation environment, for reach and entropy"""


SMOKE = Sizes(64, 200, 2_100, 64, 2_100, 15, 1, 2, 30, 1, 48)


@dataclass(frozen=True)
class Arm:
    """One configuration. Two arms that end up with equal options share their runs."""

    name: str
    change: Change
    """what is different from the recipe's options"""
    cold: bool = False
    """from random weights, with the recipe for it, instead of from cloned ones"""
    environments: int | None = None
    """different training environments; none = as many as there are rows"""
    demonstrations: int = 0
    """episodes of the expert that are all there is to clone, before the policy gradient; only with ``cold``"""
    waiting: str = ""
    """what is not there yet that it needs"""


def recipe(sizes: Sizes, seed: int, threads: int, *, cold: bool) -> TrainingOptions:
    """What every arm begins with: the standard profile's options, but for this.

    Live samples only, no aid and no orchestrator, learning rate and entropy weight constant, so that the budget decides
    nothing. From random weights there are fewer environments, longer rollouts, smaller minibatches and more epochs:
    many small updates are what leaves the plateau there.
    """
    from agentpipe.learning.aids.options import AidOptions
    from agentpipe.learning.options import training_options
    from agentpipe.settings import Settings

    chosen = training_options(Settings.model_construct(threads=threads, seed=seed))
    ppo = dataclasses.replace(chosen.ppo, schedule="constant", final_entropy_share=1.0)
    rows, budget = sizes.rows, sizes.budget
    if cold:
        rows, budget = sizes.cold_rows, sizes.cold_budget
        ppo = dataclasses.replace(
            ppo, rollout_steps=32, minibatch=512, epochs=4, learning_rate=5e-4, entropy_weight=0.01
        )
    assert chosen.warm_up is not None
    return dataclasses.replace(
        chosen,
        ppo=ppo,
        warm_up=None if cold else dataclasses.replace(chosen.warm_up, episodes=sizes.warm_up_episodes),
        replay=dataclasses.replace(chosen.replay, share=0.0),
        aids=AidOptions(curiosity="off", dynamic_lambda="off", layer_rates="off", distillation="off"),
        orchestrator=None,
        stream=None,
        budget_steps=budget,
        patience=None,
        validate_every=max(1, round(budget / (ppo.rollout_steps * rows) / sizes.looks)),
        checkpoint_every=10**9,
    )


def options_of(arm: Arm, sizes: Sizes, seed: int, threads: int) -> TrainingOptions:
    """The recipe's options, changed as the arm says."""
    return arm.change(recipe(sizes, seed, threads, cold=arm.cold))


def key_of(arm: Arm, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Everything that the figures of an arm depend on, but the code."""
    from agentpipe.environments.layout import SIMULATOR_VERSION

    options = decisive(options_of(arm, sizes, seed, 1))
    more: dict[str, Any] = {"environments": arm.environments, "cold": arm.cold, "seed": seed}
    if arm.demonstrations:
        more["demonstrations"] = arm.demonstrations
    return {"options": options, "sizes": dataclasses.asdict(sizes), "simulator": SIMULATOR_VERSION, **more}


def decisive(options: TrainingOptions) -> dict[str, Any]:
    """Options that a run depends on.

    Thresholds of aids of which none is on, and what belongs to a replay without a share, change nothing: without them
    a run stays the same run when one of their defaults is changed. How a training would clone recorded episodes changes
    nothing either: arms that have some clone them before.
    """
    from agentpipe.learning.aids.options import Mode

    content = options.decisive()
    content.pop("demonstrations", None)
    modes = [value for value in content["aids"].values() if value in get_args(Mode)]
    if set(modes) == {"off"}:
        content["aids"] = None
    if options.replay.share == 0:
        content["replay"] = None
    return content


def run(arm: Arm, sizes: Sizes, seed: int, threads: int, starts: Path) -> dict[str, Any]:
    """Trains an arm and measures its policy.

    Args:
        arm: which.
        sizes: of everything.
        seed: of environments, weights and all random numbers.
        threads: they change no figure but rates.
        starts: folder where cloned weights are kept, for other arms that start from them.

    Raises:
        KeyboardInterrupt: training was told to end; nothing of it is kept.
    """
    from agentpipe.learning.workers import single_threaded_torch

    with single_threaded_torch():  # as in training: on several threads torch adds in another order
        return _run(arm, sizes, seed, threads, starts)


def _run(arm: Arm, sizes: Sizes, seed: int, threads: int, starts: Path) -> dict[str, Any]:
    from agentpipe.learning.trainer import train
    from benchmarks.claims_distilled import distilled
    from benchmarks.claims_start import starting_weights, training_pool

    scene = _scene(arm, sizes, seed, threads)
    options, statistics = options_of(arm, sizes, seed, threads), scene.statistics()
    start, cloned = starting_weights(arm, options, scene, statistics, starts, sizes)
    with tempfile.TemporaryDirectory(prefix="agentpipe-claims-") as name:
        folder = Path(name)
        pool = training_pool(scene, sizes.cold_rows if arm.cold else sizes.rows)
        began = time.process_time()
        result = train(
            pool,
            statistics,
            dataclasses.replace(options, warm_up=None),
            directory=folder / "train",
            initial=start,
            validate=scene.validate,
        )
        worked = time.process_time() - began
        pool.close()
        if result.reason == "interrupted":
            raise KeyboardInterrupt
        samples = options.ppo.rollout_steps * pool.size
        more: dict[str, Any] = {}
        package = result.package
        if options.aids.distillation != "off":
            package, more = distilled(result, options, scene, folder / "distilled")
        return {
            "seed": seed,
            "cloned_steps": cloned,
            "steps": cloned + result.environment_steps,
            "curve": [[cloned + update * samples, score] for update, score in result.validations],
            "stopped_by": result.reason,
            "train_seconds": round(result.seconds, 1),
            "processor_seconds": round(worked, 1),
            "steps_per_processor_second": round(result.environment_steps / worked),
            **more,
            **judged(package, scene, sizes),
            **_measured(package, result.checkpoint, options, scene, sizes, folder),
        }


def _scene(arm: Arm, sizes: Sizes, seed: int, threads: int) -> Scene:
    rows = sizes.cold_rows if arm.cold else sizes.rows
    environments = min(arm.environments or rows, rows)
    return Scene(seed, SceneSizes(environments, sizes.validation, sizes.validation_episodes), threads)


def judged(package: PolicyPackage, scene: Scene, sizes: Sizes) -> dict[str, float]:
    """Success and mean simulated seconds of a decision on held-out environments, of the policy and of the rules."""
    from agentpipe.environments.catalog import load_catalog
    from agentpipe.environments.layout import Purpose
    from agentpipe.environments.rules import RulesPlayer
    from agentpipe.evaluation.holdout import evaluate
    from agentpipe.learning.policy.player import PolicyPlayer

    report = evaluate(
        [PolicyPlayer(package), RulesPlayer(scene.profile)],
        chosen_at_random(load_catalog().environments("holdout"), sizes.holdout, 0),
        scene.table,
        scene.profile,
        seed=scene.seed,
        purpose=Purpose.REPORT,
        episodes_per_env=sizes.holdout_episodes,
        trained_on=scene.train,
        threads=scene.threads,
    )
    policy, rules = report.player("policy"), report.player("rules")
    return {
        "success": policy["success"],
        "decision_seconds": policy["decision_seconds"],
        "rules_success": rules["success"],
        "rules_decision_seconds": rules["decision_seconds"],
    }


def _measured(
    package: PolicyPackage, checkpoint: Path, options: TrainingOptions, scene: Scene, sizes: Sizes, folder: Path
) -> dict[str, float]:
    """Reach, spread of entropy, shares of draws, and of the orchestrator's moves."""
    played = claims_measures.sampled(package, scene, sizes.sampled_steps)
    reward = claims_measures.scaled_rewards(played, checkpoint, options.ppo.reward_clamp)
    return {
        **claims_measures.entropy_spread(package, played),
        **claims_measures.reach(played, reward, options.ppo),
        **claims_measures.drawn(package, scene, folder / "drawn"),
        **claims_measures.steered(folder / "train"),
    }
