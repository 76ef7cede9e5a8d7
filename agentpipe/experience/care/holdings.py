"""Which shards there are, and who refers to them: in a home, or below any other folder.

A home holds recorded trajectories as ``trajectories/<cell>/<key>`` and the live rollouts of a training as
``policy_checkpoint/<partition>/<key>/experience/<name>``. A shard is *claimed* where a current materialisation, a
checkpoint or a policy package names its digest, or where a checkpoint names it by its folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from agentpipe.errors import AgentpipeError, CorruptError, InputError
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
_HIDDEN: Final = ".staging-"
_POINTER: Final = "checkpoints.json"
"""which checkpoints there are, beside them"""
_CLAIMING: Final = ("references", "references/trajectories", "policy_checkpoint")
_UNTIL_THEN: Final = "restore it; until then nothing that it might refer to is deleted"


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
        return training.parent.name if training else str(self.said.get("cell", self.path.parent.name))


@dataclass(frozen=True)
class Named:
    """A shard that a checkpoint names."""

    by: str
    file: str
    """where it does, relative to the home"""
    folder: Path
    digest: str | None


@dataclass(frozen=True)
class Claims:
    """Who refers to which shard."""

    digests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """by digest of the content"""
    paths: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)
    """by folder (resolved)"""
    current: Mapping[Path, str] = field(default_factory=dict)
    """folder (resolved) of a current materialisation → its name"""
    expected: Mapping[Path, str] = field(default_factory=dict)
    """folder (resolved) → digest that the reference to it says"""
    named: tuple[Named, ...] = ()
    """what the checkpoints name"""
    unreadable: tuple[AgentpipeError, ...] = ()
    """files that should say what they refer to, and cannot be read"""

    def on(self, holding: Holding) -> tuple[str, ...]:
        """The names of those who refer to a shard, without doubles."""
        named = self.digests.get(holding.digest or "", ()) + self.paths.get(holding.path.resolve(), ())
        return tuple(dict.fromkeys(named))

    def is_current(self, holding: Holding) -> bool:
        """True where it is the current materialisation of a cell."""
        return holding.path.resolve() in self.current


def find_shards(root: Path) -> list[Holding]:
    """Every shard of the home ``root``, in order of its path; staging folders and the quarantine are not among them."""
    places = [*root.glob("trajectories/*/*"), *root.glob("policy_checkpoint/*/*/experience/*")]
    return [look_at(path) for path in sorted(places) if path.is_dir() and not path.name.startswith(_HIDDEN)]


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
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith(_HIDDEN):
            yield from _shards_below(entry)


def looks_like_shard(path: Path) -> bool:
    """True where a file lies in ``path`` that only shards have."""
    return any((path / name).is_file() for name in _SIGNS)


def begun(path: Path) -> bool:
    """True where the shard is open, or was, whether its header can be read or not."""
    return (path / HEADER).exists() and not (path / MANIFEST).exists()


def nothing_counts(path: Path) -> bool:
    """True where a writer died before it had begun: no header yet, no sealed part, and a counter that says nothing."""
    names = (
        {entry.name for entry in path.iterdir() if not entry.name.startswith(_HIDDEN)} if path.is_dir() else {HEADER}
    )
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


# ------------------------------------------------------------------------------------------------------- claims


def find_claims(home: Path) -> Claims:
    """Who refers to which shard of ``home``: references, checkpoints, policy packages.

    A file that cannot be read is not an error here: it is in ``unreadable``, and whoever deletes has to mind it.
    """
    gathering = _Gathering(home)
    for place in (*(home / name for name in _CLAIMING), *home.glob("policy_checkpoint/*/*/checkpoints")):
        gathering.need_folder(place)
    for path in sorted(home.glob("references/trajectories/*.json")):
        gathering.take(path, gathering.reference)
    for folder in sorted(home.glob("policy_checkpoint/*/*/checkpoints/*")):
        if folder.is_dir() and not folder.name.startswith(_HIDDEN):
            gathering.take(folder / MANIFEST, gathering.checkpoint)
    packages = {*home.glob("policy_checkpoint/*/*/*/package.json")}
    packages |= {folder / "package.json" for folder in home.glob("policy_checkpoint/*/*/package") if folder.is_dir()}
    for path in sorted(packages):
        if not path.parent.name.startswith(_HIDDEN):
            gathering.take(path, gathering.package)
    return gathering.claims()


def _retired(checkpoint: Path) -> bool:
    """True where the pointer beside a checkpoint lists it no more: its removal goes on, or was cut short."""
    try:
        names = read_json(checkpoint.parent / _POINTER)["checkpoints"]
    except (CorruptError, KeyError, TypeError):
        return False
    return isinstance(names, list) and checkpoint.name not in names


class _Gathering:
    def __init__(self, home: Path) -> None:
        self.home = home.resolve()
        self.digests: dict[str, list[str]] = {}
        self.paths: dict[Path, list[str]] = {}
        self.current: dict[Path, str] = {}
        self.expected: dict[Path, str] = {}
        self.named: list[Named] = []
        self.unreadable: list[AgentpipeError] = []

    def take(self, path: Path, reader: Any) -> None:  # noqa: ANN401 - one of the three below
        try:
            reader(path, read_json(path))
        except AgentpipeError as error:
            if path.exists() or not _retired(path.parent):
                self.unreadable.append(error)
        except (AttributeError, KeyError, TypeError) as error:
            self.unreadable.append(CorruptError("it cannot be told what it refers to", file=path, remedy=_UNTIL_THEN))
            del error

    def need_folder(self, path: Path) -> None:
        """Something else in the place of a folder hides what lay in it."""
        if path.exists() and not path.is_dir():
            self.unreadable.append(CorruptError("not a folder", file=path, remedy=_UNTIL_THEN))

    def reference(self, _: Path, content: Any) -> None:  # noqa: ANN401 - JSON
        name = f"trajectories[{content['partition']}]"
        folder, digest = (self.home / content["path"]).resolve(), str(content["data_version"])
        self.digests.setdefault(digest, []).append(name)
        self.current[folder] = name
        self.expected[folder] = digest

    def checkpoint(self, path: Path, content: Any) -> None:  # noqa: ANN401 - JSON
        name = f"checkpoint {path.parent.name} of {path.parents[3].name}"
        own = path.parents[2] / "experience"
        for entry in content["content"].get("trajectory_index") or []:
            digest = str(entry["digest"]) if entry.get("digest") else None
            if digest is not None:
                self.digests.setdefault(digest, []).append(name)
            folder = (own / str(entry["name"])).resolve()
            if folder.parent == own.resolve():
                for place in (folder, folder.with_name(f"{OPEN}{folder.name}")):
                    self.paths.setdefault(place, []).append(name)
                self.named.append(Named(name, self._relative(path), folder, digest))

    def package(self, path: Path, content: Any) -> None:  # noqa: ANN401 - JSON
        recorded = content["provenance"].get("trajectories") or {}
        for digest in recorded.values():
            self.digests.setdefault(str(digest), []).append(f"package of {path.parents[2].name}")
        # Also the last ones of its training, which ended after the last checkpoint.
        for folder in (path.parents[1] / "experience").glob("[!.]*"):
            self.paths.setdefault(folder.resolve(), []).append(f"package of {path.parents[2].name}")

    def _relative(self, path: Path) -> str:
        path = path.resolve()
        return path.relative_to(self.home).as_posix() if path.is_relative_to(self.home) else str(path)

    def claims(self) -> Claims:
        return Claims(
            digests={digest: tuple(names) for digest, names in self.digests.items()},
            paths={path: tuple(names) for path, names in self.paths.items()},
            current=self.current,
            expected=self.expected,
            named=tuple(self.named),
            unreadable=tuple(self.unreadable),
        )
