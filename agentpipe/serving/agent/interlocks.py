"""Interlocks: hard limits on actions, declared by the user, outside the policy.

They narrow the mask before a decision and are held against the action after it. A file (TOML or JSON) lists them::

    [[interlock]]
    name = "never start while a part is on its way"
    actions = ["start"]
    segments = ["dispatch"]           # in force only there; without it everywhere

    [[interlock]]
    name = "two expedites an order"
    actions = ["expedite"]
    at_most = 2
    per = "order"                     # order, minute, hour or day

    [[interlock]]
    name = "no replacements at night"
    actions = ["depth_replace"]
    allowed_hours = "06:00-22:00"     # forbidden outside of these
    timezone = "Europe/Berlin"        # UTC without it

An interlock with neither ``at_most`` nor ``allowed_hours`` forbids. ``actions`` are names where the line's are known,
else numbers; ``lines`` restricts it to these lines.
"""

from __future__ import annotations

import json
import re
import tomllib
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import InputError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from agentpipe.serving.agent.types import Frame
    from agentpipe.serving.agent.vocabulary import Vocabulary

PERIODS: Final = {"minute": 60.0, "hour": 3_600.0, "day": 86_400.0}
"""seconds of a sliding window"""
ORDER: Final = "order"
LARGEST_FILE: Final = 1 << 20
MOST_TIMES: Final = 100_000
"""the largest ``at_most``: so many times are kept in memory"""
MOST_ORDERS: Final = 10_000
"""orders whose actions are counted at one time; beyond it the one that was quiet for longest is forgotten"""
_FIELDS: Final = ("name", "actions", "segments", "lines", "at_most", "per", "allowed_hours", "timezone")
_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class InterlockError(InputError):
    """Raised when a file of interlocks cannot be used; nothing is started with half of them."""


@dataclass(frozen=True)
class Interlock:
    """One limit. ``hours`` are minutes of the local day; ``at_most`` is None where the actions are forbidden."""

    name: str
    actions: frozenset[int]
    segments: frozenset[int] | None = None
    lines: frozenset[str] | None = None
    at_most: int | None = None
    per: str = ORDER
    hours: tuple[int, int] | None = None
    zone: zoneinfo.ZoneInfo = field(default_factory=lambda: zoneinfo.ZoneInfo("UTC"))

    def concerns(self, line_id: str, segment: int | None) -> bool:
        """Whether it is in force at this line and in this segment; an unknown segment counts as any."""
        here = self.lines is None or line_id in self.lines
        return here and (self.segments is None or segment is None or segment in self.segments)

    def within_hours(self, time: dt.datetime) -> bool:
        """Whether ``time`` (aware) lies in the allowed hours; hours such as 22:00-06:00 go over midnight."""
        if self.hours is None:
            return False
        local = time.astimezone(self.zone)
        minute, (start, end) = local.hour * 60 + local.minute, self.hours
        return start <= minute < end if start < end else minute >= start or minute < end


