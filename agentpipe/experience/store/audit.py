"""Looks at every byte of a shard and names what is damaged: file, record and, where it can be told, field.

A checksum says that a record is damaged, not where. For one changed byte the place is found by trying all changes of
one byte until the checksum fits; otherwise a field is named that has become impossible, or else ``content``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import CorruptError
from agentpipe.experience.store import checksum
from agentpipe.experience.store import records as rec
from agentpipe.experience.store.content import content_digest, word_counts
from agentpipe.experience.store.index import SEALED_INDEX, sealed_rows
from agentpipe.experience.store.intake import Layout
from agentpipe.experience.store.manifest import MANIFEST, NAMES, file_facts
from agentpipe.experience.store.remedies import mend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agentpipe.experience.store.shard import Shard

CONTENT: Final = "content"
_BLOCK: Final = 65_536
_SEARCHED_BYTES: Final = 4_096
_SEARCHES: Final = 8


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong.

    Args:
        file: Name of the file in the shard.
        text: What is wrong.
        record: Number of the record, or of the episode row for a graph.
        field: Which field, ``content`` where it cannot be told.
    """

    file: str
    text: str
    record: int | None = None
    field: str | None = None

    def error(self, directory: Path) -> CorruptError:
        """As an error on a shard in ``directory``."""
        where = {"file": directory / self.file, "record": self.record, "field": self.field}
        return CorruptError(self.text, **where, remedy=mend(directory))


def audit(shard: Shard, start: int = 0) -> Iterator[Damage]:
    """Everything that is wrong with ``shard``, in the order of the files; reads in blocks.

    Args:
        shard: Sealed, or a view of an open one.
        start: The first episode row to look at. Index, names and digest are looked at for whole shards (0) only.

    Raises:
        CorruptError: a file is cut short underneath.
    """
    shard.still_whole()
    damages = list(_table(shard, start))
    yield from damages
    bad = len(damages)
    searches = iter(range(_SEARCHES))
    first = _first_record(shard, start)
    for part in (
        _checksums(shard, rec.RECORDS, shard.records, first, searches),
        _checksums(shard, rec.FINALS, shard.finals, _first_final(shard, start), searches),
        () if bad else _graphs(shard, start),
        () if start else _sealed_files(shard),
    ):
        for damage in part:
            bad += 1
            yield damage
    if bad:
        return
    for damage in (*_contents(shard, start), *_finals(shard, start)):
        bad += 1
        yield damage
    if not bad and not start and shard.digest:
        yield from _digest(shard)


def check_episode(shard: Shard, row: int) -> None:
    """Looks at every byte of one episode, for who reads it without :meth:`Shard.check`.

    Raises:
        CorruptError: names the file.
    """
    shard.still_whole()
    rows = np.ascontiguousarray(shard.episodes[row : row + 1])
    if len(rows) == 0 or checksum.wrong(rows).any():
        raise Damage(rec.EPISODES, "checksum does not fit", row).error(shard.path)
    first, steps, graph, final = (int(rows[name][0]) for name in ("first", "steps", "graph", "final"))
    words = np.array([rec.graph_words(steps)])
    ends = first + steps <= len(shard.records) and graph + int(words[0]) <= len(shard.graph)
    if not (1 <= steps <= rec.MAX_EPISODE_STEPS and ends and rec.NO_FINAL <= final < len(shard.finals)):
        raise Damage(rec.EPISODES, "it leads out of the other files", row).error(shard.path)
    bad = np.flatnonzero(checksum.wrong(shard.records[first : first + steps]))
    if len(bad):
        raise Damage(rec.RECORDS, "checksum does not fit", first + int(bad[0])).error(shard.path)
    if final != rec.NO_FINAL and checksum.wrong(shard.finals[final : final + 1]).any():
        raise Damage(rec.FINALS, "checksum does not fit", final).error(shard.path)
    if checksum.range_checksums(shard.graph, np.array([graph]), words)[0] != rows["graph_checksum"][0]:
        raise Damage(rec.GRAPH, "checksum does not fit", row).error(shard.path)


# ------------------------------------------------------------------------------------------ the episode table


