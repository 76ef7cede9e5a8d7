"""Questions that are asked again: what was decided is said once more, where it is the same question and allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agentpipe.errors import StoreError
from agentpipe.serving.agent.interlocks import Interlocks

if TYPE_CHECKING:
    from agentpipe.serving.agent.journal import Journal, Known
    from agentpipe.serving.agent.types import Frame
    from agentpipe.serving.agent.vocabulary import Vocabulary

MASK = "the mask"


def on_record(journal: Journal, frame: Frame) -> Known | None:
    """What the journal knows under the id of a question; None where it knows nothing."""
    try:
        if journal.find(frame.decision_id) is None:
            return None
    except StoreError:
        pass  # recorded, and cannot be read any more
    return next((each for each in journal.decisions() if each.decision_id == frame.decision_id), None)


def contradicts(known: Known, frame: Frame) -> str:
    """Why a question cannot be the one that was decided under its id; empty where it can."""
    if (known.line_id, known.order_id, known.number) == (frame.line_id, frame.order_id, frame.number):
        return ""
    return f"{frame.decision_id} is question {known.number} of order {known.order_id} at {known.line_id}"


def forbids(frame: Frame, action: int, interlocks: Interlocks) -> str:
    """Who forbids an action that was chosen: the mask, or an interlock; empty where nobody does."""
    if action >= len(frame.mask) or not frame.mask[action]:
        return MASK
    name = interlocks.refuses(frame, action)
    return f"interlock {name}" if name else ""


def forbids_again(frame: Frame, action: int, interlocks: Interlocks, journal: Journal, vocabulary: Vocabulary) -> str:
    """Who forbids an action that was decided for this question before, and is counted by its limits already."""
    found = forbids(frame, action, interlocks)
    if found in ("", MASK):
        return found
    limits = (
        each if each.at_most is None else replace(each, at_most=each.at_most + 1) for each in interlocks.interlocks
    )
    others = Interlocks(limits, vocabulary)
    others.steady = interlocks.steady
    journal.tell_taken(others)
    return forbids(frame, action, others)
