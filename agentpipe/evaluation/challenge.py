"""Champion and challenger on the same held-out episodes: is the candidate not worse, overall and in every cell (S19)?

Both play the same episodes of the same environments (common random numbers: counters depend on seed, purpose,
environment and episode, not on the player), so what an episode's difficulty adds to both cancels. Overall the candidate
must be shown to lack less than ``margin`` of success, at error rate ``alpha``; in no cell may it be shown to lack more
than ``cell_margin``, Holm-corrected over the cells. The statistics are in
:mod:`agentpipe.evaluation.challenge_statistics`, which episodes are played in
:mod:`agentpipe.evaluation.challenge_looks`.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.environments.layout import SIMULATOR_VERSION, Purpose
from agentpipe.environments.parameters import CELLS
from agentpipe.errors import EvaluationError
from agentpipe.evaluation.challenge_result import (
    INSUFFICIENT_DATA,
    NOT_BETTER_ENOUGH,
    PROMOTE,
    VETO_CELL,
    Challenge,
)
from agentpipe.evaluation.challenge_statistics import environments_needed, holm, paired_bound, worse_p_value
from agentpipe.evaluation.columns import column
from agentpipe.evaluation.holdout import check_disjoint, episode_table, identity
from agentpipe.evaluation.report import EvaluationReport
from agentpipe.evaluation.rollout import default_builder, play_first_episodes
from agentpipe.evaluation.statistics import group_by, mean_interval, rounded
from agentpipe.progress import silent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.players import Player
    from agentpipe.environments.table import DisturbanceTable
    from agentpipe.evaluation.challenge_looks import Look
    from agentpipe.evaluation.challenge_statistics import Limits, PairedBound
    from agentpipe.evaluation.rollout import PoolBuilder
    from agentpipe.progress import Progress

    Floats = npt.NDArray[np.float64]

__all__ = ["INSUFFICIENT_DATA", "NOT_BETTER_ENOUGH", "PROMOTE", "VETO_CELL", "Challenge", "challenge", "judge"]

CANDIDATE, CHAMPION = "candidate", "champion"
CELL_ENVIRONMENTS = 10
"""Least environments of each cell; the hold-out has 200."""


def challenge(  # noqa: PLR0913 - keyword-only, each a part of what the figures depend on
    candidate: Player,
    champion: Player,
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    profile: LineProfile,
    *,
    seed: int,
    look: Look,
    trained_on: Sequence[EnvironmentSpec],
    limits: Limits,
    cells: Sequence[str] = CELLS,
    cell_environments: int = CELL_ENVIRONMENTS,
    threads: int = 1,
    progress: Progress = silent,
    build: PoolBuilder | None = None,
) -> Challenge:
    """Plays both on the episodes of ``look`` and judges; equal arguments give an equal digest.

    Args:
        candidate: One with a method ``reset()`` has it called before its turn; so for the champion.
        champion: The one that would be replaced.
        environments: G distinct held-out environments.
        table: The pinned disturbance table.
        profile: The line profile the pool is built from.
        seed: Root seed.
        look: Which episodes; see :meth:`LookStore.take`.
        trained_on: Every environment that training could have seen, to be checked against.
        limits: What the candidate may lack, and the error rate.
        cells: Cells that must be judged.
        cell_environments: Least environments of each of them; fewer are INSUFFICIENT_DATA.
        threads: Simulation threads; they do not change any figure.
        progress: Told of finished episodes.
        build: Builds the pool; the built-in line's where it is ``None``.

    Raises:
        EvaluationError: no or repeated environments, a look of other policies, overlap with training, players that met
            different episodes, an episode that does not end, a result that is not finite.
    """
    report = play_pair(
        candidate,
        champion,
        environments,
        table,
        profile,
        seed=seed,
        look=look,
        trained_on=trained_on,
        threads=threads,
        progress=progress,
        build=build,
    )
    return judge(report, limits, cells=cells, cell_environments=cell_environments)


def play_pair(  # noqa: PLR0913 - as for challenge
    candidate: Player,
    champion: Player,
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    profile: LineProfile,
    *,
    seed: int,
    look: Look,
    trained_on: Sequence[EnvironmentSpec],
    threads: int = 1,
    progress: Progress = silent,
    build: PoolBuilder | None = None,
) -> EvaluationReport:
    """The episodes of ``look``, played by both; players are called ``candidate`` and ``champion``. See challenge."""
    if not environments:
        raise EvaluationError("no environment to compare on", remedy="compare on the hold-out split")
    for role, player, digest in ((CANDIDATE, candidate, look.candidate), (CHAMPION, champion, look.champion)):
        if identity(player) not in (None, digest):
            raise EvaluationError(f"the look was taken for another {role}", policy=identity(player), look=digest)
    disjoint = check_disjoint(environments, trained_on, Purpose.PROMOTION)
    builder = build or default_builder()
    ids = [spec.environment_id for spec in environments]
    results: dict[str, dict[str, npt.NDArray[Any]]] = {}
    durations: dict[str, float] = {}
    for role, player in ((CANDIDATE, candidate), (CHAMPION, champion)):
        start = time.perf_counter()
        pool = builder(environments, table, profile, seed=seed, purpose=Purpose.PROMOTION, threads=threads)
        try:
            results[role] = play_first_episodes(
                pool,
                player,
                look.episodes,
                environment_ids=ids,
                first_episode=look.first_episode,
                progress=lambda _, done, total, role=role: progress(f"play {role}", done, total),
            )
        finally:
            pool.close()
        durations[role] = time.perf_counter() - start
    _check_common(results, ids)
    context = {
        "simulator_version": SIMULATOR_VERSION,
        "table_version": table.version,
        "line_profile": profile.digest,
        "seed": seed,
        "purpose": Purpose.PROMOTION.name.lower(),
        "environments": len(environments),
        "disjoint": disjoint,
        "identities": {CANDIDATE: identity(candidate), CHAMPION: identity(champion)},
        "look": {name: value for name, value in asdict(look).items() if name != "at"},
    }
    return EvaluationReport.build(_numbered(results, environments, table, look), context, durations)


def judge(
    report: EvaluationReport,
    limits: Limits,
    *,
    cells: Sequence[str] = CELLS,
    cell_environments: int = CELL_ENVIRONMENTS,
) -> Challenge:
    """The verdict on episodes that :func:`play_pair` has played; arguments as for :func:`challenge`.

    The verdict is the first of these that applies: ``INSUFFICIENT_DATA`` (even a candidate that never differed could
    not be shown to lack less than ``margin``, or a cell has fewer than ``cell_environments``); ``NOT_BETTER_ENOUGH``
    (the lower bound does not reach ``-margin``: inferior or undecided); ``VETO_CELL``; ``PROMOTE``.

    Raises:
        EvaluationError: episodes that are not pairs.
    """
    margin, cell_margin, alpha = limits.margin, limits.cell_margin, limits.alpha
    pairs = _Pairs(report)
    overall = paired_bound(pairs.by_environment(np.arange(pairs.size)), alpha)
    by_cell = _cells(pairs, cell_margin, alpha)
    needed = environments_needed(margin, alpha)
    thin = [cell for cell in cells if by_cell.get(cell, {"environments": 0})["environments"] < cell_environments]
    vetoes = [cell for cell, figures in by_cell.items() if figures["worse"]]
    problems = [
        *_too_few(overall, needed, margin, thin, cell_environments),
        *_not_shown(overall, margin),
        *(_veto(cell, by_cell[cell], cell_margin) for cell in vetoes),
    ]
    if overall.environments < needed or thin:
        verdict = INSUFFICIENT_DATA
    elif not overall.low > -margin:
        verdict = NOT_BETTER_ENOUGH
    else:
        verdict = VETO_CELL if vetoes else PROMOTE
    shown = (
        f"success {overall.difference:+.2%} against the champion, at least {overall.low:+.2%}: it does not lack "
        f"{margin:.2%}, and no cell is shown to lack more than {cell_margin:.2%}"
    )
    figures = {
        "verdict": verdict,
        "reasons": problems or [shown],
        "margin": margin,
        "cell_margin": cell_margin,
        "alpha": alpha,
        "method": "one-sided t over environment means, with the variance of the hypothesis' loss",
        "look": report.summary["look"],
        "identities": report.summary["identities"],
        "episodes_digest": report.digest,
        "environments": overall.environments,
        "environments_needed": needed,
        **pairs.figures(np.arange(pairs.size), overall),
        "by_template": _by_template(pairs),
        "by_cell": by_cell,
    }
    return Challenge.build(rounded(figures), report)


# --------------------------------------------------------------------------------------------------- inside


class _Pairs:
    """The outcomes of both players, row by row the same episode."""

    def __init__(self, report: EvaluationReport) -> None:
        player = column(report.table, "player")
        rows = {role: np.flatnonzero(player == role) for role in (CANDIDATE, CHAMPION)}
        keys = [
            {name: column(report.table, name)[part] for name in ("environment_id", "episode", "cell", "template_id")}
            for part in rows.values()
        ]
        if not rows[CANDIDATE].size or not all(np.array_equal(keys[0][name], keys[1][name]) for name in keys[0]):
            raise EvaluationError("candidate and champion did not play the same episodes")
        self.environment, self.cell, self.template = (keys[0][n] for n in ("environment_id", "cell", "template_id"))
        success = column(report.table, "success")
        self.candidate, self.champion = success[rows[CANDIDATE]], success[rows[CHAMPION]]
        self.difference: Floats = self.candidate.astype(np.float64) - self.champion.astype(np.float64)
        self.size = self.difference.size

    def by_environment(self, part: npt.NDArray[np.int64]) -> Floats:
        """Mean difference f64[G] of each environment among the rows ``part``."""
        _, index, counts = np.unique(self.environment[part], return_inverse=True, return_counts=True)
        means: Floats = np.bincount(index, weights=self.difference[part]) / counts
        return means

    def figures(self, part: npt.NDArray[np.int64], bound: PairedBound) -> dict[str, Any]:
        """What is shown of the rows ``part``: difference, bounds, success, discordant episodes."""
        ours, theirs = self.candidate[part], self.champion[part]
        return {
            "difference": bound.difference,
            "low": bound.low,
            "high": bound.high,
            "episodes": int(part.size),
            "success": {CANDIDATE: float(ours.mean()), CHAMPION: float(theirs.mean())},
            "only_candidate": int((ours & ~theirs).sum()),
            "only_champion": int((~ours & theirs).sum()),
        }


def _cells(pairs: _Pairs, cell_margin: float, alpha: float) -> dict[str, dict[str, Any]]:
    parts = group_by(pairs.cell)
    means = {cell: pairs.by_environment(part) for cell, part in parts.items()}
    p_values = [worse_p_value(values, cell_margin) for values in means.values()]
    adjusted = holm(p_values)
    return {
        cell: {
            "environments": int(means[cell].size),
            **pairs.figures(part, paired_bound(means[cell], alpha)),
            "p": p,
            "p_holm": float(corrected),
            "worse": bool(corrected < alpha),
        }
        for (cell, part), p, corrected in zip(parts.items(), p_values, adjusted, strict=True)
    }


def _by_template(pairs: _Pairs) -> dict[str, Any]:
    """Beside the verdict: the two-sided 95 % interval for lines drawn anew, clustered by template."""
    estimate = mean_interval(pairs.difference, pairs.template)
    return {"difference": estimate.value, "ci95": estimate.ci95(), "templates": estimate.clusters}


def _too_few(bound: PairedBound, needed: int, margin: float, thin: list[str], least: int) -> list[str]:
    reasons = []
    if bound.environments < needed:
        reasons.append(f"{bound.environments} environments cannot show a margin of {margin:.2%}: {needed} are needed")
    if thin:
        reasons.append(f"fewer than {least} environments in {', '.join(thin)}")
    return reasons


def _not_shown(bound: PairedBound, margin: float) -> list[str]:
    if bound.low > -margin or bound.environments < 2:
        return []
    found = f"success {bound.difference:+.2%} against the champion"
    if bound.high < -margin:
        return [f"inferior: {found}, at most {bound.high:+.2%}, where {-margin:+.2%} is allowed"]
    return [f"undecided: {found}, which may be {bound.low:+.2%}, where {-margin:+.2%} is allowed"]


def _veto(cell: str, figures: Mapping[str, Any], cell_margin: float) -> str:
    p = figures["p_holm"]
    return f"worse in {cell}: {figures['difference']:+.2%}, where {-cell_margin:+.2%} is allowed (p = {p:.2g}, Holm)"


def _numbered(
    results: dict[str, dict[str, npt.NDArray[Any]]],
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    look: Look,
) -> Any:  # noqa: ANN401 - pyarrow publishes no types
    """The per-episode table, its episodes counted from the look's first."""
    import pyarrow as pa

    played = episode_table(results, environments, table)
    numbers = column(played, "episode").astype(np.int64) + look.first_episode
    return played.set_column(played.column_names.index("episode"), "episode", pa.array(numbers))


def _check_common(results: dict[str, dict[str, npt.NDArray[Any]]], ids: Sequence[str]) -> None:
    ours, theirs = results[CANDIDATE], results[CHAMPION]
    differs = (ours["mode"] != theirs["mode"]) | (ours["machine"] != theirs["machine"])
    if differs.any():
        row = int(np.flatnonzero(differs.any(axis=1))[0])
        raise EvaluationError("candidate and champion met different faults in the same episode", environment=ids[row])
