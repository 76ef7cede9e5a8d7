"""Incidents: from the loss of a part to its return, each with a repair report that is kept and sent."""

from __future__ import annotations

import contextlib
import datetime as dt
import queue
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentpipe.alerts import Alert, send
from agentpipe.errors import CorruptError, StoreError
from agentpipe.serving.agent.incident_text import report
from agentpipe.storage import read_json, typed_os_errors, write_bytes, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pydantic import SecretStr

    from agentpipe.serving.agent.probes import Change
    from agentpipe.serving.agent.types import Answer
    from agentpipe.settings import AgentSettings

Status = Literal["open", "closed", "stopped", "interrupted"]
MOST_EVENTS: Final = 100
"""losses and returns that a report lists; the others it counts"""
KEPT: Final = 500
"""reports that stay in the folder"""
LARGEST: Final = 1 << 20
"""bytes of an incident; the ones that an agent writes have a few thousand"""
_SAVE_EVERY: Final = 5.0
_UNSENT: Final = 64
_MOST_FAULTS: Final = 5
"""damaged files that are said one by one"""


@dataclass
class Incident:
    """What happened to one part, and to decisions meanwhile. Times are UTC, latencies seconds."""

    name: str
    agent: str
    part: str
    opened: dt.datetime
    status: Status = "open"
    ended: dt.datetime | None = None
    seconds: float = 0.0
    losses: int = 0
    returns: int = 0
    unlisted: int = 0
    events: list[tuple[dt.datetime, str]] = field(default_factory=list)
    decided: Counter[str] = field(default_factory=Counter)
    late: int = 0
    latency_sum: float = 0.0
    latency_max: float = 0.0

    def tell(self, moment: dt.datetime, text: str) -> None:
        """Adds an event."""
        if len(self.events) < MOST_EVENTS:
            self.events.append((moment, text))
        else:
            self.unlisted += 1

    def to_json(self) -> dict[str, Any]:
        """The incident as a JSON object."""
        return {
            **vars(self),
            "opened": self.opened.isoformat(),
            "ended": self.ended.isoformat() if self.ended else None,
            "events": [[moment.isoformat(), text] for moment, text in self.events],
            "decided": dict(self.decided),
        }

    @classmethod
    def from_json(cls, content: Any, file: object = None) -> Incident:  # noqa: ANN401 - JSON is Any
        """Reads what :meth:`to_json` wrote.

        Raises:
            CorruptError: fields are missing, unknown or malformed; a time without zone; a name that no file can have.
        """
        try:
            return _Stored.model_validate(content).incident()
        except (ValueError, RecursionError) as error:  # pydantic's are ValueErrors
            text = str(error)
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False, include_context=False, include_input=False)[0]
                text = f"{'.'.join(str(part) for part in first['loc'])[:200]}: {first['msg']}"
            raise CorruptError(f"malformed incident: {text}", file=file, remedy="move the file away") from error


Count = Annotated[int, Field(ge=0, le=1 << 53)]
Seconds = Annotated[float, Field(ge=0.0, le=1e12)]
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,500}$")]


class _Stored(BaseModel):
    """What a file says, each field of its type; such a file may be anybody's."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
    agent: Text
    part: Text
    opened: str
    status: Status
    ended: str | None
    seconds: Seconds
    losses: Count
    returns: Count
    unlisted: Count
    events: Annotated[list[tuple[str, str]], Field(max_length=2 * MOST_EVENTS)]
    decided: dict[Text, Count]
    late: Count
    latency_sum: Seconds
    latency_max: Seconds

    @field_validator("events", mode="before")
    @classmethod
    def _pairs(cls, events: object) -> object:
        """JSON has no pairs."""
        if not isinstance(events, list):
            return events
        return [tuple(event) if isinstance(event, list) else event for event in events]

    def incident(self) -> Incident:
        ended = None if self.ended is None else _time(self.ended)
        events = [(_time(moment), text) for moment, text in self.events]
        times = {"opened": _time(self.opened), "ended": ended, "events": events}
        return Incident(**{**self.model_dump(), **times, "decided": Counter(self.decided)})


def _time(text: str) -> dt.datetime:
    moment = dt.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment


def read_incidents(folder: Path, faults: list[StoreError] | None = None) -> list[Incident]:
    """All incidents of ``HOME/agent/<name>/incidents``, oldest first; damaged files are left out.

    Args:
        folder: of the incidents.
        faults: gets why each file that was left out was.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(_read(path))
        except StoreError as error:
            if faults is not None:
                faults.append(error)
    return found


