"""A candidate that decides beside the champion without acting, and what the two made of the same questions.

It has a thread and a queue of its own: what does not fit into the queue is dropped and counted, and the champion never
waits. One report a run, ``HOME/agent/<name>/shadow/<candidate>-<start>.json``; :func:`read_reports` reads them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import queue
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import AgentpipeError, BundleError, CorruptError
from agentpipe.evaluation.drift_rows import smoothed_kl
from agentpipe.serving.agent.deciders import LocalDecider
from agentpipe.storage import read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agentpipe.serving.agent.deciders import PolicyFiles
    from agentpipe.serving.agent.types import Answer, Decider, Frame, OrderEnded
    from agentpipe.serving.agent.vocabulary import Vocabulary

FORMAT: Final = 1
QUEUE: Final = 256
_LATENCIES: Final = 10_000
"""newest ones that quantiles are taken of"""
_DISAGREEMENTS: Final = 20
"""most frequent ones that a report names"""
_UNKNOWN: Final = "all"
KEPT: Final = 500
"""reports that stay in the folder"""


class _Group:
    """Sums of one segment."""

    def __init__(self) -> None:
        self.rows = self.agree = self.compared = 0
        self.kl = self.kl_most = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "agreement": self.agree / self.rows if self.rows else None,
            "rows_with_kl": self.compared,
            "kl_mean": self.kl / self.compared if self.compared else None,
            "kl_most": self.kl_most if self.compared else None,
        }


class Shadow:
    """Told of every decision that was sent (an onlooker of the runtime); compares in a thread of its own.

    KL(candidate || champion) in nats, smoothed as in :mod:`agentpipe.evaluation.drift_rows`, is taken where the
    champion itself decided; agreement of actions wherever an action was taken, by whoever took it.

    Args:
        candidate: its bundle.
        champion: the bundle that acts.
        folder: of the reports; made where it is missing.
        vocabulary: for the segments.
        every: seconds between two writes of the report.
        say: told when something goes wrong, one line.
        decider: who decides, in place of the candidate's graph in this process.

    Raises:
        BundleError: the candidate is of another line, damaged, or refused by ONNX Runtime.
    """

    def __init__(
        self,
        candidate: PolicyFiles,
        champion: PolicyFiles,
        folder: Path,
        vocabulary: Vocabulary,
        *,
        every: float = 30.0,
        say: Callable[[str], object] = str,
        decider: Decider | None = None,
    ) -> None:
        if not candidate.signature.same_line(champion.signature):
            remedy = "give a bundle with the same inputs and actions"
            raise BundleError("the candidate is of another line than the champion", file=candidate.path, remedy=remedy)
        self._decider = decider or LocalDecider(candidate, "shadow")
        self._candidate, self._champion = candidate.version, champion.version
        self._vocabulary, self._every, self._say = vocabulary, every, say
        self._started = dt.datetime.now(dt.UTC)
        self.path = folder / f"{candidate.version[:16]}-{self._started:%Y%m%dT%H%M%S.%f}Z.json"
        self._queue: queue.Queue[tuple[Frame, Answer, float] | None] = queue.Queue(QUEUE)
        self.dropped = self.failed = 0
        self._last_failure = ""
        self._ended = False
        self._groups: dict[str, _Group] = {_UNKNOWN: _Group()}
        self._disagreements: Counter[tuple[str, str]] = Counter()
        self._seconds: tuple[deque[float], deque[float]] = (deque(maxlen=_LATENCIES), deque(maxlen=_LATENCIES))
        self._thread = threading.Thread(target=self._work, name="shadow", daemon=True)
        self._thread.start()

    def decided(self, frame: Frame, answer: Answer, seconds: float) -> None:
        """A decision was sent; never waits."""
        try:
            self._queue.put_nowait((frame, answer, seconds))
        except queue.Full:
            self.dropped += 1

    def ended(self, message: OrderEnded) -> None:
        """Orders do not matter here."""

    def close(self, wait: float = 5.0) -> None:
        """Compares what is in the queue, as far as ``wait`` seconds reach, and writes the report."""
        try:
            self._queue.put(None, timeout=wait)
        except queue.Full:
            return
        self._thread.join(wait)
        self._decider.close()

    def report(self) -> dict[str, Any]:
        """What is known so far, as a JSON object."""
        return {
            "format": FORMAT,
            "candidate": self._candidate,
            "champion": self._champion,
            "started": self._started.isoformat(),
            "ended": self._ended,
            "written": dt.datetime.now(dt.UTC).isoformat(),
            "dropped": self.dropped,
            "failed": self.failed,
            "last_failure": self._last_failure,
            **self._groups[_UNKNOWN].to_json(),
            "segments": {name: group.to_json() for name, group in self._groups.items() if name != _UNKNOWN},
            "disagreements": [
                {"champion": acted, "candidate": wanted, "count": count}
                for (acted, wanted), count in self._disagreements.most_common(_DISAGREEMENTS)
            ],
            "latency_seconds": {
                name: {"p50": _quantile(each, 0.5), "p99": _quantile(each, 0.99)}
                for name, each in zip(("candidate", "champion"), self._seconds, strict=True)
            },
        }

    # ------------------------------------------------------------------------------------------------ inside

    def _work(self) -> None:
        written, changed = time.monotonic(), True
        self._prune()
        while True:
            entry, ending = self._next()
            if entry is not None:
                self._compare(*entry)
                changed = True
            self._ended = ending
            if ending or (changed and time.monotonic() - written >= self._every):
                self._write()
                written, changed = time.monotonic(), False
            if ending:
                return

    def _next(self) -> tuple[tuple[Frame, Answer, float] | None, bool]:
        """The next decision, if one comes in time, and whether this is the end."""
        try:
            entry = self._queue.get(timeout=self._every)
        except queue.Empty:
            return None, False
        return entry, entry is None

    def _compare(self, frame: Frame, answer: Answer, seconds: float) -> None:
        started = time.monotonic()
        try:
            own = self._decider.decide(frame, 1.0)
        except AgentpipeError as error:
            self.failed += 1
            self._last_failure = error.message
            return
        self._seconds[0].append(time.monotonic() - started)
        self._seconds[1].append(seconds)
        segment = self._vocabulary.segment(frame)
        names = [_UNKNOWN, *([] if segment is None else [self._vocabulary.segments[segment]])]
        kl = None
        if answer.policy_version == self._champion:
            kl = float(smoothed_kl(own.probabilities[None], answer.probabilities[None], frame.mask[None])[0])
        for group in (self._groups.setdefault(name, _Group()) for name in names):
            group.rows += 1
            group.agree += own.action == answer.action
            if kl is not None:
                group.compared += 1
                group.kl += kl
                group.kl_most = max(group.kl_most, kl)
        if own.action != answer.action:
            pair = (self._vocabulary.action_name(answer.action), self._vocabulary.action_name(own.action))
            self._disagreements[pair] += 1

    def _prune(self) -> None:
        """Removes the oldest reports of earlier runs."""
        with contextlib.suppress(OSError):
            found = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for old in found[: max(0, len(found) + 1 - KEPT)]:
                old.unlink()

    def _write(self) -> None:
        try:
            write_json(self.path, self.report())
        except AgentpipeError as error:
            self._say(f"the shadow's report cannot be written: {error.message}")


def _quantile(values: deque[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports of all runs, oldest first; none where there is no folder.

    Raises:
        CorruptError: a report is damaged.
    """
    return sorted((read_report(path) for path in folder.glob("*.json")), key=lambda report: str(report["started"]))


def read_report(path: Path) -> dict[str, Any]:
    """One of them.

    Raises:
        CorruptError: it is damaged.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT or "started" not in content:
        raise CorruptError("not a report of a shadow", file=path, remedy="remove it")
    return content
