"""The built-in line as Gymnasium environments: one line, or thousands side by side in one compiled pool.

Both number the episodes of an environment: ``reset(seed=s)`` begins episode 0 under root seed ``s``, ``reset()`` the
next one, ``reset(options={"episode": k})`` episode ``k``. An episode is a function of seed, purpose, environment and
number alone, so a row of the vector environment equals the single environment step by step.

``info`` holds, at reset and at every step, ``action_mask`` (int8, what ``Discrete.sample`` wants), ``segment`` (index
into :data:`layout.SEGMENTS`), ``last_action`` (what was carried out, ``ACTION_COUNT`` at the start), ``time`` (minutes
since the alarm) and ``illegal_action``; in the last step of an episode also ``outcome``, which names the true fault and
what became of the order. Nothing else of the hidden state is ever shown.

Gymnasium lets a caller send every action of the action space, so by default an action that the mask forbids is replaced
by the lowest allowed one and reported as ``illegal_action``. ``illegal_actions="raise"`` raises ``ActionError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from agentpipe.environments import gym_line
from agentpipe.environments.gym_line import Info, Int64, Line, LineOptions, Rows
from agentpipe.errors import ActionError, SimulationError

if TYPE_CHECKING:
    from collections.abc import Sequence

Float32 = npt.NDArray[np.float32]

COPY_STRIDE = 1_000_000
"""A second copy of one environment in a vector environment plays the episodes from this number on, and so forth."""


class ProductionLineEnv(gymnasium.Env[Float32, np.int64]):
    """One production line.

    Args:
        environment_id: environment of the catalogue, such as ``t0001.sensor-3``; ``None``: the first of ``cell`` and
            ``split``.
        cell: disturbance kind and intensity, such as ``network-4``; ``None``: any.
        split: ``train``, ``validation`` or ``holdout``; of no account where ``environment_id`` is given.
        **options: see :class:`gym_line.LineOptions`.

    Raises:
        CatalogError: no such environment, cell or split.
        SimulationError: an unknown purpose, disturbance kind or way with illegal actions, or a render mode.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(
        self,
        environment_id: str | None = None,
        cell: str | None = None,
        split: str = "train",
        **options: Unpack[LineOptions],
    ) -> None:
        environment = gym_line.select(environment_id, cell, split, 1)[0]
        self.environment_id = environment.environment_id
        self._line = Line([environment], 1, **options)
        self.observation_space, self.action_space = self._line.observation_space, self._line.action_space
        self._episode, self._over = -1, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Float32, Info]:
        """Begins an episode, see the module.

        Args:
            seed: root seed; ``None`` keeps the current one (the first time: a random one).
            options: ``{"episode": k}`` begins episode ``k`` >= 0.

        Returns:
            Observation f32[D] and info.

        Raises:
            SimulationError: an unknown option or a negative episode.
        """
        super().reset(seed=seed)
        wanted = gym_line.known_options(options, ("episode",)).get("episode")
        pool = None if seed is not None else self._line.pool
        following = 0 if pool is None else self._episode + 1
        episode = following if wanted is None else int(wanted)
        episodes = np.array([episode], np.int64)
        if pool is None:
            pool = self._line.build(self.np_random_seed, episodes)
        else:
            pool.reset(episodes)
        self._episode, self._over = episode, False
        return pool.observation[0].copy(), gym_line.first_row(gym_line.running_infos(pool, np.zeros(1, np.bool_)))

    def step(self, action: np.int64 | int) -> tuple[Float32, float, bool, bool, Info]:
        """Takes one action.

        Args:
            action: number of an action, see :data:`layout.ACTION_NAMES`.

        Returns:
            Observation f32[D], reward, terminated, truncated, info.

        Raises:
            ActionError: not an action at all, or one that the mask forbids under ``illegal_actions="raise"``.
            SimulationError: no episode is running.
        """
        if self._over:
            raise SimulationError("no episode is running", environment=self.environment_id, remedy="call reset() first")
        pool, illegal = self._line.step(_whole_numbers(np.asarray(action)[None], 1))
        terminated, truncated = bool(pool.terminated[0]), bool(pool.truncated[0])
        self._over = terminated or truncated
        if self._over:
            observation = pool.final_observation[0].copy()
            info = gym_line.first_row(gym_line.final_infos(pool, illegal))
            info["outcome"] = gym_line.outcome(pool, 0)
        else:
            observation = pool.observation[0].copy()
            info = gym_line.first_row(gym_line.running_infos(pool, illegal))
        return observation, float(pool.reward[0]), terminated, truncated, info

    def close(self) -> None:
        """Frees the pool; a second call does nothing."""
        self._line.close()
        self._over = True


