"""Candidates that are held until a person judges them, and what a person may do to the champion (S19)."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agentpipe.errors import BundleError, CheckpointError, CorruptError, InputError, LearningError, VersionError
from agentpipe.learning.succession.champion import (
    APPROVAL,
    SHORTEST,
    Champion,
    ChampionConflictError,
    ChampionStore,
    exclusive,
    rollback_target,
    untyped_figure,
)
from agentpipe.storage import check_home_format, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    BundleCheck = Callable[[Path, str], object]
    """Verifies the bundle in a folder, and that it has a digest, as ``agentpipe.serving.verify.check_bundle`` does."""

_FORMAT = 1
_NAME = re.compile(r"[0-9A-Za-z_-]{1,128}")
APPROVED, REJECTED = "approved", "rejected"


class DecidedError(LearningError):
    """Raised when a held candidate was decided the other way before."""


@dataclass(frozen=True)
class Decision:
    """What a person decided of a held candidate."""

    kind: str
    """``approved`` or ``rejected``"""
    who: str
    reason: str
    at: str
    """UTC, ISO 8601"""


@dataclass(frozen=True)
class Held:
    """A candidate that waits for a person, or has been decided by one."""

    candidate: str
    """digest of its package"""
    package: str
    """where that lies, relative to the home"""
    bundle: str
    """where its bundle lies, relative to the home"""
    compared_with: str | None
    """digest of the champion that it was compared with"""
    reasons: tuple[str, ...]
    """why a person must judge it"""
    who: str
    """what held it"""
    at: str
    """UTC, ISO 8601"""
    figures: dict[str, Any] = field(default_factory=dict)
    """what a person needs to decide; they become the champion's figures on approval"""
    decision: Decision | None = None
    """``None`` while it waits"""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**dataclasses.asdict(self), "reasons": list(self.reasons)}


class HoldStore:
    """Held candidates below ``root``, one file each; a decision is made once.

    An approval moves the champion's pointer first and is noted here afterwards. The pointer is what counts: where the
    process dies in between, every reader and the next decision see the approval in the champion's history; where that
    was restored from a backup without the approval, the candidate waits again.

    Args:
        root: directory; made when the first candidate is held.
        champions: where an approval promotes to.
    """

    def __init__(self, root: Path, champions: ChampionStore) -> None:
        self.root, self.champions = root, champions

    # ------------------------------------------------------------------------------------------- reading

    def all(self) -> tuple[Held, ...]:
        """Every candidate that ever was held, the oldest first.

        Raises:
            CorruptError, VersionError: a file is damaged, or of another version.
        """
        files = sorted(self.root.glob("*.json")) if self.root.is_dir() else []
        read = [_read(path) for path in files]
        history = self.champions.history()  # afterwards: it knows every approval that was noted in a file by then
        held = [_settled(each, history) for each in read]
        return tuple(sorted(held, key=lambda each: (each.at, each.candidate)))

    def waiting(self) -> tuple[Held, ...]:
        """Those that no person has decided yet."""
        return tuple(held for held in self.all() if held.decision is None)

    def find(self, name: str) -> Held:
        """The held candidate of that digest; six or more of its first characters will do.

        Raises:
            InputError: there is none, or more than one begins like that.
            CorruptError, VersionError: a file is damaged, or of another version.
        """
        whole = bool(_NAME.fullmatch(name))
        found = [self._path(name)] if whole and self._path(name).exists() else []
        if whole and not found and len(name) >= SHORTEST:
            found = sorted(self.root.glob(f"{name}*.json"))
        if len(found) != 1:
            text = f"{len(found)} held candidates begin with {name}" if found else f"no held candidate {name}"
            raise InputError(text, remedy="agentpipe champion held --all lists them")
        return _settled(_read(found[0]), self.champions.history())

    # ------------------------------------------------------------------------------------------- writing

    def hold(
        self,
        candidate: str,
        *,
        package: str,
        bundle: str,
        compared_with: str | None,
        reasons: Sequence[str],
        figures: Mapping[str, Any],
        who: str = "agentpipe",
    ) -> Held:
        """Holds a candidate, with the comparison that a person is to judge it by.

        Held again with another comparison, that one takes the place of the earlier; decided, it stays as decided.

        Raises:
            InputError: no reason is given, or ``candidate`` is no digest.
            DiskFullError, HomeError: it cannot be written; what was there stays.
        """
        if not _NAME.fullmatch(candidate):
            raise InputError(f"not a digest: {candidate!r}", field="candidate")
        if not reasons or not all(reason.strip() for reason in reasons):
            raise InputError("a candidate is held for a reason", field="reasons", remedy="say what a person must judge")
        with exclusive(self.root / "held.lock"):
            now, path = _now(), self._path(candidate)
            new = Held(candidate, package, bundle, compared_with, tuple(reasons), who, now, dict(figures))
            if path.exists():
                before = _settled(_read(path), self.champions.history())
                same = dataclasses.replace(before, at=now, who=who) == new
                if before.decision is not None or same:
                    return before
            _write(path, new)
            return new

    def approve(self, candidate: str, *, who: str, reason: str) -> Champion:
        """Makes a held candidate the champion, if the champion is still the one that it was compared with.

        Approved before, nothing is changed and the entry of then is returned.

        Raises:
            InputError: no such candidate, or no ``who`` or ``reason``.
            DecidedError: it was rejected.
            ChampionConflictError: the champion is another one by now; the candidate stays held and must be compared
                again.
            DiskFullError, HomeError: it cannot be written.
        """
        signed(who, reason)
        with exclusive(self.root / "held.lock"):
            held = self.find(candidate)
            if held.decision is not None and held.decision.kind == REJECTED:
                raise _decided(held, self._path(held.candidate))
            entry = _approval(held.candidate, self.champions.history())
            if entry is None:
                figures = {**held.figures, "bundle": held.bundle, "held_because": list(held.reasons)}
                try:
                    entry = self.champions.promote(
                        held.candidate,
                        held.package,
                        expected=held.compared_with,
                        reason=reason,
                        who=who,
                        figures=figures,
                        kind=APPROVAL,
                    )
                except ChampionConflictError as error:
                    remedy = "it must be compared with the present champion again: materialise its publish once more"
                    raise ChampionConflictError(error.message, **error.where, remedy=remedy) from error
            decision = Decision(APPROVED, entry.who, entry.reason, entry.at)
            self._note(dataclasses.replace(held, decision=decision))
            return entry

    def reject(self, candidate: str, *, who: str, reason: str) -> Held:
        """Decides that a held candidate never becomes champion. Rejected before, the decision of then is returned.

        Raises:
            InputError: no such candidate, or no ``who`` or ``reason``.
            DecidedError: it was approved.
            DiskFullError, HomeError: it cannot be written.
        """
        signed(who, reason)
        with exclusive(self.root / "held.lock"):
            held = self.find(candidate)
            if held.decision is None:
                held = dataclasses.replace(held, decision=Decision(REJECTED, who, reason, _now()))
                self._note(held)
            elif held.decision.kind == APPROVED:
                raise _decided(held, self._path(held.candidate))
            return held

    def _note(self, held: Held) -> None:
        path = self._path(held.candidate)
        if _read(path) != held:
            _write(path, held)

    def _path(self, candidate: str) -> Path:
        return self.root / f"{candidate}.json"


