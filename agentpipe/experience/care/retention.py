"""Which shards go: a plan by age, policy and size that spares whatever somebody refers to.

A shard that a current materialisation, a checkpoint or a policy package refers to is never deleted. Where the built-in
simulator can play it again it may shrink to seeds and actions, but for the current ones, which training reads. Age is
that of the sealing, as the manifest says it.

Limits of size are met or missed, and by how much is said. Age and policies say what is due: what is in use then stays,
and is not counted as missing a limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from agentpipe.errors import SettingsError
from agentpipe.experience.store.remedies import buffer_command, home_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from agentpipe.experience.care.holdings import State

CURRENT = "current trajectories"
"""the current materialisations, as those who use them are called together"""
Verb = Literal["keep", "shrink", "delete"]
DAY_NS = 86_400 * 10**9
_MAKES_ROOM = "makes room"
_WITHIN = "within the limits"


@dataclass(frozen=True)
class Rules:
    """What may stay. ``None`` = no such limit."""

    max_age_days: float | None = None
    """days since sealing"""
    keep_policies: int | None = None
    """the newest so many behaviour policies, by ordinal; of recorded trajectories"""
    max_bytes: int | None = None
    """bytes of one cell or one training"""
    budget: int | None = None
    """bytes of all shards together"""
    leftovers: bool = False
    """also delete what nobody refers to and nobody can use: open shards without a writer, shards of another format"""

    def __post_init__(self) -> None:
        for name, least in (("max_age_days", 0), ("keep_policies", 1), ("max_bytes", 0), ("budget", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                remedy = f"give a number of at least {least}"
                raise SettingsError(f"{name} {value} is out of range", field=name, remedy=remedy)


@dataclass(frozen=True)
class Candidate:
    """One shard as far as retention is concerned."""

    path: Path
    state: State
    group: str
    """its cell or training"""
    recorded: bool
    """True for a cell's trajectories, False for live rollouts of a training"""
    bytes: int
    shrunk_bytes: int | None
    """what it would take as seeds and actions; none where it cannot shrink"""
    sealed_ns: int | None
    """UTC, as its manifest says"""
    ordinal: int | None
    """newest behaviour policy in it"""
    claims: tuple[str, ...]
    """who refers to it"""
    current: bool
    """the current materialisation of a cell"""
    holder: str | None = None
    """who writes to it now"""
    readable: bool = True
    """of the format that this program reads"""


@dataclass(frozen=True)
class Action:
    """What happens to one shard, and why."""

    candidate: Candidate
    verb: Verb
    reason: str

    @property
    def bytes_after(self) -> int:
        """What is left of it."""
        if self.verb == "delete":
            return 0
        shrunk = self.candidate.shrunk_bytes
        return shrunk if self.verb == "shrink" and shrunk is not None else self.candidate.bytes

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        found = self.candidate
        return {
            "shard": str(found.path),
            "group": found.group,
            "state": found.state,
            "action": self.verb,
            "reason": self.reason,
            "bytes": found.bytes,
            "bytes_after": self.bytes_after,
            "claims": list(found.claims),
        }


@dataclass(frozen=True)
class Plan:
    """What happens to every shard."""

    actions: tuple[Action, ...]
    over: int = 0
    """bytes above a limit that cannot be met, since all that is left is referred to or in use"""

    @property
    def bytes_before(self) -> int:
        """Bytes of all shards now."""
        return sum(action.candidate.bytes for action in self.actions)

    @property
    def bytes_after(self) -> int:
        """Bytes of all shards afterwards."""
        return sum(action.bytes_after for action in self.actions)

    def in_use(self) -> list[dict[str, Any]]:
        """What stays, by who refers to it: ``by``, ``shards``, ``bytes``; the largest first.

        A shard counts with the first of those who refer to it. Current materialisations are one entry.
        """
        found: dict[str, list[int]] = {}
        for action in self.actions:
            candidate = action.candidate
            if action.bytes_after and (candidate.claims or candidate.current):
                packages = [claim for claim in candidate.claims if claim.startswith("package")]
                by = CURRENT if candidate.current else [*packages, *candidate.claims][0]
                found.setdefault(by, []).append(action.bytes_after)
        entries = [{"by": by, "shards": len(sizes), "bytes": sum(sizes)} for by, sizes in found.items()]
        return sorted(entries, key=lambda entry: -int(entry["bytes"]))


