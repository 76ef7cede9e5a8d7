"""Checking shards: files against each other, shards against those who refer to them. Nothing is changed here."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import AgentpipeError, CorruptError, DiskFullError, HomeError, StoreError, VersionError
from agentpipe.experience.care.cross_checks import COMPACT, check_compact, cross_check
from agentpipe.experience.care.holdings import (
    OPEN,
    begun,
    find_below,
    find_claims,
    find_shards,
    holder_of,
    look_at,
    nothing_counts,
)
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.audit import Damage, audit
from agentpipe.experience.store.index import OPEN_INDEX, SEALED, SEALED_INDEX, OpenIndex, sealed_rows
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.lock import CHECK, WriterLock
from agentpipe.experience.store.manifest import MANIFEST, NAMES, file_facts, read_manifest
from agentpipe.experience.store.mapped import map_records
from agentpipe.experience.store.shard import is_open, map_shard, read_names
from agentpipe.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from agentpipe.experience.care.holdings import Claims, Holding
    from agentpipe.experience.store.shard import Shard

_LOOKS: Final = 3
FIX: Final = "agentpipe buffer check --fix"
AGAIN: Final = "materialise these trajectories again"
_REMEDIES: Final = {MANIFEST: f"{FIX}, then {AGAIN}"}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a shard."""

    shard: str
    file: str
    record: int | None
    field: str | None
    message: str
    remedy: str

    def __str__(self) -> str:
        place = "".join(
            f", {name} {value}" for name, value in (("record", self.record), ("field", self.field)) if value is not None
        )
        return f"{self.shard}: {self.message} [file {self.file}{place}] - {self.remedy}"


@dataclass
class Report:
    """What a check found."""

    shards: int = 0
    episodes: int = 0
    steps: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    """shards that are being written, of which LevelDB's part was left out → by whom"""
    repairs: list[str] = field(default_factory=list)
    """what was repaired, one sentence each"""

    @property
    def ok(self) -> bool:
        """Nothing is wrong (any more)."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, ``ok`` first."""
        return {"ok": self.ok, **asdict(self)}


def check_home(home: Path, *, progress: Progress = silent) -> Report:
    """Checks every shard of a home, and that whoever refers to one finds what it means."""
    report, shards, claims = Report(), find_shards(home), find_claims(home)
    _check_each(shards, report, home, progress)
    report.problems += _claim_problems(home, shards, claims)
    return report


def check_folder(folder: Path, *, progress: Progress = silent) -> Report:
    """Checks the shard ``folder``, or every shard below it.

    Raises:
        InputError: there is none.
    """
    report = Report()
    _check_each(find_below(folder), report, folder, progress)
    return report


def _check_each(shards: Iterable[Holding], report: Report, root: Path, progress: Progress) -> None:
    shards = list(shards)
    for number, holding in enumerate(shards):
        progress("check", number, len(shards))
        checked = check_shard(holding)
        name = shard_name(holding.path, root)
        report.shards += 1
        report.episodes += checked.episodes
        report.steps += checked.steps
        report.bytes += holding.bytes
        report.problems += [_problem(name, damage, checked.remedy) for damage in checked.damages]
        if checked.held is not None:
            report.held[name] = checked.held
    progress("check", len(shards), len(shards))


def shard_name(path: Path, root: Path) -> str:
    """How a shard is called in what is printed: relative to the home, or as it is."""
    path, root = path.resolve(), root.resolve()
    return path.relative_to(root).as_posix() if path != root and path.is_relative_to(root) else str(path)


def _problem(shard: str, damage: Damage, remedy: str | None) -> Problem:
    told = remedy or _REMEDIES.get(damage.file, FIX)
    return Problem(shard, damage.file, damage.record, damage.field, damage.text, told)


def _claim_problems(home: Path, shards: list[Holding], claims: Claims) -> Iterator[Problem]:
    for error in claims.unreadable:
        file = str(error.where.get("file", home))
        yield Problem("-", file, None, None, error.message, error.remedy)
    found = {holding.path.resolve(): holding for holding in shards if not nothing_counts(holding.path)}
    for folder, name in claims.current.items():
        file = f"references/trajectories/{name[13:-1]}.json"
        holding = found.get(folder)
        if holding is None:
            yield Problem(shard_name(folder, home), file, None, "path", f"{name} is gone", AGAIN)
        elif holding.digest is not None and holding.digest != claims.expected[folder]:
            text = f"{name} refers to {claims.expected[folder][:16]}, the shard is {holding.digest[:16]}"
            yield Problem(shard_name(folder, home), file, None, "data_version", text, AGAIN)
    digests = {holding.digest for holding in shards}
    for entry in claims.named:
        places = (entry.folder, entry.folder.with_name(f"{OPEN}{entry.folder.name}"))
        if not any(place in found for place in places) and entry.digest not in digests:
            text = f"{entry.by} names it, and it is gone"
            yield Problem(shard_name(entry.folder, home), entry.file, None, "trajectory_index", text, "restore it")