def _table(shard: Shard, start: int) -> Iterator[Damage]:
    rows = np.ascontiguousarray(shard.episodes[start:])
    for i in np.flatnonzero(checksum.wrong(rows)).tolist():
        yield Damage(rec.EPISODES, "checksum does not fit", start + i, _field_of(rows[i].tobytes(), rec.EPISODE))
    lengths = rows["steps"].astype(np.int64)
    expected = {"first": lengths, "graph": word_counts(lengths)}
    ends = {"first": len(shard.records), "graph": len(shard.graph)}
    wrong = (lengths < 1) | (lengths > rec.MAX_EPISODE_STEPS)
    if wrong.any():
        yield Damage(rec.EPISODES, "impossible length", start + int(wrong.argmax()), "steps")
        return
    for name, sizes in expected.items():
        following = rows[name].astype(np.int64) + sizes
        begin = 0 if not start else int(shard.episodes[name][start]) if len(rows) else 0
        wrong = rows[name].astype(np.int64) != np.concatenate([[begin], following[:-1]])[: len(rows)]
        if wrong.any() or (len(rows) and following[-1] != ends[name]) or (not len(rows) and ends[name] and not start):
            record = start + int(wrong.argmax()) if wrong.any() else start + max(len(rows) - 1, 0)
            yield Damage(rec.EPISODES, f"episodes and {name} places do not fit each other", record, name)
            return
    numbers = rows["final"][rows["final"] != rec.NO_FINAL]
    begin = len(shard.finals) - len(numbers) if start else 0
    if not np.array_equal(numbers, np.arange(begin, begin + len(numbers))) or begin + len(numbers) != len(shard.finals):
        yield Damage(rec.EPISODES, "episodes and final records do not fit each other", None, "final")


def _first_record(shard: Shard, start: int) -> int:
    if start >= len(shard.episodes):
        return len(shard.records) if start else 0
    return min(int(shard.episodes["first"][start]), len(shard.records)) if start else 0


def _first_final(shard: Shard, start: int) -> int:
    numbers = shard.episodes["final"][start:]
    numbers = numbers[numbers != rec.NO_FINAL]
    first = int(numbers[0]) if len(numbers) else len(shard.finals)
    return min(max(first, 0), len(shard.finals)) if start else 0


# ------------------------------------------------------------------------------------------------- checksums


def _checksums(
    shard: Shard, file: str, records: npt.NDArray[Any], first: int, searches: Iterator[int]
) -> Iterator[Damage]:
    for block in range(first, len(records), _BLOCK):
        shard.still_whole()
        part = records[block : block + _BLOCK]
        for i in np.flatnonzero(checksum.wrong(part)).tolist():
            search = next(searches, None) is not None
            field = _field_of(part[i].tobytes(), records.dtype, search=search)
            if field == CONTENT and file == rec.RECORDS:
                field = impossible(part[i], shard) or CONTENT
            yield Damage(file, "checksum does not fit", block + i, field)


def _field_of(record: bytes, dtype: np.dtype[Any], *, search: bool = True) -> str:
    """The field in which one byte was changed, or ``content``."""
    found = checksum.find_flip(record) if search and len(record) <= _SEARCHED_BYTES else None
    return CONTENT if found is None else field_at(dtype, found[0])


def field_at(dtype: np.dtype[Any], offset: int) -> str:
    """The field of ``dtype`` that holds the byte at ``offset``."""
    assert dtype.names is not None
    assert dtype.fields is not None
    return next(name for name in reversed(dtype.names) if dtype.fields[name][1] <= offset)


def impossible(record: Any, shard: Shard) -> str | None:  # noqa: ANN401 - one structured row
    """A field of a damaged step record that holds what it cannot, or None."""
    actions = int(shard.manifest["action_count"])
    mask = np.unpackbits(record["mask"], bitorder="little")
    action = int(record["action"])
    claims = {
        **{name: not np.isfinite(record[name]) for name in checksum.FLOAT_FIELDS},
        "observation": not np.isfinite(record["observation"]).all(),
        "policy": int(record["policy"]) >= len(shard.policies),
        "action": not 0 <= action < actions or not mask[action],
        "last_action": not 0 <= int(record["last_action"]) <= actions,
        "mask": bool(mask[actions:].any()),
        "step": int(record["step"]) >= rec.MAX_EPISODE_STEPS,
        **{name: int(record[name]) > 1 for name in ("terminated", "truncated", "earned")},
        "reserved": bool(record["reserved"].any()),
    }
    return next((name for name, holds in claims.items() if holds), None)


