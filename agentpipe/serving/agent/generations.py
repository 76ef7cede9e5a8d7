"""Which policy answers which order: the one that was in use when the order began.

A *generation* is one bundle with a decider for every rung. Another one is installed while the agent works; an open
order goes on with its own, so that the policy never changes within an order. An earlier generation is asked in this
process only, whichever rung is asked: a server serves what is newest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agentpipe.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.serving.agent.deciders import PolicyFiles
    from agentpipe.serving.agent.types import Answer, Decider, Frame, OrderEnded

LINES: Final = 1_024
"""whose present orders are known; of one that was silent longest, the next question goes to the newest policy"""


@dataclass(frozen=True, eq=False)
class Generation:
    """One policy. ``deciders`` are the rungs, best first; the last one answers in this process."""

    files: PolicyFiles
    deciders: tuple[Decider, ...]


class Generations:
    """The policies in use; an onlooker of the runtime, to know when orders are over.

    Args:
        files: the bundle of the first one.
        deciders: its rungs, best first, without the rules; the last one answers in this process.
    """

    def __init__(self, files: PolicyFiles, deciders: Sequence[Decider]) -> None:
        self._lock = threading.Lock()
        self._newest = Generation(files, tuple(deciders))
        self._earlier: list[Generation] = []
        self._orders: OrderedDict[str, tuple[str, Generation]] = OrderedDict()
        self.rungs: tuple[Rung, ...] = tuple(Rung(self, index) for index in range(len(deciders)))
        """for the ladder, for as long as the agent works"""

    @property
    def newest(self) -> Generation:
        """The one that orders which begin now get."""
        return self._newest

    @property
    def count(self) -> int:
        """Generations that some order may still need."""
        return 1 + len(self._earlier)

    def install(self, files: PolicyFiles, deciders: Sequence[Decider]) -> None:
        """Makes another policy the one of all orders that begin from now on.

        Raises:
            ServingError: it has other rungs.
        """
        if [decider.name for decider in deciders] != [rung.name for rung in self.rungs]:
            raise ServingError("a policy with other rungs cannot be installed", remedy="start the agent anew")
        with self._lock:
            left, self._newest = self._newest, Generation(files, tuple(deciders))
            self._earlier.append(left)
            unused = self._unused()
        for decider in left.deciders[:-1]:  # its servers are not asked any more
            decider.close()
        self._close(unused)

    def of(self, frame: Frame) -> Generation:
        """The policy of the order of ``frame``."""
        with self._lock:
            order, generation = self._orders.get(frame.line_id, ("", self._newest))
            if order != frame.order_id:
                generation = self._newest
            self._orders[frame.line_id] = (frame.order_id, generation)
            self._orders.move_to_end(frame.line_id)
            if len(self._orders) > LINES:
                self._orders.popitem(last=False)
            unused = self._unused()
        self._close(unused)
        return generation

    def decided(self, frame: Frame, answer: Answer, seconds: float) -> None:
        """Decisions do not matter here."""

    def ended(self, message: OrderEnded) -> None:
        """The order is over: its policy is not needed any more."""
        with self._lock:
            if self._orders.get(message.line_id, ("", None))[0] == message.order_id:
                del self._orders[message.line_id]
            unused = self._unused()
        self._close(unused)

    def _unused(self) -> list[Generation]:
        """Takes out the earlier ones that no order needs. Under the lock."""
        if not self._earlier:
            return []
        needed = {id(generation) for _, generation in self._orders.values()}
        unused = [generation for generation in self._earlier if id(generation) not in needed]
        self._earlier = [generation for generation in self._earlier if id(generation) in needed]
        return unused

    @staticmethod
    def _close(unused: list[Generation]) -> None:
        for generation in unused:
            generation.deciders[-1].close()


class Rung:
    """One rung of every generation, as the ladder sees it."""

    def __init__(self, generations: Generations, index: int) -> None:
        self._generations, self._index = generations, index
        self.name = generations.newest.deciders[index].name

    @property
    def policy_version(self) -> str:
        """Of the policy that orders which begin now get."""
        return self._generations.newest.files.version

    def decide(self, frame: Frame, timeout: float) -> Answer:
        """The answer of the policy of the frame's order.

        Raises:
            ServingError: it cannot, see :class:`~agentpipe.serving.agent.types.Decider`.
        """
        found = self._generations.of(frame)
        index = self._index if found is self._generations.newest else -1
        return found.deciders[index].decide(frame, timeout)

    def probe(self, timeout: float) -> None:
        """Probes the newest policy's; raises as :meth:`decide` does."""
        self._generations.newest.deciders[self._index].probe(timeout)

    def close(self) -> None:
        """Lets go of the newest policy's connections."""
        self._generations.newest.deciders[self._index].close()
