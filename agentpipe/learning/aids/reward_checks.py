"""Whether rewards keep the discipline of S11, measured on recorded steps and on what the policy has just learned from.

- *Range*: 95 % of raw rewards lie within ±10, and few scaled ones are clamped at ±5.
- *Signs*: positive to negative **advantages**, 0.8 to 1.2. Three ratios can be formed, and two of them say little here.
  Every step of the line costs time, so that raw rewards are mostly negative however well it is worked: 0.08 for the
  random player, 0.18 for the rules, 0.40 for the demonstrator who fails once in a hundred. Rewards net of that running
  cost (``earned``) rise with the skill of the player, 0.15, 0.97, 3.2: a policy that gets better leaves any fixed
  range, although nothing is wrong with its rewards. The advantage is what the policy gradient is handed: far more
  negative than positive ones mean that most decisions are pushed down a little, for the sake of few that are pushed up.
- *Gradient*: how reward changes with time, waiting, lead and travel, by least squares over recorded steps, against what
  the line declares. A deviation of more than 15 % warns and names the term.

The line's gradients are measured on these steps:

- ``step`` and ``decision second``: those whose reward is the running cost alone, and that wait for nothing, on the
  seconds until the next step;
- ``waiting second``: ``start`` and ``retry``, by action and by whether it repaired, on the seconds until the next step;
- ``lead minute``: ``reserve_depot_d``, on ``lead.d`` of the observation, the seconds accounted for;
- ``travel minute``: ``technician_t``, by whether they have the skill, on ``travel.t``, likewise.

Last steps of an episode are left out: what ends it is paid there. Steps of one group share a constant of their own.
Seconds of a ``start`` are mostly waiting: the decision's own share varies by seconds, the wait by minutes, so that it
changes the coefficient by less than a hundredth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import (
    A_DEPOT,
    A_EXPEDITE,
    A_RETRY,
    A_START,
    A_TECHNICIAN,
    OBSERVATION_NAMES,
    block_start,
)
from agentpipe.errors import LearningError
from agentpipe.learning.gates import GateFigure, at_least, at_most

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.experience.store.shard import Shard

LINE: Final[Mapping[str, float]] = {
    "step": -0.01,
    "decision second": -0.004,
    "waiting second": -0.001,
    "lead minute": -0.1,
    "travel minute": -0.1,
}
"""what the built-in line declares: change of reward for one more of each"""
SECONDS: Final = "seconds"
"""term of an environment of one's own: how long the step took"""
RANGE, RANGE_SHARE, CLAMPED_SHARE = 10.0, 0.95, 0.05
SIGNS: Final = (0.8, 1.2)
DEVIATION: Final = 0.15
LEAST_STEPS: Final = 30
"""below which nothing is measured"""

Floats = npt.NDArray[np.float64]


class Gradient(NamedTuple):
    """One term of reward, declared and measured."""

    term: str
    declared: float
    measured: float
    error: float
    """standard error of the measured one"""
    steps: int
    """that it was measured on"""

    @property
    def deviation(self) -> float:
        """Of the measured from the declared one, over the declared one; the measured one itself where that is 0."""
        return abs(self.measured - self.declared) / (abs(self.declared) or 1.0)


@dataclass(frozen=True)
class RewardReport:
    """What was found."""

    figures: tuple[GateFigure, ...]
    """judged, as figures of gate 4; each of them warns at the most"""
    gradients: tuple[Gradient, ...]
    """measured terms"""
    notes: tuple[str, ...]
    """what is not judged: the other ratios, terms that could not be measured, "not declared\""""


# -- range and signs -----------------------------------------------------------------------------------------------


def range_figures(inside: float, clamped: float | None = None) -> tuple[GateFigure, ...]:
    """Judges the range.

    Args:
        inside: share of raw rewards within ±10.
        clamped: share of scaled rewards beyond ±5; none = not known.
    """
    far = float("inf")
    figures = [at_least("4", "rewards within 10", inside, RANGE_SHARE, -far, "scale the environment's reward down")]
    if clamped is not None:
        remedy = "a few rewards are far larger than the rest: spread them over the steps that earn them"
        figures.append(at_most("4", "clamped rewards", clamped, CLAMPED_SHARE, far, remedy))
    return tuple(figures)