# --------------------------------------------------------------------------------------------------- one shard


@dataclass
class Checked:
    """What a check of one shard found."""

    damages: list[Damage] = field(default_factory=list)
    episodes: int = 0
    steps: int = 0
    remedy: str | None = None
    """where a repair is not the remedy"""
    held: str | None = None
    """who writes to it now, so that LevelDB was left alone"""


def check_shard(holding: Holding) -> Checked:
    """Checks one shard in whatever state it is."""
    for _ in range(_LOOKS):
        checked, now = _look_once(holding), look_at(holding.path)
        if not holding.path.exists():
            return Checked()
        if not checked.damages or (now.state, now.said) == (holding.state, holding.said):
            break
        holding = now  # it was sealed, shrunk, restored or recorded anew meanwhile
    return checked


def _look_once(holding: Holding) -> Checked:
    checked = Checked()
    try:
        if nothing_counts(holding.path):
            return checked
        if holding.state == "open" or begun(holding.path):
            _check_open(holding.path, checked)
        else:
            _check_closed(holding.path, checked)
    except VersionError as error:
        checked.damages.append(damage_of(error))
        checked.remedy = f"{error.remedy}; agentpipe buffer retain --leftovers removes it where nobody refers to it"
    except StoreError as error:
        checked.damages.append(damage_of(error))
    except OSError as error:
        checked.damages.append(Damage(str(error.filename or "-"), f"cannot be read: {error.strerror}"))
    return checked


def damage_of(error: AgentpipeError) -> Damage:
    """A typed error on a file of a shard as a damage."""
    where = error.where
    record, named = where.get("record"), where.get("field")
    return Damage(
        file=getattr(where.get("file"), "name", "-"),
        text=error.message,
        record=record if isinstance(record, int) else None,
        field=str(named) if named is not None else "content" if "JSON" in error.message else None,
    )


def _check_closed(path: Path, checked: Checked) -> None:
    manifest = read_manifest(path / MANIFEST)
    checked.episodes, checked.steps = manifest["episodes"], manifest["steps"]
    if manifest.get("shrunk"):
        checked.damages += _shrunk(path, manifest)
        return
    shard = map_shard(path, manifest)
    checked.damages += _look_at(shard)


def _look_at(shard: Shard) -> list[Damage]:
    """What bytes and records say; where only the digest of the whole does not fit, the records may say why."""
    damages = list(audit(shard))
    if all(damage.file == MANIFEST for damage in damages):
        damages = [*cross_check(shard), *damages]
    return damages


def _shrunk(path: Path, manifest: Mapping[str, Any]) -> Iterator[Damage]:
    episodes = map_records(path / rec.EPISODES, rec.EPISODE, manifest["episodes"]).records
    compact = map_records(path / COMPACT, rec.COMPACT, manifest["steps"]).records
    index = map_records(path / SEALED_INDEX, SEALED, manifest["episodes"]).records
    damages = list(check_compact(compact, episodes, manifest["action_count"], len(manifest["policies"])))
    yield from damages
    if not damages and (index != sealed_rows(episodes)).any():
        yield Damage(SEALED_INDEX, "not what the episode table says", int((index != sealed_rows(episodes)).argmax()))
    missing = set(episodes["environment"].tolist()) - set(read_names(path / NAMES))
    if missing and not damages:
        yield Damage(NAMES, f"no name for environment {min(missing)}")
    for name, fact in manifest["sealed"]["files"].items():
        if not (path / name).is_file():
            yield Damage(name, "file is missing")
        elif file_facts(path, [name])[name] != fact and not any(damage.file == name for damage in damages):
            yield Damage(name, "checksum does not fit", field="content")


def _check_open(path: Path, checked: Checked) -> None:
    shard = open_live(path)
    checked.episodes, checked.steps = len(shard.episodes), len(shard.records)
    checked.damages += _look_at(shard)
    checked.held = holder_of(path)
    if checked.held is None and not checked.damages:
        try:
            checked.damages += _leveldb(path, shard.episodes)
        except (DiskFullError, HomeError) as error:  # opening LevelDB writes: full or read-only
            checked.held = f"nobody, but {error.message}"


def _leveldb(path: Path, episodes: npt.NDArray[Any]) -> list[Damage]:
    if not os.access(path, os.W_OK):
        raise HomeError("the folder is read-only", file=path)
    lock = WriterLock(path, CHECK)
    try:
        if not is_open(path):  # sealed meanwhile
            lock.path.unlink(missing_ok=True)
            return []
        index = OpenIndex(path / OPEN_INDEX, make=False)
        try:
            return [Damage(OPEN_INDEX, text, row) for row, text in index.disagreements(episodes)]
        finally:
            index.close()
    except CorruptError as error:
        return [Damage(OPEN_INDEX, error.message)]
    finally:
        lock.release()
