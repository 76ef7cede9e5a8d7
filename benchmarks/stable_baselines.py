"""Stable-Baselines3's PPO as a contestant. It is not a dependency: it is fetched into a folder of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.cartpole import ACTIONS, NAMES, CartPolePool
from benchmarks.fetched import fetch, folder
from benchmarks.measure import Contestant

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from benchmarks.training import Schedule

VERSION = "2.9.2"
PACKAGES = (f"stable-baselines3=={VERSION}", "cloudpickle==3.1.3")
OWN, SHARED = "Stable-Baselines3 PPO, its DummyVecEnv", "Stable-Baselines3 PPO, the same compiled CartPole"


def make_importable() -> str:
    """Puts Stable-Baselines3 behind everything installed, fetching it at first use; says why where it cannot be had."""
    if why_not := fetch(folder(f"stable-baselines3-{VERSION}"), PACKAGES):
        return why_not
    try:
        import stable_baselines3  # noqa: F401
    except ImportError as error:
        return f"stable-baselines3 {VERSION} does not import here: {error}"
    return ""


def contestant(name: str, schedule: Schedule, cores: int, threads: int) -> Contestant:
    """PPO on CartPole; a turn is one ``learn`` of a new model, its construction not timed.

    Args:
        name: :data:`OWN` or :data:`SHARED`, which environment it gets.
        schedule: sizes and number of updates.
        cores: threads of the compiled environment.
        threads: of torch.
    """
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    notes: dict[str, Any] = {}

    def turn() -> float:
        torch.set_num_threads(threads)
        shared = name == SHARED
        environments = vectorised(schedule.size, cores) if shared else make_vec_env("CartPole-v1", schedule.size)
        model = PPO(
            "MlpPolicy",
            environments,
            n_steps=schedule.rollout_steps,
            batch_size=schedule.minibatch,
            n_epochs=schedule.epochs,
            learning_rate=schedule.learning_rate,
            gamma=schedule.discount,
            gae_lambda=schedule.gae_lambda,
            clip_range=schedule.clip,
            ent_coef=0.0,
            vf_coef=0.5,
            max_grad_norm=0.5,
            policy_kwargs={"net_arch": {"pi": list(schedule.hidden), "vf": list(schedule.hidden)}},
            device="cpu",
            seed=0,
        )
        began = time.perf_counter()
        model.learn(schedule.steps)
        seconds = time.perf_counter() - began
        returns = [episode["r"] for episode in model.ep_info_buffer or ()]
        notes["updates"] = schedule.updates
        notes["mean_return_at_the_end"] = round(float(np.mean(returns)), 1) if returns else None
        environments.close()
        return seconds

    label = f"{name}, torch on {threads} thread{'s' if threads > 1 else ''}"
    return Contestant(label, schedule.steps, turn, schedule.size, lambda: notes)


def vectorised(size: int, threads: int) -> Any:  # noqa: ANN401, C901 - a class; its base class is known at run time only
    """The compiled CartPole as Stable-Baselines3's ``VecEnv``."""
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.vec_env import VecEnv

    class Compiled(VecEnv):  # type: ignore[misc]
        def __init__(self) -> None:
            self.pool = CartPolePool(size, threads=threads)
            self.nothing: dict[str, Any] = {}
            super().__init__(size, Box(-np.inf, np.inf, (len(NAMES),), np.float32), Discrete(ACTIONS))

        def reset(self) -> npt.NDArray[np.float32]:
            self.pool.reset()
            return self.pool.observation.copy()

        def step_async(self, actions: npt.NDArray[np.int64]) -> None:
            self.pool.step(actions)

        def step_wait(self) -> tuple[Any, ...]:
            pool = self.pool
            ended = pool.terminated | pool.truncated
            infos: list[dict[str, Any]] = [self.nothing] * size
            for row in np.flatnonzero(ended):
                infos[row] = {
                    "terminal_observation": pool.final_observation[row].copy(),
                    "TimeLimit.truncated": bool(pool.truncated[row]),
                    "episode": {"r": float(pool.result_return[row]), "l": int(pool.result_steps[row])},
                }
            return pool.observation.copy(), pool.reward.copy(), ended, infos

        def close(self) -> None:
            self.pool.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:  # noqa: ANN401 - its interface
            del indices
            return [getattr(self.pool, attr_name, None)] * size

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:  # noqa: ANN401
            raise NotImplementedError(attr_name)

        def env_method(self, method_name: str, *arguments: Any, indices: Any = None, **more: Any) -> list[Any]:  # noqa: ANN401
            raise NotImplementedError(method_name)

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Sequence[bool]:  # noqa: ANN401
            del wrapper_class, indices
            return [False] * size

    return Compiled()
