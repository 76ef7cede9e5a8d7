"""Shards of the built-in simulator as seeds and actions, and the way back: byte for byte.

A shrunk shard keeps its manifest (same digest), episode table, index and names, and of each step what the simulator
cannot say again: action, probability, value, policy, time stamp. The manifest is what decides: the compact records are
complete before it says ``shrunk``, and the full ones are complete before it says so no more. Whoever has the full
records mapped keeps them; only the names go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CorruptError, InputError
from agentpipe.experience.care.cross_checks import COMPACT
from agentpipe.experience.origin import require_built_in
from agentpipe.experience.regenerate import compact_of, regenerate
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import wrong
from agentpipe.experience.store.index import SEALED, SEALED_INDEX
from agentpipe.experience.store.manifest import MANIFEST, MEASUREMENTS, NAMES, complete, file_facts, read_manifest
from agentpipe.experience.store.mapped import map_records
from agentpipe.experience.store.remedies import mend, read_part
from agentpipe.experience.store.shard import Shard, open_shard, read_names
from agentpipe.storage import write_bytes, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agentpipe.experience.origin import PoolFor

FULL: Final = (rec.RECORDS, rec.FINALS, rec.GRAPH)
"""what goes, and what is made again"""
NOBODY: Final = 0xFFFFFFFF
"""what the records call no environment"""
_SMALL: Final = (SEALED_INDEX, NAMES, MEASUREMENTS)
_BLOCK: Final = 65_536
_REMEDY: Final = "keep its full records, and report this"


def shrink(path: Path, pool_for: PoolFor | None = None, *, verify: bool = True) -> int:
    """Reduces a sealed shard to seeds and actions.

    Args:
        path: The shard; nothing happens where it is shrunk already.
        pool_for: Makes its pool, such as :func:`~agentpipe.experience.origin.home_pools`; needed to verify.
        verify: Play every episode again first and compare every byte. Leave it out only where that was just done, or
            where the shard was just sealed in an environment whose episodes have come back before; only checksums are
            looked at then.

    Returns:
        The bytes that are free now.

    Raises:
        InputError: episodes of another environment than the built-in line; or no ``pool_for``.
        VersionError: recorded by another version of the simulator; names both.
        CorruptError: the shard is damaged, or does not come back as it was. Nothing has changed then.
        DiskFullError, HomeError: it cannot be written.
    """
    manifest = read_manifest(path / MANIFEST)
    if manifest.get("shrunk"):
        remove_files(path, FULL)  # what was killed on the way left them
        return 0
    require_built_in(manifest, path / MANIFEST)
    shard = open_shard(path, check=verify)
    if not verify:
        _refuse_damage(path, ((rec.EPISODES, shard.episodes), (rec.RECORDS, shard.records)))
    compact = compact_of(shard.records)
    if verify:
        if pool_for is None:
            raise InputError("nothing to verify with", file=path, remedy="pass pool_for, or verify=False")
        _same(shard, play(manifest, shard.names, shard.episodes, compact, pool_for))
    before = sum((path / name).stat().st_size for name in FULL)
    write_bytes(path / COMPACT, compact.tobytes())
    facts = file_facts(path, (*_SMALL, rec.EPISODES, COMPACT))
    write_json(path / MANIFEST, complete(manifest, facts, shrunk=True, made_at=manifest["sealed"]["made_at"]))
    remove_files(path, FULL)
    return before - compact.nbytes


def regenerate_shard(path: Path, pool_for: PoolFor) -> Shard:
    """A shrunk shard with its full records, in memory; its digest is that of the full one.

    Raises:
        InputError: episodes of another environment than the built-in line, or what it needs is gone.
        VersionError: recorded by another version of the simulator; names both.
        CorruptError: what is left is damaged, or plays otherwise than it did.
    """
    manifest = read_manifest(path / MANIFEST)
    require_built_in(manifest, path / MANIFEST)
    if not manifest.get("shrunk"):
        return open_shard(path)
    names = read_names(path / NAMES)
    episodes = map_records(path / rec.EPISODES, rec.EPISODE, manifest["episodes"]).records
    index = map_records(path / SEALED_INDEX, SEALED, manifest["episodes"]).records
    compact = map_records(path / COMPACT, rec.COMPACT, manifest["steps"]).records
    _refuse_damage(path, ((rec.EPISODES, episodes), (COMPACT, compact)))
    records, finals, words = play(manifest, names, episodes, compact, pool_for)
    for array in (records, finals, words):
        array.flags.writeable = False  # like the mapped ones
    full = {key: value for key, value in manifest.items() if key != "shrunk"}
    shard = Shard(
        path, full, records, episodes, finals, words, index, names, full.get("quality"), read_part(path / MEASUREMENTS)
    )
    shard.check()
    return shard


def restore(path: Path, pool_for: PoolFor) -> Shard:
    """Makes the full records of a shrunk shard again, on disk; a full one stays as it is.

    Raises:
        InputError, VersionError, CorruptError: see :func:`regenerate_shard`.
        DiskFullError, HomeError: they cannot be written; the shard stays shrunk then.
    """
    manifest = read_manifest(path / MANIFEST)
    if not manifest.get("shrunk"):
        return open_shard(path)
    shard = regenerate_shard(path, pool_for)
    for name, array in zip(FULL, (shard.records, shard.finals, shard.graph), strict=True):
        write_bytes(path / name, array.tobytes())
    made_at = manifest["sealed"]["made_at"]
    write_json(path / MANIFEST, complete(manifest, file_facts(path, _SMALL), made_at=made_at))
    remove_files(path, (COMPACT,))
    return open_shard(path)


def remove_files(path: Path, names: Sequence[str]) -> None:
    """Takes away the names of files that the manifest does not speak of any more."""
    for name in names:
        (path / name).unlink(missing_ok=True)


def play(
    manifest: Mapping[str, Any],
    names: Mapping[int, str],
    episodes: npt.NDArray[Any],
    compact: npt.NDArray[Any],
    pool_for: PoolFor,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.uint64]]:
    """Records, finals and graph words of episodes of the built-in line, from what is left of them.

    Args:
        manifest: Says where they came from.
        names: Ids of their environments, by index in the catalogue.
        episodes: Their rows.
        compact: ``records.COMPACT`` of their steps, in the order of ``episodes``.
        pool_for: Makes their pool.

    Raises:
        CorruptError, VersionError, InputError: they play otherwise than they did, or cannot be played.
    """
    pool = pool_for(manifest, names)
    try:
        numbers = {name: index for index, name in names.items()}
        index = np.array([numbers.get(name, NOBODY) for name in pool.names], np.uint32)
        version = str(manifest["simulator_version"])
        steps, _, finals, words = regenerate(pool, index, episodes, compact, simulator_version=version)
    finally:
        pool.close()
    dtype = rec.final_dtype(manifest["observation_size"], manifest["action_count"])
    return steps, np.zeros(0, dtype) if finals is None else finals, words


def _same(shard: Shard, played: tuple[npt.NDArray[Any], ...]) -> None:
    for name, stored, found in zip(FULL, (shard.records, shard.finals, shard.graph), played, strict=True):
        if len(stored) != len(found):
            text = f"{len(found):,} records come back instead of {len(stored):,}"
            raise CorruptError(text, file=shard.path / name, remedy=_REMEDY)
        for first in range(0, len(stored), _BLOCK):
            one, other = (_words(part[first : first + _BLOCK]) for part in (stored, found))
            differs = (one != other).any(axis=1)
            if differs.any():
                record = first + int(differs.argmax())
                raise CorruptError("played again it is another", file=shard.path / name, record=record, remedy=_REMEDY)


def _words(records: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    return records.view(np.uint64).reshape(len(records), -1)


def _refuse_damage(path: Path, parts: Sequence[tuple[str, npt.NDArray[Any]]]) -> None:
    for name, records in parts:
        bad = wrong(records)
        if bad.any():
            raise CorruptError("checksum does not fit", file=path / name, record=int(bad.argmax()), remedy=mend(path))
