"""Whether the parts of a training fit each other: said before the first step, in the words of whoever gave them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from agentpipe.errors import CheckpointError, LearningError, NonFiniteError
from agentpipe.learning.samples.shown import NOW, Shown
from agentpipe.storage import canonical_json, digest_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.environments.pool import LinePool
    from agentpipe.learning.cloning.demonstrations import Demonstrations
    from agentpipe.learning.options import TrainingOptions
    from agentpipe.learning.policy.normalisation import ObservationStatistics

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_COPIES = 6
"""of the weights: themselves, gradient, two moments of the optimiser, the best ones, the last good ones"""


def require_fit(
    pool: LinePool,
    statistics: ObservationStatistics,
    demonstrations: Demonstrations | None,
    action_names: Sequence[str],
) -> None:
    """Holds widths against those of the pool, and looks at what a pool of one's own has to have.

    Raises:
        LearningError: the pool is empty, has not one name for each environment, or its snapshot cannot be kept; the
            statistics are of other observations; there are not as many names as actions, or one twice; demonstrations
            of other sizes.
        SimulationError: an array of the pool has another dtype or shape than it should.
    """
    _require_pool(pool)
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
    Shown(pool.size, features, actions).require(pool, NOW, 0)


def _require_pool(pool: LinePool) -> None:
    if pool.size < 1:
        raise LearningError("the pool has no environment", field="pool", remedy="give one or more")
    if len(pool.names) != pool.size:
        text = f"{len(pool.names)} names for {pool.size} environments"
        raise LearningError(text, field="names", remedy="name each environment of the pool")
    given: tuple[Any, ...] = tuple(pool.names)
    odd = [name for name in given if not isinstance(name, str) or not name.isprintable()]
    if odd:
        text = f"{odd[0]!r} names an environment, which is no text that can be shown"
        raise LearningError(text, field="names", remedy="name environments by plain text")
    for name in ("observation", "mask"):
        table: object = getattr(pool, name, None)
        if not isinstance(table, np.ndarray) or table.ndim != 2:
            raise LearningError(f"the pool has no table {name}", field=name, remedy="give it the arrays of LinePool")
    for name, array in pool.snapshot().items():
        dtype = np.asarray(array).dtype
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            text = f"a checkpoint cannot keep {name} of the pool's snapshot: it is of dtype {dtype}"
            raise LearningError(text, field="snapshot", remedy="give arrays of numbers or truth values")


def require_room(options: TrainingOptions, size: int, features: int, actions: int) -> None:
    """Refuses what this machine's memory cannot hold, before anything is allocated.

    What is counted is less than what is needed: the samples of one update, and the copies of the weights.

    Raises:
        LearningError: names the option that asks for most, how much it takes and how much there is.
    """
    network, ppo, memory = options.network, options.ppo, _memory()
    encoded = features + 2 * network.time_frequencies + network.memory
    trunks = 1 if network.shared_trunk else 2
    layers = [encoded, *(width * trunks for width in network.hidden[:1]), *network.hidden[1:]]
    weights = sum(below * above for below, above in itertools.pairwise(layers))
    needed = {
        "rollout_steps": ppo.rollout_steps * size * (4 * encoded + actions + 64),
        "hidden": 4 * _COPIES * (weights + network.hidden[-1] * actions),
    }
    most = max(needed, key=lambda name: needed[name])
    if sum(needed.values()) > memory:
        text = f"a training of {size:,} environments takes more than {sum(needed.values()) / 1e9:,.1f} GB of memory"
        remedy = f"choose less, above all of {most}: this machine has {memory / 1e9:,.1f} GB"
        raise LearningError(text, field=most, remedy=remedy)


def _memory() -> int:
    """Bytes of memory that this process may have: the machine's, or what its container is given."""
    whole = int(psutil.virtual_memory().total)
    try:
        return min(whole, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return whole


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


def require_score(score: object, update: int) -> float:
    """What ``validate`` said after ``update``, as a number.

    Raises:
        LearningError: it is no number.
        NonFiniteError: it is NaN or infinite.
    """
    remedy = "mend what scores policies, and resume where there is a checkpoint"
    if not isinstance(score, int | float | np.integer | np.floating):
        text = f"the validation score is {score!r}, no number"
        raise LearningError(text, field="validation score", step=update, remedy=remedy)
    if not math.isfinite(score):
        raise NonFiniteError("not finite", field="validation score", step=update, remedy=remedy)
    return float(score)
