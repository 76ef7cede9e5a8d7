"""Many sealed shards become one, in the order of environment and episode: fewer files, neighbours side by side."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import InputError, RecordError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.keys import episode_keys
from agentpipe.experience.store.shard import Shard, open_shard
from agentpipe.experience.store.writer import ShardWriter
from agentpipe.storage import canonical_json, typed_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentpipe.experience.care.claims import Claims
    from agentpipe.experience.care.holdings import Holding

BLOCK_STEPS: Final = 65_536
"""steps appended together, give or take an episode"""
COMPUTED: Final = frozenset(
    {
        *("format", "steps", "episodes", "finals", "graph_words", "record_bytes", "fields", "reasons", "content"),
        *("bytes", "quality", "digest", "sealed", "shrunk", "policies"),
    }
)
"""what a manifest says that its writer did not give, and the policies, which are merged"""


OF_ONE_RECORDING: Final = frozenset({"behaviour", "environments", "episodes_per_environment", "first_episode"})
"""what a header says of how a shard came about; a merged one keeps what all of its shards say alike"""


def header_of(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The header with which a shard of the episodes of all of these is written, without policies."""
    first = {name: value for name, value in manifests[0].items() if name not in COMPUTED}
    for name in OF_ONE_RECORDING & set(first):
        if any(manifest.get(name) != first[name] for manifest in manifests):
            del first[name]
    return {**first, "policies": []}


def compact(
    folders: Sequence[Path], final: Path, *, quality: Callable[[Shard], Mapping[str, Any]] | None = None
) -> Shard:
    """Merges sealed shards into a new one at ``final``; those merged stay.

    Args:
        folders: At least two shards that were written under the same header (cell, simulator, table, origin).
        final: The new shard's folder, on their file system; nothing may lie there.
        quality: Makes the figures of its manifest.

    Raises:
        InputError: fewer than two, of different headers, or something lies at ``final``, or ``final`` in one of them.
        RecordError: an episode occurs twice; names it.
        CorruptError, VersionError, ShrunkError: one cannot be read.
        DiskFullError, HomeError: the new one cannot be written.
    """
    places = [folder.resolve() for folder in folders]
    if len(set(places)) < 2 or len(set(places)) < len(places):
        raise InputError("fewer than two different shards to merge", remedy="name at least two")
    if any(final.resolve().is_relative_to(place) for place in places):
        text = "the merged shard would lie inside one of those that are merged, and go with it"
        raise InputError(text, file=final, remedy="choose another --out")
    if final.exists():
        raise InputError("something lies where the merged shard goes", file=final, remedy="choose another --out")
    shards = [open_shard(folder) for folder in folders]  # a shrunk one says how it gets its full records back
    _refuse_strangers(shards)
    return merge(shards, final, quality=quality)


def merge(
    shards: Sequence[Shard],
    final: Path,
    *,
    keep: Sequence[npt.NDArray[np.bool_]] | None = None,
    quality: Callable[[Shard], Mapping[str, Any]] | None = None,
) -> Shard:
    """The episodes of ``shards``, or those of them that are to be kept, as a new sealed shard in place of ``final``.

    Args:
        shards: With full records, of one header.
        final: Its folder; what lies there is replaced.
        keep: Of each shard bool ``[episodes]``; ``None`` = all.
        quality: Makes the figures of its manifest.
    """
    for shard in shards:
        shard.still_whole()
    chosen = (
        [np.flatnonzero(kept) for kept in keep]
        if keep is not None
        else [np.arange(len(shard.episodes)) for shard in shards]
    )
    source = np.repeat(np.arange(len(shards)), [len(rows) for rows in chosen])
    rows = np.concatenate(chosen)
    keys = np.concatenate([episode_keys(shard.episodes[picked]) for shard, picked in zip(shards, chosen, strict=True)])
    order = np.argsort(keys, kind="stable")
    _refuse_doubles(shards, keys[order], source[order])
    with typed_os_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".staging-{final.name}-", dir=final.parent))
        staging.chmod(0o755)
    try:
        with ShardWriter.open(
            staging, header_of([shard.manifest for shard in shards]), holder="agentpipe buffer"
        ) as writer:
            _list_policies(writer, shards)
            policies = [
                np.array([writer.policy(**_policy(policy)) for policy in shard.policies], np.uint32) for shard in shards
            ]
            steps = [shard.episodes["steps"][picked] for shard, picked in zip(shards, chosen, strict=True)]
            for block in _blocks(np.concatenate(steps).astype(np.int64)[order]):
                picked = order[block]
                _append(writer, shards, policies, source[picked], rows[picked])
            names = {index: name for shard in shards for index, name in shard.names.items()}
            return writer.seal(final, names=names, reasons=shards[0].manifest["reasons"], quality=quality)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _list_policies(writer: ShardWriter, shards: Sequence[Shard]) -> None:
    """In the order of time, whatever the order of the shards."""
    found = {canonical_json(policy): _policy(policy) for shard in shards for policy in shard.policies}
    for policy in sorted(found.values(), key=lambda one: (one["ordinal"], one["player"], one["version"])):
        writer.policy(**policy)