def _read(path: Path) -> Incident:
    with typed_os_errors(path):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
            text = f"no file of at most {LARGEST:,} bytes"
            raise CorruptError(text, file=path, remedy="move it away")
    incident = Incident.from_json(read_json(path), path)
    if incident.name != path.stem:
        raise CorruptError(f"the incident is called {incident.name!r}", file=path, remedy="move the file away")
    return incident


@dataclass
class _Open:
    incident: Incident
    started: float
    lost: set[str] = field(default_factory=set)
    returned: float = 0.0
    """monotonic seconds of the last return, while nothing of it is lost"""
    changed: bool = True
    announced: bool = False


class IncidentBook:
    """Opens an incident when a part is lost and closes it when the part has been back for ``quiet`` seconds.

    A part that is lost again before belongs to the same incident, so flapping is one incident. Sensors of one line are
    one part. Files are written and the webhook is called in threads of their own; what the disk refuses is written
    later.
    :meth:`note` and :meth:`decided` never block and may be called from any thread.

    Args:
        folder: of the reports: ``<name>.md`` for people and ``<name>.json``.
        agent: its name.
        settings: the quiet time is ``probe_every`` × ``successes_to_recover``.
        webhook: whom incidents are told when they open and when they end; a secret.
        alert_timeout: seconds of one attempt.
        say: told of incidents that cannot be used, one line.
    """

    def __init__(
        self,
        folder: Path,
        agent: str,
        settings: AgentSettings,
        *,
        webhook: SecretStr | None = None,
        alert_timeout: float = 5.0,
        say: Callable[[str], object] = str,
    ) -> None:
        self._folder, self._agent, self._settings = folder, agent, settings
        self._webhook, self._alert_timeout = webhook, alert_timeout
        self._say = say
        self._quiet = settings.probe_every * settings.successes_to_recover
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._ended: list[Incident] = []
        self._wake, self._stop = threading.Event(), threading.Event()
        self._alerts: queue.Queue[Alert | None] = queue.Queue(_UNSENT)
        self._interrupted_read = False
        self._threads = [threading.Thread(target=self._run, name="incidents", daemon=True)]
        if webhook is not None:
            self._threads.append(threading.Thread(target=self._send, name="incident alerts", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def open_count(self) -> int:
        """Incidents that are open now."""
        return len(self._open)

    def note(self, change: Change) -> None:
        """Takes a loss or a return of a part. The return of a part without an incident is none."""
        part = change.part.partition(": ")[0]
        with self._lock:
            entry = self._open.get(part)
            if entry is None:
                if change.up:
                    return
                stamp = change.time.strftime("%Y%m%dT%H%M%S.%f")
                name = f"{stamp}-{re.sub('[^A-Za-z0-9]+', '-', part).strip('-').lower()[:100]}"
                entry = _Open(Incident(name, self._agent, part, change.time), change.moment)
                self._open[part] = entry
            incident = entry.incident
            what = change.part.partition(": ")[2]
            text = f"{'back' if change.up else 'lost'}{f' ({what})' if what else ''}: {change.reason}"
            incident.tell(change.time, text)
            if change.up:
                incident.returns += 1
                entry.lost.discard(change.part)
                entry.returned = change.moment
            else:
                incident.losses += 1
                entry.lost.add(change.part)
            entry.changed = True
        self._wake.set()

    def decided(self, answer: Answer, seconds: float, *, late: bool = False) -> None:
        """Counts a decision, and the seconds that it took, for every open incident."""
        if not self._open:
            return
        with self._lock:
            for entry in self._open.values():
                incident = entry.incident
                incident.decided[answer.decided_by] += 1
                incident.late += late
                incident.latency_sum += seconds
                incident.latency_max = max(incident.latency_max, seconds)
                entry.changed = True

    def close(self, wait: float = 5.0) -> None:
        """Ends open incidents as ``stopped``, writes what is left, and waits ``wait`` seconds at most for alerts."""
        end = time.monotonic() + wait
        with self._lock:
            for part in list(self._open):
                self._end(part, "closed" if not self._open[part].lost else "stopped")
        self._stop.set()
        self._wake.set()
        self._threads[0].join(max(0.1, end - time.monotonic()))
        with contextlib.suppress(queue.Full):
            self._alerts.put_nowait(None)
        for thread in self._threads[1:]:
            thread.join(max(0.1, end - time.monotonic()))

    # ------------------------------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while True:
            stopping = self._stop.is_set()
            self._wake.clear()
            try:
                self._interrupted()
                self._settle()
                written = self._write()
            except Exception as error:  # noqa: BLE001 - a thread that dies of it would keep no report any more
                written = False
                self._tell(f"incidents are not written: {type(error).__name__}: {error}")
            if stopping:
                return
            self._wake.wait(self._pause() if written else _SAVE_EVERY)

    def _pause(self) -> float:
        with self._lock:
            settling = any(not entry.lost for entry in self._open.values())
        return min(_SAVE_EVERY, max(0.02, self._quiet / 10)) if settling else _SAVE_EVERY

    def _interrupted(self) -> None:
        """Incidents that an agent of this name left open: it was killed."""
        if self._interrupted_read:
            return
        self._interrupted_read = True
        faults: list[StoreError] = []
        found = [incident for incident in read_incidents(self._folder, faults) if incident.status == "open"]
        for fault in faults[:_MOST_FAULTS]:
            self._tell(f"an incident is left out: {fault}")
        if len(faults) > _MOST_FAULTS:
            self._tell(f"{len(faults) - _MOST_FAULTS} more incidents are left out")
        now = dt.datetime.now(dt.UTC)
        with self._lock:
            known = {entry.incident.name for entry in self._open.values()}
            for incident in found:
                if incident.name not in known:
                    incident.status, incident.ended = "interrupted", now
                    incident.seconds = max(0.0, (now - incident.opened).total_seconds())
                    incident.tell(now, "the agent started anew: the one before was killed, or the machine stopped")
                    self._ended.append(incident)

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception):  # whoever is told may fail (a closed terminal)
            self._say(text)

    def _settle(self) -> None:
        now = time.monotonic()
        with self._lock:
            for part, entry in list(self._open.items()):
                if not entry.lost and now - entry.returned >= self._quiet:
                    self._end(part, "closed")

    def _end(self, part: str, status: Status) -> None:
        entry = self._open.pop(part)
        incident = entry.incident
        incident.status, incident.ended = status, dt.datetime.now(dt.UTC)
        incident.seconds = max(0.0, (time.monotonic() if entry.lost else entry.returned) - entry.started)
        self._ended.append(incident)

    def _write(self) -> bool:
        """Writes what has changed; false where the disk refuses."""
        with self._lock:
            for entry in self._open.values():
                if not entry.announced:
                    entry.announced = True
                    self._announce(entry.incident)
            pending = [
                (entry, entry.incident.to_json(), self._report(entry.incident))
                for entry in self._open.values()
                if entry.changed
            ]
            for entry, _, _ in pending:
                entry.changed = False
            ended, self._ended = self._ended, []
        for entry, content, text in pending:
            if not self._save(content, text):
                entry.changed = True
        unsaved = [each for each in ended if not self._save(each.to_json(), self._report(each))]
        for incident in ended:
            if incident not in unsaved or self._stop.is_set():
                self._announce(incident)
        with self._lock:
            self._ended = unsaved + self._ended
        self._prune()
        return not unsaved and not any(entry.changed for entry, _, _ in pending)

    def _save(self, content: dict[str, Any], text: str) -> bool:
        try:
            write_bytes(self._folder / f"{content['name']}.md", text.encode(errors="replace"))
            write_json(self._folder / f"{content['name']}.json", content)
        except (StoreError, OSError):
            return False
        except (TypeError, ValueError) as error:  # another time would help no more
            self._tell(f"incident {content['name']} is not kept: {type(error).__name__}: {error}")
        return True

    def _report(self, incident: Incident) -> str:
        try:
            return report(incident, self._settings)
        except Exception as error:  # noqa: BLE001 - one incident must not cost the others
            return f"# Incident: {incident.part} ({incident.status})\n\nNo report: {type(error).__name__}: {error}\n"

    def _prune(self) -> None:
        for path in sorted(self._folder.glob("*.json"))[:-KEPT]:
            for old in (path, path.with_suffix(".md")):
                with contextlib.suppress(OSError):
                    old.unlink()

    def _announce(self, incident: Incident) -> None:
        if self._webhook is None:
            return
        fields = {
            "agent": incident.agent,
            "part": incident.part,
            "opened": incident.opened.isoformat(timespec="seconds"),
            "lost": incident.losses,
            "decisions meanwhile": sum(incident.decided.values()),
        }
        title = f"{incident.agent}: {incident.part} lost" if incident.status == "open" else ""
        title = title or f"{incident.agent}: incident of {incident.part} {incident.status}"
        with contextlib.suppress(queue.Full):  # whoever does not take them gets no more; the reports are kept
            self._alerts.put_nowait(Alert(title, self._report(incident), fields))

    def _send(self) -> None:
        while (alert := self._alerts.get()) is not None:
            if self._webhook is not None:
                send(self._webhook, alert, self._alert_timeout)
