"""Repairing an open shard that nobody writes to: what counted and is whole goes on counting."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from agentpipe.experience.care.holdings import holder_of
from agentpipe.experience.care.mending import Parts, mend, read_parts
from agentpipe.experience.origin import is_built_in
from agentpipe.experience.store.counter import COUNTER, newest
from agentpipe.experience.store.header import read_header
from agentpipe.experience.store.index import OPEN_INDEX
from agentpipe.experience.store.recovery import recover
from agentpipe.experience.store.writer import ShardWriter
from agentpipe.storage import write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agentpipe.experience.care.repair import Workshop


def fix_open(path: Path, workshop: Workshop) -> list[str]:
    """Repairs an open shard; one that is being written stays as it is.

    Single bytes, graphs and episodes that can be played again are put back first. If some are lost all the same, or the
    counter is, the whole episodes move to a new shard, and the damaged one goes to the quarantine as it is.

    Raises:
        CorruptError: its header cannot be read.
        VersionError: of another format.
    """
    from agentpipe.experience.care.repair import say_why

    if holder_of(path) is not None:
        return []
    said = read_header(path).manifest()
    parts = _mended(path, said, workshop)
    done = list(parts.mended) if parts is not None else []
    recovery = recover(path, workshop.quarantine)
    if recovery.quarantine is not None:
        reasons = parts.lost if parts is not None else {}
        listed = [{"row": row, "reason": why} for row, why in sorted(reasons.items())]
        say_why(recovery.quarantine, path, None, listed or [{"reason": "the counter cannot be read"}])
        if recovery.lost:
            text = f"{recovery.lost} of {recovery.kept + recovery.lost} episodes are lost; it goes on without them"
            workshop.lose(path, recovery.lost, text, recovery.quarantine)
        else:
            done.append(f"its {recovery.kept} episodes count again; as it was it lies in {recovery.quarantine}")
    shutil.rmtree(path / OPEN_INDEX, ignore_errors=True)
    ShardWriter.open(path, said, holder="agentpipe buffer check --fix").close()  # enters every episode again
    return [*done, "LevelDB, from the episodes"]


def _mended(path: Path, said: Mapping[str, Any], workshop: Workshop) -> Parts | None:
    """What counts, as far as it can be brought back, in memory and on disk; ``None`` where the counter is lost."""
    counts = newest((path / COUNTER).read_bytes()) if (path / COUNTER).is_file() else None
    if counts is None:
        return None
    sizes = {"steps": counts.steps, "episodes": counts.episodes, "finals": counts.finals, "graph_words": counts.words}
    parts = read_parts(path, said, sizes)
    mend(parts, said, _names(said, parts), workshop.pool_for if is_built_in(said) else None)
    for name, array in parts.files().items():
        data = array.tobytes()
        if parts.mended and (path / name).is_file() and (path / name).read_bytes()[: len(data)] != data:
            write_bytes(path / name, data)
    return parts


def _names(said: Mapping[str, Any], parts: Parts) -> dict[int, str]:
    from agentpipe.environments.catalog import load_catalog

    if not is_built_in(said):
        return {}
    inside = set(parts.episodes["environment"].tolist())
    return {spec.index: spec.environment_id for spec in load_catalog().environments() if spec.index in inside}
