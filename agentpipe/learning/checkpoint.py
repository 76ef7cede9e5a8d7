"""A checkpoint is the whole context of a training run (S17): resuming from it gives the same next update, bit for bit.

A directory, named by update and content digest, published by rename:

- ``manifest.json``: counters, learning-rate schedule, random state, options, parent, digests of all other files;
- ``network``, ``best``, ``good``, ``optimiser``, ``random``, ``rewards``, ``pool``, ``statistics``, ``replay`` (where
  the sampler of recorded steps stands), ``running`` (the episodes that are being recorded), ``aids`` (what the training
  aids go by), ``joint`` (the memory of each environment, perception's and memory's optimisers), all ``.safetensors``;
- ``times.safetensors``: when the steps of those episodes were taken; checked, but not part of the digest;
- ``updates.arrow``: per update its losses, layer-wise gradient norms and the range of samples it used;
- ``utilisation.arrow``: per update wall time, processor, memory and temperature; checked, but not part of the digest.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from agentpipe.errors import CheckpointError, CorruptError, SettingsError
from agentpipe.learning.tensors import Arrays, open_sealed, pack, required, seal, sealed_manifest, unpack
from agentpipe.storage import publish_directory, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KIND, FORMAT = "agentpipe.checkpoint", 4
_MANIFEST, _POINTER = "manifest.json", "checkpoints.json"
_UPDATES, _UTILISATION = "updates.arrow", "utilisation.arrow"
GROUPS = (
    "network",
    "best",
    "good",
    "optimiser",
    "random",
    "rewards",
    "pool",
    "statistics",
    "replay",
    "running",
    "times",
    "aids",
    "joint",
)
_UNKNOWN = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
_UNSEALED = (_UTILISATION, "times.safetensors")


@dataclass
class Checkpoint:
    """What a checkpoint holds, in plain arrays and JSON."""

    content: dict[str, Any]
    """JSON-ready: counters, options, schedule, random state, parent, configuration digest"""
    arrays: dict[str, Arrays]
    """one group of arrays for each of :data:`GROUPS`"""
    updates: list[dict[str, Any]] = field(default_factory=list)
    """one row an update"""
    utilisation: list[dict[str, Any]] = field(default_factory=list)
    """one row an update; durations and temperatures"""
    digest: str = ""
    """of the content; set by :func:`save` and :func:`load`"""


def save(checkpoint: Checkpoint, directory: Path, *, keep: int = 2) -> Path:
    """Publishes ``checkpoint`` below ``directory`` and removes all but the newest ``keep`` that the pointer names.

    Returns:
        The checkpoint's own directory.

    Raises:
        DiskFullError, HomeError: it cannot be written; those that are there stay.
    """
    files = {f"{group}.safetensors": pack(checkpoint.arrays[group]) for group in GROUPS}
    files[_UPDATES] = to_arrow(checkpoint.updates)
    files[_UTILISATION] = to_arrow(checkpoint.utilisation)
    manifest = {"kind": KIND, "format": FORMAT, "content": checkpoint.content}
    full = sealed_manifest(manifest, files, unsealed=_UNSEALED)
    checkpoint.digest = str(full["digest"])
    final = directory / f"update-{int(checkpoint.content['update']):06d}-{checkpoint.digest[:12]}"
    with publish_directory(final) as staging:
        seal(staging, _MANIFEST, full, files)
    names = [*(name for name in _names(directory) if name != final.name), final.name]
    write_json(directory / _POINTER, {"format": FORMAT, "checkpoints": names[-keep:]})
    for folder in directory.glob("update-*"):  # those of a process that died here, too
        if folder.name not in names[-keep:]:
            shutil.rmtree(folder, ignore_errors=True)
    return final


def load(path: Path) -> Checkpoint:
    """Reads and checks one checkpoint.

    Raises:
        CheckpointError: a file is missing, damaged or does not fit; names it.
        VersionError: written under another format version.
    """
    manifest, files = open_sealed(path, _MANIFEST, KIND, FORMAT, unsealed=_UNSEALED)
    arrays = {}
    for group in GROUPS:
        name = f"{group}.safetensors"
        arrays[group] = unpack(required(files, name, path), path / name)
    updates, utilisation = (from_arrow(required(files, name, path), path / name) for name in (_UPDATES, _UTILISATION))
    return Checkpoint(
        required(manifest, "content", path / _MANIFEST), arrays, updates, utilisation, str(manifest["digest"])
    )


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """While the content of ``path`` is taken over: digests only tell that it is what somebody wrote.

    Raises:
        CheckpointError: something in it is missing, or is not what this program keeps there.
    """
    try:
        yield
    except (SettingsError, *_UNKNOWN) as error:
        text = f"not what this program keeps in one: {type(error).__name__} {error}"
        raise CheckpointError(text, file=path, remedy="take another checkpoint, or train again") from error


def latest(directory: Path) -> Path | None:
    """The newest checkpoint below ``directory`` (by the order of writing, not by time stamps), or ``None``.

    Raises:
        CheckpointError: the pointer is damaged.
    """
    names = _names(directory)
    return directory / names[-1] if names else None


def _names(directory: Path) -> list[str]:
    pointer = directory / _POINTER
    if not pointer.exists():
        return []
    remedy = f"remove {_POINTER} to start anew, or resume from a checkpoint by its path"
    try:
        names = read_json(pointer).get("checkpoints")
    except (CorruptError, AttributeError) as error:
        raise CheckpointError("the pointer cannot be read", file=pointer, remedy=remedy) from error
    if not isinstance(names, list) or any(not isinstance(name, str) or "/" in name for name in names):
        raise CheckpointError("the pointer is damaged", file=pointer, remedy=remedy)
    return names


def to_arrow(rows: list[dict[str, Any]]) -> bytes:
    """``rows`` as an Arrow IPC file; columns in name order, missing values null."""
    names = sorted({name for row in rows for name in row})
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def from_arrow(data: bytes, file: Path) -> list[dict[str, Any]]:
    """The inverse of :func:`to_arrow` (nulls left out).

    Raises:
        CheckpointError: not an Arrow file.
    """
    try:
        alone = pa.ipc.IpcReadOptions(use_threads=False)
        rows = pa.ipc.open_file(pa.py_buffer(data), options=alone).read_all().to_pylist()
    except pa.ArrowException as error:
        raise CheckpointError(f"not an Arrow file: {error}", file=file) from error
    return [{name: value for name, value in row.items() if value is not None} for row in rows]
