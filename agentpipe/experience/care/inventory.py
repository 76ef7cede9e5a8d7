"""What a home keeps of experience: every shard with its figures, its condition and who refers to it."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentpipe.experience.care.claims import find_claims
from agentpipe.experience.care.holdings import find_shards, holder_of, partition_of, training_of
from agentpipe.experience.store.counter import COUNTER, newest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agentpipe.experience.care.claims import Claims
    from agentpipe.experience.care.holdings import Holding


@dataclass(frozen=True)
class ShardFigures:
    """One shard at a glance. ``None`` where it does not say."""

    path: Path
    state: str
    cell: str | None
    training: str | None
    """partition of the training whose rollouts it holds"""
    digest: str | None
    episodes: int | None
    steps: int | None
    bytes: int
    policies: tuple[str, ...]
    """``player version`` of each behaviour policy"""
    ordinals: tuple[int, ...]
    idle_share: float | None
    coverage: float | None
    """of the ten most influential steps, under causal sampling"""
    sealed_at: str | None
    """UTC, ISO 8601"""
    holder: str | None
    """who writes to it now"""
    claims: tuple[str, ...]
    """who refers to it"""

    @property
    def bytes_per_step(self) -> float | None:
        """Bytes of all files over steps."""
        return self.bytes / self.steps if self.steps else None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        content = {**self.__dict__, "path": str(self.path), "bytes_per_step": self.bytes_per_step}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in content.items()}


def inventory(home: Path) -> list[ShardFigures]:
    """Figures of every shard of a home, in order of its path; no record is read."""
    claims = find_claims(home)
    return [figures(holding, claims) for holding in find_shards(home)]


def figures(holding: Holding, claims: Claims) -> ShardFigures:
    """What one shard says of itself."""
    said, training = holding.said, training_of(holding.path)
    quality = _mapping(said.get("quality"))
    cell = said.get("cell")
    policies = _policies(said)
    episodes, steps = _counts(holding)
    sealed = sealed_ns(said)
    return ShardFigures(
        path=holding.path,
        state=holding.state,
        cell=cell if isinstance(cell, str) else None,
        training=partition_of(training) if training else None,
        digest=holding.digest,
        episodes=episodes,
        steps=steps,
        bytes=holding.bytes,
        policies=tuple(dict.fromkeys(f"{policy.get('player')} {policy.get('version')}" for policy in policies)),
        ordinals=tuple(sorted(_ordinals(said))),
        idle_share=_share(quality.get("idle_share")),
        coverage=_share(quality.get("coverage")),
        sealed_at=None if sealed is None else iso(sealed),
        holder=holder_of(holding.path) if holding.state == "open" else None,
        claims=claims.on(holding),
    )


def totals(shards: Sequence[ShardFigures]) -> dict[str, Any]:
    """Sums over some shards."""
    states = {state: sum(shard.state == state for shard in shards) for state in ("open", "sealed", "shrunk", "damaged")}
    steps = sum(shard.steps or 0 for shard in shards)
    size = sum(shard.bytes for shard in shards)
    return {
        "shards": len(shards),
        **states,
        "episodes": sum(shard.episodes or 0 for shard in shards),
        "steps": steps,
        "bytes": size,
        "bytes_per_step": size / steps if steps else None,
    }


def sealed_ns(said: Mapping[str, Any]) -> int | None:
    """When a shard was sealed, in nanoseconds UTC, as its manifest says; ``None`` where it does not."""
    made = _mapping(said.get("sealed")).get("made_at")
    if isinstance(made, str):
        try:
            return round(dt.datetime.fromisoformat(made).timestamp() * 1e9)
        except (ValueError, OverflowError):
            return None
    return None


def iso(time_ns: int) -> str:
    """A time in nanoseconds as ISO 8601, UTC, whole seconds."""
    return dt.datetime.fromtimestamp(time_ns // 10**9, dt.UTC).isoformat()


def newest_ordinal(said: Mapping[str, Any]) -> int | None:
    """The newest behaviour policy of a shard, by ordinal."""
    return max(_ordinals(said), default=None)


def _ordinals(said: Mapping[str, Any]) -> set[int]:
    found = {_count(policy.get("ordinal")) for policy in _policies(said)}
    return {ordinal for ordinal in found if ordinal is not None}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _share(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else None


def _policies(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = said.get("policies")
    return [policy for policy in found if isinstance(policy, dict)] if isinstance(found, list) else []


def _counts(holding: Holding) -> tuple[int | None, int | None]:
    if holding.state == "open":
        counts = newest((holding.path / COUNTER).read_bytes()) if (holding.path / COUNTER).is_file() else None
        return (None, None) if counts is None else (counts.episodes, counts.steps)
    return _count(holding.said.get("episodes")), _count(holding.said.get("steps"))
