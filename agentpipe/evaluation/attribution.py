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
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from agentpipe.environments.layout import DISTURBANCE_KINDS
from agentpipe.errors import CorruptError, EvaluationError, VersionError
from agentpipe.evaluation.columns import coded, column, content_digest, read_parquet, write_parquet
from agentpipe.evaluation.rollout import RESULT_TYPES, default_builder, play_first_episodes
from agentpipe.evaluation.statistics import group_by, rounded, success_interval
from agentpipe.evaluation.tables import interval, markdown_table, percent
from agentpipe.progress import silent
from agentpipe.storage import publish_directory, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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

FORMAT = 1
SINGLES = tuple((kind,) for kind in DISTURBANCE_KINDS)
PAIRS = (("sensor", "network"), ("sensor", "load"), ("network", "load"))
CAUSES = (*DISTURBANCE_KINDS, "compound", "policy_or_information")
_TABLE, _SUMMARY = "attribution.parquet", "summary.json"


def column_name(kinds: Sequence[str]) -> str:
    """Column that holds the outcome with ``kinds`` switched off, such as ``sensor_network_off``."""
    return "_".join((*kinds, "off"))


@dataclass(frozen=True)
class AttributionReport:
    """One row per failed episode that was replayed, and what they add up to."""

    table: pa.Table
    summary: dict[str, Any]

    @property
    def digest(self) -> str:
        """Content digest of the table and the figures."""
        return str(self.summary["digest"])

    def save(self, path: Path) -> Path:
        """Publishes the report as the directory ``path``, whole or not at all."""
        with publish_directory(path) as staging:
            write_parquet(self.table, staging / _TABLE)
            write_json(staging / _SUMMARY, self.summary)
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a saved report.

        Raises:
            CorruptError: missing, damaged, or changed since it was written.
            VersionError: written in another format.
        """
        summary = read_json(path / _SUMMARY)
        if not isinstance(summary, dict) or "digest" not in summary:
            raise CorruptError("not an attribution summary", file=path / _SUMMARY)
        if summary.get("format") != FORMAT:
            found = summary.get("format")
            raise VersionError(f"attribution format {found!r}, this program reads {FORMAT}", file=path / _SUMMARY)
        table = read_parquet(path / _TABLE)
        if (
            content_digest(table, {key: value for key, value in summary.items() if key != "digest"})
            != summary["digest"]
        ):
            raise CorruptError("the attribution does not match its digest", file=path, remedy="attribute again")
        return cls(table, summary)


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


def decide_causes(helped: dict[tuple[str, ...], Bools]) -> npt.NDArray[np.int64]:
    """Index into :data:`CAUSES` for each episode [n] from which replays succeeded, keyed by the kinds switched off."""
    singles = np.stack([helped[single] for single in SINGLES])
    alone = singles.sum(axis=0)
    any_pair = np.any([helped[pair] for pair in PAIRS], axis=0)
    compound, rest = CAUSES.index("compound"), CAUSES.index("policy_or_information")
    return np.select([alone == 1, alone > 1, any_pair], [singles.argmax(axis=0), compound, compound], default=rest)


def _selected(report: EvaluationReport, name: str, environments: Sequence[EnvironmentSpec]) -> dict[str, Any]:
    """The player's rows: columns as numpy, with ``row`` = position of the environment in ``environments``."""
    report.player(name)
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


def _table(
    columns: dict[str, Any], chosen: npt.NDArray[np.int64], same: Bools, helped: dict[tuple[str, ...], Bools]
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
        }
    )


def _breakdown(labels: npt.NDArray[Any], cause: npt.NDArray[Any]) -> dict[str, dict[str, int]]:
    return {name: {key: int(np.sum(cause[part] == key)) for key in CAUSES} for name, part in group_by(labels).items()}


def _figures(table: pa.Table, failures: int) -> dict[str, Any]:
    """Shares of causes over the replayed rows."""
    replayed = column(table, "replayed")
    cause, cluster = column(table, "cause")[replayed], column(table, "environment_id")[replayed]
    base = {"failures": failures, "sampled": table.num_rows, "replayed": int(replayed.sum())}
    if not cause.size:
        status = "NO_FAILURES" if not failures else "NOT_REPLAYABLE"
        empty = {key: {"count": 0, "share": None} for key in CAUSES}
        return {**base, "status": status, "attributed": None, "ci95": [None, None], "causes": empty}
    estimate = success_interval(cause != "policy_or_information", cluster)
    counts = {key: int(np.sum(cause == key)) for key in CAUSES}
    return {
        **base,
        "status": "OK",
        "attributed": estimate.value,
        "ci95": estimate.ci95(),
        "causes": {key: {"count": count, "share": count / cause.size} for key, count in counts.items()},
        "by_segment": _breakdown(column(table, "failed_segment")[replayed], cause),
        "by_cell": _breakdown(column(table, "cell")[replayed], cause),
    }


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
    for key, value in given.items():
        if report.summary[key] != value:
            message = f"the evaluation used {key} {report.summary[key]!r}, not {value!r}"
            raise EvaluationError(message, remedy="attribute under what was evaluated, or evaluate again")
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
    result = _table(columns, chosen, same, helped)
    figures: dict[str, Any] = rounded(
        {
            "format": FORMAT,
            "player": player.name,
            "evaluation_digest": report.digest,
            **given,
            **_figures(result, int(failed.size)),
            "control": _control(replayer, columns, control_cap),
        }
    )
    return AttributionReport(result, {**figures, "digest": content_digest(result, figures)})


def _same_end(columns: dict[str, Any], chosen: npt.NDArray[np.int64], again: dict[str, npt.NDArray[Any]]) -> Bools:
    from agentpipe.environments.layout import REASONS, SEGMENTS

    reason = np.array(REASONS)[again["reason"]] == columns["reason"][chosen]
    segment = np.array(SEGMENTS)[again["segment"]] == columns["failed_segment"][chosen]
    result: Bools = reason & segment
    return result


def same_disturbance(table: pa.Table, fingerprint: str) -> pa.Table:
    """The rows under the disturbance with this SHA-256 or CRC-32."""
    import pyarrow as pa

    name = "crc32" if len(fingerprint) == 8 else "fingerprint"
    return table.filter(pa.array(column(table, name) == fingerprint))


def causes_markdown(summary: dict[str, Any]) -> str:
    """Causes with count and share, and the control, as Markdown."""
    if summary["attributed"] is None:
        return f"{summary['status']}: {summary['failures']:,} failures, {summary['replayed']:,} replayed."
    rows = [
        [name, item["count"], percent(item["share"]), percent(summary["control"].get(name, {}).get("share"))]
        for name, item in summary["causes"].items()
    ]
    head = (
        f"{percent(summary['attributed'])} ({interval(summary['ci95'])}) of {summary['replayed']:,} replayed failures "
        f"are due to a disturbance.\n\n"
    )
    return head + markdown_table(["cause", "failures", "share", "control: successes lost with it off"], rows)
