"""Repairing shards: what a checksum proves is put back; what is lost is set aside, with the reasons, and named.

Every file is written aside and renamed, so that whoever reads keeps what is mapped. Episodes that are lost go to a
quarantine as they are found, and the shard is published again without them: another digest. A shard of which nothing
can be told goes there whole.
"""

from __future__ import annotations

import datetime as dt
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import AgentpipeError, CorruptError, HomeError, VersionError
from agentpipe.experience.care.check import check_shard
from agentpipe.experience.care.claims import relative
from agentpipe.experience.care.compaction import merge
from agentpipe.experience.care.cross_checks import COMPACT, cross_check
from agentpipe.experience.care.holdings import begun
from agentpipe.experience.care.inventory import iso
from agentpipe.experience.care.mending import (
    Parts,
    mend,
    mend_file,
    mend_header,
    mend_manifest,
    mend_records,
    read_array,
    read_parts,
)
from agentpipe.experience.care.report import Loss, Repairs
from agentpipe.experience.care.shrink import play
from agentpipe.experience.graph import words_of
from agentpipe.experience.origin import is_built_in
from agentpipe.experience.quality import measure_quality
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.checksum import wrong
from agentpipe.experience.store.header import read_header
from agentpipe.experience.store.index import SEALED_INDEX, sealed_rows
from agentpipe.experience.store.manifest import (
    MANIFEST,
    MEASUREMENTS,
    NAMES,
    complete,
    file_facts,
    manifest_digest,
    read_manifest,
)
from agentpipe.experience.store.shard import HEADER, Shard, read_names
from agentpipe.storage import publish_directory, read_json, typed_os_errors, write_bytes, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from agentpipe.experience.care.holdings import Holding
    from agentpipe.experience.origin import PoolFor
    from agentpipe.experience.store.audit import Damage

_SMALL: Final = (SEALED_INDEX, NAMES, MEASUREMENTS)


@dataclass(frozen=True)
class Workshop:
    """Where repairs happen.

    Args:
        quarantine: Folder that takes what is lost.
        pool_for: Makes the pool that plays episodes of the built-in line again; none = they cannot be played.
        republished: Told of each shard whose digest is another now, or that is gone.
        root: What the names of shards are relative to.
        lost: Takes what could not be brought back.
    """

    quarantine: Path
    pool_for: PoolFor | None
    republished: Callable[[Path], None] = lambda _: None
    root: Path | None = None
    lost: list[Loss] = field(default_factory=list)

    def name(self, path: Path) -> str:
        """How the shard ``path`` is called."""
        return str(path) if self.root is None else relative(path, self.root)

    def lose(self, path: Path, episodes: int | None, message: str, place: Path | None) -> None:
        """Notes a loss, and that the shard is another now or gone, where it is."""
        self.lost.append(Loss(self.name(path), episodes, message, None if place is None else str(place)))
        if place is not None:
            self.republished(path)


def fix_all(holdings: Iterable[Holding], workshop: Workshop) -> Repairs:
    """Repairs every shard that needs it.

    What cannot be repaired here stays as it is: the next check says so again.

    Raises:
        DiskFullError: no room for a repair.
    """
    repairs = Repairs(lost=workshop.lost)
    for holding in holdings:
        if check_shard(holding).damages:
            name = workshop.name(holding.path)
            try:
                repairs.done += [f"{name}: {text}" for text in fix(holding, workshop)]
            except HomeError as error:  # such as a folder in place of a file: the other shards still want theirs
                repairs.failed.append(f"{name}: {error}")
    return repairs


def fix(holding: Holding, workshop: Workshop) -> list[str]:
    """Repairs one damaged shard; returns what was brought back, one sentence each; the workshop hears of losses."""
    from agentpipe.experience.care.repair_open import fix_open

    path = holding.path
    try:
        if holding.state == "open" or begun(path):
            return _header(path) + fix_open(path, workshop)
        manifest, done = _manifest(path)
    except VersionError:
        return []  # of another format: nothing is wrong with it
    except CorruptError as error:
        set_aside_whole(path, workshop, error.message)
        return []
    if manifest.get("shrunk"):
        return done + _fix_shrunk(path, manifest, workshop)
    return done + _fix_sealed(path, manifest, workshop)


