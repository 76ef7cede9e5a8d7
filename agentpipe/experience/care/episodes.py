"""The episodes of one shard as a list, whatever its condition: no record is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentpipe.environments.layout import ACCUMULATING, ACTION_COUNT, MODES, REASONS
from agentpipe.errors import InputError
from agentpipe.experience.care.holdings import find_below
from agentpipe.experience.quality import CUT
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.audit import Damage
from agentpipe.experience.store.checksum import wrong
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.manifest import MANIFEST, NAMES, read_manifest
from agentpipe.experience.store.mapped import map_records
from agentpipe.experience.store.shard import read_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from agentpipe.experience.care.holdings import Holding

_LISTED = 3


def list_episodes(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The shard in ``folder`` and its episodes in the order of the file.

    Each has ``environment`` (its id, or empty), ``index``, ``episode``, ``row``, ``steps``, ``outcome``, ``success``,
    ``return``, ``minutes`` and ``mode``, as ``show`` calls them.

    Raises:
        InputError: no shard in ``folder``, or several.
        CorruptError, VersionError: it cannot be read.
    """
    found = find_below(folder)
    if len(found) > 1:
        names = ", ".join(str(holding.path) for holding in found[:_LISTED])
        remedy = f"name one of them, or an episode: {names}{', …' if len(found) > _LISTED else ''}"
        raise InputError(f"{len(found)} shards", file=folder, remedy=remedy)
    manifest, episodes, known_as = _table(found[0])
    bad = wrong(episodes)
    if bad.any():
        raise Damage(rec.EPISODES, "checksum does not fit", int(bad.argmax())).error(found[0].path)
    known = manifest.get("accumulating") == ACCUMULATING and manifest["action_count"] == ACTION_COUNT
    reasons: Sequence[str] = manifest.get("reasons", REASONS)
    return found[0].path, [
        {
            "environment": known_as.get(int(episode["environment"]), ""),
            "index": int(episode["environment"]),
            "episode": int(episode["episode"]),
            "row": row,
            "steps": int(episode["steps"]),
            "outcome": _named(reasons, int(episode["reason"]), CUT),
            "success": bool(episode["success"]),
            "return": float(episode["return"]),
            "minutes": float(episode["elapsed_seconds"]) / 60,
            "mode": _named(MODES if known else (), int(episode["mode"]), "unknown"),
        }
        for row, episode in enumerate(episodes)
    ]


def _table(holding: Holding) -> tuple[Mapping[str, Any], npt.NDArray[Any], Mapping[int, str]]:
    if holding.state == "open":
        live = open_live(holding.path)
        return live.manifest, live.episodes, live.names
    manifest = read_manifest(holding.path / MANIFEST)
    episodes = map_records(holding.path / rec.EPISODES, rec.EPISODE, manifest["episodes"]).records
    return manifest, episodes, read_names(holding.path / NAMES)


def _named(names: Sequence[str], number: int, none: str) -> str:
    if number < 0:
        return none
    return names[number] if number < len(names) else str(number)
