"""Finding one episode among all shards of a home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import AgentpipeError, CatalogError, CorruptError, InputError
from agentpipe.experience.care.claims import find_claims
from agentpipe.experience.care.cross_checks import COMPACT
from agentpipe.experience.care.holdings import find_below, find_shards
from agentpipe.experience.care.shrink import play
from agentpipe.experience.origin import home_pools
from agentpipe.experience.show import Place, locate
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.audit import Damage, check_episode
from agentpipe.experience.store.checksum import wrong
from agentpipe.experience.store.index import SEALED, SEALED_INDEX, find_row
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.manifest import MANIFEST, NAMES, read_manifest
from agentpipe.experience.store.mapped import map_records
from agentpipe.experience.store.remedies import buffer_command
from agentpipe.experience.store.shard import Shard, open_shard, read_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agentpipe.experience.care.claims import Claims
    from agentpipe.experience.care.holdings import Holding

_DIGITS: Final = 10
"""of the largest index in a catalogue"""


@dataclass(frozen=True)
class Found:
    """One episode and where it lies."""

    shard: Shard
    row: int
    """of the shard's episode table"""
    step: int | None
    """that was asked for"""
    others: tuple[Path, ...]
    """further shards that hold an episode of this number"""


def find_episode(text: str, home: Path, *, folder: Path | None = None, cell: str | None = None) -> Found:
    """The episode that ``ENV[:STEP]`` names.

    Current materialisations come first, then shards that are being written, then all others; by path among equals.
    Without a STEP it is the first episode of the environment. One of a shrunk shard is played again.

    Args:
        text: see :func:`~agentpipe.experience.show.locate`.
        home: whose shards are searched.
        folder: a shard, or a folder that holds shards, to search instead.
        cell: only the current trajectories of this cell.

    Raises:
        InputError: no such episode, or ``text`` names nothing of the kind.
        CorruptError, VersionError: the shard that holds it cannot be read.
    """
    place = locate(text)
    claims = find_claims(home)
    holdings = find_below(folder) if folder is not None else _in_order(find_shards(home), claims, cell)
    unreadable: list[AgentpipeError] = []
    matches = [holding for holding in holdings if _row(holding, place, unreadable) is not None]
    if not matches:
        if unreadable:  # it may be in there
            raise unreadable[0]
        searched = f"{len(holdings)} shards" + (f" of {cell}" if cell is not None else "")
        what = (
            f"no episode {place.episode} of environment" if place.episode is not None else "no episode of environment"
        )
        remedy = f"this lists the shards: {buffer_command('stats', home=home)}; --path SHARD searches in another"
        raise InputError(f"{what} {place.environment} in {searched}", field="ENV[:STEP]", remedy=remedy)
    first = matches[0]
    row = _row(first, place, [])
    if row is None:
        raise CorruptError("it has gone meanwhile", file=first.path, remedy="run it again")
    shard, row = _open(first, row, home)
    return Found(shard, row, place.step, tuple(holding.path for holding in matches[1:]))


def _in_order(holdings: list[Holding], claims: Claims, cell: str | None) -> list[Holding]:
    current = [holding for holding in holdings if claims.is_current(holding)]
    if cell is not None:
        return [holding for holding in current if claims.current[holding.path.resolve()] == f"trajectories[{cell}]"]
    live = [holding for holding in holdings if holding.state == "open"]
    return current + live + [holding for holding in holdings if holding not in current and holding not in live]


def _row(holding: Holding, place: Place, unreadable: list[AgentpipeError]) -> int | None:
    """The row of the episode in one shard, or ``None``; why one cannot be read is added to ``unreadable``."""
    try:
        episodes, index, names = _table(holding)
    except AgentpipeError as error:
        unreadable.append(error)
        return None
    environment = _environment(place.environment, names)
    if environment is None:
        return None
    rows = np.flatnonzero(episodes["environment"] == environment)
    if place.episode is not None:
        row, there = find_row(index, environment, place.episode), rows[episodes["episode"][rows] == place.episode]
        if [row] != there.tolist() and (row is not None or len(there)):
            unreadable.append(Damage(SEALED_INDEX, "not what the episode table says").error(holding.path))
            return None
        return row
    return int(rows[episodes["episode"][rows].argmin()]) if len(rows) else None


def _table(holding: Holding) -> tuple[npt.NDArray[Any], npt.NDArray[Any], Mapping[int, str]]:
    if holding.state == "open":
        live = open_live(holding.path)
        return live.episodes, live.index, live.names
    count = read_manifest(holding.path / MANIFEST)["episodes"]
    episodes = map_records(holding.path / rec.EPISODES, rec.EPISODE, count).records
    index = map_records(holding.path / SEALED_INDEX, SEALED, count).records
    return episodes, index, read_names(holding.path / NAMES)


def _environment(text: str, names: Mapping[int, str]) -> int | None:
    """Index of an environment: given as such, by the shard's own names, or by the catalogue's."""
    if text.isdecimal():
        return int(text) if len(text) <= _DIGITS else None
    for index, name in names.items():
        if name == text:
            return index
    if names:
        return None
    from agentpipe.environments.catalog import load_catalog

    try:
        return load_catalog().environment(text).index
    except CatalogError:
        return None


def _open(holding: Holding, row: int, home: Path) -> tuple[Shard, int]:
    if holding.state == "open":
        live = open_live(holding.path)
        check_episode(live, row)
        return live, row
    manifest = read_manifest(holding.path / MANIFEST)
    if not manifest.get("shrunk"):
        shard = open_shard(holding.path, check=False)
        check_episode(shard, row)
        return shard, row
    return _played(holding.path, manifest, row, home), 0


def _played(path: Path, manifest: Mapping[str, Any], row: int, home: Path) -> Shard:
    """A shard in memory of just one episode of a shrunk one."""
    all_episodes = map_records(path / rec.EPISODES, rec.EPISODE, manifest["episodes"]).records
    compact = map_records(path / COMPACT, rec.COMPACT, manifest["steps"]).records
    episode = all_episodes[row : row + 1].copy() if row < len(all_episodes) else all_episodes[:0].copy()
    if len(episode) == 0 or wrong(episode).any():
        raise Damage(rec.EPISODES, "checksum does not fit", row).error(path)
    first, steps = int(episode["first"][0]), int(episode["steps"][0])
    if wrong(compact[first : first + steps]).any():
        raise Damage(COMPACT, "checksum does not fit", first).error(path)
    names, environment = read_names(path / NAMES), int(episode["environment"][0])
    if environment not in names:
        raise Damage(NAMES, f"no name for environment {environment}").error(path)
    own = {environment: names[environment]}
    records, finals, words = play(manifest, own, episode, compact[first : first + steps], home_pools(home))
    episode["first"] = episode["graph"] = 0
    episode["final"] = 0 if len(finals) else rec.NO_FINAL
    return Shard(path, manifest, records, episode, finals, words, np.zeros(0, SEALED), own, None, {})
