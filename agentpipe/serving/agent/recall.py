"""Looking up what resembles an order's present course: a short-term trace asks the long-term memory.

The trace of an order follows the embeddings x of its questions by Holt's exponential smoothing with trend (Holt 1957,
"Forecasting seasonals and trends by exponentially weighted moving averages")::

    level  l_t = α x_t + (1 − α)(l_(t−1) + b_(t−1))
    trend  b_t = β (l_t − l_(t−1)) + (1 − β) b_(t−1)

and its prediction of the next one, l_t + b_t, is the query. Cases go to a policy as inputs only, where its signature
has such inputs. No present one has: then they are noted in the journal beside the decision, and choose nothing.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from agentpipe.errors import StoreError
from agentpipe.serving.agent.memory import Memory, unit

if TYPE_CHECKING:
    from pathlib import Path

    from agentpipe.serving.agent.journal import Journal
    from agentpipe.serving.agent.memory import Vectors
    from agentpipe.serving.agent.types import Answer, Frame, OrderEnded
    from agentpipe.serving.agent.vocabulary import Vocabulary
    from agentpipe.serving.signature import Signature

ALPHA: Final = 0.6
BETA: Final = 0.3
CASES: Final = 3
"""that are looked up for a decision"""
QUEUE: Final = 256
ORDERS: Final = 256
"""open orders whose traces are kept"""


class Trace:
    """The short-term trace of one order."""

    def __init__(self) -> None:
        self._level: Vectors | None = None
        self._trend: Vectors | None = None

    def follow(self, embedding: Vectors) -> Vectors:
        """Takes in the next embedding f32[32]; the prediction of the one after it, f32[32] of length 1."""
        if self._level is None or self._trend is None:
            self._level, self._trend = embedding, embedding * 0
        else:
            level = ALPHA * embedding + (1 - ALPHA) * (self._level + self._trend)
            self._trend = BETA * (level - self._level) + (1 - BETA) * self._trend
            self._level = level
        return unit(self._level + self._trend)


class Recall:
    """An onlooker of the runtime with a thread of its own; what does not fit into its queue is dropped and counted.

    Args:
        memory: the long-term one.
        vocabulary: for the segments; without any, all cases lie in segment 0.
        journal: where cases are noted.
    """

    def __init__(self, memory: Memory, vocabulary: Vocabulary, journal: Journal) -> None:
        self._memory, self._vocabulary, self._journal = memory, vocabulary, journal
        self.dropped = self.looked_up = 0
        self.trouble = ""
        """why the last look-up failed"""
        self._traces: OrderedDict[tuple[str, str], Trace] = OrderedDict()
        self._queue: queue.Queue[Frame | OrderEnded | None] = queue.Queue(QUEUE)
        self._thread = threading.Thread(target=self._work, name="recall", daemon=True)
        self._thread.start()

    def decided(self, frame: Frame, answer: Answer, seconds: float) -> None:
        """A decision was sent; never waits."""
        del answer, seconds
        self._put(frame)

    def ended(self, message: OrderEnded) -> None:
        """The order's trace is not needed any more."""
        self._put(message)

    def close(self, wait: float = 5.0) -> None:
        """Ends the thread."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=wait)
            self._thread.join(wait)

    def _put(self, entry: Frame | OrderEnded) -> None:
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.dropped += 1

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            key = (entry.line_id, entry.order_id)
            if hasattr(entry, "result"):
                self._traces.pop(key, None)
                continue
            try:
                self._look_up(entry, self._trace(key))
                self.trouble = ""
            except StoreError as error:  # a damaged partition, a journal that takes nothing
                self.trouble = error.message

    def _trace(self, key: tuple[str, str]) -> Trace:
        trace = self._traces.setdefault(key, Trace())
        self._traces.move_to_end(key)
        if len(self._traces) > ORDERS:
            self._traces.popitem(last=False)
        return trace

    def _look_up(self, frame: Frame, trace: Trace) -> None:
        query = trace.follow(self._memory.embedding(frame.observation[None])[0])
        cases = self._memory.search(self._vocabulary.segment(frame) or 0, query, CASES)
        self.looked_up += 1
        if cases:
            self._journal.retrieved(frame.decision_id, [case.to_json() for case in cases])


def open_memory(home: Path, signature: Signature) -> Memory | None:
    """The memory of a line; None where none was made.

    Raises:
        CorruptError, VersionError: it is damaged.
    """
    folder = home / "memory" / signature.observation_digest[:16]
    return Memory(folder, signature) if folder.is_dir() else None
