"""Measurements of hours, in pieces: each is kept as soon as it is made, under the digest of what it depends on.

A piece that is kept is never made again; one whose configuration changed has another digest, and is. What the digest
does not cover is the revision of the code: it is kept beside the figures, and a page says when there are several.
Pieces are kept among the results, where they can be committed: another machine goes on where this one stopped.
"""

from __future__ import annotations

import datetime as dt
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentpipe.storage import canonical_json, digest_bytes, read_json, write_json
from benchmarks.measure import RESULTS, revision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    Tell = Callable[[str], None]

RUNS = RESULTS / "runs"
"""holds a folder for each benchmark of this kind"""
_AGAIN = 1.1
"""a piece is expected to take this many times the median of its kind: the last one should not run over"""


@dataclass(frozen=True)
class Piece:
    """One measurement that is made at once or not at all."""

    kind: str
    """pieces of one kind take about as long"""
    label: str
    """for people"""
    key: Mapping[str, Any]
    """JSON values: everything that the figures depend on"""
    seconds: float
    """expected, before one of its kind was made"""
    run: Callable[[], dict[str, Any]]
    """makes it; returns its figures as JSON values"""

    @property
    def digest(self) -> str:
        """Of kind and key."""
        return digest_bytes(canonical_json([self.kind, dict(self.key)]))[:24]


class Cache:
    """Figures of finished pieces, one JSON file each.

    Args:
        folder: holds a folder for each kind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, piece: Piece) -> Path:
        """Where the figures of ``piece`` are, or will be."""
        return self.folder / piece.kind / f"{piece.digest}.json"

    def has(self, piece: Piece) -> bool:
        """Whether it was made."""
        return self.path(piece).exists()

    def entry(self, piece: Piece) -> dict[str, Any]:
        """``row`` (the figures), ``revision``, ``made`` and ``seconds``.

        Raises:
            CorruptError: it was not made, or its file is damaged.
        """
        return dict(read_json(self.path(piece)))

    def row(self, piece: Piece) -> dict[str, Any] | None:
        """The figures; ``None`` where there are none yet."""
        return dict(self.entry(piece)["row"]) if self.has(piece) else None

    def make(self, piece: Piece) -> dict[str, Any]:
        """Makes the piece and keeps it."""
        began = time.monotonic()
        row = piece.run()
        entry = {
            "label": piece.label,
            "key": dict(piece.key),
            "row": row,
            "seconds": round(time.monotonic() - began, 1),
            "revision": revision(),
            "made": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
        write_json(self.path(piece), entry)
        return row

    def expected(self, piece: Piece) -> float:
        """Seconds that ``piece`` should take, by those of its kind."""
        known = [read_json(path)["seconds"] for path in sorted((self.folder / piece.kind).glob("*.json"))]
        return _AGAIN * statistics.median(known) if known else piece.seconds

    def keep_only(self, pieces: Iterable[Piece]) -> None:
        """Removes figures of a configuration that is no more: of none of ``pieces``, not even under another seed."""
        wanted = {(piece.kind, canonical_json(_seedless(dict(piece.key)))) for piece in pieces}
        for path in self.folder.glob("*/*.json"):
            key = read_json(path)["key"]
            if (path.parent.name, canonical_json(_seedless(key))) not in wanted:
                path.unlink(missing_ok=True)

    def origins(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Revisions that the figures of ``pieces`` stem from, and between when and when they were made."""
        entries = [self.entry(piece) for piece in pieces if self.has(piece)]
        made = sorted(entry["made"] for entry in entries)
        revisions = sorted({entry["revision"] for entry in entries})
        return {"revisions": revisions, "first": made[0] if made else "", "last": made[-1] if made else ""}


def _seedless(key: Any) -> Any:  # noqa: ANN401 - a JSON value
    """``key`` without its seeds."""
    if isinstance(key, dict):
        return {name: _seedless(value) for name, value in key.items() if name != "seed"}
    return [_seedless(value) for value in key] if isinstance(key, list | tuple) else key


def deadline_in(minutes: float | None) -> float:
    """The moment on the monotonic clock that is so many minutes away; never for ``None``."""
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


def work(pieces: Sequence[Piece], cache: Cache, deadline: float, tell: Tell) -> list[Piece]:
    """Makes the pieces that are missing, in order; one that should not be done by the deadline is left out.

    Two processes may share a cache, best with seeds of their own: what is being made is seen by the other once it is
    there.

    Returns:
        Those that are still missing.
    """
    left = []
    missing = [piece for piece in _different(pieces) if not cache.has(piece)]
    for number, piece in enumerate(missing, 1):
        if cache.has(piece):  # another process that shares the folder was faster
            continue
        expected = cache.expected(piece)
        if time.monotonic() + expected > deadline:
            left.append(piece)
            continue
        tell(f"[{number} of {len(missing)}] {piece.label}, about {expected:.0f} s")
        cache.make(piece)
    return left


def _different(pieces: Sequence[Piece]) -> list[Piece]:
    """The first of each digest, in order."""
    found: dict[str, Piece] = {}
    for piece in pieces:
        found.setdefault(piece.digest, piece)
    return list(found.values())


def say_what_is_left(left: Sequence[Piece], cache: Cache, tell: Tell) -> None:
    """How many pieces are missing and about how long they take."""
    seconds = sum(cache.expected(piece) for piece in left)
    tell(f"{len(left)} measurements are left, about {seconds / 60:.0f} minutes: run the same command again")


def plan(pieces: Sequence[Piece], cache: Cache) -> str:
    """What is there and what is missing, by kind, with about how long it takes; nothing is made."""
    lines, total = [], 0.0
    different = _different(pieces)
    for kind in dict.fromkeys(piece.kind for piece in different):
        some = [piece for piece in different if piece.kind == kind]
        missing = [piece for piece in some if not cache.has(piece)]
        seconds = sum(cache.expected(piece) for piece in missing)
        total += seconds
        each = f", {seconds / len(missing):.0f} s each" if missing else ""
        lines.append(f"{kind}: {len(some) - len(missing)} of {len(some)} are there{each}")
    return "\n".join([*lines, f"in all about {total / 60:.0f} minutes are left; finished ones: {cache.folder}"])