class Interlocks:
    """All limits, and what was done lately, which rates are counted from. Used by one thread at a time.

    Windows are measured by the monotonic clock: a wall clock that jumps opens none. Hours are those of the wall clock
    and, where there is one, of ``steady`` as well: while the two disagree, what either forbids is forbidden.

    Args:
        interlocks: the limits; none at all allows everything.
        vocabulary: names of the line.

    Attributes:
        steady: UTC by a clock that does not follow jumps; None: the time of the question alone counts.
    """

    def __init__(self, interlocks: Iterable[Interlock], vocabulary: Vocabulary) -> None:
        self.interlocks = tuple(interlocks)
        self._vocabulary = vocabulary
        self.steady: Callable[[], dt.datetime] | None = None
        self._rates = tuple(each for each in self.interlocks if each.at_most is not None and each.per != ORDER)
        self._recent: dict[tuple[str, str], deque[float]] = {}
        """by interlock and line: the moments of the last ``at_most`` times"""
        self._most_recent = MOST_ORDERS
        self._of_order: OrderedDict[tuple[str, str], Counter[int]] = OrderedDict()

    def absent_lines(self, lines: Iterable[str]) -> tuple[str, ...]:
        """Lines that interlocks are restricted to and that are not among ``lines``: these limits mean nothing there."""
        named = {line for each in self.interlocks for line in each.lines or ()}
        return tuple(sorted(named.difference(lines)))

    def forbidding(self, frame: Frame) -> dict[int, str]:
        """The actions that may not be taken now, each with the name of the first interlock that says so."""
        found: dict[int, str] = {}
        segment = self._vocabulary.segment(frame)
        for interlock in self.interlocks:
            if interlock.concerns(frame.line_id, segment) and self._closed(interlock, frame):
                for action in interlock.actions:
                    found.setdefault(action, interlock.name)
        return found

    def narrow(self, frame: Frame) -> tuple[npt.NDArray[np.bool_], tuple[str, ...]]:
        """The mask without what is forbidden, bool[A], and a note for each interlock that took something away."""
        mask = frame.mask.copy()
        by: dict[str, list[str]] = defaultdict(list)
        for action, name in sorted(self.forbidding(frame).items()):
            if action < len(mask) and mask[action]:
                mask[action] = False
                by[name].append(self._vocabulary.action_name(action))
        return mask, tuple(f"interlock {name}: {', '.join(actions)}" for name, actions in by.items())

    def refuses(self, frame: Frame, action: int) -> str | None:
        """The name of the interlock that forbids ``action`` now; None where it may be taken."""
        return self.forbidding(frame).get(action)

    def done(self, line_id: str, order_id: str, action: int, moment: float, times: int = 1) -> None:
        """An action was taken: rates count it. Also told of what is on record, after a restart, oldest first.

        Args:
            line_id: of the line.
            order_id: its order; empty where that is not known any more.
            action: what was done.
            moment: monotonic seconds; may lie before the start of this machine.
            times: how often.
        """
        if order_id:
            counts = self._of_order.setdefault((line_id, order_id), Counter())
            counts[action] += times
            self._of_order.move_to_end((line_id, order_id))
            while len(self._of_order) > MOST_ORDERS:
                self._of_order.popitem(last=False)
        for each in self._rates:
            if action in each.actions:
                assert each.at_most is not None
                recent = self._recent.setdefault((each.name, line_id), deque(maxlen=each.at_most))
                latest = max(moment, recent[-1]) if recent else moment
                recent.extend([latest] * min(times, each.at_most))
        if len(self._recent) > self._most_recent:
            self._forget(moment)

    def _forget(self, moment: float) -> None:
        """Lines at which nothing lies in a window any more: a line may call its stations as it likes."""
        periods = {each.name: PERIODS[each.per] for each in self._rates}
        self._recent = {key: recent for key, recent in self._recent.items() if recent[-1] > moment - periods[key[0]]}
        self._most_recent = max(MOST_ORDERS, 2 * len(self._recent))

    def counted(self, line_id: str, order_id: str, action: int, times: int) -> None:
        """An action of an order that was taken long ago: only limits of the order count it."""
        self._of_order.setdefault((line_id, order_id), Counter())[action] += times

    def _closed(self, interlock: Interlock, frame: Frame) -> bool:
        if interlock.hours is not None:
            times = (frame.time, *([self.steady()] if self.steady is not None else []))
            if not all(interlock.within_hours(time) for time in times):
                return True
        if interlock.at_most is None:
            return interlock.hours is None
        if interlock.per == ORDER:
            counts = self._of_order.get((frame.line_id, frame.order_id))
            return counts is not None and sum(counts[each] for each in interlock.actions) >= interlock.at_most
        recent = self._recent.get((interlock.name, frame.line_id))
        return (
            recent is not None
            and len(recent) >= interlock.at_most
            and recent[0] > frame.received - PERIODS[interlock.per]
        )


# -------------------------------------------------------------------------------------------------- files


def read_interlocks(path: Path, vocabulary: Vocabulary, action_count: int) -> Interlocks:
    """Reads a file of interlocks, TOML or JSON by its suffix.

    Raises:
        InterlockError: unreadable, malformed, an unknown field or action, an impossible value; names file and field.
    """
    content = _load(path)
    entries = content.get("interlock") if isinstance(content, dict) else None
    if not isinstance(entries, list) or set(content) != {"interlock"}:
        raise _fault(path, "interlock", "a list of interlocks, and nothing beside it, is expected")
    found: list[Interlock] = []
    for number, entry in enumerate(entries, 1):
        place = f"interlock {number}"
        if not isinstance(entry, dict):
            raise _fault(path, place, "a table of fields is expected")
        found.append(_interlock(_Entry(path, place, entry), vocabulary, action_count))
        if found[-1].name in {other.name for other in found[:-1]}:
            raise _fault(path, f"{place}, name", f"{found[-1].name!r} is there already")
    return Interlocks(found, vocabulary)


