"""The champion: one pointer, changed by compare-and-set, with its whole history (S19)."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agentpipe.errors import CorruptError, LearningError, VersionError
from agentpipe.storage import read_json, typed_os_errors, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FORMAT = 1


class ChampionConflictError(LearningError):
    """Raised when the champion is no longer the one that the candidate was compared with."""


@dataclass(frozen=True)
class Champion:
    """One champion."""

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


class ChampionStore:
    """The champion's pointer below ``root``.

    The pointer file holds the whole history, so that pointer and history cannot disagree; it is replaced by rename
    under an exclusive lock. Readers need no lock.

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
        remedy = "restore champion.json from a backup"
        if not isinstance(content, dict) or not isinstance(content.get("history"), list):
            raise CorruptError("not a champion pointer", file=self._pointer, remedy=remedy)
        if content.get("format") != _FORMAT:
            text = f"champion format {content.get('format')!r}, this program reads {_FORMAT}"
            raise VersionError(text, file=self._pointer, remedy="use the agentpipe that wrote it")
        try:
            champions = tuple(Champion(**entry) for entry in content["history"])
        except TypeError as error:
            raise CorruptError(f"not a champion: {error}", file=self._pointer, remedy=remedy) from error
        if [champion.sequence for champion in champions] != list(range(1, len(champions) + 1)):
            raise CorruptError("champions are missing from the history", file=self._pointer, remedy=remedy)
        return champions

    def promote(
        self,
        digest: str,
        package: str,
        *,
        expected: str | None,
        reason: str,
        who: str = "agentpipe",
        figures: dict[str, Any] | None = None,
    ) -> Champion:
        """Makes ``digest`` the champion if the champion is still ``expected``.

        Args:
            digest: of the candidate's package.
            package: where it lies.
            expected: digest of the champion that the candidate was compared with; ``None`` = there was none yet.
            reason: why.
            who: who or what decided.
            figures: JSON-ready, what the decision rested on.

        Raises:
            ChampionConflictError: another champion was promoted meanwhile; nothing is changed.
            DiskFullError, HomeError: the pointer cannot be written; the old one stays.
        """
        with self._locked():
            history = self.history()
            current = history[-1].digest if history else None
            if current != expected:
                text = f"the champion is {current or 'none'}, the candidate was compared with {expected or 'none'}"
                raise ChampionConflictError(text, file=self._pointer, remedy="compare with the present champion again")
            now = datetime.now(UTC).isoformat(timespec="seconds")
            champion = Champion(len(history) + 1, package, digest, current, reason, who, now, dict(figures or {}))
            entries = [dataclasses.asdict(entry) for entry in (*history, champion)]
            write_json(self._pointer, {"format": _FORMAT, "history": entries})
            return champion

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path = self.root / "champion.lock"
        with typed_os_errors(path):
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
