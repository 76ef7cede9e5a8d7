"""agentpipe in the race: from random weights, with what its peers have; and as ``agentpipe run`` trains.

Both run :func:`agentpipe.learning.trainer.train`, all it does included: events, checkpoint and package with their
flushes to disk. What would only record live episodes is off.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentpipe.environments.layout import Purpose
from benchmarks.peers_settings import CLIP, DISCOUNT, GAE_LAMBDA, HIDDEN

if TYPE_CHECKING:
    from agentpipe.learning.gates import WarmUpFigures
    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.result import TrainingResult
    from benchmarks.peers_line import Ground
    from benchmarks.peers_recorder import Recorder
    from benchmarks.peers_settings import Setting

_PROBE_EPISODES, _PROBE_UPDATES = 20_000, 4
_SAFE = 0.97
"""of what a probe says fits: a run must not go beyond the steps or seconds that all have"""
_ATTEMPTS = 3
"""at most: a run that went beyond them does not count, and is made again, smaller"""
NEVER = 10**12


def default_options(ground: Ground) -> TrainingOptions:
    """As ``agentpipe run`` trains, live episodes not recorded."""
    from agentpipe.learning.options import training_options
    from agentpipe.settings import Settings

    chosen = training_options(Settings.model_construct(threads=ground.cores, seed=ground.seed))
    return dataclasses.replace(chosen, stream=None, checkpoint_every=NEVER)


def cold_options(ground: Ground, setting: Setting) -> TrainingOptions:
    """From random weights and live samples alone, in the sizes of ``setting``; else the defaults."""
    chosen = default_options(ground)
    ppo = dataclasses.replace(
        chosen.ppo,
        rollout_steps=setting.rollout_steps,
        minibatch=setting.minibatch,
        epochs=setting.epochs,
        learning_rate=setting.learning_rate,
        schedule="linear" if setting.anneal else "constant",
        entropy_weight=setting.entropy_weight,
        final_entropy_share=1.0,
        discount=DISCOUNT,
        gae_lambda=GAE_LAMBDA,
        clip=chosen.ppo.clip if setting.segments else (CLIP,) * len(chosen.ppo.clip),
    )
    network = dataclasses.replace(
        chosen.network, hidden=HIDDEN, shared_trunk=setting.shared, activation=setting.activation
    )
    replay = dataclasses.replace(chosen.replay, share=0.0)
    return dataclasses.replace(
        chosen, network=network, ppo=ppo, replay=replay, warm_up=None, budget_steps=NEVER, patience=None, target=None
    )


def train_cold(ground: Ground, setting: Setting, recorder: Recorder) -> None:
    """Trains until the recorder says that it is enough; it keeps packages."""
    options = dataclasses.replace(cold_options(ground, setting), validate_every=1)
    over = False
    updates = -1

    def look(package: PolicyPackage) -> float:
        nonlocal over, updates
        updates += 1
        over = recorder.look(updates * options.ppo.rollout_steps * pool.size, lambda: package)
        return 0.0

    if setting.anneal:
        options = dataclasses.replace(options, budget_steps=_steps_of(ground, setting, recorder))
    pool = ground.scene.pool(ground.environments(setting), Purpose.TRAIN)
    recorder.begin()
    _train(ground, pool, options, validate=look, stop=lambda: over)
    pool.close()


def _train(ground: Ground, pool: Any, options: TrainingOptions, **more: Any) -> TrainingResult:  # noqa: ANN401
    """One training in a folder that is thrown away.

    Raises:
        KeyboardInterrupt: it was told to end by someone else than the race.
    """
    from agentpipe.learning.trainer import train

    with tempfile.TemporaryDirectory(prefix="agentpipe-peers-") as name:
        result = train(pool, ground.statistics, options, directory=Path(name), **more)
    stop = more.get("stop")
    if result.reason == "interrupted" and not (stop is not None and stop()):
        raise KeyboardInterrupt
    return result


def _steps_of(ground: Ground, setting: Setting, recorder: Recorder) -> int:
    """Over how many steps a learning rate falls: those of the race, or as many as should fit into its seconds."""
    if recorder.end == "steps":
        return ground.sizes.steps
    pool = ground.scene.pool(ground.environments(setting), Purpose.TRAIN)
    options = cold_options(ground, setting)
    options = dataclasses.replace(options, budget_steps=_PROBE_UPDATES * options.ppo.rollout_steps * pool.size)
    rate = _train(ground, pool, options).steps_per_second
    pool.close()
    return int(rate * recorder.last_second)


def probe(ground: Ground) -> dict[str, float]:
    """How fast a default training goes here: short ones, of which two clone, so that what both begin with is known."""
    options = default_options(ground)
    episodes = min(_PROBE_EPISODES, 10 * len(ground.scene.train))
    pool = ground.scene.pool(ground.scene.train, Purpose.TRAIN)
    (few, few_seconds), (many, many_seconds) = (_clone(ground, pool, share * episodes) for share in (1, 3))
    each = max(many_seconds - few_seconds, 0.1 * many_seconds) / max(1, many.samples - few.samples)
    steps = _PROBE_UPDATES * options.ppo.rollout_steps * pool.size
    short = dataclasses.replace(options, warm_up=None, budget_steps=steps, patience=None)
    with tempfile.TemporaryDirectory(prefix="agentpipe-peers-") as name:
        began = time.perf_counter()
        shard = ground.scene.recorded(Path(name) / "recorded")
        recorded_seconds = time.perf_counter() - began
        live = _train(ground, pool, short, recorded=[shard])
    pool.close()
    return {
        "cloned_steps_per_second": 1.0 / each,
        "steps_per_episode": many.samples / many.episodes,
        "steps_per_second": live.steps_per_second,
        "look_seconds": _look_seconds(ground, live.package),
        "begin_seconds": recorded_seconds + max(0.0, few_seconds - few.samples * each),
    }


def _clone(ground: Ground, pool: Any, episodes: int) -> tuple[WarmUpFigures, float]:  # noqa: ANN401
    """Clones so many episodes and no more; figures and seconds."""
    from agentpipe.environments.demonstrator import DemonstratorPlayer

    options = default_options(ground)
    assert options.warm_up is not None
    warm_up = dataclasses.replace(options.warm_up, episodes=episodes)
    began = time.perf_counter()
    made = _train(
        ground, pool, dataclasses.replace(options, warm_up=warm_up, budget_steps=0), expert=DemonstratorPlayer()
    )
    assert made.warm_up is not None
    return made.warm_up, time.perf_counter() - began


def _look_seconds(ground: Ground, package: PolicyPackage) -> float:
    began = time.perf_counter()
    ground.scene.validate(package)
    return time.perf_counter() - began


def scaled(ground: Ground, rates: dict[str, float], axis: str, safe: float = _SAFE) -> tuple[TrainingOptions, float]:
    """The default training, shrunk in all its parts so that it fits into the steps or the seconds of the race.

    Recorded episodes count: rules play one of each training line before training. The policy gradient gets whole
    rollouts. ``safe`` is how much of what fits by ``rates`` is used.
    """
    options = default_options(ground)
    assert options.warm_up is not None
    cloned = options.warm_up.episodes * rates["steps_per_episode"]
    if axis == "steps":
        recorded = len(ground.scene.train) * rates["steps_per_episode"]
        whole, free = cloned + options.budget_steps, ground.sizes.steps - recorded
    else:
        updates = options.budget_steps / (options.ppo.rollout_steps * len(ground.scene.train))
        looks = rates["look_seconds"] * updates / options.validate_every
        whole = cloned / rates["cloned_steps_per_second"] + options.budget_steps / rates["steps_per_second"] + looks
        free = ground.sizes.seconds - rates["begin_seconds"]
    share = max(1e-3, min(1.0, safe * free / whole))
    warm_up = dataclasses.replace(options.warm_up, episodes=max(1, int(share * options.warm_up.episodes)))
    rollout = options.ppo.rollout_steps * len(ground.scene.train)
    budget = max(1, int(share * options.budget_steps) // rollout) * rollout
    return dataclasses.replace(options, warm_up=warm_up, budget_steps=budget), share


def train_as_run(ground: Ground, rates: dict[str, float], axis: str) -> tuple[PolicyPackage, dict[str, float]]:
    """Records by rule, clones, learns, looks at the validation split: the package, and what it cost.

    A run that went beyond the steps or seconds of the race is thrown away, and made again as much smaller; one that
    still does after some attempts is told by what it cost.
    """
    limit, safe = getattr(ground.sizes, axis), _SAFE
    for _ in range(_ATTEMPTS):
        package, cost = _as_run(ground, rates, axis, safe)
        if cost[axis] <= limit:
            break
        safe *= _SAFE * limit / cost[axis]
    return package, cost


def _as_run(ground: Ground, rates: dict[str, float], axis: str, safe: float) -> tuple[PolicyPackage, dict[str, float]]:
    from agentpipe.environments.demonstrator import DemonstratorPlayer

    options, share = scaled(ground, rates, axis, safe)
    with tempfile.TemporaryDirectory(prefix="agentpipe-peers-") as name:
        pool = ground.scene.pool(ground.scene.train, Purpose.TRAIN)
        began = time.perf_counter()
        shard = ground.scene.recorded(Path(name) / "recorded")
        result = _train(
            ground, pool, options, expert=DemonstratorPlayer(), recorded=[shard], validate=ground.scene.validate
        )
        seconds = time.perf_counter() - began
        pool.close()
        recorded = int(shard.episodes["steps"].sum())
    assert result.warm_up is not None
    steps = recorded + result.warm_up.samples + result.environment_steps
    return result.package, {"steps": steps, "seconds": seconds, "share": share, "cloned_steps": result.warm_up.samples}
