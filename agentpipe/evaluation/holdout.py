"""Plays several players on the same held-out episodes and reports how they did (S20)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.environments.layout import MODES, REASONS, SEGMENTS, SIMULATOR_VERSION, Purpose
from agentpipe.errors import EvaluationError
from agentpipe.evaluation.columns import coded
from agentpipe.evaluation.report import EvaluationReport
from agentpipe.evaluation.rollout import default_builder, play_first_episodes
from agentpipe.progress import silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from agentpipe.environments.catalog import EnvironmentSpec
    from agentpipe.environments.line_profile import LineProfile
    from agentpipe.environments.players import Player
    from agentpipe.environments.table import DisturbanceTable
    from agentpipe.evaluation.rollout import PoolBuilder
    from agentpipe.progress import Progress

    Results = dict[str, npt.NDArray[Any]]

_SPLIT_PURPOSE = {"train": Purpose.TRAIN, "validation": Purpose.VALIDATION, "holdout": Purpose.REPORT}


def purpose_for_split(split: str) -> Purpose:
    """What the random numbers of an evaluation on ``split`` are drawn for.

    Raises:
        EvaluationError: there is no such split.
    """
    if split not in _SPLIT_PURPOSE:
        raise EvaluationError(f"no split {split!r}", remedy=f"one of {', '.join(_SPLIT_PURPOSE)}")
    return _SPLIT_PURPOSE[split]


def check_disjoint(
    environments: Sequence[EnvironmentSpec], trained_on: Sequence[EnvironmentSpec], purpose: Purpose
) -> dict[str, int]:
    """Counts what ``environments`` share with ``trained_on`` and refuses it where the purpose is to judge.

    Training and validation may share a template (never an environment); the hold-out shares neither.

    Returns:
        ``training_environments``, ``environment_overlap``, ``template_overlap``.

    Raises:
        EvaluationError: an environment occurs twice, or one that is judged was trained on.
    """
    ids = [spec.environment_id for spec in environments]
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise EvaluationError("an environment occurs twice", environment=twice)
    trained = {spec.environment_id for spec in trained_on}
    templates = {spec.template.template_id for spec in trained_on}
    shared = [name for name in ids if name in trained]
    shared_templates = {spec.template.template_id for spec in environments} & templates
    held_out = [spec for spec in environments if spec.split == "holdout" and spec.template.template_id in templates]
    if purpose in (Purpose.VALIDATION, Purpose.REPORT, Purpose.PROMOTION):
        if shared:
            message = f"{len(shared)} of the judged environments were trained on"
            raise EvaluationError(message, environment=shared[0], remedy="judge on the validation or hold-out split")
        if held_out:
            message = f"{len(held_out)} held-out environments have a template that was trained on"
            raise EvaluationError(message, environment=held_out[0].environment_id, remedy="repair the split file")
    return {
        "training_environments": len(trained),
        "environment_overlap": len(shared),
        "template_overlap": len(shared_templates),
    }


def _spec_columns(
    environments: Sequence[EnvironmentSpec], table: DisturbanceTable, rows: npt.NDArray[np.int64]
) -> dict[str, pa.Array]:
    """Dictionary-encoded columns of what is known of each environment, for row numbers ``rows`` into them."""

    def names(value: Callable[[EnvironmentSpec], str]) -> pa.Array:
        labels, codes = np.unique(np.array([value(spec) for spec in environments]), return_inverse=True)
        return coded(codes[rows], labels.tolist())

    return {
        "environment_id": names(lambda spec: spec.environment_id),
        "template_id": names(lambda spec: spec.template.template_id),
        "topology": names(lambda spec: spec.template.topology),
        "cell": names(lambda spec: spec.cell),
        "kind": names(lambda spec: spec.kind),
        "split": names(lambda spec: spec.split),
        "fingerprint": names(lambda spec: table.fingerprint(spec.environment_id).sha256),
    }


def episode_table(
    results: dict[str, Results], environments: Sequence[EnvironmentSpec], table: DisturbanceTable
) -> pa.Table:
    """The per-episode Arrow table of every player's results, each [N, K]; rows by player, environment, episode."""
    import pyarrow as pa

    size, episodes = next(iter(results.values()))["success"].shape
    players = len(results)
    environment = np.tile(np.repeat(np.arange(size), episodes), players)
    flat = {name: np.concatenate([r[name].ravel() for r in results.values()]) for name in next(iter(results.values()))}
    segment = np.where(flat["success"], len(SEGMENTS), flat["segment"])
    known = _spec_columns(environments, table, environment)
    return pa.table(
        {
            "player": coded(np.repeat(np.arange(players), size * episodes), list(results)),
            **{name: known[name] for name in ("environment_id", "template_id", "topology", "cell", "kind")},
            "intensity": np.array([spec.intensity for spec in environments], dtype=np.int8)[environment],
            "split": known["split"],
            "episode": np.tile(np.arange(episodes, dtype=np.int32), size * players),
            "mode": coded(flat["mode"], MODES),
            "machine": flat["machine"],
            "success": flat["success"],
            "reason": coded(flat["reason"], REASONS),
            "failed_segment": coded(segment, (*SEGMENTS, "")),
            **{name: flat[name] for name in ("decisions", "decision_seconds", "elapsed_seconds", "steps", "return")},
            "table_version": coded(np.zeros(environment.size, dtype=np.int32), [table.version]),
            "fingerprint": known["fingerprint"],
        }
    )


