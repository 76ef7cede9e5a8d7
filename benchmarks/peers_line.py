"""The line as all peers get it, and how their policies are judged.

Through Gymnasium's vector interface: ``agentpipe/ProductionLine-v0`` with its own compiled pool behind it, observations
normalised by the statistics that agentpipe's policies carry, rewards scaled and clamped as agentpipe scales them, the
allowed actions in ``infos["action_mask"]``. An action that the mask forbids is replaced by the lowest allowed one,
which is what the environment does unless told otherwise.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorWrapper

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE, Purpose
from agentpipe.environments.players import Decision, certain
from benchmarks.buffer_learning import Scene, chosen_at_random
from benchmarks.buffer_learning import Sizes as SceneSizes
from benchmarks.peers_settings import DISCOUNT, REWARD_CLAMP, WITH_MASK

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.policy.normalisation import ObservationStatistics
    from benchmarks.peers_settings import Setting, Sizes

Floats = npt.NDArray[np.float32]
_CLIP = 8.0
_EYE = np.eye(ACTION_COUNT + 1, dtype=np.float32)


class Preparation:
    """What a peer's network reads: normalised observations, with the last action one-hot where the setting says so.

    Args:
        statistics: of observations.
        last_action: 47 more inputs; the last one stands for "none yet".
    """

    def __init__(self, statistics: ObservationStatistics, *, last_action: bool) -> None:
        self.mean, self.scale = statistics.mean.astype(np.float32), statistics.scale
        self.last_action = last_action
        self.size = OBSERVATION_SIZE + (ACTION_COUNT + 1 if last_action else 0)

    def __call__(self, observation: Floats, last_action: npt.NDArray[np.int64]) -> Floats:
        """f32[N, size] of raw observations f32[N, D] and last actions i64[N]."""
        normalised: Floats = np.clip((observation - self.mean) * self.scale, -_CLIP, _CLIP)
        return np.concatenate([normalised, _EYE[last_action]], axis=1) if self.last_action else normalised


class PreparedLine(VectorWrapper):
    """The line with prepared observations and scaled rewards.

    ``infos["final_prepared"]`` holds, f32[N, size], the prepared last observation of each episode that was cut off in
    this step, for those who go on from its value.
    """

    def __init__(self, env: Any, preparation: Preparation) -> None:  # noqa: ANN401 - a Gymnasium environment
        from agentpipe.learning.gradient.rewards import RewardScaler

        super().__init__(env)
        self.preparation = preparation
        self.scaler = RewardScaler(env.num_envs, DISCOUNT, REWARD_CLAMP)
        self.single_observation_space = gymnasium.spaces.Box(-_CLIP, _CLIP, (preparation.size,), np.float32)
        self.mask = np.ones((env.num_envs, ACTION_COUNT), np.bool_)
        self._final = np.zeros((env.num_envs, preparation.size), np.float32)

    def reset(self, **how: Any) -> tuple[Floats, dict[str, Any]]:  # noqa: ANN401 - its interface
        """Prepared observations and infos."""
        observation, infos = self.env.reset(**how)
        self.mask = infos["action_mask"].astype(np.bool_)
        return self.preparation(observation, infos["last_action"]), infos

    def step(self, actions: npt.NDArray[np.int64]) -> tuple[Any, ...]:
        """One step of every line; rewards f32[N]."""
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        self.mask = infos["action_mask"].astype(np.bool_)
        scaled = self.scaler(reward.astype(np.float32)[None], (terminated | truncated)[None])[0]
        rows = np.flatnonzero(truncated & ~terminated)
        if rows.size:
            last = infos["final_info"]["last_action"][rows]
            self._final[rows] = self.preparation(np.stack(list(infos["final_obs"][rows])), last)
        infos["final_prepared"] = self._final
        return self.preparation(observation, infos["last_action"]), scaled, terminated, truncated, infos


class Ground:
    """The lines of one seed, for training and for judging.

    Args:
        seed: of environments and of all their random numbers.
        sizes: of the race.
        cores: threads of the simulator.
    """

    def __init__(self, seed: int, sizes: Sizes, cores: int) -> None:
        self.seed, self.sizes, self.cores = seed, sizes, cores
        self.scene = Scene(seed, SceneSizes(sizes.environments, sizes.validation, sizes.validation_episodes), cores)

    @functools.cached_property
    def statistics(self) -> ObservationStatistics:
        """Of observations; the same for all contestants, and no part of anybody's time or steps."""
        return self.scene.statistics()

    def rows(self, setting: Setting) -> int:
        """Lines side by side."""
        return min(setting.rows, self.sizes.largest, len(self.scene.train))

    def environments(self, setting: Setting) -> list[Any]:
        """Those that a setting trains in."""
        return chosen_at_random(self.scene.train, self.rows(setting), self.seed)

    def line(self, setting: Setting) -> PreparedLine:
        """The line for a peer."""
        from agentpipe.environments.registration import ENVIRONMENT_ID

        names = [environment.environment_id for environment in self.environments(setting)]
        made = gymnasium.make_vec(
            ENVIRONMENT_ID,
            num_envs=len(names),
            vectorization_mode="vector_entry_point",
            environment_id=names,
            threads=self.cores,
            copy=False,  # the preparation makes arrays of its own
        )
        return PreparedLine(made, Preparation(self.statistics, last_action=setting.last_action))

    def validated(self, player: Player) -> float:
        """Greedy success on the validation split."""
        from agentpipe.evaluation.rollout import play_first_episodes

        environments = self.scene.validation
        pool = self.scene.pool(environments, Purpose.VALIDATION)
        names = [environment.environment_id for environment in environments]
        played = play_first_episodes(pool, player, self.sizes.validation_episodes, environment_ids=names)
        pool.close()
        return float(played["success"].mean())

    def held_out(self, player: Player) -> float:
        """Greedy success on held-out lines."""
        from agentpipe.environments.catalog import load_catalog
        from agentpipe.evaluation.holdout import evaluate

        report = evaluate(
            [player],
            chosen_at_random(load_catalog().environments("holdout"), self.sizes.holdout, 0),
            self.scene.table,
            self.scene.profile,
            seed=self.seed,
            purpose=Purpose.REPORT,
            episodes_per_env=self.sizes.holdout_episodes,
            trained_on=self.scene.train,
            threads=self.cores,
        )
        return float(report.player(player.name)["success"])


class PeerPlayer:
    """A peer's policy as a player of the simulator's pools.

    Args:
        logits: f32[N, A] of prepared observations.
        preparation: as in its training.
        play: one of the ways of ``peers_settings``.
    """

    name = "peer"

    def __init__(self, logits: Callable[[Floats], Floats], preparation: Preparation, play: str) -> None:
        self._logits, self._preparation, self._masked = logits, preparation, play == WITH_MASK

    def act(self, pool: LinePool) -> Decision:
        """The most probable action, of those allowed or replaced as the environment would."""
        logits = self._logits(self._preparation(pool.observation, pool.last_action))
        if self._masked:
            return certain(np.where(pool.mask, logits, -np.inf).argmax(axis=1).astype(np.int64))
        actions = logits.argmax(axis=1)
        allowed = pool.mask[np.arange(len(actions)), actions]
        return certain(np.where(allowed, actions, pool.mask.argmax(axis=1)).astype(np.int64))
