"""Why episodes failed: each is replayed with disturbances switched off (S21, simple form).

A failed episode is played again from the same random counters: first unchanged, which must fail in the same way, then
with one disturbance kind switched off at a time, then, where no single one helps, with two. All other draws stay the
same, so what turns the failure into a success is its cause:

 - ``sensor``, ``network``, ``load``: switching off this kind alone helps, and no other does;
 - ``compound``: several kinds help each on its own, or only two together do;
 - ``policy_or_information``: nothing helps; what is left is skill, or a fault that the readings do not show.

A policy that sees other readings acts differently, and different actions may succeed by luck. How often luck decides is
measured the same way the other way round: ``control`` is the share of *successes* that switching a kind off turns into
failures. A share attributed that is not well above the control means little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.environments.layout import REASONS, SEGMENTS
from agentpipe.errors import EvaluationError
from agentpipe.evaluation.attribution_report import FORMAT, AttributionReport, causes_markdown, same_disturbance
from agentpipe.evaluation.causes import (
    CAUSES,
    PAIRS,
    SINGLES,
    WITNESSES,
    cause_figures,
    column_name,
    decide_causes,
    witnesses,
)
from agentpipe.evaluation.columns import coded, column
from agentpipe.evaluation.holdout import identity
from agentpipe.evaluation.rollout import RESULT_TYPES, default_builder, play_first_episodes
from agentpipe.evaluation.statistics import rounded
from agentpipe.evaluation.stored import sealed
from agentpipe.progress import silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.layout import Purpose
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.players import Player
    from agentpipe.environments.table import DisturbanceTable
    from agentpipe.evaluation.report import EvaluationReport
    from agentpipe.evaluation.rollout import PoolBuilder
    from agentpipe.progress import Progress

    Bools = npt.NDArray[np.bool_]

__all__ = ["AttributionReport", "attribute_failures", "causes_markdown", "same_disturbance"]


@dataclass(frozen=True)
class _Replayer:
    """Plays chosen episodes of chosen environments again."""

    player: Player
    environments: Sequence[EnvironmentSpec]
    table: DisturbanceTable
    profile: LineProfile
    seed: int
    purpose: Purpose
    threads: int
    build: PoolBuilder

    def replay(
        self, rows: npt.NDArray[np.int64], episodes: npt.NDArray[np.int64], off: Sequence[str]
    ) -> dict[str, npt.NDArray[Any]]:
        """Results [n] of episode ``episodes[i]`` of environment ``rows[i]`` with ``off`` off."""
        if not rows.size:
            return {name: np.zeros(0, dtype=kind) for name, kind in RESULT_TYPES.items()}
        specs = [self.environments[row] for row in rows]
        ids = [spec.environment_id for spec in specs]
        settings = {"seed": self.seed, "purpose": self.purpose, "threads": self.threads, "off": frozenset(off)}
        pool = self.build(specs, self.table, self.profile, **settings)
        try:
            played = play_first_episodes(pool, self.player, 1, environment_ids=ids, first_episode=episodes)
        finally:
            pool.close()
        return {name: values[:, 0] for name, values in played.items()}


def sample_rows(rows: npt.NDArray[np.int64], cap: int, seed: int) -> npt.NDArray[np.int64]:
    """At most ``cap`` of ``rows`` without repetition, drawn by ``seed``, in ascending order."""
    if rows.size <= cap:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, size=cap, replace=False))


def _selected(report: EvaluationReport, name: str, environments: Sequence[EnvironmentSpec]) -> dict[str, Any]:
    """The player's rows: columns as numpy, with ``row`` = position of the environment in ``environments``."""
    mine = column(report.table, "player") == name
    columns = {key: column(report.table, key)[mine] for key in report.table.column_names}
    position = {spec.environment_id: row for row, spec in enumerate(environments)}
    missing = [key for key in columns["environment_id"] if key not in position]
    if missing:
        raise EvaluationError("an evaluated environment is not among those given", environment=missing[0])
    columns["row"] = np.array([position[key] for key in columns["environment_id"]], dtype=np.int64)
    return columns


def _replay_all(
    replayer: _Replayer, rows: npt.NDArray[np.int64], episodes: npt.NDArray[np.int64], progress: Progress
) -> dict[tuple[str, ...], Bools]:
    """Outcome with each single kind off, and with each pair off where no single one helped (else False)."""
    helped: dict[tuple[str, ...], Bools] = {}
    total = len(SINGLES) + len(PAIRS)
    for done, single in enumerate(SINGLES, start=1):
        helped[single] = replayer.replay(rows, episodes, single)["success"]
        progress("attribute failures", done, total, f"{single[0]} off")
    open_rows = np.flatnonzero(~np.any([helped[single] for single in SINGLES], axis=0))
    for done, pair in enumerate(PAIRS, start=len(SINGLES) + 1):
        helped[pair] = np.zeros(rows.size, dtype=np.bool_)
        if open_rows.size:
            helped[pair][open_rows] = replayer.replay(rows[open_rows], episodes[open_rows], pair)["success"]
        progress("attribute failures", done, total, f"{' and '.join(pair)} off")
    return helped


