"""What limits count after a restart: when which action was taken, also where the journal does not hold it any more.

Decisions of the journal's segments are kept one by one. Before a segment is removed, its decisions are folded into a
record beside the segments: how often a line took an action in each minute of the last day, and how often each order
took it. A minute counts from its last decision, so what is folded closes a limit for up to a minute too long, never too
short. Ages are told by the clock that runs since the machine was started, and by the wall clock over a restart of the
machine; a time that lies in the future is none.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import CorruptError
from agentpipe.serving.agent.interlocks import MOST_ORDERS, PERIODS
from agentpipe.serving.agent.wal import decode, encode
from agentpipe.storage import write_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentpipe.serving.agent.interlocks import Interlocks
    from agentpipe.serving.agent.wal import Entry

NAME: Final = "taken.log"
FORMAT: Final = 1
_DAY: Final = max(PERIODS.values())
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Stamp:
    """When something was done: UTC, and seconds since the start ``boot`` of the machine; "" where that is not known."""

    time: dt.datetime
    boot: str = ""
    up: float = 0.0

    @classmethod
    def of(cls, time: str, boot: object, up: object) -> Stamp:
        """Reads one; ValueError where ``time`` is none, or has no zone."""
        moment = dt.datetime.fromisoformat(time)
        if moment.tzinfo is None:
            raise ValueError(f"{time!r} has no time zone")
        return cls(moment, boot, float(up)) if isinstance(boot, str) and isinstance(up, int | float) else cls(moment)


class Clock:
    """Ages of stamps, by the two clocks of this machine."""

    def __init__(self, now: Callable[[], dt.datetime]) -> None:
        self._now, self.boot = now, ""
        with contextlib.suppress(OSError):
            self.boot = _BOOT.read_text().strip()

    def up(self) -> float:
        """Seconds since the machine was started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def age(self, stamp: Stamp) -> float:
        """Seconds since then, at least 0."""
        if stamp.boot and stamp.boot == self.boot:
            return max(0.0, self.up() - stamp.up)
        return max(0.0, (self._now() - stamp.time).total_seconds())


@dataclass(frozen=True, slots=True)
class _Decision:
    line_id: str
    order_id: str
    action: int
    stamp: Stamp
    entry: Entry


class Taken:
    """Actions that were taken. Used under the journal's lock.

    Args:
        path: of the record of what was folded.
        now: UTC.

    Attributes:
        fault: what is wrong with the record that was found; None where nothing is.
    """

    def __init__(self, path: Path, now: Callable[[], dt.datetime]) -> None:
        self.clock = Clock(now)
        self.through = 0
        """segments up to this one are folded"""
        self._path = path
        self._decisions: OrderedDict[str, _Decision] = OrderedDict()
        self._minutes: OrderedDict[tuple[str, int, str], tuple[int, Stamp]] = OrderedDict()
        self._orders: OrderedDict[tuple[str, str], Counter[int]] = OrderedDict()
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.fault: CorruptError | None = None
        if path.exists():
            try:
                self._read()
            except CorruptError as error:
                self.fault = error

    def add(self, decision_id: str, key: tuple[str, str], action: int, stamp: Stamp, entry: Entry) -> None:
        """A decision of the order ``key`` (line, order) that is about to be acted on, or that the journal holds."""
        if not 0 <= entry.segment <= self.through:
            self._decisions[decision_id] = _Decision(*key, action, stamp, entry)
            self._ended.pop(key, None)

    def forget(self, decision_id: str) -> None:
        """It was not acted on."""
        self._decisions.pop(decision_id, None)

    def ended(self, key: tuple[str, str]) -> None:
        """An order is over: nothing of it is counted any more once its segment is gone."""
        self._orders.pop(key, None)
        self._ended[key] = None
        while len(self._ended) > MOST_ORDERS:
            self._ended.popitem(last=False)

    def tell(self, interlocks: Interlocks) -> None:
        """Has limits count all of it, oldest first."""
        now = time.monotonic()
        for (line, order), counts in self._orders.items():
            for action, times in counts.items():
                interlocks.counted(line, order, action, times)
        for (line, action, _), (times, stamp) in self._minutes.items():
            interlocks.done(line, "", action, now - self.clock.age(stamp), times)
        for each in self._decisions.values():
            interlocks.done(each.line_id, each.order_id, each.action, now - self.clock.age(each.stamp))

    def fold(self, first: int) -> bytes:
        """Folds decisions of segments before ``first``; returns the record, for :meth:`keep`."""
        for name, each in list(self._decisions.items()):
            if not 0 <= each.entry.segment < first:
                break
            del self._decisions[name]
            self._fold(each)
        self._minutes = OrderedDict(
            (key, value) for key, value in self._minutes.items() if self.clock.age(value[1]) <= _DAY
        )
        while len(self._orders) > MOST_ORDERS:
            self._orders.popitem(last=False)
        self.through = max(self.through, first - 1)
        minutes = [
            [line, action, times, stamp.time.isoformat(), stamp.boot, stamp.up]
            for (line, action, _), (times, stamp) in self._minutes.items()
        ]
        orders = [[line, order, list(counts.items())] for (line, order), counts in self._orders.items()]
        return encode({"k": "taken", "format": FORMAT, "through": self.through, "minutes": minutes, "orders": orders})

    def keep(self, record: bytes) -> None:
        """Writes a record durably.

        Raises:
            StoreError: the disk does not take it; the segments must stay.
        """
        write_bytes(self._path, record)

    def _fold(self, each: _Decision) -> None:
        key = (each.line_id, each.order_id)
        if key not in self._ended:
            self._orders.setdefault(key, Counter())[each.action] += 1
            self._orders.move_to_end(key)
        self._add_minute(each.line_id, each.action, 1, each.stamp)

    def _add_minute(self, line: str, action: int, times: int, stamp: Stamp) -> None:
        seconds = stamp.up if stamp.boot else stamp.time.timestamp()
        minute = (line, action, f"{stamp.boot} {seconds // 60:.0f}")
        before = self._minutes.get(minute, (0, stamp))[0]
        self._minutes[minute] = (before + times, stamp)
        self._minutes.move_to_end(minute)

    def _read(self) -> None:
        fault = CorruptError("what limits count is damaged", file=self._path, remedy="limits count the journal alone")
        try:
            record = decode(self._path.read_bytes())
            if record is None or record["format"] != FORMAT:
                raise fault
            for line, action, times, *stamp in record["minutes"]:
                self._add_minute(str(line), int(action), int(times), Stamp.of(*stamp))
            for line, order, counts in record["orders"]:
                self._orders[str(line), str(order)] = Counter({int(action): int(times) for action, times in counts})
            self.through = int(record["through"])
        except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            self._minutes.clear()
            self._orders.clear()
            raise fault from error


def stamp_fields(clock: Clock) -> dict[str, Any]:
    """What a record of a decision says beside its time."""
    return {"boot": clock.boot, "up": round(clock.up(), 3)}
