"""The champion: one pointer, changed by compare-and-set, with its whole history (S19)."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agentpipe.errors import CorruptError, InputError, LearningError, VersionError
from agentpipe.storage import read_json, typed_os_errors, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_FORMAT = 2
_READABLE = (1, _FORMAT)
"""Format 1 knew neither kinds of entry nor rollbacks: all its entries are promotions."""
_REMEDY = "restore champion.json from a backup"

PROMOTION, APPROVAL, ROLLBACK = "promotion", "approval", "rollback"
KINDS = (PROMOTION, APPROVAL, ROLLBACK)
SHORTEST = 6
"""Least characters of a digest that name a champion or a candidate."""
_FIGURES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("partition", "bundle", "bundle_digest", "drift", "verdict"), str),
    **dict.fromkeys(("package_bytes", "look", "look_of_champion"), int),
    **dict.fromkeys(("success", "difference", "low", "high"), (int, float)),
}
"""Types of the figures that something is decided by or computed from; others may be anything."""


class ChampionConflictError(LearningError):
    """Raised when the champion is no longer the one that the candidate was compared with."""


@dataclass(frozen=True)
class Champion:
    """One entry of the history; the last one is the champion."""

    sequence: int
    """1 for the first"""
    package: str
    """where its package lies, as told at promotion (relative to the home)"""
    digest: str
    """of the package"""
    previous: str | None
    """digest of the champion before; none for the first"""
    reason: str
    """why it was promoted"""
    who: str
    """who or what promoted it"""
    at: str
    """UTC, ISO 8601"""
    figures: dict[str, Any] = field(default_factory=dict)
    """what the decision rested on"""
    kind: str = PROMOTION
    """``promotion`` (a comparison decided), ``approval`` (a person did) or ``rollback``"""
    restores: int | None = None
    """sequence of the entry that a rollback brought back"""


class ChampionStore:
    """The champion's pointer below ``root``.

    The pointer file holds the whole history, so that pointer and history cannot disagree; it is replaced by rename
    under an exclusive lock. Entries are only ever added. Readers need no lock.

    Args:
        root: directory; made at the first promotion.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pointer = root / "champion.json"

    def current(self) -> Champion | None:
        """The champion, or ``None`` before the first.

        Raises:
            CorruptError, VersionError: the pointer is damaged, or of another version.
        """
        history = self.history()
        return history[-1] if history else None

    def history(self) -> tuple[Champion, ...]:
        """Every champion, oldest first.

        Raises:
            CorruptError, VersionError: the pointer is damaged, or of another version.
        """
        if not self._pointer.exists():
            return ()
        content = read_json(self._pointer)
        if not isinstance(content, dict) or not isinstance(content.get("history"), list):
            raise CorruptError("not a champion pointer", file=self._pointer, remedy=_REMEDY)
        if content.get("format") not in _READABLE:
            text = f"champion format {content.get('format')!r}, this program reads {_FORMAT}"
            raise VersionError(text, file=self._pointer, remedy="use the agentpipe that wrote it")
        champions = tuple(self._entry(entry) for entry in content["history"])
        if [champion.sequence for champion in champions] != list(range(1, len(champions) + 1)):
            raise CorruptError("champions are missing from the history", file=self._pointer, remedy=_REMEDY)
        if [champion.previous for champion in champions] != [None, *(c.digest for c in champions)][: len(champions)]:
            text = "a champion does not follow the one before"
            raise CorruptError(text, file=self._pointer, remedy=_REMEDY)
        if any(c.restores is not None and not 0 < c.restores < c.sequence for c in champions):
            raise CorruptError("a rollback restores what was never there", file=self._pointer, remedy=_REMEDY)
        return champions

    def find(self, name: str | int) -> Champion:
        """The newest entry of that digest (six or more of its first characters will do) or of that sequence.

        Raises:
            InputError: there is none, or more than one digest begins like that.
        """
        return find_champion(self.history(), name)

    def promote(
        self,
        digest: str,
        package: str,
        *,
        expected: str | None,
        reason: str,
        who: str = "agentpipe",
        figures: Mapping[str, Any] | None = None,
        kind: str = PROMOTION,
    ) -> Champion:
        """Makes ``digest`` the champion if the champion is still ``expected``.

        Args:
            digest: of the candidate's package.
            package: where it lies.
            expected: digest of the champion that the candidate was compared with; ``None`` = there was none yet.
            reason: why.
            who: who or what decided.
            figures: JSON-ready, what the decision rested on.
            kind: ``promotion``, or ``approval`` where a person decided.

        Raises:
            ChampionConflictError: another champion was promoted meanwhile; nothing is changed.
            DiskFullError, HomeError: the pointer cannot be written; the old one stays.
        """
        with exclusive(self.root / "champion.lock"):
            history = self.history()
            self._expect(history, expected, "compare with the present champion again")
            entry = Champion(0, package, digest, None, reason, who, "", dict(figures or {}), kind)
            return self._append(history, entry)

    def rollback(self, to: str | int | None = None, *, expected: str | None, reason: str, who: str) -> Champion:
        """Brings an earlier champion back, as a new entry, if the champion is still ``expected``.

        Args:
            to: digest or sequence, see :meth:`find`; ``None`` = the champion before this one. Repeated, that goes one
                step further back each time, never forth again.
            expected: digest of the champion that is to be left.
            reason: why.
            who: who decided.

        Raises:
            InputError: no such champion, nothing before this one, or it is the champion already.
            ChampionConflictError: another champion was promoted meanwhile; nothing is changed.
            DiskFullError, HomeError: the pointer cannot be written; the old one stays.
        """
        with exclusive(self.root / "champion.lock"):
            history = self.history()
            self._expect(history, expected, "look at the present champion, then decide again")
            target = rollback_target(history, to)
            figures = target.figures
            entry = Champion(
                0, target.package, target.digest, None, reason, who, "", figures, ROLLBACK, target.sequence
            )
            return self._append(history, entry)

    def _expect(self, history: tuple[Champion, ...], expected: str | None, remedy: str) -> None:
        current = history[-1].digest if history else None
        if current != expected:
            text = f"the champion is {current or 'none'}, not {expected or 'none'} as expected"
            raise ChampionConflictError(text, file=self._pointer, remedy=remedy)

    def _append(self, history: tuple[Champion, ...], entry: Champion) -> Champion:
        """Writes the history with ``entry``, which gets its place and time here. The lock is held."""
        previous = history[-1].digest if history else None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        champion = dataclasses.replace(entry, sequence=len(history) + 1, previous=previous, at=now)
        entries = [dataclasses.asdict(each) for each in (*history, champion)]
        write_json(self._pointer, {"format": _FORMAT, "history": entries})
        return champion

    def _entry(self, content: object) -> Champion:
        if not isinstance(content, dict):
            raise CorruptError("not a champion: no object", file=self._pointer, remedy=_REMEDY)
        try:
            champion = Champion(**content)
        except TypeError as error:
            raise CorruptError(f"not a champion: {error}", file=self._pointer, remedy=_REMEDY) from error
        texts = (champion.package, champion.digest, champion.reason, champion.who, champion.at)
        numbers: tuple[object, ...] = (champion.sequence, 0 if champion.restores is None else champion.restores)
        typed = all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)
        if not typed or not isinstance(champion.figures, dict):
            raise CorruptError("not a champion: a field has another type", file=self._pointer, remedy=_REMEDY)
        if (wrong := untyped_figure(champion.figures)) is not None:
            text = f"not a champion: the figure {wrong!r} has another type"
            raise CorruptError(text, file=self._pointer, field=wrong, remedy=_REMEDY)
        if not isinstance(champion.previous, str | None):
            raise CorruptError("not a champion: previous is no digest", file=self._pointer, remedy=_REMEDY)
        if champion.kind not in KINDS:
            raise CorruptError(f"no kind of entry: {champion.kind!r}", file=self._pointer, remedy=_REMEDY)
        return champion


