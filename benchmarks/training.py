"""Environment steps a second of a whole training: collecting, learning and keeping books, nothing left out.

``python -m benchmarks.training`` trains, in turns,

- the line as ``agentpipe run`` does (7,000 environments, network and sizes of the standard profile): the policy
  gradient, and the warm-up that clones an expert;
- CartPole with two hidden layers of 64, in agentpipe's trainer, in Stable-Baselines3's PPO and in PPO as one program
  that JAX compiles, in the style of PureJaxRL, with the same sizes of rollout, minibatch and network, the same number
  of epochs and the same cores: once as small as its users run it, once with thousands of environments.

The mean return of the last episodes is kept beside each rate: it shows that what was measured has learned.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import purejax, stable_baselines
from benchmarks.line import frozen_line
from benchmarks.measure import Contestant, take_turns
from benchmarks.worker import Found, main

if TYPE_CHECKING:
    from agentpipe.learning.options import TrainingOptions

CARTPOLE = "agentpipe, the compiled CartPole"
LINE, WARM_UP = "agentpipe, production line, policy gradient", "agentpipe, production line, warm-up by cloning"


@dataclass(frozen=True)
class Schedule:
    """Sizes that all trainers get."""

    size: int
    """environments"""
    rollout_steps: int
    minibatch: int
    updates: int
    """of one turn"""
    epochs: int = 4
    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = 3e-4
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2

    @property
    def steps(self) -> int:
        """Environment steps of one turn."""
        return self.size * self.rollout_steps * self.updates


SMALL, LARGE = Schedule(64, 128, 2_048, updates=48), Schedule(4_096, 32, 32_768, updates=8)
SLOWER = 4
"""Stable-Baselines3 gets this many times fewer updates a turn: a rate needs no more, and a turn takes as long"""


def cartpole_contestant(schedule: Schedule, cores: int) -> Contestant:
    """The own trainer on the compiled CartPole; a turn is one whole ``train``, its files included."""
    from agentpipe.learning.options import GateOptions, NetworkOptions, PpoOptions, TrainingOptions

    ppo = PpoOptions(
        rollout_steps=schedule.rollout_steps,
        epochs=schedule.epochs,
        minibatch=schedule.minibatch,
        learning_rate=schedule.learning_rate,
        schedule="constant",
        discount=schedule.discount,
        gae_lambda=schedule.gae_lambda,
        clip=(schedule.clip,) * 4,
        entropy_weight=0.0,
        value_weight=0.5,
        max_gradient_norm=0.5,
    )
    network = NetworkOptions(schedule.hidden, action_embedding=1, time_frequencies=1, activation="tanh")
    options = TrainingOptions(
        network, ppo, None, GateOptions(), budget_steps=schedule.steps, patience=None, threads=cores
    )
    notes: dict[str, Any] = {}

    def turn() -> float:
        from agentpipe.learning.policy.normalisation import ObservationStatistics
        from benchmarks.cartpole import NAMES, CartPolePool

        pool = CartPolePool(schedule.size, threads=cores)
        neutral = ObservationStatistics.empty(NAMES)  # Stable-Baselines3 does not normalise either
        seconds, result = timed_training(pool, neutral, options, action_names=("left", "right"))
        notes["updates"] = schedule.updates
        notes["mean_return_at_the_end"] = round(result.update_log[-1]["charts/episodic_return"], 1)
        pool.close()
        return seconds

    return Contestant(CARTPOLE, schedule.steps, turn, schedule.size, lambda: notes)


def timed_training(pool: Any, statistics: Any, options: TrainingOptions, **more: Any) -> tuple[float, Any]:  # noqa: ANN401
    """Seconds of one training in a folder that is thrown away, and its result."""
    from agentpipe.learning.trainer import train

    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        result = train(pool, statistics, options, directory=Path(directory), **more)
        return time.perf_counter() - began, result


class Line:
    """The production line under the standard profile's settings, without what only a judged run needs.

    Args:
        environments: of the training split, evenly spread; ``None`` for all 7,000.
        cores: threads.
    """

    def __init__(self, environments: int | None, cores: int) -> None:
        from agentpipe.environments.rules import RulesPlayer
        from agentpipe.learning.options import training_options
        from agentpipe.learning.policy.normalisation import gather_statistics
        from agentpipe.settings import Settings

        line = frozen_line(environments, cores)
        self.pool = line.pool
        self.statistics = gather_statistics(self.pool, RulesPlayer(line.profile), steps=32)
        self.options = training_options(Settings.model_construct(threads=cores))

    def policy_gradient(self, updates: int) -> Contestant:
        """So many updates from random weights; no looks at the validation split, one checkpoint at the end."""
        steps = self.options.ppo.rollout_steps * self.pool.size * updates
        options = dataclasses.replace(self.options, warm_up=None, budget_steps=steps, patience=None, target=None)
        notes: dict[str, Any] = {}

        def turn() -> float:
            seconds, result = timed_training(self.pool, self.statistics, options)
            notes["updates_alone_per_second"] = round(result.steps_per_second)
            return seconds

        return Contestant(LINE, steps, turn, self.pool.size, lambda: notes)

    def warm_up(self, episodes: int) -> Contestant:
        """The expert plays and is cloned, until so many of its episodes have ended."""
        from agentpipe.environments.demonstrator import DemonstratorPlayer

        assert self.options.warm_up is not None
        warm_up = dataclasses.replace(self.options.warm_up, episodes=episodes)
        options = dataclasses.replace(self.options, warm_up=warm_up, budget_steps=0)
        steps = timed_training(self.pool, self.statistics, options, expert=DemonstratorPlayer())[1].warm_up.samples

        def turn() -> float:
            return timed_training(self.pool, self.statistics, options, expert=DemonstratorPlayer())[0]

        return Contestant(WARM_UP, steps, turn, self.pool.size)


def body(cores: int, smoke: bool) -> Found:  # noqa: FBT001 - called by the worker
    """Measures on as many threads as there are cores."""
    found, repeats = Found(), 1 if smoke else 5
    line = Line(256 if smoke else None, cores)
    contestants = [line.policy_gradient(1 if smoke else 5), line.warm_up(300 if smoke else 40_000)]
    found.figures += take_turns(contestants, cores, repeats)
    for name, package, version, why_not in (
        ("Stable-Baselines3", "stable-baselines3", stable_baselines.VERSION, stable_baselines.make_importable()),
        ("PureJaxRL style", "jax", purejax.VERSION, purejax.make_importable(smoke=smoke)),
    ):
        if why_not:
            found.skipped[name] = why_not
        else:
            found.versions[package] = version
    for schedule in (dataclasses.replace(SMALL, updates=8),) if smoke else (SMALL, LARGE):
        contestants = [cartpole_contestant(schedule, cores)]
        fewer = dataclasses.replace(schedule, updates=max(1, schedule.updates // SLOWER))
        for threads in sorted({1, cores}) if "stable-baselines3" in found.versions else ():
            own = [stable_baselines.OWN] if schedule.size <= SMALL.size else []
            contestants += [
                stable_baselines.contestant(name, fewer, cores, threads) for name in [*own, stable_baselines.SHARED]
            ]
        if "jax" in found.versions:
            contestants.append(purejax.contestant(schedule, cores))
        found.figures += take_turns(contestants, cores, repeats)
    return found


if __name__ == "__main__":
    main("training", body)