def _graphs(shard: Shard, start: int) -> Iterator[Damage]:
    for block in range(start, len(shard.episodes), _BLOCK):
        shard.still_whole()
        rows = shard.episodes[block : block + _BLOCK]
        counts = word_counts(rows["steps"])
        found = checksum.range_checksums(shard.graph, rows["graph"].astype(np.int64), counts)
        for i in np.flatnonzero(found != rows["graph_checksum"]).tolist():
            yield Damage(rec.GRAPH, "checksum does not fit", block + i, _graph_field(shard, block + i))


def _graph_field(shard: Shard, row: int) -> str:
    parents = shard.parents(row)
    if parents.nbytes > _SEARCHED_BYTES:
        return CONTENT
    found = checksum.find_flip(parents.tobytes(), int(shard.episodes["graph_checksum"][row]))
    return CONTENT if found is None or found[0] < 0 else f"parents of step {found[0] // (8 * parents.shape[1])}"


# --------------------------------------------------------------------------------------------- do they fit


def _contents(shard: Shard, start: int) -> Iterator[Damage]:
    """Records whose checksum fits, but which are not what the episode table says, or hold a NaN."""
    layout = Layout.of(int(shard.manifest["observation_size"]), int(shard.manifest["action_count"]))
    names = {
        checksum.ENVIRONMENT: "environment",
        checksum.EPISODE: "episode",
        checksum.STEP: "step",
        checksum.POLICY: "policy",
        checksum.ACTION: "action",
    }
    for block in range(start, len(shard.episodes), _BLOCK // 8):
        shard.still_whole()
        rows = shard.episodes[block : block + _BLOCK // 8]
        lengths = rows["steps"].astype(np.int64)
        first = int(rows["first"][0])
        part = shard.records[first : first + int(lengths.sum())]
        where = np.zeros(3, np.int64)
        code = checksum.inspect_steps(
            checksum.as_words(part).view(np.uint32),
            np.stack([rows["environment"], rows["episode"]], axis=1),
            lengths,
            *layout.sizes,
            len(shard.policies),
            where,
        )
        if code:
            record = first + int(lengths[: where[0]].sum() + where[1])
            element = (*checksum.FLOAT_FIELDS, "observation")[min(int(where[2]), 4)]
            text = "not finite" if code == checksum.NOT_FINITE else "not what the episode table says"
            yield Damage(rec.RECORDS, text, record, names.get(int(code), element))


def _finals(shard: Shard, start: int) -> Iterator[Damage]:
    rows = shard.episodes[start:]
    rows = rows[rows["final"] != rec.NO_FINAL]
    finals = shard.finals[rows["final"]]
    for name in ("environment", "episode"):
        wrong = finals[name] != rows[name]
        if wrong.any():
            record = int(rows["final"][int(wrong.argmax())])
            yield Damage(rec.FINALS, "not what the episode table says", record, name)
    for name in ("time", "observation"):
        bad = ~np.isfinite(finals[name]).all(axis=tuple(range(1, finals[name].ndim)))
        if bad.any():
            yield Damage(rec.FINALS, "not finite", int(rows["final"][int(bad.argmax())]), name)


def _sealed_files(shard: Shard) -> Iterator[Damage]:
    for name, facts in shard.manifest.get("sealed", {}).get("files", {}).items():
        try:
            fits = file_facts(shard.path, [name])[name] == facts
        except OSError as error:
            yield Damage(name, f"cannot be read: {error.strerror}")
            continue
        if not fits:
            yield Damage(
                name, "checksum does not fit", *(_index_place(shard) if name == SEALED_INDEX else (None, CONTENT))
            )


def _index_place(shard: Shard) -> tuple[int | None, str]:
    expected = sealed_rows(shard.episodes)
    assert expected.dtype.names is not None
    for name in expected.dtype.names:
        differs = expected[name] != shard.index[name]
        if differs.any():
            return int(differs.argmax()), name
    return None, CONTENT


def _digest(shard: Shard) -> Iterator[Damage]:
    if not np.array_equal(sealed_rows(shard.episodes), shard.index):
        record, field = _index_place(shard)
        yield Damage(SEALED_INDEX, "not what the episode table says", record, field)
    missing = set(np.unique(shard.episodes["environment"]).tolist()) - set(shard.names)
    if missing:
        yield Damage(NAMES, f"no name for environment {min(missing)}")
    parts = shard.records, shard.episodes, shard.finals, shard.graph
    if content_digest(*parts, before=shard.still_whole) != shard.manifest.get("content"):
        yield Damage(MANIFEST, "the episodes differ from the digest of the content", field=CONTENT)
