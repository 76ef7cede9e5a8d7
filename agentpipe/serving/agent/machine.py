"""States of execution at one line, and the only ways from one to another.

========  ============================================================================================
idle      no order is open
waiting   an order is open, its next question has not come
deciding  a question is in hand
acting    an action was chosen and recorded, and is being sent
frozen    a person has the line; nothing is sent
degraded  as idle or waiting, while something that decisions rest on is lost; questions are answered all the same
asking    a person was asked, and has not come
stopped   the end
========  ============================================================================================
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from agentpipe.errors import ServingError


class State(StrEnum):
    """Where execution stands."""

    IDLE = "idle"
    WAITING = "waiting"
    DECIDING = "deciding"
    ACTING = "acting"
    FROZEN = "frozen"
    DEGRADED = "degraded"
    ASKING = "asking"
    STOPPED = "stopped"


class Event(StrEnum):
    """What moves it."""

    QUESTION = "question"
    CHOSEN = "chosen"
    SENT = "sent"
    DROPPED = "dropped"
    """the question is no longer there: its line is lost, or it was withdrawn"""
    ASKED = "asked"
    """a person was asked instead"""
    TAKEN_OVER = "taken_over"
    HANDED_BACK = "handed_back"
    ENDED = "ended"
    """the order is over"""
    DEGRADED = "degraded"
    RECOVERED = "recovered"
    STOPPED = "stopped"


class IllegalTransitionError(ServingError):
    """Raised when something happens that cannot happen in this state; nothing has changed then."""


_S, _E = State, Event
_REST: Final = None
"""idle, waiting or degraded, whichever it is"""
_RESTING: Final = (_S.IDLE, _S.WAITING, _S.DEGRADED)
_ALIVE: Final = tuple(state for state in State if state is not State.STOPPED)

# An action chosen while a person has the line cannot be sent: (FROZEN, CHOSEN) is not in the table.
TRANSITIONS: Final[dict[tuple[State, Event], State | None]] = {
    **{(state, _E.QUESTION): _S.DECIDING for state in (*_RESTING, _S.DECIDING, _S.ASKING)},
    (_S.FROZEN, _E.QUESTION): _S.FROZEN,
    (_S.DECIDING, _E.CHOSEN): _S.ACTING,
    (_S.ACTING, _E.SENT): _REST,
    (_S.FROZEN, _E.SENT): _S.FROZEN,
    (_S.DECIDING, _E.ASKED): _S.ASKING,
    **{(state, _E.DROPPED): _REST for state in (*_RESTING, _S.DECIDING, _S.ACTING, _S.ASKING)},
    (_S.FROZEN, _E.DROPPED): _S.FROZEN,
    **{(state, _E.TAKEN_OVER): _S.FROZEN for state in _ALIVE},
    **{(state, _E.HANDED_BACK): state for state in (_S.DECIDING, _S.ACTING, _S.ASKING)},
    **{(state, _E.HANDED_BACK): _REST for state in (*_RESTING, _S.FROZEN)},
    **{(state, _E.ENDED): _REST for state in (*_RESTING, _S.DECIDING, _S.ASKING)},
    (_S.FROZEN, _E.ENDED): _S.FROZEN,
    **{(state, event): _REST for state in _RESTING for event in (_E.DEGRADED, _E.RECOVERED)},
    **{
        (state, event): state
        for state in (_S.DECIDING, _S.ACTING, _S.FROZEN, _S.ASKING)
        for event in (_E.DEGRADED, _E.RECOVERED)
    },
    **{(state, _E.STOPPED): _S.STOPPED for state in _ALIVE},
}


class Machine:
    """The state of one line. Not locked: whoever shares it between threads locks around it.

    Attributes:
        state: where it stands.
        order_open: whether an order is being worked.
        degraded: whether something that decisions rest on is lost.
    """

    def __init__(self) -> None:
        self.state = State.IDLE
        self.order_open = False
        self.degraded = False

    def allows(self, event: Event) -> bool:
        """Whether ``event`` can happen now."""
        return (self.state, event) in TRANSITIONS

    def fire(self, event: Event) -> State:
        """Lets ``event`` happen; returns the new state.

        Raises:
            IllegalTransitionError: it cannot happen in this state.
        """
        if not self.allows(event):
            possible = ", ".join(sorted(e for s, e in TRANSITIONS if s is self.state)) or "nothing"
            raise IllegalTransitionError(f"{event} cannot happen while {self.state}", remedy=f"possible: {possible}")
        target = TRANSITIONS[self.state, event]
        if event is Event.QUESTION:
            self.order_open = True
        elif event is Event.ENDED:
            self.order_open = False
        elif event in (Event.DEGRADED, Event.RECOVERED):
            self.degraded = event is Event.DEGRADED
        self.state = self._rest() if target is None else target
        return self.state

    def _rest(self) -> State:
        if self.degraded:
            return State.DEGRADED
        return State.WAITING if self.order_open else State.IDLE