def plan(candidates: Iterable[Candidate], rules: Rules, *, now_ns: int) -> Plan:
    """Decides for each shard; touches nothing.

    First what is too old or of too old a policy: deleted, or shrunk where somebody refers to it. Then, while a limit of
    size is exceeded, the oldest first: what nobody refers to is deleted, then what is referred to shrinks. Current
    materialisations stay as they are: the next training reads them.

    Args:
        candidates: every shard.
        rules: what may stay.
        now_ns: the time, UTC.
    """
    ordered = sorted(candidates, key=lambda found: (found.sealed_ns or 0, str(found.path)))
    oldest = _oldest_ordinal(ordered, rules.keep_policies)
    actions = [_due(found, rules, oldest, now_ns) for found in ordered]
    over = 0
    if rules.max_bytes is not None:
        for group in sorted({found.group for found in ordered}):
            over += _make_room(actions, group, rules.max_bytes)
    if rules.budget is not None:
        over = max(over, _make_room(actions, None, rules.budget))
    return Plan(tuple(sorted(actions, key=lambda action: str(action.candidate.path))), over)


def _oldest_ordinal(candidates: Sequence[Candidate], keep: int | None) -> int | None:
    """The lowest policy ordinal that stays."""
    if keep is None:
        return None
    known = sorted({found.ordinal for found in candidates if found.recorded and found.ordinal is not None})
    return known[-keep] if len(known) > keep else None


def _due(found: Candidate, rules: Rules, oldest: int | None, now_ns: int) -> Action:
    """What age and policy say, before any size is looked at."""
    if found.state == "open":
        return _open(found, rules)
    if found.state == "damaged":
        return Action(found, "keep", f"damaged: {buffer_command('check --fix', home=home_of(found.path))}")
    if not found.readable and not found.claims and not found.current:
        return _leftover(found, rules, "of another format; nobody refers to it")
    reason = _too_old(found, rules, oldest, now_ns)
    if not reason:
        return Action(found, "keep", _WITHIN)
    if found.current:
        return Action(found, "keep", f"{reason}; {_use(found)}")
    if not found.claims:
        return Action(found, "delete", f"{reason}; nobody refers to it")
    if found.shrunk_bytes is None:
        return Action(found, "keep", f"{reason}; {_use(found)}")
    return Action(found, "shrink", f"{reason}; {_use(found)}")


def _use(found: Candidate) -> str:
    """Why a shard cannot go, or not wholly."""
    if found.current:
        return f"current: {found.claims[0]}" if found.claims else "current"
    more = f" and {len(found.claims) - 1} more" if len(found.claims) > 1 else ""
    text = f"in use by {found.claims[0]}{more}"
    if found.state == "shrunk":
        return f"{text}, already shrunk"
    return text if found.shrunk_bytes is not None else f"{text}, cannot be played again"


def _open(found: Candidate, rules: Rules) -> Action:
    if found.holder is not None:
        return Action(found, "keep", f"held by {found.holder}")
    if found.claims or found.current:
        return Action(found, "keep", f"open, {found.claims[0] if found.claims else 'its partition'} refers to it")
    return _leftover(found, rules, "left over: nobody writes to it or refers to it")


def _leftover(found: Candidate, rules: Rules, why: str) -> Action:
    if rules.leftovers:
        return Action(found, "delete", why)
    return Action(found, "keep", f"{why}; --leftovers deletes it")


def _too_old(found: Candidate, rules: Rules, oldest: int | None, now_ns: int) -> str:
    if rules.max_age_days is not None and found.sealed_ns is not None:
        age = (now_ns - found.sealed_ns) / DAY_NS
        if age > rules.max_age_days:
            return f"sealed {age:.1f} days ago"
    if oldest is not None and found.recorded and found.ordinal is not None and found.ordinal < oldest:
        return f"policy {found.ordinal}, kept from {oldest}"
    return ""


def _make_room(actions: list[Action], group: str | None, limit: int) -> int:
    """Changes ``actions`` until the group fits; returns the bytes above the limit that stay."""
    members = [place for place, action in enumerate(actions) if group in (None, action.candidate.group)]
    over = sum(actions[place].bytes_after for place in members) - limit
    for step in (_delete, _shrink):
        for place in members:
            if over <= 0:
                return 0
            changed = step(actions[place])
            if changed is not None:
                over -= actions[place].bytes_after - changed.bytes_after
                actions[place] = changed
    if over > 0:
        for place in members:
            if actions[place].reason == _WITHIN:
                actions[place] = replace(actions[place], reason=_kept(actions[place].candidate))
    return max(over, 0)


def _kept(found: Candidate) -> str:
    """Why a shard stays although a limit of size is missed."""
    if found.claims or found.current:
        return _use(found)
    return "it cannot be told what it is" if found.readable else "of another format"


def _closed(action: Action) -> bool:
    return action.verb == "keep" and action.candidate.readable and action.candidate.state in ("sealed", "shrunk")


def _delete(action: Action) -> Action | None:
    found = action.candidate
    if found.claims or found.current or not _closed(action):
        return None
    return replace(action, verb="delete", reason=f"{_MAKES_ROOM}; nobody refers to it")


def _shrink(action: Action) -> Action | None:
    found = action.candidate
    if found.current or found.shrunk_bytes is None or found.shrunk_bytes >= found.bytes or not _closed(action):
        return None
    return replace(action, verb="shrink", reason=f"{_MAKES_ROOM}; {_use(found)}")