def untyped_figure(figures: Mapping[str, Any]) -> str | None:
    """The first figure of a champion, or of one that may become it, that is not of its type; ``None`` where all are."""
    known = ((name, figures[name]) for name in _FIGURES if name in figures)
    wrong = (name for name, value in known if isinstance(value, bool) or not isinstance(value, _FIGURES[name]))
    return next(wrong, None)


def find_champion(history: tuple[Champion, ...], name: str | int) -> Champion:
    """The newest entry of ``history`` with that digest, its beginning, or that sequence; see ChampionStore.find.

    Raises:
        InputError: there is none, or more than one digest begins like that.
    """
    remedy = "agentpipe champion history lists them"
    if isinstance(name, int):
        found = [champion for champion in history if champion.sequence == name]
    else:
        found = [champion for champion in history if champion.digest == name]
        if not found and len(name) >= SHORTEST:
            found = [champion for champion in history if champion.digest.startswith(name)]
    if len({champion.digest for champion in found}) > 1:
        raise InputError(f"more than one champion begins with {name}", remedy="give more of its digest")
    if not found:
        raise InputError(f"no champion {name}", remedy=remedy)
    return found[-1]


def rollback_target(history: tuple[Champion, ...], to: str | int | None) -> Champion:
    """The entry that a rollback to ``to`` brings back; see :meth:`ChampionStore.rollback`.

    Raises:
        InputError: no such champion, nothing before this one, or it is the champion already.
    """
    if not history:
        raise InputError("there is no champion yet", remedy="nothing can be rolled back")
    current = history[-1]
    if to is not None:
        target = find_champion(history, to)
    else:
        stands_for = current
        while stands_for.restores is not None:
            stands_for = history[stands_for.restores - 1]
        if stands_for.sequence == 1:
            raise InputError("there is no champion before this one", remedy="name one with --to")
        target = history[stands_for.sequence - 2]
    if target.digest == current.digest:
        raise InputError(f"{target.digest[:12]} is the champion already", remedy="name another one with --to")
    return target


def summed_differences(history: Sequence[Champion]) -> list[float]:
    """For each entry, the measured differences in success of all steps that led to its policy, added up.

    Each step may lose a little less than the margin, and many such steps a lot; this sum shows it. A promotion without
    a ``difference`` among its figures counts as 0; a rollback has the sum of what it restores.
    """
    sums: list[float] = []
    for entry in history:
        if entry.restores is not None:
            sums.append(sums[entry.restores - 1])
        else:
            sums.append((sums[-1] if sums else 0.0) + entry.figures.get("difference", 0.0))
    return sums


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file ``path`` while the body runs; waits for another holder. The lock dies with its process.

    Raises:
        DiskFullError, HomeError: the file cannot be made.
    """
    with typed_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