# --------------------------------------------------------------------------------------- what a person does


def champion_stores(home: Path) -> tuple[ChampionStore, HoldStore]:
    """The champion and the held candidates of a home.

    Raises:
        VersionError: the home was written by a newer agentpipe.
        CorruptError: its marker is damaged.
    """
    check_home_format(home)
    champions = ChampionStore(home / "champion")
    return champions, HoldStore(home / "champion" / "held", champions)


def approve_candidate(home: Path, candidate: str, *, who: str, reason: str, check_bundle: BundleCheck) -> Champion:
    """Checks package and bundle of a held candidate, then approves it; see :meth:`HoldStore.approve`.

    Raises:
        CheckpointError, BundleError, ParityError, CorruptError, VersionError: its package or its bundle is missing,
            damaged or another one; nothing is changed.
        InputError, DecidedError, ChampionConflictError, DiskFullError, HomeError: as in :meth:`HoldStore.approve`.
    """
    signed(who, reason)
    _, holds = champion_stores(home)
    held = holds.find(candidate)
    if held.decision is None:
        check_candidate(home, held.candidate, held.package, {**held.figures, "bundle": held.bundle}, check_bundle)
    return holds.approve(held.candidate, who=who, reason=reason)


def reject_candidate(home: Path, candidate: str, *, who: str, reason: str) -> Held:
    """Rejects a held candidate; see :meth:`HoldStore.reject`."""
    signed(who, reason)
    _, holds = champion_stores(home)
    return holds.reject(holds.find(candidate).candidate, who=who, reason=reason)


def roll_back(home: Path, to: str | int | None, *, who: str, reason: str, check_bundle: BundleCheck) -> Champion:
    """Checks package and bundle of an earlier champion, then brings it back; see :meth:`ChampionStore.rollback`.

    Raises:
        CheckpointError, BundleError, ParityError, CorruptError, VersionError: its package or its bundle is missing,
            damaged or another one; nothing is changed.
        InputError: no such champion, or no ``who`` or ``reason``.
        ChampionConflictError: another champion was promoted in this very moment.
        DiskFullError, HomeError: it cannot be written.
    """
    signed(who, reason)
    champions, _ = champion_stores(home)
    history = champions.history()
    target = rollback_target(history, to)
    check_candidate(home, target.digest, target.package, target.figures, check_bundle)
    return champions.rollback(target.sequence, expected=history[-1].digest, reason=reason, who=who)


