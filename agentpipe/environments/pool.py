"""The vectorised pool: thousands of lines stepped by one compiled kernel, bit-identical for any number of threads."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from agentpipe.environments import kernel, state
from agentpipe.environments.compound import Compounds
from agentpipe.environments.fixed import build_fixed
from agentpipe.environments.layout import ACTION_COUNT, ACTION_NAMES, OBSERVATION_NAMES, Purpose
from agentpipe.environments.observation_bounds import observation_bounds
from agentpipe.errors import ActionError, NonFiniteError, SimulationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.table import DisturbanceTable

Actions = npt.NDArray[np.int64]

_FEWEST = 256
"""environments that are worth a thread of their own: to wake one takes as long as it takes to step about as many"""
# What is told of the step just taken, and of no use to the next: not part of a snapshot.
_TOKENS = ("produced", "used", "earned")
_FINAL = ("final_observation", "final_mask", "final_segment", "final_last_action", "final_time")
_STEERING = ("compound", "waits", "next_compound")


def build_pool(
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    profile: LineProfile,
    *,
    seed: int,
    purpose: Purpose,
    threads: int = 1,
    off: frozenset[str] = frozenset(),
    first_episode: int = 0,
) -> LinePool:
    """A pool of ``environments`` under one version of ``table``, with every environment at the start of an episode.

    Args:
        environments: at least one.
        table: gives each environment its disturbance parameters.
        profile: fault signatures and prevalences.
        seed: root seed of all randomness, 0 <= seed < 2**63.
        purpose: what the episodes are for; part of the random key.
        threads: worker threads; the bytes do not depend on it.
        off: disturbance kinds (``sensor``, ``network``, ``load``) to switch off; all other draws stay the same.
        first_episode: episode that every environment begins with.

    Raises:
        SimulationError: no environments, an unknown kind in ``off``, or a seed out of range.
    """
    fixed = build_fixed(environments, table, profile, seed=seed, purpose=purpose, off=off)
    names = tuple(environment.environment_id for environment in environments)
    compounds = None
    if purpose == Purpose.TRAIN:
        allowed = np.array([environment.split == "train" for environment in environments])
        compounds = Compounds(table, names, fixed, allowed=allowed, off=off)
    return LinePool(fixed, names, threads=threads, first_episode=first_episode, compounds=compounds)


class LinePool:
    """``size`` production lines side by side. The arrays are reused: copy what must outlive the next step.

    On the end of an episode the next one begins in the same step (same-step auto-reset): ``observation`` is already the
    new episode's first, and the last of the old one is in ``final_observation``.

    Attributes:
        fingerprints: u32[N], CRC-32 of the disturbance that each environment's running episode is played under.
        compound: u8[N, 3], the compound that it is, see :mod:`compound`; zeros = the row of the environment itself.
        compounds: what compounds are here; None: this pool's environments keep the disturbances of their rows.
        observation: f32[N, D], see :data:`layout.OBSERVATION_NAMES`.
        observation_space: bounds of one environment's observation, equal for all of them.
        mask: bool[N, A], the legal actions; never empty.
        segment: i8[N], index into :data:`layout.SEGMENTS`.
        last_action: i64[N]; ``ACTION_COUNT`` at the start of an episode.
        time: f32[N], minutes since the alarm.
        reward: f32[N]; terminated, truncated: bool[N], never both.
        produced, used: u32[N], what the step just taken made and needed, see :mod:`tokens`; earned: bool[N], its reward
            is not just the running cost of time. Zero before the first step and after :meth:`restore`.
        final_observation, final_mask, final_segment, final_last_action, final_time: the last of an episode, valid where
            terminated or truncated.
        result_...: outcome of the episode that just ended, valid in the same places.
    """

    def __init__(
        self,
        fixed: state.Fixed,
        names: Sequence[str],
        *,
        threads: int = 1,
        first_episode: int = 0,
        compounds: Compounds | None = None,
    ) -> None:
        if threads < 1:
            raise SimulationError("a pool needs at least one thread", threads=threads, remedy="pass threads >= 1")
        self.size = len(names)
        self.names = tuple(names)
        self._fixed = fixed
        self.fingerprints, self.compound, self.compounds = fixed.fingerprint, fixed.compound, compounds
        self.observation_space = observation_bounds(fixed)
        self._hidden = state.allocate_hidden(self.size)
        self._plant = state.allocate_plant(self.size)
        self._visible = state.allocate_visible(self.size)
        self._result = state.allocate_result(self.size)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="pool") if threads > 1 else None
        bounds = np.linspace(0, self.size, max(1, min(threads, self.size // _FEWEST)) + 1).astype(np.int64)
        self._slices = [(int(a), int(b)) for a, b in itertools.pairwise(bounds) if b > a]
        seen, outcome = self._visible, self._result
        self.observation, self.mask, self.segment = seen.observation, seen.mask, seen.segment
        self.last_action, self.time = seen.last_action, seen.time
        self.reward, self.terminated, self.truncated = seen.reward, seen.terminated, seen.truncated
        self.produced, self.used, self.earned = seen.produced, seen.used, seen.earned
        self.final_observation, self.final_mask = seen.final_observation, seen.final_mask
        self.final_segment = seen.final_segment
        self.final_last_action, self.final_time = seen.final_last_action, seen.final_time
        self.episode = self._hidden.episode
        self.result_success, self.result_reason = outcome.success, outcome.reason
        self.result_segment, self.result_decisions = outcome.segment, outcome.decisions
        self.result_decision_seconds = outcome.decision_seconds
        self.result_elapsed_seconds = outcome.elapsed_seconds
        self.result_mode, self.result_machine = outcome.mode, outcome.machine
        self.result_return, self.result_steps = outcome.total, outcome.steps
        self.result_episode = outcome.episode
        self.reset(first_episode)

    def _each_slice(self, function: Callable[..., int | None], *arguments: object) -> list[int | None]:
        if self._executor is None:
            return [function(low, high, *arguments) for low, high in self._slices]
        first, *others = self._slices
        futures = [self._executor.submit(function, low, high, *arguments) for low, high in others]
        return [function(*first, *arguments), *(future.result() for future in futures)]

    def reset(self, episode: int | npt.NDArray[np.int64] = 0) -> None:
        """Begins ``episode`` (one number, or one for each environment) everywhere.

        Raises:
            SimulationError: a negative episode number.
        """
        episodes = np.broadcast_to(np.asarray(episode, dtype=np.int64), (self.size,)).copy()
        if (episodes < 0).any():
            raise SimulationError("episode numbers start at 0", episode=int(episodes.min()), remedy="pass one >= 0")
        self._each_slice(kernel.run_begin, episodes, self._fixed, self._hidden, self._plant, self._visible)

    def step(self, actions: Actions) -> None:
        """Takes one action in every environment.

        Args:
            actions: i64[N], each legal under ``mask``.

        Raises:
            ActionError: wrong shape or dtype, or an illegal action; nothing has changed then in any environment.
        """
        if actions.shape != (self.size,) or actions.dtype != np.int64:
            found = f"{actions.dtype}{list(actions.shape)}"
            raise ActionError(f"actions are {found}, expected int64[{self.size}]", remedy="pass one int64 each")
        self._check(actions)
        self._each_slice(kernel.run, actions, self._fixed, self._hidden, self._plant, self._visible, self._result)

    def override(self, rows: npt.NDArray[np.int64], compounds: npt.NDArray[np.uint8]) -> None:
        """Gives environments another disturbance, from their next episode on until the next call.

        Args:
            rows: i64[k], of the pool.
            compounds: u8[k, 3], or u8[3] for all of them, see :mod:`compound`; zeros = the row of the environment.

        Raises:
            SimulationError: the pool is not for training, an environment is not of the training split, or there is no
                such compound; nothing has changed then.
        """
        known = self.compounds
        if known is None:
            remedy = "evaluate and record under the disturbances of the table"
            raise SimulationError("only pools for training can be given other disturbances", remedy=remedy)
        rows = np.asarray(rows, np.int64)
        if not known.allowed[rows].all():
            name = self.names[int(rows[int(known.allowed[rows].argmin())])]
            remedy = "give other disturbances to environments of the training split"
            raise SimulationError("not an environment of the training split", environment=name, remedy=remedy)
        codes = np.broadcast_to(np.asarray(compounds, np.uint8), (len(rows), self.compound.shape[1]))
        self._await(rows, codes, known.sources(rows, codes))
        self._fixed.waits[rows] = (codes != self.compound[rows]).any(axis=1)

    def next_compound(self) -> npt.NDArray[np.uint8]:
        """u8[N, 3]: under what the next episode of each environment will be played."""
        fixed = self._fixed
        if self.compounds is None:
            return fixed.compound.copy()
        return np.where(fixed.waits[:, None], fixed.next_compound, fixed.compound)

    def _await(self, rows: npt.NDArray[np.int64], codes: npt.NDArray[np.uint8], sources: state.Array) -> None:
        assert self.compounds is not None
        fixed, parameters = self._fixed, self.compounds.parameters(sources)
        fixed.next_compound[rows], fixed.next_parameters[rows] = codes, parameters
        fixed.next_capacity[rows] = self.compounds.capacity(rows, parameters)
        fixed.next_fingerprint[rows] = self.compounds.crc32(sources)

    def _check(self, actions: Actions) -> None:
        inside = (actions >= 0) & (actions < ACTION_COUNT)
        legal = inside & self.mask[np.arange(self.size), np.where(inside, actions, 0)]
        if legal.all():
            return
        first = int(np.argmin(legal))
        action = int(actions[first])
        name = ACTION_NAMES[action] if inside[first] else "out of range"
        raise ActionError(
            f"action {action} ({name}) is not allowed",
            environment=self.names[first],
            step=int(self._plant.step[first]),
            remedy="choose among the actions that mask allows",
        )

    def uniforms(self, channel: int = 0) -> npt.NDArray[np.float64]:
        """f64[N] in [0, 1) for a player's own use, keyed by environment, episode, step and ``channel`` (0 to 31)."""
        out = np.empty(self.size, np.float64)
        self._each_slice(kernel.run_uniforms, channel, self._hidden, self._plant, out)
        return out

    def check_finite(self) -> None:
        """Looks for a NaN or an infinity in what the players see.

        Raises:
            NonFiniteError: names the first environment, feature and step.
        """
        bad = ~np.isfinite(self.observation)
        if bad.any():
            row, column = (int(index) for index in np.argwhere(bad)[0])
            raise NonFiniteError(
                "observation is not finite",
                environment=self.names[row],
                field=OBSERVATION_NAMES[column],
                step=int(self._plant.step[row]),
                remedy="check the disturbance table's row and the line profile",
            )

    def snapshot(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all that changes; :meth:`restore` continues from it bit for bit."""
        groups: dict[str, Any] = {"hidden": self._hidden, "plant": self._plant, "visible": self._visible}
        changing = {
            f"{group}.{name}": array.copy()
            for group, arrays in groups.items()
            for name, array in arrays._asdict().items()
            if name not in (*_TOKENS, *_FINAL)
        }
        steering = _STEERING if self.compounds else ()
        return changing | {f"fixed.{name}": getattr(self._fixed, name).copy() for name in steering}

    def restore(self, snapshot: dict[str, npt.NDArray[Any]]) -> None:
        """Puts a snapshot of an equally built pool back.

        Raises:
            SimulationError: an array is missing or of another shape or dtype; nothing has changed then.
        """
        groups: dict[str, Any] = {"hidden": self._hidden, "plant": self._plant, "visible": self._visible}
        groups["fixed"] = self._fixed
        pairs = []
        for key in self.snapshot():
            group, name = key.split(".")
            target, source = getattr(groups[group], name), snapshot.get(key)
            if source is None or source.shape != target.shape or source.dtype != target.dtype:
                raise SimulationError("snapshot does not fit this pool", field=key, remedy="build the same pool")
            pairs.append((target, source))
        self._restore_disturbances(snapshot)
        for target, source in pairs:
            target[...] = source
        for name in _TOKENS:
            getattr(self._visible, name)[...] = 0

    def _restore_disturbances(self, snapshot: dict[str, npt.NDArray[Any]]) -> None:
        """What follows from the compounds of a snapshot: parameters, capacities and fingerprints, now and next."""
        known, fixed = self.compounds, self._fixed
        if known is None:
            return
        current, following = snapshot["fixed.compound"], snapshot["fixed.next_compound"]
        everywhere = np.arange(self.size)
        sources = known.sources(everywhere, current), known.sources(everywhere, following)  # refuses before it changes
        for codes, source in zip((current, following), sources, strict=True):
            self._await(everywhere, codes, source)
            if codes is current:
                fixed.parameters[...], fixed.capacity[...] = fixed.next_parameters, fixed.next_capacity
                fixed.fingerprint[...] = fixed.next_fingerprint

    def hidden(self) -> state.Hidden:
        """The true state, for the oracle, the supervised labels and the evaluation; never for a deployed player."""
        return self._hidden

    def plant(self) -> state.Plant:
        """What the plant itself keeps: clocks, stock, people, work orders."""
        return self._plant

    def close(self) -> None:
        """Ends the worker threads."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
            self._slices = [(0, self.size)]