def _check_common_episodes(results: dict[str, Results], environments: Sequence[EnvironmentSpec]) -> None:
    """Every player must have met the same hidden fault in the same episode.

    Raises:
        EvaluationError: one did not, naming player and environment.
    """
    first = next(iter(results.values()))
    for player, other in results.items():
        differs = (first["mode"] != other["mode"]) | (first["machine"] != other["machine"])
        if differs.any():
            row = int(np.flatnonzero(differs.any(axis=1))[0])
            where = {"environment": environments[row].environment_id, "player": player}
            raise EvaluationError("players met different faults in the same episode", **where)


def identity(player: Player) -> str | None:
    """Content digest of a player that has one (its own, or its package's)."""
    own = getattr(player, "digest", None) or getattr(getattr(player, "package", None), "digest", None)
    return None if own is None else str(own)


def _check_players(players: Sequence[Player]) -> None:
    names = [player.name for player in players]
    if not names or len(set(names)) != len(names):
        raise EvaluationError(f"need at least one player and distinct names, got {names}")


def evaluate(  # noqa: PLR0913 - keyword-only, each a part of what the figures depend on
    players: Sequence[Player],
    environments: Sequence[EnvironmentSpec],
    table: DisturbanceTable,
    profile: LineProfile,
    *,
    seed: int,
    purpose: Purpose,
    episodes_per_env: int,
    trained_on: Sequence[EnvironmentSpec],
    threads: int = 1,
    progress: Progress = silent,
    build: PoolBuilder | None = None,
) -> EvaluationReport:
    """Plays every player on the first ``episodes_per_env`` episodes of every environment.

    All players meet the same episodes (common random numbers: counters depend on seed, purpose, environment and
    episode, not on the player), so differences between them are paired. Equal arguments give an equal digest.

    Args:
        players: Distinct names. One with a method ``reset()`` has it called before its turn.
        environments: N distinct environments.
        table: The pinned disturbance table.
        profile: The line profile the pool is built from.
        seed: Root seed.
        purpose: What random numbers are drawn for; see :func:`purpose_for_split`.
        episodes_per_env: K >= 1.
        trained_on: Every environment that training could have seen, to be checked against.
        threads: Simulation threads; they do not change any figure.
        progress: Told of finished episodes.
        build: Builds the pool; the built-in line's where it is ``None``.

    Raises:
        EvaluationError: no or repeated players or environments, overlap with training, players that met different
            episodes, an episode that does not end, a result that is not finite.
    """
    _check_players(players)
    if not environments:
        raise EvaluationError("no environment to evaluate", remedy="choose a split that is not empty")
    disjoint = check_disjoint(environments, trained_on, purpose)
    builder = build or default_builder()
    ids = [spec.environment_id for spec in environments]
    results: dict[str, Results] = {}
    durations: dict[str, float] = {}
    for player in players:
        start = time.perf_counter()
        pool = builder(environments, table, profile, seed=seed, purpose=purpose, threads=threads)
        try:
            played = play_first_episodes(pool, player, episodes_per_env, environment_ids=ids, progress=progress)
        finally:
            pool.close()
        results[player.name] = played
        durations[player.name] = time.perf_counter() - start
    _check_common_episodes(results, environments)
    splits = sorted({spec.split for spec in environments})
    context = {
        "simulator_version": SIMULATOR_VERSION,
        "table_version": table.version,
        "line_profile": profile.digest,
        "seed": seed,
        "purpose": purpose.name.lower(),
        "split": splits[0] if len(splits) == 1 else "mixed",
        "episodes_per_env": episodes_per_env,
        "environments": len(environments),
        "disjoint": disjoint,
        "identities": {player.name: identity(player) for player in players},
    }
    return EvaluationReport.build(episode_table(results, environments, table), context, durations)
