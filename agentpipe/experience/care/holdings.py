"""Which shards there are: in a home, or below any other folder.

A home holds recorded trajectories as ``trajectories/<cell>/<key>`` and the live rollouts of a training as
``policy_checkpoint/<partition>/<key>/experience/<name>``, of a retraining that labels follow below ``retraining/``.
Who refers to them: :mod:`~agentpipe.experience.care.claims`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from agentpipe.errors import CorruptError, InputError
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.counter import newest
from agentpipe.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

State = Literal["sealed", "shrunk", "open", "damaged"]
MANIFEST: Final = "manifest.json"
HEADER: Final = "header.json"
COUNTER: Final = "counter.bin"
INDEX: Final = "index.bin"
NAMES: Final = "names.json"
COMPACT: Final = "compact.bin"
LOCK: Final = "lock"
_SIGNS: Final = (HEADER, COUNTER, rec.RECORDS, rec.EPISODES, COMPACT, INDEX)
"""a folder with one of these is a shard, or was meant to be one"""
OPEN: Final = "open-"
"""before the name of a training's shard until it is sealed"""
_BEFORE_HEADER: Final = frozenset({LOCK, COUNTER, rec.RECORDS, rec.EPISODES, rec.FINALS, rec.GRAPH, "index"})
HIDDEN: Final = ".staging-"
RETRAINING: Final = "retraining"
"""folder of the policy gradient of a candidate that then learns from labels"""


@dataclass(frozen=True)
class Holding:
    """One shard on disk, whatever its condition."""

    path: Path
    state: State
    said: Mapping[str, Any]
    """its manifest; of an open shard the header; empty where neither can be read"""
    bytes: int
    """of all its files, as allocated for their content"""

    @property
    def digest(self) -> str | None:
        """Digest of the content; none while it is open, or where the manifest cannot be read."""
        digest = self.said.get("digest")
        return digest if isinstance(digest, str) else None

    @property
    def group(self) -> str:
        """What it belongs with: its cell, or the training whose rollouts it holds (the folder's name)."""
        training = training_of(self.path)
        return partition_of(training) if training else str(self.said.get("cell", self.path.parent.name))


def find_shards(root: Path) -> list[Holding]:
    """Every shard of the home ``root``, in order of its path; staging folders and the quarantine are not among them."""
    places = [*root.glob("trajectories/*/*")]
    places += [path for training in trainings(root) for path in training.glob("experience/*")]
    return [look_at(path) for path in sorted(places) if path.is_dir() and not path.name.startswith(HIDDEN)]


def find_below(folder: Path) -> list[Holding]:
    """``folder`` itself where it is a shard, else every shard below it, in order of its path.

    Raises:
        InputError: there is no such folder, or no shard in it.
    """
    if not folder.is_dir():
        raise InputError("no such folder", file=folder, remedy="give the folder of a shard, or one that holds shards")
    found = [look_at(path) for path in sorted(_shards_below(folder))]
    if not found:
        raise InputError("no shard there", file=folder, remedy="give the folder of a shard, or one that holds shards")
    return found


def _shards_below(folder: Path) -> Iterator[Path]:
    if looks_like_shard(folder):
        yield folder
        return
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith(HIDDEN):
            yield from _shards_below(entry)


def looks_like_shard(path: Path) -> bool:
    """True where a file lies in ``path`` that only shards have."""
    return any((path / name).is_file() for name in _SIGNS)


def begun(path: Path) -> bool:
    """True where the shard is open, or was, whether its header can be read or not."""
    return (path / HEADER).exists() and not (path / MANIFEST).exists()


def nothing_counts(path: Path) -> bool:
    """True where a writer died before it had begun: no header yet, no sealed part, and a counter that says nothing."""
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(HIDDEN)} if path.is_dir() else {HEADER}
    if names - _BEFORE_HEADER:
        return False
    if COUNTER not in names:
        return names <= {LOCK}
    try:
        data = (path / COUNTER).read_bytes()
    except OSError:
        return False
    counts = newest(data)
    return not any(data) if counts is None else counts.episodes == 0


def look_at(path: Path) -> Holding:
    """What lies in ``path``; nothing but the manifest or header is read."""
    name = HEADER if (path / HEADER).exists() else MANIFEST
    said: Mapping[str, Any] = {}
    with contextlib.suppress(CorruptError):
        content = read_json(path / name)
        said = content if isinstance(content, dict) else {}
        if name == HEADER and isinstance(said.get("header"), dict):
            said = {**said["header"], "policies": said.get("policies")}
    if not said:
        state: State = "damaged"
    elif name == HEADER:
        state = "open"
    else:
        state = "shrunk" if said.get("shrunk") is True else "sealed"
    return Holding(path, state, said, folder_bytes(path))


def folder_bytes(path: Path) -> int:
    """Bytes of every file below ``path``; what vanishes meanwhile counts nothing."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - walked by name
    return total


def holder_of(path: Path) -> str | None:
    """Who writes to the open shard ``path`` now, or ``None``; asked by trying the lock for an instant."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 4096, 0).decode(errors="replace").strip() or "another writer"
    finally:
        os.close(descriptor)
    return None


def training_of(path: Path) -> Path | None:
    """The folder of the training whose live rollouts ``path`` holds, or ``None``."""
    return path.parent.parent if path.parent.name == "experience" else None


def partition_of(training: Path) -> str:
    """The partition that a training belongs to, as its folder is called: ``2026-01-31_manual``."""
    key = training.parent if training.name == RETRAINING else training
    return key.parent.name


def trainings(home: Path) -> list[Path]:
    """The folders of ``home`` that hold ``checkpoints``, ``experience`` and ``package`` of a training."""
    keys = [path for path in sorted(home.glob("policy_checkpoint/*/*")) if path.is_dir()]
    found = [folder for key in keys for folder in (key, key / RETRAINING) if folder.is_dir()]
    return [folder for folder in found if not folder.name.startswith(HIDDEN)]
