"""Checking shards: files against each other, shards against those who refer to them. Nothing is changed here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import AgentpipeError, CorruptError, DiskFullError, HomeError, StoreError, VersionError
from agentpipe.experience.care.claim_checks import claim_problems
from agentpipe.experience.care.claims import find_claims, relative
from agentpipe.experience.care.cross_checks import COMPACT, check_compact, cross_check
from agentpipe.experience.care.holdings import (
    begun,
    find_below,
    find_shards,
    holder_of,
    look_at,
    nothing_counts,
)
from agentpipe.experience.care.report import Problem, Report
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.audit import Damage, audit
from agentpipe.experience.store.index import OPEN_INDEX, SEALED, SEALED_INDEX, OpenIndex, sealed_rows
from agentpipe.experience.store.live import open_live
from agentpipe.experience.store.lock import CHECK, WriterLock
from agentpipe.experience.store.manifest import MANIFEST, NAMES, file_facts, read_manifest
from agentpipe.experience.store.mapped import map_records
from agentpipe.experience.store.remedies import buffer_command, home_of
from agentpipe.experience.store.shard import is_open, map_shard, read_names
from agentpipe.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from agentpipe.experience.care.holdings import Holding
    from agentpipe.experience.store.shard import Shard

_LOOKS: Final = 3


def check_home(home: Path, *, progress: Progress = silent) -> Report:
    """Checks every shard of a home, and that whoever refers to one finds what it means."""
    report, shards, claims = Report(), find_shards(home), find_claims(home)
    _check_each(shards, report, home, buffer_command("check --fix", home=home), progress)
    report.problems += claim_problems(home, shards, claims)
    return report


def check_folder(folder: Path, *, home: Path | None = None, progress: Progress = silent) -> Report:
    """Checks the shard ``folder``, or every shard below it.

    Args:
        folder: A shard, or a folder that holds shards.
        home: Whose table and line profiles a repair would use, for the remedies; that which ``folder`` lies in is
            named anyway.
        progress: Told of shards checked.

    Raises:
        InputError: there is none.
    """
    report, around = Report(), home_of(folder)
    fix = buffer_command("check --fix", path=folder, home=None if around == home else home)
    _check_each(find_below(folder), report, around or folder, fix, progress)
    return report


def _check_each(shards: Iterable[Holding], report: Report, root: Path, fix: str, progress: Progress) -> None:
    shards = list(shards)
    for number, holding in enumerate(shards):
        progress("check", number, len(shards))
        checked = check_shard(holding)
        name = relative(holding.path, root)
        report.shards += 1
        report.episodes += checked.episodes
        report.steps += checked.steps
        report.bytes += holding.bytes
        report.problems += [_problem(name, damage, checked.remedy or fix) for damage in checked.damages]
        if checked.held is not None:
            report.held[name] = checked.held
    progress("check", len(shards), len(shards))


def _problem(shard: str, damage: Damage, remedy: str) -> Problem:
    return Problem(shard, damage.file, damage.record, damage.field, damage.text, remedy)


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
        removal = buffer_command("retain --leftovers", home=home_of(holding.path))
        checked.remedy = f"{error.remedy}; where nobody refers to it this removes it: {removal}"
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
