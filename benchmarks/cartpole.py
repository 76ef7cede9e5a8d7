"""CartPole-v1 as a compiled pool with the attributes of :class:`agentpipe.environments.pool.LinePool`.

The reference that everyone knows: equations and constants of Gymnasium's ``CartPole-v1`` (Barto, Sutton and Anderson,
1983; Euler steps of 0.02 s, 500 steps at most, reward 1 a step). It shows what a step costs beside a line's, and lets
the trainer be held against another one on equal ground.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry
from agentpipe.environments.rng import bits, episode_key, root_key, uniform

ACTIONS: Final = 2
NAMES: Final = ("position", "velocity", "angle", "angular_velocity")
STEP_LIMIT: Final = 500
FEWEST: Final = 4_096
"""cart-poles that are worth a thread of their own: to wake one takes as long as it takes to step about as many"""
GRAVITY, MASS_CART, MASS_POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOTAL_MASS, POLE_MOMENT = MASS_CART + MASS_POLE, MASS_POLE * HALF_LENGTH
ANGLE_LIMIT, POSITION_LIMIT = 12 * 2 * math.pi / 360, 2.4

Floats = npt.NDArray[np.float64]


class CartPolePool:
    """``size`` cart-poles side by side, with same-step auto-reset.

    Args:
        size: N.
        seed: of the starting states, which are keyed by environment and episode.
        threads: share the environments; the result does not depend on them.
    """

    def __init__(self, size: int, *, seed: int = 0, threads: int = 1) -> None:
        self.size = size
        self.names = tuple(f"cart-pole-{index}" for index in range(size))
        self._root = root_key(seed, 0)
        slices = max(1, min(threads, size // FEWEST))
        self._executor = ThreadPoolExecutor(slices - 1) if slices > 1 else None
        bounds = np.linspace(0, size, slices + 1).astype(int)
        self._slices = [(int(low), int(high)) for low, high in pairwise(bounds)]
        self.state: Floats = np.zeros((size, len(NAMES)))
        self.episode = np.zeros(size, np.int64)
        self.steps = np.zeros(size, np.int64)
        self.observation = np.zeros((size, len(NAMES)), np.float32)
        self.mask = np.ones((size, ACTIONS), np.bool_)
        self.segment = np.zeros(size, np.int8)
        self.last_action = np.full(size, ACTIONS, np.int64)
        self.time = np.zeros(size, np.float32)
        self.reward = np.zeros(size, np.float32)
        self.terminated, self.truncated = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        self.final_observation, self.final_mask = self.observation.copy(), self.mask
        self.final_last_action, self.final_time = self.last_action.copy(), self.time.copy()
        self.result_success, self.result_reason = self.truncated, np.zeros(size, np.int8)
        self.result_return, self.result_steps = np.zeros(size, np.float32), np.zeros(size, np.int32)
        self.result_decisions, self.result_decision_seconds = self.result_steps, np.zeros(size, np.float32)
        self.reset()

    def _each(self, function: Any, *arguments: Any) -> None:  # noqa: ANN401 - compiled functions
        if self._executor is None:
            function(0, self.size, *arguments)
            return
        first, *others = self._slices
        futures = [self._executor.submit(function, low, high, *arguments) for low, high in others]
        function(*first, *arguments)
        for future in futures:
            future.result()

    def reset(self, episode: int = 0) -> None:
        """Begins ``episode`` everywhere."""
        self.episode[:] = episode
        self._each(_begin_all, self._root, self.state, self.episode, self.steps, self.observation, self.last_action)
        self.time[:] = 0.0

    def step(self, actions: npt.NDArray[np.int64]) -> None:
        """Takes ``actions`` i64[N], each 0 (left) or 1 (right)."""
        own = (self.state, self.episode, self.steps)
        seen = (self.observation, self.last_action, self.time, self.reward, self.terminated, self.truncated)
        final = (self.final_observation, self.final_last_action, self.final_time)
        self._each(_run, self._root, actions, *own, *seen, *final, self.result_return, self.result_steps)

    def snapshot(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all that changes."""
        return {name: getattr(self, name).copy() for name in ("state", "episode", "steps", "last_action", "time")}

    def close(self) -> None:
        """Ends the threads."""
        if self._executor is not None:
            self._executor.shutdown()


@entry
def advance(state: Any, action: int) -> bool:  # noqa: ANN401 - numba infers it
    """One Euler step of f64[4] in place; true where the pole has fallen or the cart has left."""
    position, velocity, angle, angular = state[0], state[1], state[2], state[3]
    force = FORCE if action == 1 else -FORCE
    cosine, sine = math.cos(angle), math.sin(angle)
    push = (force + POLE_MOMENT * angular * angular * sine) / TOTAL_MASS
    turn = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4.0 / 3.0 - MASS_POLE * cosine * cosine / TOTAL_MASS))
    acceleration = push - POLE_MOMENT * turn * cosine / TOTAL_MASS
    state[0] = position + SECONDS * velocity
    state[1] = velocity + SECONDS * acceleration
    state[2] = angle + SECONDS * angular
    state[3] = angular + SECONDS * turn
    return bool(abs(state[0]) > POSITION_LIMIT or abs(state[2]) > ANGLE_LIMIT)


@entry
def _begin(n: int, root: Any, state: Any, episode: Any, steps: Any, observation: Any, last_action: Any) -> None:  # noqa: ANN401
    key = episode_key(root, np.uint64(n), episode[n])
    steps[n] = 0
    last_action[n] = ACTIONS
    for j in range(4):
        state[n, j] = 0.1 * uniform(bits(key, 0, j)) - 0.05
        observation[n, j] = state[n, j]


@entry
def _begin_all(  # type: ignore[no-untyped-def]  # noqa: ANN202 - a kernel
    low,  # noqa: ANN001
    high,  # noqa: ANN001
    root,  # noqa: ANN001
    state,  # noqa: ANN001
    episode,  # noqa: ANN001
    steps,  # noqa: ANN001
    observation,  # noqa: ANN001
    last_action,  # noqa: ANN001
):
    for n in range(low, high):
        _begin(n, root, state, episode, steps, observation, last_action)


@entry
def _run(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917 - a kernel
    low,  # noqa: ANN001
    high,  # noqa: ANN001
    root,  # noqa: ANN001
    actions,  # noqa: ANN001
    state,  # noqa: ANN001
    episode,  # noqa: ANN001
    steps,  # noqa: ANN001
    observation,  # noqa: ANN001
    last_action,  # noqa: ANN001
    time,  # noqa: ANN001
    reward,  # noqa: ANN001
    terminated,  # noqa: ANN001
    truncated,  # noqa: ANN001
    final_observation,  # noqa: ANN001
    final_last_action,  # noqa: ANN001
    final_time,  # noqa: ANN001
    result_return,  # noqa: ANN001
    result_steps,  # noqa: ANN001
):
    for n in range(low, high):
        fallen = advance(state[n], actions[n])
        steps[n] += 1
        reward[n] = 1.0
        last_action[n] = actions[n]
        time[n] = steps[n] * SECONDS / 60.0
        for j in range(4):
            observation[n, j] = state[n, j]
        terminated[n] = fallen
        truncated[n] = steps[n] >= STEP_LIMIT and not fallen
        if terminated[n] or truncated[n]:
            for j in range(4):
                final_observation[n, j] = state[n, j]
            final_last_action[n], final_time[n] = last_action[n], time[n]
            result_return[n], result_steps[n] = steps[n], steps[n]
            episode[n] += 1
            _begin(n, root, state, episode, steps, observation, last_action)
            time[n] = 0.0
