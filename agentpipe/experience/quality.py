"""What the recorded experience is like: counts, outcomes, rewards, what depends on what, and what samplers make of it.

All figures follow from a shard's content, so that equal content has equal figures; durations are measurements and
kept apart. Words are defined in :mod:`agentpipe.experience.sampling.definitions`.

Shares under a sampler are exact: the sum of the probabilities of the steps in question. Prioritised replay has none
here, since it draws by TD errors of whoever learns, and a shard holds neither a learner nor the scale of its rewards;
the training log has its shares.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.layout import REASONS
from agentpipe.experience.graph import unexplained_spikes
from agentpipe.experience.sampling.causal import causal_masses
from agentpipe.experience.sampling.definitions import most_influential
from agentpipe.experience.sampling.masses import UNIT, Masses, expected_cover
from agentpipe.experience.sampling.sets import SampleSet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentpipe.experience.store.shard import Shard

HISTOGRAM_EDGES: Final = tuple(float(edge) for edge in np.linspace(-10, 10, 21))
SPIKE: Final = 1.0
"""size of a reward that an edge must explain"""
CUT: Final = "cut"
"""outcome of an episode whose recording ended before it did"""


@dataclass(frozen=True)
class Quality:
    """Figures of one shard; a share of nothing is None.

    Args:
        episodes: all, those cut included.
        steps: of all episodes.
        bytes: of records, episodes, finals, graphs and index.
        success_share: of the episodes that ended.
        mean_steps: of an episode.
        reward_mean: of a step.
        reward_min: of a step.
        reward_max: of a step.
        reward_within_10_share: of the steps, those with |reward| <= 10.
        zero_reward_share: of the steps.
        sign_ratio: positive over negative rewards (healthy: 0.8 to 1.2), None without negative ones.
        unexplained_spikes: steps with |reward| >= :data:`SPIKE` that depend on no earlier step.
        parents_per_step: edges of all graphs over steps.
        idle_share: of the steps, those on which none depends and whose reward is the running cost of time alone.
        strict_idle_share: of the steps, those on which none depends and whose reward is zero.
        influential_nodes: the ten most influential nodes of each episode, as far as their influence is above zero.
        coverage: share of those nodes that one epoch of causal draws has at least once, on average; an epoch has as
            many draws as there are steps.
        coverages: the same for each way of drawing.
        key_fault_shares: share of draws of steps of failed or rare episodes, for each sampler.
        idle_shares: share of draws of idle steps, for each sampler.
        strict_idle_shares: likewise of strictly idle ones.
        reward_histogram: ``edges`` and ``counts``; rewards beyond ±10 count in the outermost bins.
        reasons: episodes of each outcome.
    """

    episodes: int
    steps: int
    bytes: int
    success_share: float | None
    mean_steps: float | None
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None
    reward_within_10_share: float | None
    zero_reward_share: float | None
    sign_ratio: float | None
    unexplained_spikes: int
    parents_per_step: float | None
    idle_share: float | None
    strict_idle_share: float | None
    influential_nodes: int
    coverage: float | None
    coverages: dict[str, float | None]
    key_fault_shares: dict[str, float | None]
    idle_shares: dict[str, float | None]
    strict_idle_shares: dict[str, float | None]
    reward_histogram: dict[str, tuple[float, ...] | tuple[int, ...]]
    reasons: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Quality:
        """Reads what :meth:`to_json` wrote."""
        histogram = {key: tuple(values) for key, values in content["reward_histogram"].items()}
        return cls(**{**content, "reward_histogram": histogram})


def measure_quality(shard: Shard) -> Quality:
    """Figures of a shard, sealed or open.

    Args:
        shard: reads all of its rewards and graphs; its manifest names the outcomes (``reasons``), else they are the
            line's.

    Raises:
        CorruptError: a file was cut short.
    """
    steps, episodes = SampleSet([shard]), shard.episodes
    rewards = steps.rewards.astype(np.float64)
    positive, negative = int((rewards > 0).sum()), int((rewards < 0).sum())
    counts, _ = np.histogram(np.clip(rewards, HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1]), bins=HISTOGRAM_EDGES)
    spikes = unexplained_spikes(shard.graph, episodes["steps"], steps.rewards, SPIKE)
    return Quality(
        episodes=len(episodes),
        steps=steps.size,
        bytes=sum(array.nbytes for array in (shard.records, episodes, shard.finals, shard.graph, shard.index)),
        success_share=_mean(episodes["success"][episodes["cut"] == 0]),
        mean_steps=_mean(episodes["steps"]),
        reward_mean=_mean(rewards),
        reward_min=float(rewards.min()) if len(rewards) else None,
        reward_max=float(rewards.max()) if len(rewards) else None,
        reward_within_10_share=_mean(np.abs(rewards) <= 10),
        zero_reward_share=_mean(rewards == 0),
        sign_ratio=positive / negative if negative else None,
        unexplained_spikes=int(spikes.sum()),
        parents_per_step=int(np.bitwise_count(shard.graph).sum()) / steps.size if steps.size else None,
        idle_share=_mean(steps.idle),
        strict_idle_share=_mean(steps.idle_strict),
        reward_histogram={"edges": HISTOGRAM_EDGES, "counts": tuple(int(count) for count in counts)},
        reasons=_count_reasons(episodes, shard.manifest.get("reasons", REASONS)),
        **_drawn(steps, episodes["steps"].astype(np.int64)),
    )


def _drawn(steps: SampleSet, lengths: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Figures of what samplers make of the steps."""
    samplers: dict[str, Masses] = {}
    if steps.size:
        samplers = {"uniform": np.full(steps.size, UNIT, np.uint64), "causal": causal_masses(steps.influence)}
    top = most_influential(steps.influence, lengths)
    coverages = {
        f"{name}_{kind}": _mean(expected_cover(masses, stratified=kind == "stratified")[top])
        for name, masses in samplers.items()
        for kind in ("independent", "stratified")
    }
    return {
        "influential_nodes": int(top.sum()),
        "coverage": coverages.get("causal_stratified"),
        "coverages": coverages,
        "key_fault_shares": {name: share_of_draws(masses, steps.key_fault) for name, masses in samplers.items()},
        "idle_shares": {name: share_of_draws(masses, steps.idle) for name, masses in samplers.items()},
        "strict_idle_shares": {name: share_of_draws(masses, steps.idle_strict) for name, masses in samplers.items()},
    }


def share_of_draws(masses: Masses, chosen: npt.NDArray[np.bool_]) -> float:
    """Share of draws that fall on ``chosen`` bool[n], exactly but for one rounding."""
    return float(masses[chosen].sum(dtype=np.float64) / (float(UNIT) * len(masses)))


def _mean(values: npt.NDArray[Any]) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None


def _count_reasons(episodes: npt.NDArray[Any], reasons: Sequence[str]) -> dict[str, int]:
    names = {**dict(enumerate(reasons)), -1: CUT}
    found, counts = np.unique(episodes["reason"], return_counts=True)
    pairs = zip(found.tolist(), counts.tolist(), strict=True)
    return {names.get(reason, f"reason {reason}"): count for reason, count in pairs}
