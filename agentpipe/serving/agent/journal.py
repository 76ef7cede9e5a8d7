"""What the agent decided, each decision once, before it is acted on; and what has become of it since.

Records of the log (:mod:`~agentpipe.serving.agent.wal`), by ``k``: ``decision`` (a row of the intake, the order that
it belongs to, notes, and what a policy with a memory remembers behind it), ``withdrawn`` (it was not acted on: a person
had taken over), ``ended`` (an order's result), ``asked`` (a person was asked; no decision), ``retrieved`` (cases that
memory showed), ``shipped`` (ids that were handed on), ``set_aside`` (a decision whose record turned out to be damaged).
A decision is handed on with the result of its order, or without where that takes too long.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from agentpipe.errors import CorruptError, StoreError
from agentpipe.serving.agent.clocks import SteadyClock
from agentpipe.serving.agent.states import Remembered, from_record, to_record
from agentpipe.serving.agent.taken import NAME as TAKEN
from agentpipe.serving.agent.taken import Stamp, Taken, stamp_fields
from agentpipe.serving.agent.types import Answer
from agentpipe.serving.agent.wal import DamagedRecordError, Log, LogFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from agentpipe.serving.agent.interlocks import Interlocks
    from agentpipe.serving.agent.types import Frame, OrderEnded
    from agentpipe.serving.agent.wal import Entry

REMEMBERED: Final = 10_000
"""decisions that were handed on and are still known by their id, so that a question asked again is answered the same"""
KEPT_SEGMENTS: Final = 4
"""segments with nothing left to hand on that are kept all the same: questions may be asked again"""
SUCCESS: Final = "done"
DAMAGE: Final = "damage:"
"""what is said of damage begins like this"""


@dataclass(slots=True)
class Known:
    """One decision of the journal."""

    decision_id: str
    line_id: str
    order_id: str
    number: int
    action: int
    time: dt.datetime
    entry: Entry
    shipped: bool = False


class Journal:
    """The journal in ``folder``. Safe to use from several threads.

    Args:
        folder: of the log.
        most_waiting: records that wait in memory while the disk takes nothing.
        segment_bytes: see :class:`~agentpipe.serving.agent.wal.Log`.
        damaged: folder where bytes are kept that were found damaged; None: nowhere.
        say: told of damage, one line that begins with :data:`DAMAGE`.

    Raises:
        CorruptError, VersionError, DiskFullError, HomeError: see :class:`~agentpipe.serving.agent.wal.Log`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        most_waiting: int = 512,
        segment_bytes: int = 4 << 20,
        damaged: Path | None = None,
        say: Callable[[str], object] = str,
    ) -> None:
        self.log = Log(folder, segment_bytes=segment_bytes, most_waiting=most_waiting, aside=damaged)
        self.damaged = self.log.damaged + (self.log.torn_bytes > 0)
        """records that were found damaged or torn since the start"""
        self._aside, self._say = damaged, say
        self.clock = SteadyClock()
        """stamps of decisions do not follow a jump of the wall clock"""
        self._lock = threading.RLock()
        self._taken = Taken(folder / TAKEN, self.clock.now)
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._open: OrderedDict[tuple[str, str], list[str]] = OrderedDict()
        """ids that are not handed on yet, by line and order"""
        self._results: dict[tuple[str, str], str] = {}
        self._shipped: OrderedDict[str, None] = OrderedDict()
        """newest names under which decisions were handed on"""
        self._say_damage()
        for entry, record in self.log.recovered:
            self._replay(entry, record)
        self.log.recovered.clear()

    # ------------------------------------------------------------------------------------------------ recording

    def decide(self, frame: Frame, answer: Answer, *, until: float, seen: Frame | None = None) -> bool:
        """Records a decision before it is acted on; returns whether it was on the disk by ``until`` (monotonic).

        Args:
            frame: the question as the line asked it.
            answer: what is about to be done; its action is not −1.
            until: when to stop waiting for the disk.
            seen: the question as the policy saw it (estimates, a narrower mask); ``frame`` where nothing was changed.

        Raises:
            LogFullError: it cannot be recorded, so it must not be done.
        """
        record = {
            "k": "decision",
            "order": frame.order_id,
            "number": frame.number,
            "by": answer.decided_by,
            "notes": list(answer.notes),
            "value": answer.value,
            **stamp_fields(self._taken.clock),
            "row": {**decision_row(seen or frame, answer), "time": self.clock.correct(frame.time).isoformat()},
        }
        if answer.memory is not None:
            record["memory"] = to_record(answer.memory)
        with self._lock:
            if frame.decision_id in self._known:
                return True
            entry = self.log.append(record)
            self._add(entry, record)
        return self.log.flushed(entry, until)

    def withdraw(self, decision_id: str) -> None:
        """A recorded decision was not acted on: it is no decision."""
        with self._lock:
            self.log.append({"k": "withdrawn", "id": decision_id})
            self._forget(decision_id)

    def asked(self, frame: Frame, reason: str) -> None:
        """A person was asked; told once for each question."""
        with self._lock:
            self.log.append(
                {"k": "asked", "id": frame.decision_id, "line": frame.line_id, "order": frame.order_id,
                 "time": frame.time.isoformat(), "reason": reason}
            )  # fmt: skip

    def retrieved(self, decision_id: str, cases: Sequence[dict[str, Any]]) -> None:
        """What memory showed to a decision."""
        with self._lock:
            self.log.append({"k": "retrieved", "id": decision_id, "cases": list(cases)})

    def ended(self, message: OrderEnded) -> None:
        """An order is over: its decisions can be handed on, with its result."""
        result = result_text(message)
        with self._lock:
            key = (message.line_id, message.order_id)
            self._taken.ended(key)
            if key in self._open:
                self.log.append({"k": "ended", "line": key[0], "order": key[1], "result": result})
                self._results[key] = result

    # ------------------------------------------------------------------------------------------------ looking

    def find(self, decision_id: str) -> Answer | None:
        """What was decided to a question before; None where nothing was, or it is forgotten."""
        with self._lock:
            known = self._known.get(decision_id)
        if known is None:
            return None
        record = self.log.read(known.entry)
        row = record["row"]
        return Answer(
            int(row["action"]),
            np.asarray(row["probabilities"], np.float32),
            float(record["value"]),
            str(record["by"]),
            str(row["policy_version"]),
            (*record["notes"], "asked again"),
        )

    def remembered(self, line_id: str, order_id: str) -> Remembered | None:
        """What a policy with a memory remembered behind the newest decision of an order that tells; None where none."""
        with self._lock:
            known = [each for each in self._known.values() if (each.line_id, each.order_id) == (line_id, order_id)]
        for each in reversed(known):
            with contextlib.suppress(StoreError, KeyError, TypeError, ValueError):
                return from_record(self.log.read(each.entry)["memory"])
        return None

    def undone(self, frame: Frame) -> str | None:
        """The id of the decision before this question that the line did not follow, as its last action says.

        Somebody else acted: a person, after the agent was killed between recording and sending; or the line refused.
        """
        with self._lock:
            ids = self._open.get((frame.line_id, frame.order_id))
            known = self._known[ids[-1]] if ids else None
        if known is None or known.number + 1 != frame.number or known.action == frame.last_action:
            return None
        return known.decision_id

    def decisions(self) -> Iterator[Known]:
        """What is known, oldest first."""
        with self._lock:
            return iter(tuple(self._known.values()))

    def tell_taken(self, interlocks: Interlocks) -> None:
        """Has limits count what was done before this start."""
        with self._lock:
            self._taken.tell(interlocks)

    @property
    def backlog(self) -> int:
        """Decisions that are not handed on yet."""
        with self._lock:
            return sum(len(ids) for ids in self._open.values())

    # ------------------------------------------------------------------------------------------------ handing on

    def due(self, now: dt.datetime, after: dt.timedelta, most: int = 200) -> list[tuple[str, dict[str, Any]]]:
        """Rows that can be handed on, with their ids: of orders that are over, and those older than ``after``."""
        chosen: list[tuple[Known, str]] = []
        with self._lock:
            for key, ids in self._open.items():
                result, known = self._results.get(key), [self._known[identifier] for identifier in ids]
                chosen += [
                    (each, result or "")
                    for each in known
                    if (result is not None or each.time + after <= now) and each.entry.segment >= 0
                ]
                if len(chosen) >= most:
                    break
        found = []
        for each, text in chosen[:most]:
            try:
                row = self._row(each)
            except DamagedRecordError as error:
                self._set_aside(each, error)
            else:
                found.append((each.decision_id, {**row, "result": text}))
        return found

    def shipped(self, name: str, ids: Sequence[str]) -> bool:
        """Notes that decisions were handed on under ``name``; False where that cannot be noted durably now."""
        if self.log.append_safely({"k": "shipped", "name": name, "ids": list(ids)}) is None:
            return False
        with self._lock:
            self._note_shipped(name, ids)
        self._tidy()
        return True

    def was_shipped(self, name: str) -> bool:
        """Whether decisions were handed on under ``name``."""
        with self._lock:
            return name in self._shipped

    def close(self) -> None:
        """Flushes, and lets go of the files."""
        self.log.close()

    # ------------------------------------------------------------------------------------------------ inside

    def _say_damage(self) -> None:
        where = f"; the bytes are in {self._aside}" if self._aside is not None else ""
        if self.log.damaged:
            self._say(f"{DAMAGE} {self.log.damaged:,} records of the journal cannot be read and are left out{where}")
        if self.log.torn_bytes:
            self._say(f"{DAMAGE} the journal's last {self.log.torn_bytes:,} bytes are no whole record{where}")
        if self._taken.fault is not None:
            self.damaged += 1
            self._say(f"{DAMAGE} {self._taken.fault}")
            if self._aside is not None:
                with contextlib.suppress(OSError):
                    self._aside.mkdir(parents=True, exist_ok=True)
                    path = self.log.folder / TAKEN
                    path.rename(self._aside / f"{path.stem}-{path.stat().st_mtime_ns}.bin")

    def _row(self, known: Known) -> dict[str, Any]:
        row = self.log.read(known.entry).get("row", {})
        if row.get("decision_id") != known.decision_id:
            path = self.log.path(known.entry.segment)
            raise DamagedRecordError("another record is where it was", file=path, remedy="restore the file")
        return dict(row)

    def _set_aside(self, known: Known, error: DamagedRecordError) -> None:
        """A decision that cannot be handed on does not hold up those behind it."""
        try:
            self.log.append({"k": "set_aside", "id": known.decision_id, "reason": error.message})
        except LogFullError:
            return  # it is due again
        self.log.keep_aside(known.entry)
        with self._lock:
            self.damaged += 1
            self._close_one(known.decision_id)
        self._say(f"{DAMAGE} decision {known.decision_id} is not handed on: {error}")

    def _close_one(self, decision_id: str) -> None:
        known = self._known.get(decision_id)
        if known is not None and not known.shipped:
            known.shipped = True
            self._close((known.line_id, known.order_id), decision_id)

    def _replay(self, entry: Entry, record: dict[str, Any]) -> None:
        kind = record.get("k")
        try:
            if kind == "decision" and record["row"]["decision_id"] not in self._known:
                self._add(entry, record)
            elif kind == "withdrawn":
                self._forget(record["id"])
            elif kind == "ended" and (record["line"], record["order"]) in self._open:
                self._results[record["line"], record["order"]] = record["result"]
                self._taken.ended((record["line"], record["order"]))
            elif kind == "set_aside":
                self._close_one(record["id"])
            elif kind == "shipped":
                self._note_shipped(record["name"], record["ids"])
        except (KeyError, TypeError, ValueError) as error:
            path = self.log.path(entry.segment)
            raise CorruptError(f"a record without {error}", file=path, remedy="restore the file") from error

    def _add(self, entry: Entry, record: dict[str, Any]) -> None:
        row = record["row"]
        key = (row["line_id"], record["order"])
        time = dt.datetime.fromisoformat(row["time"])
        self._known[row["decision_id"]] = Known(
            row["decision_id"], *key, int(record["number"]), int(row["action"]), time, entry
        )
        self._open.setdefault(key, []).append(row["decision_id"])
        stamp = Stamp.of(row["time"], record.get("boot"), record.get("up"))
        self._taken.add(row["decision_id"], key, int(row["action"]), stamp, entry)

    def _forget(self, decision_id: str) -> None:
        self._taken.forget(decision_id)
        known = self._known.pop(decision_id, None)
        if known is not None and not known.shipped:
            self._close((known.line_id, known.order_id), decision_id)

    def _close(self, key: tuple[str, str], decision_id: str) -> None:
        ids = self._open.get(key, [])
        if decision_id in ids:
            ids.remove(decision_id)
        if not ids:
            self._open.pop(key, None)
            self._results.pop(key, None)

    def _note_shipped(self, name: str, ids: Sequence[str]) -> None:
        self._shipped[name] = None
        while len(self._shipped) > REMEMBERED:
            self._shipped.popitem(last=False)
        for identifier in ids:
            self._close_one(identifier)
        while len(self._known) > REMEMBERED and next(iter(self._known.values())).shipped:
            self._known.popitem(last=False)

    def _tidy(self) -> None:
        """Removes the oldest segments that hold nothing which is still to be handed on."""
        with self._lock:
            needed = min((known.entry.segment for known in self._known.values() if not known.shipped), default=None)
            first = (
                self.log.segment - KEPT_SEGMENTS if needed is None else min(needed, self.log.segment - KEPT_SEGMENTS)
            )
            old = [segment for segment in self.log.segments() if segment < first]
            if not old:
                return
            record = self._taken.fold(first)
        try:
            self._taken.keep(record)  # before they go, and without holding up decisions
        except StoreError:
            return
        with self._lock:
            for name in [name for name, known in self._known.items() if known.entry.segment in old]:
                del self._known[name]
            for segment in old:
                self.log.remove(segment)


def decision_row(frame: Frame, answer: Answer) -> dict[str, Any]:
    """A decision as the feedback intake takes it (``agentpipe.feedback.schema.DECISION``), without a result."""
    return {
        "kind": "decision",
        "decision_id": frame.decision_id,
        "time": frame.time.isoformat(),
        "line_id": frame.line_id,
        "policy_version": answer.policy_version,
        "observation": frame.observation.tolist(),
        "last_action": frame.last_action,
        "elapsed_minutes": frame.elapsed_minutes,
        "mask": frame.mask.tolist(),
        "probabilities": answer.probabilities.tolist(),
        "action": answer.action,
    }


def result_text(message: OrderEnded) -> str:
    """The result of an order as the intake reads it: ``done`` where it ended well, else what the line says."""
    if message.success is True:
        return SUCCESS
    text = " ".join(message.result.split())[:200]
    if message.success is False and text.lower() in ("", "done", "ok", "success"):
        return "failed"
    return text