def _load(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        data = path.read_bytes()
        if len(data) > LARGEST_FILE:
            raise InterlockError(f"more than {LARGEST_FILE:,} bytes", file=path, remedy="no list of limits is so long")
        text = data.decode()
        return json.loads(text, object_pairs_hook=_once) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InterlockError(f"cannot be read: {error.strerror}", file=path, remedy="name an existing file") from error
    except (ValueError, RecursionError) as error:  # tomllib's, json's and UTF-8's errors are ValueErrors
        kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
        raise InterlockError(f"not valid {kind}: {error}", file=path, remedy="correct it") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} occurs twice in one object")
    return dict(pairs)


def _fault(path: Path, where: str, message: str) -> InterlockError:
    return InterlockError(message, file=path, field=where, remedy="correct it; the agent does not start with a part")


class _Entry:
    """One table of the file, read field by field."""

    def __init__(self, path: Path, place: str, content: Mapping[str, Any]) -> None:
        self.path, self.place, self.content = path, place, content
        for name in content:
            if name not in _FIELDS:
                raise self.fault(name, f"no such field; there are {', '.join(_FIELDS)}")

    def fault(self, name: str, message: str) -> InterlockError:
        return _fault(self.path, f"{self.place}, {name}", message)

    def text(self, name: str) -> str | None:
        value = self.content.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            raise self.fault(name, "a text is expected")
        return value

    def texts(self, name: str) -> list[Any] | None:
        value = self.content.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value:
            raise self.fault(name, "a list with at least one entry is expected")
        return value


def _interlock(entry: _Entry, vocabulary: Vocabulary, action_count: int) -> Interlock:
    name = entry.text("name")
    if name is None:
        raise entry.fault("name", "is missing")
    if not name.isprintable():
        raise entry.fault("name", "a text of one line is expected")
    at_most, per = entry.content.get("at_most"), entry.text("per")
    whole = isinstance(at_most, int) and not isinstance(at_most, bool)
    if at_most is not None and not (whole and 1 <= at_most <= MOST_TIMES):
        text = f"a whole number from 1 to {MOST_TIMES:,} is expected; leave it out to forbid"
        raise entry.fault("at_most", text)
    if (at_most is None) != (per is None):
        raise entry.fault("per", "at_most and per belong together")
    if per is not None and per not in (ORDER, *PERIODS):
        raise entry.fault("per", f"one of {', '.join((ORDER, *PERIODS))} is expected")
    hours, zone = _hours(entry)
    return Interlock(
        name,
        _actions(entry, vocabulary, action_count),
        _segments(entry, vocabulary),
        _lines(entry),
        at_most,
        per or ORDER,
        hours,
        zone,
    )


def _actions(entry: _Entry, vocabulary: Vocabulary, action_count: int) -> frozenset[int]:
    names = entry.texts("actions")
    if names is None:
        raise entry.fault("actions", "is missing")
    found = set()
    for name in names:
        known = isinstance(name, str | int) and not isinstance(name, bool)
        action = vocabulary.action(name) if known else None
        if action is None or action >= action_count:
            names_known = "its names are not known: use numbers" if not vocabulary.actions else "one is close"
            raise entry.fault("actions", f"the line has no action {name!r} ({names_known})")
        found.add(action)
    return frozenset(found)


def _segments(entry: _Entry, vocabulary: Vocabulary) -> frozenset[int] | None:
    names = entry.texts("segments")
    if names is None:
        return None
    for name in names:
        if name not in vocabulary.segments:
            there = ", ".join(vocabulary.segments) or "none that are known"
            raise entry.fault("segments", f"the line has no segment {name!r}; it has {there}")
    return frozenset(vocabulary.segments.index(name) for name in names)


def _lines(entry: _Entry) -> frozenset[str] | None:
    names = entry.texts("lines")
    if names is None:
        return None
    if not all(isinstance(name, str) and name for name in names):
        raise entry.fault("lines", "names of lines are expected")
    return frozenset(names)


def _hours(entry: _Entry) -> tuple[tuple[int, int] | None, zoneinfo.ZoneInfo]:
    text, zone_name = entry.text("allowed_hours"), entry.text("timezone")
    if text is None:
        if zone_name is not None:
            raise entry.fault("timezone", "means nothing without allowed_hours")
        return None, zoneinfo.ZoneInfo("UTC")
    match = _HOURS.fullmatch(text)
    start, end = (int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])) if match else (0, 0)
    if start == end:
        raise entry.fault("allowed_hours", f"{text!r} is not of the form 06:00-22:00")
    try:
        zone = zoneinfo.ZoneInfo(zone_name or "UTC")
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise entry.fault("timezone", f"{zone_name!r} is no time zone; one is Europe/Berlin") from error
    return (start, end), zone