def _policy(policy: Mapping[str, Any]) -> dict[str, Any]:
    return {name: policy[name] for name in ("player", "version", "ordinal")}


def _blocks(lengths: npt.NDArray[np.int64]) -> list[slice]:
    """Ranges of episodes of about ``BLOCK_STEPS`` steps each."""
    block = np.cumsum(lengths) // BLOCK_STEPS
    bounds = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(lengths)]
    return [slice(first, last) for first, last in itertools.pairwise(bounds) if last > first]


def _append(
    writer: ShardWriter,
    shards: Sequence[Shard],
    policies: Sequence[npt.NDArray[np.uint32]],
    source: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
) -> None:
    for shard in shards:
        shard.still_whole()
    steps, episodes, finals, parents = [], [], [], []
    for number, row in zip(source.tolist(), rows.tolist(), strict=True):
        shard = shards[number]
        part = shard.steps(row).copy()
        part["policy"] = policies[number][part["policy"]]
        steps.append(part)
        episodes.append(shard.episodes[row : row + 1])
        parents.append(shard.parents(row).reshape(-1))
        at = int(shard.episodes["final"][row])
        if at != rec.NO_FINAL:
            finals.append(shard.finals[at : at + 1])
    cut = np.concatenate(finals) if finals else None
    for shard in shards:
        shard.still_whole()  # else what was copied may be zeros
    writer.append(np.concatenate(steps), np.concatenate(episodes), cut, np.concatenate(parents))


def _refuse_strangers(shards: Sequence[Shard]) -> None:
    first = header_of([shards[0].manifest])
    for shard in shards[1:]:
        other = header_of([shard.manifest])
        for name in sorted({*first, *other} - OF_ONE_RECORDING):
            if canonical_json(first.get(name)) != canonical_json(other.get(name)):
                message = f"{shard.path.name} is another recording than {shards[0].path.name}"
                remedy = "merge shards of one cell or one training, recorded under the same table and line"
                raise InputError(message, file=shard.path, field=name, remedy=remedy)


def _refuse_doubles(shards: Sequence[Shard], keys: npt.NDArray[np.uint64], source: npt.NDArray[np.int64]) -> None:
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        key = int(keys[twice[0]])
        names = sorted({shards[int(source[place])].path.name for place in (twice[0], twice[0] + 1)})
        remedy = "leave one of the shards out: one shard holds an episode once"
        where = {"environment": key >> 32, "episode": key & 0xFFFFFFFF}
        raise RecordError(f"an episode occurs twice, in {' and '.join(names)}", **where, remedy=remedy)


def refuse_claimed(holdings: Sequence[Holding], claims: Claims) -> None:
    """Refuses shards that somebody refers to, by name.

    Raises:
        InputError: a shard is referred to, or it cannot be told by whom.
    """
    if claims.unreadable:
        raise claims.unreadable[0]
    for holding in holdings:
        who = claims.on(holding)
        if who:
            text = f"{holding.path.name} cannot be merged: {', '.join(who[:3])} refers to it"
            remedy = "leave it out: a merged shard has another digest, by which nobody would find it"
            raise InputError(text, file=holding.path, remedy=remedy)
