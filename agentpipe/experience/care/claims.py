"""Who refers to which shard of a home: references, checkpoints, policy packages.

A shard is *claimed* where a current materialisation, a checkpoint or a policy package names its digest, where a
checkpoint names it by its folder, or where it lies beside the package of its training. Claims go by digest: what is
merged or repaired with losses has another one, and nobody who named the old one finds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import AgentpipeError, CorruptError
from agentpipe.experience.care.holdings import HIDDEN, MANIFEST, OPEN, partition_of, trainings
from agentpipe.storage import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agentpipe.experience.care.holdings import Holding

_POINTER: Final = "checkpoints.json"
"""which checkpoints there are, beside them"""
_CLAIMING: Final = ("references", "references/trajectories", "policy_checkpoint")
_UNTIL_THEN: Final = "put it back from a copy; until then nothing that it might refer to is deleted"


@dataclass(frozen=True)
class Named:
    """A shard that a checkpoint names."""

    by: str
    file: str
    """where it does, relative to the home"""
    folder: Path
    digest: str | None


@dataclass(frozen=True)
class Learned:
    """Recorded trajectories that a policy package says it was trained on."""

    by: str
    file: str
    """where it does, relative to the home"""
    cell: str
    digest: str


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
    learned: tuple[Learned, ...] = ()
    """what the packages name"""
    updates: Mapping[Path, int] = field(default_factory=dict)
    """folder (resolved) of a training → update of its newest checkpoint"""
    unreadable: tuple[AgentpipeError, ...] = ()
    """files that should say what they refer to, and cannot be read"""

    def on(self, holding: Holding) -> tuple[str, ...]:
        """The names of those who refer to a shard, without doubles."""
        named = self.digests.get(holding.digest or "", ()) + self.paths.get(holding.path.resolve(), ())
        return tuple(dict.fromkeys(named))

    def is_current(self, holding: Holding) -> bool:
        """True where it is the current materialisation of a cell."""
        return holding.path.resolve() in self.current


def find_claims(home: Path) -> Claims:
    """Who refers to which shard of ``home``: references, checkpoints, policy packages.

    A file that cannot be read is not an error here: it is in ``unreadable``, and whoever deletes has to mind it.
    """
    gathering, found = _Gathering(home), trainings(home)
    for place in (*(home / name for name in _CLAIMING), *(training / "checkpoints" for training in found)):
        gathering.need_folder(place)
    for path in sorted(home.glob("references/trajectories/*.json")):
        gathering.take(path, gathering.reference)
    for training in found:
        for folder in sorted((training / "checkpoints").glob("*")):
            if folder.is_dir() and not folder.name.startswith(HIDDEN):
                gathering.take(folder / MANIFEST, gathering.checkpoint)
        packages = {*training.glob("*/package.json")}
        packages |= {training / "package" / "package.json"} if (training / "package").is_dir() else set()
        for path in sorted(packages):
            if not path.parent.name.startswith(HIDDEN):
                gathering.take(path, gathering.package)
    return gathering.claims()


def pointed_at(training: Path) -> list[str] | None:
    """The checkpoints that the pointer of a training lists, or ``None`` where it cannot be read."""
    try:
        names = read_json(training / "checkpoints" / _POINTER)["checkpoints"]
    except (CorruptError, KeyError, TypeError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _retired(checkpoint: Path) -> bool:
    """True where the pointer beside a checkpoint lists it no more: its removal goes on, or was cut short."""
    names = pointed_at(checkpoint.parents[1])
    return names is not None and checkpoint.name not in names


class _Gathering:
    def __init__(self, home: Path) -> None:
        self.home = home.resolve()
        self.digests: dict[str, list[str]] = {}
        self.paths: dict[Path, list[str]] = {}
        self.current: dict[Path, str] = {}
        self.expected: dict[Path, str] = {}
        self.named: list[Named] = []
        self.learned: list[Learned] = []
        self.updates: dict[Path, int] = {}
        self.unreadable: list[AgentpipeError] = []

    def take(self, path: Path, reader: Any) -> None:  # noqa: ANN401 - one of the three below
        try:
            reader(path, read_json(path))
        except AgentpipeError as error:
            if path.exists() or not _retired(path.parent):
                self.unreadable.append(CorruptError(error.message, **error.where, remedy=_UNTIL_THEN))
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
        training = path.parents[2]
        name = f"checkpoint {path.parent.name} of {partition_of(training)}"
        own, update = training / "experience", content["content"].get("update")
        if isinstance(update, int):
            self.updates[training.resolve()] = max(update, self.updates.get(training.resolve(), 0))
        for entry in content["content"].get("trajectory_index") or []:
            digest = str(entry["digest"]) if entry.get("digest") else None
            if digest is not None:
                self.digests.setdefault(digest, []).append(name)
            folder = (own / str(entry["name"])).resolve()
            if folder.parent == own.resolve():
                for place in (folder, folder.with_name(f"{OPEN}{folder.name}")):
                    self.paths.setdefault(place, []).append(name)
                self.named.append(Named(name, relative(path, self.home), folder, digest))

    def package(self, path: Path, content: Any) -> None:  # noqa: ANN401 - JSON
        name = f"package of {partition_of(path.parents[1])}"
        for cell, digest in (content["provenance"].get("trajectories") or {}).items():
            self.digests.setdefault(str(digest), []).append(name)
            self.learned.append(Learned(name, relative(path, self.home), str(cell), str(digest)))
        # Also the last ones of its training, which ended after the last checkpoint.
        for folder in (path.parents[1] / "experience").glob("[!.]*"):
            self.paths.setdefault(folder.resolve(), []).append(name)

    def claims(self) -> Claims:
        return Claims(
            digests={digest: tuple(names) for digest, names in self.digests.items()},
            paths={path: tuple(names) for path, names in self.paths.items()},
            current=self.current,
            expected=self.expected,
            named=tuple(self.named),
            learned=tuple(self.learned),
            updates=self.updates,
            unreadable=tuple(self.unreadable),
        )


def relative(path: Path, home: Path) -> str:
    """How a file or shard is called in what is printed: relative to the home, or as it is."""
    path, home = path.resolve(), home.resolve()
    return path.relative_to(home).as_posix() if path != home and path.is_relative_to(home) else str(path)
