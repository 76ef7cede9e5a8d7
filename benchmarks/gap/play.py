"""Plays the players of the gap on the same episodes, and what is lost between two of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agentpipe.environments.fixed import build_fixed
from agentpipe.environments.players import OraclePlayer
from agentpipe.evaluation.rollout import play_first_episodes
from agentpipe.evaluation.statistics import mean_interval, paired_difference, success_interval
from benchmarks.gap.model import Model, model_of
from benchmarks.gap.observer import IdealObserver, Told, Untold
from benchmarks.gap.players import (
    DIAGNOSIS,
    DISPATCH,
    EXECUTION,
    PARTS,
    SEVERITY,
    HybridPlayer,
    MoreMeasuring,
    NoMeasuring,
    Policy,
    RuleMeasuring,
    TrueDiagnosis,
    Watched,
)
from benchmarks.gap.sight import EveryPacket, MeansOnly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.layout import Purpose
    from agentpipe.environments.players import Player
    from agentpipe.environments.pool import LinePool
    from agentpipe.environments.state import Fixed
    from agentpipe.evaluation.statistics import Estimate
    from benchmarks.difficulty import Line

    Array = npt.NDArray[Any]
    Bools = npt.NDArray[np.bool_]

REST: Final = frozenset({SEVERITY, DISPATCH, EXECUTION})
LADDER: Final = (
    "oracle",
    "truth at once",
    "truth",
    "told, every packet",
    "untold, every packet",
    "untold, means",
    "policy names",
    "policy",
)
"""each player knows less, or does more by the policy, than the one before"""
BESIDES: Final = ("told, means", "rule measures, truth", "rule measures, policy names")
EXTRA: Final = (2, 4, 8)
"""extra measurements that are tried"""


@dataclass(frozen=True)
class Group:
    """Environments of one kind, and how many episodes of each are played."""

    name: str
    environments: Sequence[EnvironmentSpec]
    episodes: int
    purpose: Purpose


@dataclass(frozen=True)
class Played:
    """What one player did in one group; arrays [N, K] by environment and episode."""

    success: Bools
    right: Bools
    """its first diagnosis was right"""
    mishap: Bools
    """a right repair failed all the same"""
    mode: Array
    """the true one, the same for all players"""
    claimed: float
    """mean probability that an observer gave to what it named first; NaN for others"""

    @property
    def rows(self) -> Array:
        """i64[N * K] the environment of each episode."""
        return np.repeat(np.arange(len(self.success)), self.success.shape[1])


class Bench:
    """One policy, and the groups that it is explained on.

    Args:
        line: what is played.
        policy: the policy that is explained.
        groups: at least one.
        tell: told of each player.
    """

    def __init__(self, line: Line, policy: Policy, groups: Sequence[Group], tell: Callable[[str], None]) -> None:
        self.line, self.policy, self.groups, self._tell = line, policy, groups, tell
        self._models: dict[str, tuple[Fixed, Model]] = {}
        self.played: dict[tuple[str, str], Played] = {}

    def pool(self, group: Group) -> LinePool:
        """A pool of the group."""
        return self.line.pool(group.environments, group.purpose)

    def of(self, name: str, group: Group) -> Played:
        """What player ``name`` did in ``group``; played once."""
        if (name, group.name) not in self.played:
            self.played[name, group.name] = self.play(self.player(name, group), group)
        return self.played[name, group.name]

    def play(self, player: Player, group: Group) -> Played:
        """Plays the first episodes of each environment of ``group``."""
        watched = Watched(player, len(group.environments), group.episodes)
        pool = self.pool(group)
        try:
            ids = [environment.environment_id for environment in group.environments]
            found = play_first_episodes(pool, watched, group.episodes, environment_ids=ids)
        finally:
            pool.close()
        claims: list[float] = getattr(player, "claims", list)()
        claimed = float(np.mean(claims)) if claims else math.nan
        self._tell(f"{group.name}, {player.name}: {found['success'].mean():.2%}")
        return Played(found["success"], watched.right, watched.mishap, found["mode"], claimed)

    def observer(self, name: str, group: Group) -> IdealObserver:
        """The observer ``name``: told or untold, of every packet or of means."""
        if group.name not in self._models:
            line = self.line
            given = (group.environments, line.table, line.profile)
            fixed = build_fixed(*given, seed=line.seed, purpose=group.purpose, off=frozenset())
            self._models[group.name] = fixed, model_of(fixed)
        fixed, model = self._models[group.name]
        knows, keeps = name.split(", ")
        sight = EveryPacket() if keeps == "every packet" else MeansOnly()
        knowledge = Told(sight, fixed) if knows == "told" else Untold(sight, self.line.table)
        return IdealObserver(model, knowledge, fixed)

    def player(self, name: str, group: Group) -> Player:
        """A player of the ladder or beside it, by name."""
        policy, truth = self.policy, TrueDiagnosis()
        if name == "oracle":
            return OraclePlayer()
        if name.startswith(("told", "untold")):
            return HybridPlayer(name, policy, None, self.observer(name, group))
        if name.startswith("policy +"):
            more = MoreMeasuring(policy, int(name.removeprefix("policy +")))
            return HybridPlayer(name, policy, more, None, REST)
        made = {
            "truth at once": (NoMeasuring(), truth, frozenset[str]()),
            "truth": (None, truth, frozenset[str]()),
            "policy names": (None, None, frozenset[str]()),
            "policy": (None, None, REST),
            "rule measures, truth": (RuleMeasuring(), truth, frozenset[str]()),
            "rule measures, policy names": (RuleMeasuring(), None, frozenset[str]()),
        }
        measures, diagnosis, parts = made[name]
        return HybridPlayer(name, policy, measures, diagnosis, parts)

    def coalition(self, parts: frozenset[str], group: Group) -> Played:
        """The policy measures and does ``parts``, the truth does the others."""
        if parts in (frozenset(), frozenset({DIAGNOSIS}), frozenset(PARTS)):
            return self.of({0: "truth", 1: "policy names"}.get(len(parts), "policy"), group)
        name = f"policy: {', '.join(part for part in PARTS if part in parts)}"
        if (name, group.name) not in self.played:
            diagnosis = None if DIAGNOSIS in parts else TrueDiagnosis()
            player = HybridPlayer(name, self.policy, None, diagnosis, parts - {DIAGNOSIS})
            self.played[name, group.name] = self.play(player, group)
        return self.played[name, group.name]


def shapley(value: Callable[[frozenset[str]], Array], parts: Sequence[str] = PARTS) -> dict[str, Array]:
    """What each part costs, episode by episode; the costs add up to the whole.

    The mean, over all orders in which the parts can pass to the policy, of what success loses when this one does
    (Shapley, A value for n-person games, 1953).

    Args:
        value: success [N, K] where the given parts are the policy's.
        parts: names.
    """
    n = len(parts)
    costs = {}
    for part in parts:
        others = [other for other in parts if other != part]
        cost = np.zeros(value(frozenset()).shape)
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for chosen in itertools.combinations(others, size):
                without = frozenset(chosen)
                cost += weight * (value(without).astype(np.float64) - value(without | {part}))
        costs[part] = cost
    return costs


def lost(before: Played, after: Played) -> Estimate:
    """Success of ``before`` less that of ``after``, episode by episode."""
    return paired_difference(before.success.ravel(), after.success.ravel(), before.rows)


def won(played: Played, where: Bools | None = None) -> Estimate:
    """Success, clustered by environment, of the episodes ``where`` bool[N, K]."""
    chosen = np.ones(played.success.size, np.bool_) if where is None else where.ravel()
    return success_interval(played.success.ravel()[chosen], played.rows[chosen])


def right(played: Played) -> Estimate:
    """Share of first diagnoses that are right."""
    return success_interval(played.right.ravel(), played.rows)


def cost(values: Array) -> Estimate:
    """Mean of per-episode costs f64[N, K]."""
    rows = np.repeat(np.arange(len(values)), values.shape[1])
    return mean_interval(values.ravel(), rows)
