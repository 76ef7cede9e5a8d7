"""Environment steps a second: the production line beside what the field measures itself by.

``python -m benchmarks.simulator`` steps, in turns: the line under the frozen catalogue and table with every disturbance
on, once on the actions of the rule-based player and once on random legal ones (recorded beforehand, so that nothing but
``pool.step`` is timed); Gymnasium's own vectorised CartPole and its generic ``SyncVectorEnv``; and a compiled CartPole
loop of ours. All of them write an observation, a reward and the end flags of every environment at every step.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.line import frozen_line
from benchmarks.measure import Contestant, take_turns
from benchmarks.worker import Found, main

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool

    Stream = npt.NDArray[np.int64]

RULES, RANDOM = "production line, actions of the rules", "production line, random legal actions"
VECTOR, SYNC = "Gymnasium CartPoleVectorEnv", "Gymnasium SyncVectorEnv of CartPole-v1"
LOOP = "compiled CartPole loop (reference)"
SIZES = (64, 1_024, 7_000)
SPREAD = 64
"""steps before the first that is measured: the environments are out of step with each other by then"""


def line_contestant(name: str, size: int, steps: int, cores: int) -> Contestant:
    """The line in ``size`` training environments spread evenly over the catalogue, on recorded actions."""
    from agentpipe.environments.players import RandomPlayer
    from agentpipe.environments.rules import RulesPlayer

    line = frozen_line(size, cores)
    pool = line.pool
    player: Player = RulesPlayer(line.profile) if name == RULES else RandomPlayer()
    start, actions, figures = record(pool, player, steps)

    def turn() -> float:
        pool.restore(start)
        return timed(pool.step, actions)

    return Contestant(name, size * steps, turn, size, lambda: figures)


def record(pool: LinePool, player: Player, steps: int) -> tuple[dict[str, Any], Stream, dict[str, float]]:
    """Where the measured part begins, the actions i64[steps, N] from there on, and how it went."""
    for _ in range(SPREAD):
        pool.step(player.act(pool).actions)
    start = pool.snapshot()
    actions = np.empty((steps, pool.size), np.int64)
    ended = successes = 0
    for t in range(steps):
        actions[t] = player.act(pool).actions
        pool.step(actions[t])
        done = pool.terminated | pool.truncated
        ended += int(done.sum())
        successes += int(pool.result_success[done].sum())
    return start, actions, {"episodes": ended, "success": round(successes / max(1, ended), 4)}


def timed(step: Callable[[Stream], object], actions: Stream) -> float:
    """Seconds of taking ``actions`` one after the other."""
    began = time.perf_counter()
    for row in actions:
        step(row)
    return time.perf_counter() - began


def gymnasium_contestant(name: str, size: int, steps: int) -> Contestant:
    """CartPole through Gymnasium, on random actions."""
    import gymnasium

    mode = "vector_entry_point" if name == VECTOR else "sync"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environments = gymnasium.make_vec("CartPole-v1", num_envs=size, vectorization_mode=mode)
    environments.reset(seed=0)
    actions = random_actions(size, steps)
    return Contestant(name, size * steps, lambda: timed(environments.step, actions), size)


def loop_contestant(size: int, steps: int, cores: int) -> Contestant:
    """CartPole in a compiled loop, called like the line's."""
    from benchmarks.cartpole import CartPolePool

    pool = CartPolePool(size, threads=cores)
    actions = random_actions(size, steps)
    return Contestant(LOOP, size * steps, lambda: timed(pool.step, actions), size)


def random_actions(size: int, steps: int) -> Stream:
    """i64[steps, size] of 0 and 1."""
    return np.random.default_rng(0).integers(0, 2, (steps, size))


def body(cores: int, smoke: bool) -> Found:  # noqa: FBT001 - called by the worker
    """Measures on as many threads as there are cores."""
    sizes, repeats, scale = ((64,), 1, 64) if smoke else (SIZES, 7, 1)
    found = Found()
    for size in sizes:
        steps = max(2, 1_000_000 // size // scale)
        few, some = max(2, 130_000 // size // scale), max(2, 4_000_000 // size // scale)
        contestants = [
            line_contestant(RULES, size, min(steps, 2_000), cores),
            line_contestant(RANDOM, size, min(steps, 2_000), cores),
            gymnasium_contestant(VECTOR, size, min(some, 8_000)),
            gymnasium_contestant(SYNC, size, few),
            loop_contestant(size, min(some, 8_000), cores),
        ]
        found.figures += take_turns(contestants, cores, repeats)
    return found


if __name__ == "__main__":
    main("simulator", body)