def _control(replayer: _Replayer, columns: dict[str, Any], cap: int) -> dict[str, dict[str, Any]]:
    """For each kind, the share of sampled successes that fail with the kind switched off."""
    chosen = sample_rows(np.flatnonzero(columns["success"]), cap, replayer.seed + 1)
    if not chosen.size:
        return {}
    rows, episodes = columns["row"][chosen], columns["episode"][chosen].astype(np.int64)
    result = {}
    for single in SINGLES:
        flips = int(np.sum(~replayer.replay(rows, episodes, single)["success"]))
        result[single[0]] = {"sampled": int(chosen.size), "flips": flips, "share": flips / chosen.size}
    return result


def _same_end(columns: dict[str, Any], chosen: npt.NDArray[np.int64], again: dict[str, npt.NDArray[Any]]) -> Bools:
    reason = np.array(REASONS)[again["reason"]] == columns["reason"][chosen]
    segment = np.array(SEGMENTS)[again["segment"]] == columns["failed_segment"][chosen]
    result: Bools = reason & segment
    return result


def _table(
    columns: dict[str, Any],
    chosen: npt.NDArray[np.int64],
    same: Bools,
    helped: dict[tuple[str, ...], Bools],
    witness: npt.NDArray[np.int64],
) -> pa.Table:
    import pyarrow as pa

    def text(name: str) -> pa.Array:
        labels, codes = np.unique(columns[name][chosen], return_inverse=True)
        return coded(codes, labels.tolist())

    texts = {name: text(name) for name in ("environment_id", "template_id", "cell", "mode", "failed_segment", "reason")}
    cause = decide_causes(helped)
    return pa.table(
        {
            "fingerprint": text("fingerprint"),
            "crc32": text("crc32"),
            **texts,
            "episode": columns["episode"][chosen],
            "replayed": same,
            **{column_name(kinds): outcome for kinds, outcome in helped.items()},
            "cause": coded(cause, CAUSES),
            "witness": coded(witness, WITNESSES),
        }
    )


def _check_conditions(report: EvaluationReport, player: Player, given: dict[str, Any]) -> None:
    report.player(player.name)
    evaluated = {**report.summary, "identity": report.summary["identities"][player.name]}
    for key, value in {**given, "identity": identity(player)}.items():
        if evaluated[key] != value:
            message = f"the evaluation used {key} {evaluated[key]!r}, not {value!r}"
            raise EvaluationError(message, remedy="attribute under what was evaluated, or evaluate again")


def attribute_failures(  # noqa: PLR0913 - keyword-only, each a part of what the figures depend on
    report: EvaluationReport,
    player: Player,
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    profile: LineProfile,
    *,
    seed: int,
    purpose: Purpose,
    cap: int = 500,
    control_cap: int = 200,
    threads: int = 1,
    progress: Progress = silent,
    build: PoolBuilder | None = None,
) -> AttributionReport:
    """Replays a sample of ``player``'s failed episodes of ``report`` and says what each is due to.

    ``player``, ``table``, ``profile``, ``seed`` and ``purpose`` are those of the evaluation. An episode whose unchanged
    replay does not end in the same way is marked ``replayed = false`` and left out of all shares.

    Args:
        report: The evaluation that ``player`` took part in.
        player: Must act the same in the same situation (a greedy policy does).
        environments: Those that were evaluated, in any order.
        table: The evaluation's table version.
        profile: The evaluation's line profile.
        seed: The evaluation's root seed.
        purpose: The evaluation's purpose.
        cap: Most failures replayed (drawn by ``seed``).
        control_cap: Most successes replayed for the control.
        threads: Simulation threads.
        progress: Told of finished replays.
        build: Builds the pools; the built-in line's where it is ``None``.

    Raises:
        EvaluationError: another table, profile, seed or purpose than the evaluation's, or an unknown player.
    """
    given = {
        "table_version": table.version,
        "line_profile": profile.digest,
        "seed": seed,
        "purpose": purpose.name.lower(),
    }
    _check_conditions(report, player, given)
    columns = _selected(report, player.name, environments)
    columns["crc32"] = np.array([table.fingerprint(name).crc32 for name in columns["environment_id"]])
    builder = build or default_builder()
    replayer = _Replayer(player, environments, table, profile, seed, purpose, threads, builder)
    failed = np.flatnonzero(~columns["success"])
    chosen = sample_rows(failed, cap, seed)
    rows, episodes = columns["row"][chosen], columns["episode"][chosen].astype(np.int64)
    again = replayer.replay(rows, episodes, ())
    same = ~again["success"] & _same_end(columns, chosen, again)
    helped = _replay_all(replayer, rows, episodes, progress)
    result = _table(columns, chosen, same, helped, witnesses(report.table, player.name, chosen))
    figures: dict[str, Any] = rounded(
        {
            "format": FORMAT,
            "player": player.name,
            "evaluation_digest": report.digest,
            **given,
            **cause_figures(result, int(failed.size)),
            "control": _control(replayer, columns, control_cap),
        }
    )
    return AttributionReport(result, sealed(result, figures))
