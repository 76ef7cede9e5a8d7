"""What causal sampling draws more of, and less of, than uniform sampling does; over shards, with intervals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from agentpipe.experience.quality import measure_quality
from benchmarks.measure import Figure
from benchmarks.seeds import interval

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agentpipe.experience.store.shard import Shard

KINDS = {
    "key_fault_shares": "key-fault steps",
    "idle_shares": "idle steps",
    "strict_idle_shares": "strictly idle steps",
}


def shares(shards: Sequence[Shard], source: str) -> list[Figure]:
    """Shares of draws under each sampler and their quotients: mean over shards, 95 % t interval.

    Shares are exact for each shard (no draws are simulated); the interval is over the shards.
    """
    measured = [measure_quality(shard) for shard in shards]
    figures = []
    for attribute, name in KINDS.items():
        found = [getattr(quality, attribute) for quality in measured]
        uniform, causal = ([share[sampler] for share in found] for sampler in ("uniform", "causal"))
        quotients = [c / u for c, u in zip(causal, uniform, strict=True) if u]
        notes = {"uniform": percent(uniform), "causal": percent(causal), "causal_over_uniform": text(quotients, 1, "×")}
        figures.append(fact(f"Shares: {name}", measured, {**notes, "shards": len(shards), "source": source}))
    covered = {
        name: percent([quality.coverages[name] for quality in measured if quality.coverages.get(name) is not None])
        for name in ("causal_stratified", "causal_independent", "uniform_stratified", "uniform_independent")
    }
    figures.append(fact("Coverage", measured, {**covered, "shards": len(shards), "source": source}))
    return figures


def fact(name: str, measured: Sequence[Any], notes: dict[str, Any]) -> Figure:
    """A figure without a rate."""
    steps = sum(quality.steps for quality in measured)
    return Figure(name, len(measured), 1, steps, (), 0.0, 0.0, 0.0, notes)


def percent(values: Sequence[Any]) -> str:
    """Mean and interval in percent."""
    return text(values, 100, " %")


def text(values: Sequence[Any], factor: float, unit: str) -> str:
    """``12.3 % (11.0 – 13.6)``; no interval for fewer than two values."""
    if not values:
        return "none"
    mean, low, high = (factor * value for value in interval([float(value) for value in values]))
    inside = "" if math.isnan(low) else f" ({low:.3g} – {high:.3g})"
    return f"{mean:.3g}{unit}{inside}"


def home_shards(home: Path) -> list[Shard]:
    """The sealed recordings of a home, one a cell."""
    from agentpipe.experience.care.claims import find_claims
    from agentpipe.experience.care.holdings import find_shards
    from agentpipe.experience.store.shard import open_shard

    claims = find_claims(home)
    return [
        open_shard(holding.path, check=False)
        for holding in find_shards(home)
        if holding.state == "sealed" and claims.is_current(holding)
    ]


def trained_shards(home: Path, folder: Path) -> list[Shard]:
    """One episode of every training environment by the home's champion, sampled; one shard a cell, none without one."""
    from agentpipe.environments.catalog import load_catalog
    from agentpipe.environments.layout import Purpose
    from agentpipe.environments.line_profile import default_profile
    from agentpipe.environments.parameters import CELLS
    from agentpipe.environments.pool import build_pool
    from agentpipe.environments.table_store import TableStore
    from agentpipe.experience.record import record_trajectories
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.learning.policy.player import PolicyPlayer
    from agentpipe.learning.succession.champion import ChampionStore

    champion = ChampionStore(home / "champion").current()
    if champion is None:
        return []
    player = PolicyPlayer(PolicyPackage.load(home / champion.package), greedy=False, name="champion")
    catalog, table, profile = load_catalog(), TableStore(home).current(), default_profile()
    return [
        record_trajectories(
            lambda some: build_pool(some, table, profile, seed=0, purpose=Purpose.COLLECT),
            player,
            environments=catalog.environments("train", cell),
            table=table,
            episodes_per_env=1,
            out_dir=folder / cell,
            cell=cell,
            policy_version=champion.digest,
            policy_ordinal=champion.sequence,
            durability="process",
        )
        for cell in CELLS
    ]


def played_shards(folder: Path, count: int, episodes: int) -> list[Shard]:
    """Small shards of the line, played by rule: for a look without a run."""
    from agentpipe.experience.store.writer import ShardWriter
    from benchmarks.buffer_own import line_header, line_pieces, seal

    pieces, shards = line_pieces(count * episodes), []
    for number in range(count):
        with ShardWriter.open(folder / f"played-{number}", line_header(number)) as writer:
            for piece in pieces[number::count]:
                writer.append(*piece)
            shards.append(seal(writer, folder / f"shard-{number}"))
    return shards
