"""What the Gymnasium environments of the built-in line share: choice of lines, spaces, the pool and its infos."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import gymnasium
import numpy as np
import numpy.typing as npt

from agentpipe.environments.catalog import Catalog, EnvironmentSpec, load_catalog
from agentpipe.environments.datafiles import data_dir
from agentpipe.environments.fixed import build_fixed
from agentpipe.environments.layout import ACTION_COUNT, MODES, REASONS, SEGMENTS, Purpose, block_start
from agentpipe.environments.line_profile import LineProfile, default_profile, load_profile
from agentpipe.environments.observation_bounds import observation_bounds
from agentpipe.environments.pool import LinePool
from agentpipe.environments.rng import root_key
from agentpipe.environments.table import DisturbanceTable, load_table
from agentpipe.errors import SimulationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.bool_]
Info = dict[str, Any]

ILLEGAL = ("replace", "raise")
_SEED_BITS = 2**63 - 1
_O_SEGMENT = block_start("segment")


class LineOptions(TypedDict, total=False):
    """Keyword arguments that the single and the vector environment share."""

    table: DisturbanceTable | Path | str | None
    """disturbance table or its CSV file; ``None``: the project's own"""
    profile: LineProfile | Path | str | None
    """line profile or its JSON file; ``None``: the project's own"""
    purpose: Purpose | str
    """what the episodes are for, part of every random key; by name or number, ``train`` unless given"""
    off: Iterable[str]
    """disturbance kinds to switch off; all other draws stay the same"""
    illegal_actions: str
    """``replace`` (by the lowest allowed action) or ``raise``"""
    render_mode: str | None
    """there is nothing to render: only ``None`` is allowed"""


class Line:
    """The fixed arrays, the spaces, and a pool under the current root seed.

    Raises:
        SimulationError: an unknown purpose, disturbance kind or way with illegal actions, or a render mode.
    """

    def __init__(
        self,
        environments: Sequence[EnvironmentSpec],
        threads: int,
        *,
        table: DisturbanceTable | Path | str | None = None,
        profile: LineProfile | Path | str | None = None,
        purpose: Purpose | str = Purpose.TRAIN,
        off: Iterable[str] = (),
        illegal_actions: str = "replace",
        render_mode: str | None = None,
    ) -> None:
        if illegal_actions not in ILLEGAL:
            remedy = f"use {' or '.join(ILLEGAL)}"
            raise SimulationError(f"illegal_actions is {illegal_actions!r}", field="illegal_actions", remedy=remedy)
        if render_mode is not None:
            raise SimulationError(f"there is no render mode {render_mode!r}", field="render_mode", remedy="pass None")
        self._purpose = _purpose(purpose)
        self._names = tuple(environment.environment_id for environment in environments)
        self._threads, self._replace = threads, illegal_actions == "replace"
        self._fixed = build_fixed(
            environments, _table(table), _profile(profile), seed=0, purpose=self._purpose, off=frozenset(off)
        )
        self.pool: LinePool | None = None
        low, high = observation_bounds(self._fixed)
        self.observation_space = gymnasium.spaces.Box(low, high, dtype=np.float32)
        self.action_space: gymnasium.spaces.Discrete[np.int64] = gymnasium.spaces.Discrete(ACTION_COUNT)

    def build(self, seed: int, episodes: Int64) -> LinePool:
        """A new pool under ``seed``, of which the lower 63 bits count, at the beginning of ``episodes`` i64[N]."""
        root = np.array([root_key(seed & _SEED_BITS, int(self._purpose))], np.uint64)
        pool = LinePool(self._fixed._replace(root=root), self._names, threads=self._threads)
        try:
            pool.reset(episodes)
        except SimulationError:
            pool.close()
            raise
        self.close()
        self.pool = pool
        return pool

    def step(self, actions: Int64) -> tuple[LinePool, Rows]:
        """Steps the pool; returns it, and where an action was illegal and the lowest allowed one was taken.

        Raises:
            ActionError: an action outside 0 … ACTION_COUNT - 1, or an illegal one where these are not replaced.
            NonFiniteError: an observation is not finite.
            SimulationError: closed, or never reset.
        """
        pool = self.pool
        if pool is None:
            raise SimulationError("the environment is closed or was never reset", remedy="call reset() first")
        inside = (actions >= 0) & (actions < ACTION_COUNT)
        illegal = inside & ~pool.mask[np.arange(pool.size), np.where(inside, actions, 0)]
        if self._replace:
            actions = np.where(illegal, pool.mask.argmax(axis=1), actions)
        pool.step(actions)
        pool.check_finite()
        return pool, illegal

    def close(self) -> None:
        """Ends the pool's threads; a second call does nothing."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def select(wanted: str | Sequence[str] | None, cell: str | None, split: str, count: int) -> tuple[EnvironmentSpec, ...]:
    """``count`` environments of the catalogue: the wanted ones in turn, else evenly spread over cell and split.

    Raises:
        CatalogError: no such environment, cell or split.
        SimulationError: ``count`` < 1, an empty list of names, or a split without environments of the cell.
    """
    if count < 1:
        raise SimulationError("at least one environment is needed", field="num_envs", num_envs=count)
    catalog = _catalog(data_dir())
    if wanted is None:
        offered = catalog.environments(split, cell)
    else:
        offered = tuple(catalog.environment(name) for name in ([wanted] if isinstance(wanted, str) else wanted))
    if not offered:
        raise SimulationError("no environment to choose", split=split, cell=cell, remedy="choose another split or cell")
    if wanted is None and count < len(offered):
        return tuple(offered[k * len(offered) // count] for k in range(count))
    return tuple(offered[k % len(offered)] for k in range(count))


def copies(names: Sequence[str]) -> Int64:
    """i64[N]: how often the same environment stands in an earlier row."""
    seen: dict[str, int] = {}
    earlier = []
    for name in names:
        earlier.append(seen.get(name, 0))
        seen[name] = earlier[-1] + 1
    return np.array(earlier, np.int64)


def known_options(options: Mapping[str, Any] | None, known: Sequence[str]) -> Mapping[str, Any]:
    """The options of a reset; raises ``SimulationError`` when there is one not in ``known``."""
    given = options or {}
    if unknown := sorted(set(given) - set(known)):
        raise SimulationError(f"unknown option {unknown[0]!r}", field="options", remedy=f"use {' or '.join(known)}")
    return given


def begin_some(pool: LinePool, episodes: Int64, chosen: Rows) -> None:
    """Begins ``episodes`` in the ``chosen`` environments and leaves the others as they are."""
    before = None if chosen.all() else pool.snapshot()
    pool.reset(np.where(chosen, episodes, 0))
    if before is not None:
        after = pool.snapshot()
        for name, array in after.items():
            array[~chosen] = before[name][~chosen]
        pool.restore(after)


def running_infos(pool: LinePool, illegal: Rows) -> Info:
    """What is known beside the observation now; each value has a row an environment."""
    return {
        "action_mask": pool.mask.astype(np.int8),
        "segment": pool.segment.copy(),
        "last_action": pool.last_action.copy(),
        "time": pool.time.copy(),
        "illegal_action": illegal.copy(),
    }


def final_infos(pool: LinePool, illegal: Rows) -> Info:
    """The same for the last moment of the episodes that ended in this step."""
    segment = pool.final_observation[:, _O_SEGMENT : _O_SEGMENT + len(SEGMENTS)].argmax(axis=1)
    return {
        "action_mask": pool.final_mask.astype(np.int8),
        "segment": segment.astype(np.int8),
        "last_action": pool.final_last_action.copy(),
        "time": pool.final_time.copy(),
        "illegal_action": illegal.copy(),
    }


def first_row(infos: Info) -> Info:
    """The infos of row 0 alone; a flag becomes a Python ``bool``, as Gymnasium's batching expects."""
    rows = {name: values[0] for name, values in infos.items()}
    return {name: bool(value) if isinstance(value, np.bool_) else value for name, value in rows.items()}