def _header(path: Path) -> list[str]:
    """The header of an open shard, with one flipped bit undone."""
    try:
        read_header(path)
    except CorruptError:
        mended = mend_header((path / HEADER).read_bytes()) if (path / HEADER).is_file() else None
        if mended is None:
            raise
        write_bytes(path / HEADER, mended)
        return ["one flipped bit of the header"]
    return []


def _manifest(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The manifest, with one flipped bit undone, or with its unsealed part made anew."""
    try:
        return read_manifest(path / MANIFEST), []
    except CorruptError:
        data = (path / MANIFEST).read_bytes() if (path / MANIFEST).is_file() else b""
        mended = mend_manifest(data)
        if mended is not None:
            write_bytes(path / MANIFEST, mended)
            return read_manifest(path / MANIFEST), ["one flipped bit of the manifest"]
        content = read_json(path / MANIFEST)
        if not isinstance(content, dict) or content.get("digest") != manifest_digest(content):
            raise
        episodes = read_array(path / rec.EPISODES, rec.EPISODE, content["episodes"])
        newest = iso(int(episodes["time_ns"].max(initial=0)))
        shrunk = not (path / rec.RECORDS).exists()
        names = [name for name in (*_SMALL, *((rec.EPISODES, COMPACT) if shrunk else ())) if (path / name).is_file()]
        whole = complete(content, file_facts(path, names), shrunk=shrunk, made_at=newest)
        write_json(path / MANIFEST, whole)
        return whole, ["the manifest's part on files and time, the latter as of the newest episode"]


# ------------------------------------------------------------------------------------------------- sealed


def _fix_sealed(path: Path, manifest: dict[str, Any], workshop: Workshop) -> list[str]:
    parts = read_parts(path, manifest, manifest)
    names, done = _names(path, manifest, parts.episodes)
    pool_for = workshop.pool_for if is_built_in(manifest) else None
    mend(parts, manifest, names, pool_for)
    shard = _shard(path, manifest, parts, names)
    if not parts.lost:
        for damage in cross_check(shard):
            parts.lose(row_of(damage, parts.episodes), damage.text)
    done += parts.mended
    if parts.lost:
        _publish_without(shard, parts, workshop)
        return done
    arrays = {
        rec.RECORDS: parts.records,
        rec.EPISODES: parts.episodes,
        rec.FINALS: parts.finals,
        rec.GRAPH: parts.words,
    }
    for name, array in arrays.items():
        _write_changed(path / name, array.tobytes())
    return done + _finish(path, manifest, parts.episodes, names, (), workshop)


def _shard(path: Path, manifest: Mapping[str, Any], parts: Parts, names: Mapping[int, str]) -> Shard:
    arrays = parts.records, parts.episodes, parts.finals, parts.words
    return Shard(path, manifest, *arrays, sealed_rows(parts.episodes), names, manifest.get("quality"), {})


def _finish(
    path: Path,
    manifest: Mapping[str, Any],
    episodes: npt.NDArray[Any],
    names: Mapping[int, str],
    further: tuple[str, ...],
    workshop: Workshop,
) -> list[str]:
    """Writes what follows from the rest: index, names, manifest."""
    done = []
    if _write_changed(path / SEALED_INDEX, sealed_rows(episodes).tobytes()):
        done.append("the index, from the episodes")
    named = set(episodes["environment"].tolist()) <= set(names)
    if named and names != _read_or_none(path / NAMES):
        write_json(path / NAMES, {str(index): name for index, name in sorted(names.items())})
        done.append("the names of the environments, from the catalogue")
    done += _measurements(path, manifest, workshop)
    old, told = manifest["sealed"], [name for name in (*_SMALL, *further) if named or name != NAMES]
    facts = {**old["files"], **file_facts(path, told)}  # names that are lost stay a problem
    whole = complete(manifest, facts, shrunk=bool(manifest.get("shrunk")), made_at=old["made_at"])
    if whole != manifest:
        write_json(path / MANIFEST, whole)
    return done


def _measurements(path: Path, manifest: Mapping[str, Any], workshop: Workshop) -> list[str]:
    file, facts = path / MEASUREMENTS, manifest["sealed"]["files"].get(MEASUREMENTS)
    data = file.read_bytes() if file.is_file() else b""
    if facts is None or (file.is_file() and file_facts(path, [MEASUREMENTS])[MEASUREMENTS] == facts):
        return []
    mended = mend_file(data, facts)
    write_bytes(file, b"{}\n" if mended is None else mended)
    if mended is not None:
        return ["the measurements, one changed byte"]
    workshop.lose(path, 0, "how long recording took is lost: measurements.json is left empty", None)
    return []


def _names(path: Path, manifest: Mapping[str, Any], episodes: npt.NDArray[Any]) -> tuple[dict[int, str], list[str]]:
    """The ids of the environments: as stored, with one changed byte undone, or from the catalogue."""
    facts = manifest["sealed"]["files"].get(NAMES)
    data = (path / NAMES).read_bytes() if (path / NAMES).is_file() else b""
    if facts is not None and (not data or file_facts(path, [NAMES])[NAMES] != facts):
        mended = mend_file(data, facts)
        if mended is None:
            return _catalogued(manifest, episodes), []
        write_bytes(path / NAMES, mended)
        return read_names(path / NAMES), ["the names, one changed byte"]
    return read_names(path / NAMES), []


def _catalogued(manifest: Mapping[str, Any], episodes: npt.NDArray[Any]) -> dict[int, str]:
    from agentpipe.environments.catalog import load_catalog

    wanted = set(episodes["environment"][~wrong(episodes)].tolist())
    known = {spec.index: spec.environment_id for spec in load_catalog().environments()} if is_built_in(manifest) else {}
    return {index: known[index] for index in sorted(wanted & set(known))}


def _read_or_none(path: Path) -> dict[int, str] | None:
    try:
        return read_names(path)
    except CorruptError:
        return None


def _write_changed(path: Path, data: bytes) -> bool:
    if path.is_file() and path.read_bytes() == data:
        return False
    write_bytes(path, data)
    return True


def row_of(damage: Damage, episodes: npt.NDArray[Any]) -> int:
    """The episode row that a damage is in."""
    assert damage.record is not None
    if damage.file == rec.RECORDS:
        return int(np.searchsorted(episodes["first"], damage.record, side="right")) - 1
    if damage.file == rec.FINALS:
        return int(np.flatnonzero(episodes["final"] == damage.record)[0])
    return damage.record


# ------------------------------------------------------------------------------------------------- shrunk


def _fix_shrunk(path: Path, manifest: dict[str, Any], workshop: Workshop) -> list[str]:
    episodes = read_array(path / rec.EPISODES, rec.EPISODE, manifest["episodes"])
    compact = read_array(path / COMPACT, rec.COMPACT, manifest["steps"])
    done = []
    for name, array in ((rec.EPISODES, episodes), (COMPACT, compact)):
        count = mend_records(array)
        if count:
            done.append(f"{count} record(s) of {name}: one changed byte each")
    names, named = _names(path, manifest, episodes)
    if wrong(episodes).any() or wrong(compact).any():
        return done + named + _play_the_rest(path, manifest, episodes, compact, names, workshop)
    for name, array in ((rec.EPISODES, episodes), (COMPACT, compact)):
        _write_changed(path / name, array.tobytes())
    return done + named + _finish(path, manifest, episodes, names, (rec.EPISODES, COMPACT), workshop)


def _play_the_rest(
    path: Path,
    manifest: Mapping[str, Any],
    episodes: npt.NDArray[Any],
    compact: npt.NDArray[Any],
    names: Mapping[int, str],
    workshop: Workshop,
) -> list[str]:
    """Publishes what can still be played of a shrunk shard, with full records."""
    lost = _lost_actions(episodes, compact)
    kept = np.array([row for row in range(len(episodes)) if row not in lost], np.int64)
    if not len(kept):
        set_aside_whole(path, workshop, "none of its episodes has all of its actions", len(episodes))
        return []
    if workshop.pool_for is None:
        return []
    rows = episodes[kept]
    spans = [slice(int(row["first"]), int(row["first"]) + int(row["steps"])) for row in rows]
    actions = np.concatenate([compact[span] for span in spans])
    try:
        records, finals, words = play(manifest, names, rows, actions, workshop.pool_for)
    except AgentpipeError:  # not here: it stays a problem
        return []
    steps = rows["steps"].astype(np.int64)
    sizes = words_of(steps)
    rows["first"], rows["graph"] = np.cumsum(steps) - steps, np.cumsum(sizes) - sizes
    rows["final"][rows["final"] != rec.NO_FINAL] = np.arange(len(finals))
    shard = Shard(path, manifest, records, rows, finals, words, sealed_rows(rows), names, None, {})
    damaged = Shard(path, manifest, compact, episodes, finals, words, sealed_rows(rows), names, None, {})
    place = set_aside_episodes(damaged, lost, workshop, COMPACT)
    merge([shard], path, quality=figures)
    workshop.lose(path, len(lost), _published(len(lost), len(episodes), lost), place)
    return [f"{len(kept)} episodes, played again from their actions"]


def _lost_actions(episodes: npt.NDArray[Any], compact: npt.NDArray[Any]) -> dict[int, str]:
    """The rows whose actions cannot be relied on → why."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(wrong(compact))])
    first, steps = (episodes[name].astype(np.int64) for name in ("first", "steps"))
    lost: dict[int, str] = {}
    for row, bad in enumerate(wrong(episodes).tolist()):
        if bad or not 0 <= first[row] <= first[row] + steps[row] <= len(compact):
            lost[row] = "its row does not fit its checksum"
        elif before[first[row] + steps[row]] > before[first[row]]:
            lost[row] = "its actions do not fit their checksums"
    return lost


# ------------------------------------------------------------------------------------------------- what is lost


def _publish_without(shard: Shard, parts: Parts, workshop: Workshop) -> None:
    kept = np.array([row not in parts.lost for row in range(len(parts.episodes))], np.bool_)
    if not kept.any():
        set_aside_whole(shard.path, workshop, next(iter(parts.lost.values())), len(kept))
        return
    place = set_aside_episodes(shard, parts.lost, workshop)
    try:
        merge([shard], shard.path, keep=[kept], quality=figures)
    except AgentpipeError as error:
        set_aside_whole(shard.path, workshop, f"{place} holds some; the others: {error.message}", len(kept))
        return
    workshop.lose(shard.path, len(parts.lost), _published(len(parts.lost), len(kept), parts.lost), place)


def _published(lost: int, count: int, reasons: Mapping[int, str]) -> str:
    why = next(iter(reasons.values()))
    return f"{lost} of {count} episodes are lost ({why}); it is published without them, under another digest"


def figures(shard: Shard) -> Mapping[str, Any]:
    """Quality figures of a shard for its manifest."""
    return measure_quality(shard).to_json()


def set_aside_episodes(shard: Shard, lost: Mapping[int, str], workshop: Workshop, name: str = rec.RECORDS) -> Path:
    """Puts lost episodes, as they lie on disk (in the file ``name``), into the quarantine."""
    place = _free(workshop.quarantine / (shard.digest or shard.path.name))
    episodes, width = shard.episodes, shard.records.itemsize
    with publish_directory(place) as staging:
        listed = []
        with (staging / name).open("wb") as file:
            raw = (shard.path / name).read_bytes() if (shard.path / name).is_file() else b""
            for row, why in sorted(lost.items()):
                episode = episodes[row]
                first, steps = int(episode["first"]), min(int(episode["steps"]), rec.MAX_EPISODE_STEPS)
                data = raw[first * width : (first + steps) * width]
                where = {"row": row, "environment": int(episode["environment"]), "episode": int(episode["episode"])}
                listed.append({**where, "reason": why, "offset": file.tell(), "bytes": len(data)})
                file.write(data)
        (staging / rec.EPISODES).write_bytes(episodes[sorted(lost)].tobytes())
        say_why(staging, shard.path, shard.digest, listed)
        write_json(staging / MANIFEST, dict(shard.manifest))
    return place


def set_aside_whole(path: Path, workshop: Workshop, why: str, episodes: int | None = None) -> None:
    """Moves a shard of which nothing can be used into the quarantine; ``episodes`` as far as it can be told."""
    place = _free(workshop.quarantine / f"{path.parent.name}-{path.name}")
    with typed_os_errors(place):
        place.mkdir(parents=True)
        shutil.move(path, place / "shard")
    say_why(place, path, None, [{"reason": why}])
    workshop.lose(path, episodes, f"all of it is lost ({why}); it is set aside whole", place)


def say_why(place: Path, path: Path, digest: str | None, listed: list[dict[str, Any]]) -> None:
    """Leaves ``reasons.json`` beside what was set aside."""
    content = {"shard": str(path), "digest": digest, "at": dt.datetime.now(dt.UTC).isoformat(), "episodes": listed}
    write_json(place / "reasons.json", content)


def _free(place: Path) -> Path:
    number, tried = 1, place
    while tried.exists():
        number += 1
        tried = place.with_name(f"{place.name}-{number}")
    return tried
