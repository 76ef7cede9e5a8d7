"""What the columns of a line are called, where this is known: the names behind a signature's digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agentpipe.environments.layout import (
    A_RETRY,
    ACTION_NAMES,
    ACTION_SEGMENT,
    OBSERVATION_NAMES,
    SEGMENTS,
    block_start,
)
from agentpipe.serving.signature import Signature, names_digest

if TYPE_CHECKING:
    from agentpipe.serving.agent.types import Frame


@dataclass(frozen=True)
class Vocabulary:
    """Names of a line; empty where they are not known, and then nothing that needs them is done.

    Args:
        observations: D names.
        actions: A names.
        segments: sub-goals of an order, in order.
        action_segments: A indices into ``segments``.
        segment_columns: first column of the observation that marks the present segment (one-hot).
        again: actions that try the present segment's sub-goal once more.
    """

    observations: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    action_segments: tuple[int, ...] = ()
    segment_columns: int | None = None
    again: frozenset[int] = frozenset()

    def segment(self, frame: Frame) -> int | None:
        """The segment that the order of ``frame`` is in; None where the line has none."""
        if self.segment_columns is None:
            return None
        marks = frame.observation[self.segment_columns : self.segment_columns + len(self.segments)]
        return int(marks.argmax()) if (marks > 0).sum() == 1 else None

    def action(self, name: str | int) -> int | None:
        """The number of the action called ``name``, or that is ``name`` already; None where there is none."""
        if isinstance(name, int):
            return name if name >= 0 else None
        return self.actions.index(name) if name in self.actions else None

    def action_name(self, action: int) -> str:
        """What people call an action."""
        return self.actions[action] if 0 <= action < len(self.actions) else f"action {action}"


BUILT_IN: Final = Vocabulary(
    OBSERVATION_NAMES,
    ACTION_NAMES,
    SEGMENTS,
    tuple(int(segment) for segment in ACTION_SEGMENT),
    block_start("segment"),
    frozenset({A_RETRY}),
)


def vocabulary_of(signature: Signature) -> Vocabulary:
    """The names behind ``signature``: the built-in line's where its digests say so, else none."""
    observations = signature.observation_digest == names_digest(OBSERVATION_NAMES)
    actions = signature.action_digest == names_digest(ACTION_NAMES)
    if observations and actions:
        return BUILT_IN
    return Vocabulary(
        observations=BUILT_IN.observations if observations else (), actions=BUILT_IN.actions if actions else ()
    )