def sign_figure(ratio: float) -> GateFigure:
    """Judges the ratio of positive to negative advantages."""
    low, high = SIGNS
    bound = low if ratio < low else high
    remedy = "balance shaping rewards and costs, or look at the advantages by segment"
    status: Any = "pass" if low <= ratio <= high else "warn"
    return GateFigure("4", "positive to negative advantages", ratio, bound, bound, status, remedy)


def sign_ratio(values: npt.NDArray[np.floating]) -> float:
    """Values above 0 over values below 0 (at least one)."""
    return float((values > 0).sum() / max(1, int((values < 0).sum())))


# -- gradients -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """M recorded steps, in the order of their episodes."""

    reward: Floats
    action: npt.NDArray[np.int64]
    observation: npt.NDArray[np.float32]
    """f32[M, D]"""
    seconds: Floats
    """from this step to the next, or to the end of the episode"""
    earned: npt.NDArray[np.bool_]
    last: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, shard: Shard) -> Steps:
        """All steps of a shard."""
        episodes = shard.episodes[np.argsort(shard.episodes["first"], kind="stable")]
        records, length = shard.records, episodes["steps"].astype(np.int64)
        time = records["time"].astype(np.float64) * 60.0
        ends = np.cumsum(length)
        last = np.zeros(len(records), np.bool_)
        last[ends - 1] = True
        after = np.append(time[1:], 0.0)
        after[ends - 1] = episodes["elapsed_seconds"]
        return cls(
            reward=records["reward"].astype(np.float64),
            action=records["action"].astype(np.int64),
            observation=records["observation"],
            seconds=after - time,
            earned=records["earned"] == 1,
            last=last,
        )


def check_shard(
    shard: Shard,
    *,
    deviation: float | None = None,
    clamp: float = 5.0,
    declared: Mapping[str, float] | None = None,
    names: Sequence[str] = OBSERVATION_NAMES,
) -> RewardReport:
    """Checks the rewards of recorded steps.

    Args:
        shard: what was recorded.
        deviation: that rewards are divided by in training (``rewards/deviation``); none = clamping is not looked at.
        clamp: of scaled rewards.
        declared: change of reward for one more of a feature of the observation, by its name, or for one more second
            (:data:`SECONDS`); none = those of the built-in line where the shard is one of it, else nothing is declared.
        names: of the observation features.

    Raises:
        LearningError: a declared term is no feature.
    """
    steps = Steps.of(shard)
    inside = float((np.abs(steps.reward) <= RANGE).mean())
    clamped = None if deviation is None else float((np.abs(steps.reward / deviation) > clamp).mean())
    notes = [f"positive to negative rewards: {sign_ratio(steps.reward):.2f}"]
    if steps.earned.any():
        net = sign_ratio(steps.reward[steps.earned])
        notes.append(f"positive to negative rewards net of the running cost: {net:.2f}")
    line = declared is None and steps.observation.shape[1] == len(OBSERVATION_NAMES) and steps.earned.any()
    wanted = LINE if line else declared or {}
    gradients = line_gradients(steps) if line else declared_gradients(steps, wanted, names)
    if not wanted:
        notes.append("reward gradient: not declared")
    missing = [term for term in wanted if term not in {gradient.term for gradient in gradients}]
    notes += [f"reward gradient of {term}: not measured, too few steps or no variation" for term in missing]
    figures = (*range_figures(inside, clamped), *(gradient_figure(gradient) for gradient in gradients))
    return RewardReport(figures, gradients, tuple(notes))


def gradient_figure(gradient: Gradient) -> GateFigure:
    """Judges how far a measured gradient is from the declared one."""
    said = f"declared {gradient.declared:g}, measured {gradient.measured:.4g} ± {gradient.error:.2g}"
    remedy = f"{said} on {gradient.steps} steps: correct the reward, or what is declared of it"
    name = f"reward gradient of {gradient.term}"
    return at_most("4", name, gradient.deviation, DEVIATION, float("inf"), remedy)


