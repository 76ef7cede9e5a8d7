"""What a line says to the agent and the agent to a line; spoken by every module of the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol, Self

if TYPE_CHECKING:
    import datetime as dt
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt

    from agentpipe.serving.agent.states import Remembered
    from agentpipe.serving.signature import Signature

HOLD_VERSION: Final = "rules-hold"
"""policy version of decisions that hold the last action, on lines that the rule-based player does not know"""


@dataclass(frozen=True)
class Frame:
    """One question of a line: what it sees, what it allows, until when it wants an answer.

    ``decision_id`` is the line's: asked again after a lost connection, a question has the same one, and its decision is
    recorded once.
    """

    decision_id: str
    line_id: str
    order_id: str
    """the maintenance order; one order is one episode"""
    number: int
    """counts the questions of an order from 0"""
    observation: npt.NDArray[np.float32]
    """``[D]``, raw; NaN where a sensor is known to be lost"""
    last_action: int
    """A where there was none"""
    elapsed_minutes: float
    mask: npt.NDArray[np.bool_]
    """``[A]``"""
    received: float
    """monotonic seconds"""
    deadline: float
    """monotonic seconds by which the line must have its answer"""
    time: dt.datetime
    """UTC, when it was received"""
    doubtful: bool = False
    """it may have waited unread for as long as its deadline supposes: where that has passed, it is answered late"""

    def with_inputs(self, observation: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_]) -> Frame:
        """The same question with an estimated observation or a narrower mask."""
        return replace(self, observation=observation, mask=mask)


@dataclass(frozen=True)
class Takeover:
    """A person takes the line over (``active``) or hands it back."""

    line_id: str
    active: bool
    who: str


@dataclass(frozen=True)
class OrderEnded:
    """An order is over; ``result`` is what the line says of it, such as ``done`` or ``timeout``."""

    line_id: str
    order_id: str
    result: str
    success: bool | None = None


Message = Frame | Takeover | OrderEnded


@dataclass(frozen=True)
class Answer:
    """What one decider says to one frame."""

    action: int
    """−1: a person is asked"""
    probabilities: npt.NDArray[np.float32]
    """``[A]``, zero where forbidden"""
    value: float
    decided_by: str
    """name of the decider, such as ``triton``, ``local``, ``rules``"""
    policy_version: str
    notes: tuple[str, ...] = field(default=())
    """what was done to it on the way: interlocks, estimates, fallbacks"""
    observation: npt.NDArray[np.float32] | None = None
    """``[D]``, what the decider saw, where that is not what the line said (estimates of lost sensors)"""
    memory: Remembered | None = None
    """what a policy with a memory remembers behind this question; None without one"""


class Decider(Protocol):
    """Somebody who answers frames: a served policy, a local one, rules. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """Short and unique on the ladder."""

    @property
    def policy_version(self) -> str:
        """Digest of the package whose policy it is; ``rules-<version>`` for rules."""

    def decide(self, frame: Frame, timeout: float) -> Answer:
        """Answers within ``timeout`` seconds.

        Raises:
            ServingError: it cannot: away, too slow, or what it says is no answer (shape, NaN, a forbidden action).
        """

    def probe(self, timeout: float) -> None:
        """Asks it something whose answer is known; raises as :meth:`decide` does."""

    def close(self) -> None:
        """Lets go of connections."""


class LineAdapter(Protocol):
    """A line, as the runtime sees it. What it hands over is validated against ``signature`` before it arrives here."""

    @property
    def signature(self) -> Signature:
        """Sizes and digests of names that the line speaks."""

    def receive(self, timeout: float) -> Message | None:
        """The next message, ``None`` where none came in time.

        Raises:
            LineError: the line is lost; call again to connect anew.
        """

    def act(self, frame: Frame, answer: Answer) -> None:
        """Sends the action of ``answer``, or the request for a person where it is −1.

        Raises:
            LineError: the line is lost; the answer may or may not have arrived.
        """

    def close(self) -> None:
        """Ends the connection."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