class ProductionLineVectorEnv(VectorEnv[Float32, Int64, npt.NDArray[Any]]):
    """Many production lines in one compiled pool.

    Auto-reset is ``SAME_STEP``: the pool begins the next episode in the step that ends the last one. ``NEXT_STEP``
    would add to every episode a step whose action is thrown away: a dummy that a careless learner trains on, and one
    step in ten or so for nothing. Here every transition is a real one. Where an episode ended, the observation and the
    infos are the next episode's first; ``infos["final_obs"][i]`` (an array of its own) and ``infos["final_info"]`` are
    the last of the old one, laid out as Gymnasium's ``SyncVectorEnv`` lays them out.

    Args:
        num_envs: number of lines, N.
        environment_id: one environment or several, by row; ``None``: spread evenly over ``cell`` and ``split``. Fewer
            than ``num_envs`` are repeated; copies play other episodes (:data:`COPY_STRIDE` apart).
        cell: see :class:`ProductionLineEnv`.
        split: see :class:`ProductionLineEnv`.
        threads: worker threads of the pool; they change no byte, and :meth:`close` ends them.
        copy: ``False`` returns the pool's own observations, which the next step overwrites.
        **options: see :class:`gym_line.LineOptions`.

    Raises:
        CatalogError: see :class:`ProductionLineEnv`.
        SimulationError: see :class:`ProductionLineEnv`.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        environment_id: str | Sequence[str] | None = None,
        cell: str | None = None,
        split: str = "train",
        *,
        threads: int = 1,
        copy: bool = True,
        **options: Unpack[LineOptions],
    ) -> None:
        environments = gym_line.select(environment_id, cell, split, num_envs)
        self.num_envs = num_envs
        self.environment_ids = tuple(environment.environment_id for environment in environments)
        self._line, self._copy = Line(environments, threads, **options), copy
        self._first = COPY_STRIDE * gym_line.copies(self.environment_ids)
        self.single_observation_space = self._line.observation_space
        self.single_action_space = self._line.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Float32, Info]:
        """Begins an episode in every environment, see the module.

        Args:
            seed: one root seed for all (environments differ by their id); ``None`` keeps the current one.
            options: ``{"episode": k}`` with one number or i64[N]; ``{"reset_mask": bool[N]}`` leaves the other
                environments where they are.

        Returns:
            Observations f32[N, D] and infos.

        Raises:
            SimulationError: an unknown option, a negative episode, several seeds, or a reset mask that does not fit.
        """
        if not (seed is None or isinstance(seed, int | np.integer)):
            raise SimulationError("one seed is wanted, not several", field="seed", remedy="environments differ by id")
        given = gym_line.known_options(options, ("episode", "reset_mask"))
        pool = None if seed is not None else self._line.pool
        chosen = self._chosen(given.get("reset_mask"), fresh=pool is None)
        super().reset(seed=seed)
        episodes = self._first if pool is None else pool.episode + 1
        if (wanted := given.get("episode")) is not None:
            episodes = np.broadcast_to(np.asarray(wanted, np.int64), (self.num_envs,)).copy()
        if pool is None:
            assert self.np_random_seed is not None
            pool = self._line.build(self.np_random_seed, episodes)
        else:
            gym_line.begin_some(pool, episodes, chosen)
        infos = gym_line.running_infos(pool, np.zeros(self.num_envs, np.bool_))
        return self._returned(pool.observation), gym_line.batched(infos, np.ones(self.num_envs, np.bool_))

    def _chosen(self, mask: object, *, fresh: bool) -> Rows:
        if mask is None:
            return np.ones(self.num_envs, np.bool_)
        if not isinstance(mask, np.ndarray) or mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise SimulationError("reset_mask does not fit", field="reset_mask", remedy=f"pass bool[{self.num_envs}]")
        if fresh and not mask.all():
            raise SimulationError("a new seed is for all", field="reset_mask", remedy="reset everything first")
        return mask

    def step(
        self, actions: npt.NDArray[np.integer[Any]]
    ) -> tuple[Float32, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], Info]:
        """Takes one action in every environment.

        Args:
            actions: whole numbers [N].

        Returns:
            Observations f32[N, D], rewards f64[N], terminations bool[N], truncations bool[N], infos.

        Raises:
            ActionError: wrong shape or type, not an action, or a forbidden one under ``illegal_actions="raise"``;
                nothing has changed then.
            SimulationError: closed, or never reset.
        """
        pool, illegal = self._line.step(_whole_numbers(np.asarray(actions), self.num_envs))
        done = pool.terminated | pool.truncated
        infos = gym_line.batched(gym_line.running_infos(pool, illegal & ~done), np.ones(self.num_envs, np.bool_))
        if done.any():
            infos["final_obs"], infos["_final_obs"] = gym_line.final_observations(pool, done), done
            infos["final_info"], infos["_final_info"] = gym_line.final_info(pool, illegal, done), done.copy()
        return (
            self._returned(pool.observation),
            pool.reward.astype(np.float64),
            pool.terminated.copy(),
            pool.truncated.copy(),
            infos,
        )

    def _returned(self, observation: Float32) -> Float32:
        return observation.copy() if self._copy else observation

    def close_extras(self, **_kwargs: object) -> None:
        """Ends the pool's threads."""
        self._line.close()


def _whole_numbers(actions: npt.NDArray[Any], size: int) -> Int64:
    if actions.shape != (size,) or not np.issubdtype(actions.dtype, np.integer):
        found = f"{actions.dtype}{list(actions.shape)}"
        raise ActionError(f"actions are {found}", remedy=f"pass whole numbers of shape [{size}]")
    return actions.astype(np.int64)
