"""Whether the parts of a training fit each other: said before the first step, in the words of whoever gave them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.errors import CheckpointError, LearningError
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.cloning.demonstrations import Demonstrations
    from agentpipe.learning.policy.normalisation import ObservationStatistics


def require_fit(
    pool: LinePool,
    statistics: ObservationStatistics,
    demonstrations: Demonstrations | None,
    action_names: Sequence[str],
) -> None:
    """Holds widths against those of the pool.

    Raises:
        LearningError: the pool is empty; the statistics are of other observations; there are not as many names as
            actions, or one twice; demonstrations of other sizes.
    """
    if pool.size < 1:
        raise LearningError("the pool has no environment", field="pool", remedy="give one or more")
    (features, actions), remedy = (pool.observation.shape[1], pool.mask.shape[1]), "give what was made for this pool"
    found: list[tuple[str, int, int]] = [
        ("statistics", len(statistics.names), features),
        ("action_names", len(set(action_names)), actions),
    ]
    if demonstrations is not None:
        found += [
            ("demonstrations.observation", demonstrations.observation.shape[1], features),
            ("demonstrations.mask", demonstrations.mask.shape[1], actions),
        ]
    for name, theirs, mine in found:
        if theirs != mine:
            raise LearningError(f"{name}: {theirs} columns or names, the pool has {mine}", field=name, remedy=remedy)


def identity(pool: LinePool, action_names: Sequence[str]) -> dict[str, Any]:
    """What a run is about, to be recorded in its checkpoints."""
    return {"environments": digest_bytes(canonical_json(list(pool.names))), "action_names": list(action_names)}


def require_same_run(found: Mapping[str, Any], mine: Mapping[str, Any], path: Path) -> None:
    """Refuses a checkpoint of another run than the one that would go on with it.

    Raises:
        CheckpointError: made under another configuration, from another package, in other environments, or with other
            actions; names which.
    """
    package = "resume with the initial package that it was made with"
    anew = "start anew, or resume with what it was made with"
    began = found.get("initial")
    if began != mine.get("initial", began):
        raise CheckpointError("it began from another package", file=path, field="initial", remedy=package)
    for name, text, remedy in (
        ("configuration_digest", "made under another configuration", anew),
        ("anchor", "made from another package", package),
        ("labels", "made from another package", package),
        ("environments", "made in other environments", anew),
        ("action_names", "made with other actions", anew),
    ):
        if found.get(name) != mine.get(name):
            raise CheckpointError(text, file=path, field=name.removesuffix("_digest"), remedy=remedy)