def batched(infos: Info, there: Rows) -> Info:
    """Gymnasium's layout: beside every key, under ``_key``, the rows that have it; zeros elsewhere."""
    laid_out: Info = {}
    for name, values in infos.items():
        values[~there] = 0
        laid_out[name], laid_out[f"_{name}"] = values, there.copy()
    return laid_out


def final_observations(pool: LinePool, done: Rows) -> npt.NDArray[np.object_]:
    """object[N]: f32[D] of its own where an episode ended, else ``None``."""
    observations = np.full(pool.size, None, dtype=object)
    for row in np.flatnonzero(done):
        observations[row] = pool.final_observation[row].copy()
    return observations


def final_info(pool: LinePool, illegal: Rows, done: Rows) -> Info:
    """Infos of the last moment, and the outcomes, of the episodes that ended in this step (at least one)."""
    final = batched(final_infos(pool, illegal), done)
    outcomes = {int(row): outcome(pool, int(row)) for row in np.flatnonzero(done)}
    laid_out: Info = {}
    for name, example in next(iter(outcomes.values())).items():
        text = isinstance(example, str)
        values = np.full(pool.size, None, object) if text else np.zeros(pool.size, type(example))
        for row, one in outcomes.items():
            values[row] = one[name]
        laid_out[name], laid_out[f"_{name}"] = values, done.copy()
    final["outcome"], final["_outcome"] = laid_out, done.copy()
    return final


def outcome(pool: LinePool, row: int) -> dict[str, bool | int | float | str]:
    """What became of the episode that ended in this step in environment ``row``, and what the fault had been."""
    success = bool(pool.result_success[row])
    return {
        "success": success,
        "reason": REASONS[pool.result_reason[row]],
        "failed_segment": "" if success else SEGMENTS[pool.result_segment[row]],
        "decisions": int(pool.result_decisions[row]),
        "decision_seconds": float(pool.result_decision_seconds[row]),
        "elapsed_seconds": float(pool.result_elapsed_seconds[row]),
        "return": float(pool.result_return[row]),
        "mode": MODES[pool.result_mode[row]],
        "machine": int(pool.result_machine[row]),
        "episode": int(pool.result_episode[row]),
    }


@functools.cache
def _catalog(folder: Path) -> Catalog:
    return load_catalog(folder)


def _table(table: DisturbanceTable | Path | str | None) -> DisturbanceTable:
    if isinstance(table, DisturbanceTable):
        return table
    return load_table(data_dir() / "disturbances.csv" if table is None else Path(table))


def _profile(profile: LineProfile | Path | str | None) -> LineProfile:
    if isinstance(profile, LineProfile):
        return profile
    return default_profile() if profile is None else load_profile(Path(profile))


def _purpose(purpose: Purpose | str) -> Purpose:
    if isinstance(purpose, Purpose):
        return purpose
    known = {member.name.lower(): member for member in Purpose}
    if purpose.lower() not in known:
        raise SimulationError(f"unknown purpose {purpose!r}", field="purpose", remedy=f"use one of: {', '.join(known)}")
    return known[purpose.lower()]