def line_gradients(steps: Steps) -> tuple[Gradient, ...]:
    """The terms of the built-in line; see the module. Those that cannot be measured are left out."""
    action, going = steps.action, ~steps.last
    working = (action == A_START) | (action == A_RETRY)
    found = _fit(steps, going & ~working & ~steps.earned, {"decision second": steps.seconds}, "step")
    outcome = 2 * action + (steps.reward > 0)
    found += _fit(steps, going & working, {"waiting second": steps.seconds}, groups=outcome)
    depot = (action >= A_DEPOT) & (action < A_TECHNICIAN)
    lead = _of_action(steps, "lead", A_DEPOT, depot)
    found += _fit(steps, going & depot, {"lead minute": lead, "": steps.seconds})
    technician = (action >= A_TECHNICIAN) & (action < A_EXPEDITE)
    travel = _of_action(steps, "travel", A_TECHNICIAN, technician)
    skilled = _of_action(steps, "skilled", A_TECHNICIAN, technician).astype(np.int64)
    found += _fit(steps, going & technician, {"travel minute": travel, "": steps.seconds}, groups=skilled)
    return tuple(gradient._replace(declared=LINE[gradient.term]) for gradient in found)


def declared_gradients(steps: Steps, declared: Mapping[str, float], names: Sequence[str]) -> tuple[Gradient, ...]:
    """The declared terms of an environment of one's own: all of them together, each action with its own constant.

    Raises:
        LearningError: a term is neither a feature nor :data:`SECONDS`.
    """
    known = {name: index for index, name in enumerate(names)}
    columns: dict[str, Floats] = {}
    for term in declared:
        if term != SECONDS and term not in known:
            remedy = f"declare gradients by names of observation features, or of {SECONDS}"
            raise LearningError(f"{term} is no feature of the observation", field=term, remedy=remedy)
        columns[term] = steps.seconds if term == SECONDS else steps.observation[:, known[term]].astype(np.float64)
    found = _fit(steps, ~steps.last, columns, groups=steps.action)
    return tuple(gradient._replace(declared=declared[gradient.term]) for gradient in found)


def _of_action(steps: Steps, block: str, first: int, rows: npt.NDArray[np.bool_]) -> Floats:
    """The feature of ``block`` that belongs to the action taken, where ``rows``, else 0."""
    column = block_start(block) + np.where(rows, steps.action - first, 0)
    values: Floats = steps.observation[np.arange(len(steps.action)), column].astype(np.float64)
    return values


def _fit(
    steps: Steps,
    rows: npt.NDArray[np.bool_],
    columns: Mapping[str, Floats],
    constant: str = "",
    *,
    groups: npt.NDArray[np.int64] | None = None,
) -> list[Gradient]:
    """Least squares of reward on ``columns``, over ``rows``; every group has a constant of its own.

    Columns without a name are accounted for and not told of; nor is what does not vary, or is told from too few steps.

    Args:
        steps: all of them.
        rows: which are looked at.
        columns: by term, f64[M].
        constant: term of the constant, where there is one group only.
        groups: i64[M]; none = one.
    """
    reward = steps.reward[rows]
    if len(reward) < LEAST_STEPS:
        return []
    _, group = np.unique(np.zeros(len(reward), np.int64) if groups is None else groups[rows], return_inverse=True)
    count = np.bincount(group)

    def centred(values: Floats) -> Floats:
        return values - (np.bincount(group, values) / count)[group]

    moving = {term: column[rows] for term, column in columns.items() if np.ptp(centred(column[rows])) > 1e-6}
    if not moving:
        return []
    design, target = np.stack([centred(column) for column in moving.values()], axis=1), centred(reward)
    slope, _, rank, _ = np.linalg.lstsq(design, target, rcond=None)
    if rank < design.shape[1]:
        return []
    residual = target - design @ slope
    variance = float(residual @ residual) / max(1, len(reward) - len(count) - len(slope))
    error = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    measured = zip(moving, slope.tolist(), error.tolist(), strict=True)
    found = [Gradient(term, 0.0, value, spread, len(reward)) for term, value, spread in measured if term]
    if constant:
        means = np.array([column.mean() for column in moving.values()])
        spread = float(np.sqrt(variance / len(reward) + (means**2 @ error**2)))
        found.append(Gradient(constant, 0.0, float(reward.mean() - means @ slope), spread, len(reward)))
    return found
