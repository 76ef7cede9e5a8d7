"""What a policy with a memory remembers of the order that a line is in.

A question is answered from the state after the question before it. A question that is asked again begins from the same
state as the first time; one that nobody answered for the policy (rules did, or a person) leaves a gap, which is said in
the notes of the next decision. After a restart the state comes from the journal, where every decision has the one that
it left behind; where it is not there, or is another policy's, the memory begins empty, and the decision says so.
"""

from __future__ import annotations

import base64
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import ServingError
from agentpipe.serving.signature import MEMORY_NEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentpipe.serving.agent.types import Frame

LINES: Final = 1_024
"""whose present orders are remembered; of one that was silent longest, the journal is asked again"""
_KEPT: Final = 2
"""states of an order: behind the present question, and behind the one before it"""


@dataclass(frozen=True)
class Remembered:
    """The state f32[M] behind question ``number`` of an order, of the policy with the digest ``version``."""

    number: int
    version: str
    state: npt.NDArray[np.float32]


class OrderStates:
    """The states of all lines. Safe to use from several threads; the rungs of one ladder share one.

    Args:
        recover: what is known of an order from before this process, by line and order; None where nothing is.
    """

    def __init__(self, recover: Callable[[str, str], Remembered | None] = lambda _line, _order: None) -> None:
        self._recover = recover
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, tuple[str, dict[int, Remembered]]] = OrderedDict()

    def before(self, frame: Frame, version: str, size: int) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
        """The state f32[size] that the policy ``version`` answers ``frame`` from, and what there is to say of it."""
        empty = np.zeros(size, np.float32)
        if frame.number == 0:
            return empty, ()
        known = self._known(frame)
        fitting = [each for number, each in known.items() if number < frame.number and len(each.state) == size]
        newest = max((each for each in fitting if each.version == version), key=lambda each: each.number, default=None)
        if newest is None:
            return empty, (f"the memory is empty: nothing is known of {frame.number} earlier questions",)
        missed = frame.number - 1 - newest.number
        return newest.state, (f"the memory lacks {missed} of {frame.number} questions",) if missed else ()

    def after(self, frame: Frame, remembered: Remembered) -> None:
        """Keeps what the policy remembers behind ``frame``."""
        known = self._known(frame)
        with self._lock:
            known[frame.number] = remembered
            for number in sorted(known)[:-_KEPT]:
                del known[number]

    def _known(self, frame: Frame) -> dict[int, Remembered]:
        with self._lock:
            order, known = self._lines.get(frame.line_id, ("", {}))
        if order != frame.order_id:
            found = self._recover(frame.line_id, frame.order_id) if frame.number else None
            known = {} if found is None else {found.number: found}
        with self._lock:
            self._lines[frame.line_id] = (frame.order_id, known)
            self._lines.move_to_end(frame.line_id)
            if len(self._lines) > LINES:
                self._lines.popitem(last=False)
        return known


def checked_state(outputs: Mapping[str, npt.NDArray[Any]], size: int, decided_by: str) -> npt.NDArray[np.float32]:
    """The state f32[size] in the outputs to one question.

    Raises:
        ServingError: it has another shape or dtype, or is not finite.
    """
    found = outputs[MEMORY_NEXT]
    if found.shape != (1, size) or found.dtype != np.float32 or not np.isfinite(found).all():
        text = f"no answer: {MEMORY_NEXT} is {found.dtype}{list(found.shape)}, or not finite"
        remedy = "its answers are not used; look at the server or the bundle behind it"
        raise ServingError(text, decider=decided_by, field=MEMORY_NEXT, remedy=remedy)
    state: npt.NDArray[np.float32] = found[0].copy()
    return state


def to_record(remembered: Remembered) -> dict[str, Any]:
    """As the journal keeps it: the state is little-endian float32 in base64."""
    text = base64.b64encode(remembered.state.astype("<f4").tobytes()).decode()
    return {"number": remembered.number, "policy": remembered.version, "state": text}


def from_record(record: Mapping[str, Any]) -> Remembered:
    """The inverse of :func:`to_record`; KeyError, TypeError or ValueError where it is none."""
    state = np.frombuffer(base64.b64decode(record["state"], validate=True), "<f4").astype(np.float32)
    if not np.isfinite(state).all():
        raise ValueError("a state that is not finite")
    return Remembered(int(record["number"]), str(record["policy"]), state)
