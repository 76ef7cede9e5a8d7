"""What the recorded experience is like: counts, outcomes, rewards."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

HISTOGRAM_EDGES: Final = tuple(float(edge) for edge in np.linspace(-10, 10, 21))


@dataclass(frozen=True)
class Quality:
    """Figures of one shard. All follow from its content; durations are kept elsewhere.

    ``sign_ratio`` is positive over negative rewards (healthy: 0.8 to 1.2), None without negative ones.
    ``idle_share`` needs the episode graph (which later step used this one) and is None until shards hold one;
    ``zero_reward_share`` is its upper bound.
    """

    episodes: int
    steps: int
    bytes: int
    success_share: float
    mean_steps: float
    reward_mean: float
    reward_min: float
    reward_max: float
    reward_within_10_share: float
    zero_reward_share: float
    sign_ratio: float | None
    idle_share: float | None
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


def measure_quality(
    rewards: npt.NDArray[np.float32], episodes: npt.NDArray[Any], size_bytes: int, reasons: tuple[str, ...]
) -> Quality:
    """Figures of ``rewards`` f32[steps] and ``episodes`` (records of ``EPISODE``).

    Rewards beyond ±10 count in the outermost bins of the histogram.
    """
    values = rewards.astype(np.float64)
    positive, negative = int((values > 0).sum()), int((values < 0).sum())
    counts, _ = np.histogram(np.clip(values, HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1]), bins=HISTOGRAM_EDGES)
    found = np.bincount(episodes["reason"].astype(np.int64), minlength=len(reasons))
    return Quality(
        episodes=len(episodes),
        steps=len(values),
        bytes=size_bytes,
        success_share=float(episodes["success"].mean()),
        mean_steps=float(episodes["steps"].mean()),
        reward_mean=float(values.mean()),
        reward_min=float(values.min()),
        reward_max=float(values.max()),
        reward_within_10_share=float((np.abs(values) <= 10).mean()),
        zero_reward_share=float((values == 0).mean()),
        sign_ratio=positive / negative if negative else None,
        idle_share=None,
        reward_histogram={"edges": HISTOGRAM_EDGES, "counts": tuple(int(count) for count in counts)},
        reasons={reason: int(count) for reason, count in zip(reasons, found, strict=False) if count},
    )
