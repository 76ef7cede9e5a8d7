"""Who works with the runtime, what it counts, and how it speaks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentpipe.serving.agent.types import Answer, Frame, OrderEnded


class Policy(Protocol):
    """Who answers, such as :class:`~agentpipe.serving.agent.healing.Healing`."""

    def decide(self, frame: Frame) -> Answer:
        """An answer within the deadline."""

    def degraded(self) -> Mapping[str, str]:
        """What is lost now, and why."""


class Onlooker(Protocol):
    """Who is told of decisions after they were sent, such as memory and shadow; must neither block nor raise."""

    def decided(self, frame: Frame, answer: Answer, seconds: float) -> None:
        """A decision was sent; ``frame`` is the question as the policy saw it, ``seconds`` what the answer took."""

    def ended(self, message: OrderEnded) -> None:
        """An order is over."""


@dataclass
class Counts:
    """What has happened since the start."""

    questions: int = 0
    decisions: int = 0
    repeated: int = 0
    """questions that were answered before"""
    fallbacks: int = 0
    """decisions of the fallback, as the policy gave none in time"""
    refused: int = 0
    """answers that interlocks or mask forbade"""
    asked: int = 0
    """times that a person was asked"""
    withdrawn: int = 0
    """recorded and not sent: a person took over"""
    expired: int = 0
    """questions whose deadline had passed when they were looked at"""
    late: int = 0
    """answers sent after the deadline"""
    nonsense: int = 0
    lost_lines: int = 0


@dataclass(frozen=True)
class HandedBack:
    """In the queue of what was heard: a person has handed a line back, and its held question may be decided."""

    line_id: str


class TakenOverError(Exception):
    """Raised inside the runtime when a person has taken the line over since its question was taken up."""


def quietly(say: Callable[[str], object]) -> Callable[[str], None]:
    """``say`` where it can be said: a closed terminal or a full disk behind it must cost nothing but the words."""

    def tell(text: str) -> None:
        with contextlib.suppress(Exception):
            say(text)

    return tell


def finite(seen: Any, asked: Any) -> Any:  # noqa: ANN401 - arrays of one shape
    """What the policy saw, where it says so; a lost sensor that nobody estimated is recorded as 0."""
    return np.nan_to_num(asked if seen is None else seen, nan=0.0).astype(np.float32)