def check_candidate(
    home: Path, digest: str, package: str, figures: Mapping[str, Any], check_bundle: BundleCheck
) -> None:
    """Whether package and bundle are what they were when they were made; to be asked before the champion is moved.

    Args:
        home: The home.
        digest: of the package.
        package: where it lies, relative to the home.
        figures: ``bundle`` says where its bundle lies, relative to the home, and ``bundle_digest`` what that is.
        check_bundle: see :data:`BundleCheck`.

    Raises:
        CheckpointError, CorruptError, VersionError: see :func:`check_package`.
        BundleError, ParityError: the bundle is missing, damaged or another one, or none is recorded.
    """
    check_package(home, package, digest)
    bundle, bundle_digest = figures.get("bundle"), figures.get("bundle_digest")
    if bundle is None or bundle_digest is None:
        remedy = "restore champion/ from a backup"
        raise BundleError(f"no bundle is recorded for {digest[:12]}", field="bundle_digest", remedy=remedy)
    check_bundle(home / bundle, bundle_digest)


def check_package(home: Path, package: str, digest: str) -> None:
    """Reads the whole package and compares its digest.

    Raises:
        CheckpointError: missing, damaged, or of another digest.
        CorruptError, VersionError: damaged, or written under another format version.
    """
    from agentpipe.learning.policy.package import PolicyPackage

    path = home / package
    if not path.is_dir():
        raise CheckpointError("the package is not there", file=path, remedy="restore it from a backup")
    found = PolicyPackage.load(path).digest
    if found != digest:
        text = f"the package there is {found[:12]}, not {digest[:12]}"
        raise CheckpointError(text, file=path, remedy="restore it from a backup")


def signed(who: str, reason: str) -> None:
    """Whether a decision says who made it and why.

    Raises:
        InputError: it does not, or not as one line of text.
    """
    for name, value in (("who", who), ("why", reason)):
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
            raise InputError(f"{name} has control characters", field=name, remedy="write one line of text")
        if not value.strip():
            raise InputError(f"a decision needs {name}", field=name, remedy="give --who NAME and --why REASON")


# --------------------------------------------------------------------------------------------------- inside


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _approval(candidate: str, history: tuple[Champion, ...]) -> Champion | None:
    return next((entry for entry in history if entry.kind == APPROVAL and entry.digest == candidate), None)


def _settled(held: Held, history: tuple[Champion, ...]) -> Held:
    """``held`` as the champion's history has it: approved if that knows of it, and only then; or rejected."""
    if held.decision is not None and held.decision.kind == REJECTED:
        return held
    entry = _approval(held.candidate, history)
    decision = None if entry is None else Decision(APPROVED, entry.who, entry.reason, entry.at)
    return dataclasses.replace(held, decision=decision)


def _decided(held: Held, file: Path) -> DecidedError:
    assert held.decision is not None
    text = f"{held.candidate[:12]} was {held.decision.kind} by {held.decision.who} at {held.decision.at}"
    back = "agentpipe champion rollback leaves a champion" if held.decision.kind == APPROVED else "train another one"
    return DecidedError(text, file=file, remedy=back)


def _write(path: Path, held: Held) -> None:
    write_json(path, {"format": _FORMAT, **held.to_json()})


def _read(path: Path) -> Held:
    content = read_json(path)
    remedy = "restore it from a backup, or remove it and compare the candidate again"
    if not isinstance(content, dict):
        raise CorruptError("not a held candidate", file=path, remedy=remedy)
    if content.get("format") != _FORMAT:
        text = f"format {content.get('format')!r} of a held candidate, this program reads {_FORMAT}"
        raise VersionError(text, file=path, remedy="use the agentpipe that wrote it")
    fields = {name: value for name, value in content.items() if name != "format"}
    if not isinstance(fields.get("reasons"), list) or not isinstance(fields.get("decision"), dict | None):
        raise CorruptError("not a held candidate: reasons or decision", file=path, remedy=remedy)
    try:
        decision = fields.pop("decision")
        held = Held(
            **{**fields, "reasons": tuple(fields["reasons"])},
            decision=None if decision is None else Decision(**decision),
        )
    except (KeyError, TypeError) as error:
        raise CorruptError(f"not a held candidate: {error}", file=path, remedy=remedy) from error
    if not _typed(held):
        raise CorruptError("not a held candidate: a field has another type", file=path, remedy=remedy)
    if held.candidate != path.stem or (held.decision and held.decision.kind not in (APPROVED, REJECTED)):
        raise CorruptError("not a held candidate", file=path, remedy=remedy)
    return held


def _typed(held: Held) -> bool:
    """Whether every field that was read is of its type."""
    texts: list[object] = [held.candidate, held.package, held.bundle, held.who, held.at, *held.reasons]
    if held.compared_with is not None:
        texts.append(held.compared_with)
    if held.decision is not None:
        texts += dataclasses.astuple(held.decision)
    if not all(isinstance(text, str) for text in texts) or not isinstance(held.figures, dict):
        return False
    return untyped_figure(held.figures) is None
