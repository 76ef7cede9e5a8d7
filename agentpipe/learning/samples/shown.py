"""What a pool shows and an expert says: dtypes, shapes and ranges, since compiled code reads them without looking.

A pool of one's own has the arrays of :class:`~agentpipe.environments.pool.LinePool`. They are looked at in every step,
at the price of a few comparisons, so that the first wrong one is named instead of what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.demonstrator import QUESTION_COUNT, QUESTIONS
from agentpipe.environments.layout import REASONS
from agentpipe.errors import ActionError, NonFiniteError, SimulationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.environments.pool import LinePool

NOW: Final = {
    "observation": np.float32,
    "mask": np.bool_,
    "segment": np.int8,
    "last_action": np.int64,
    "time": np.float32,
}
"""what the next decision is made on"""
TAKEN: Final = {"reward": np.float32, "terminated": np.bool_, "truncated": np.bool_}
"""what a step led to"""
ENDED: Final = {
    "final_observation": np.float32,
    "final_mask": np.bool_,
    "final_last_action": np.int64,
    "final_time": np.float32,
}
"""the last of an episode"""
_RESULTS: Final = {
    "result_success": "b",
    "result_return": "f",
    "result_steps": "iu",
    "result_decisions": "iu",
    "result_decision_seconds": "f",
    "result_reason": "iu",
}
"""kinds of dtypes of an episode's outcome"""
_REMEDY: Final = "mend the pool, whose arrays are those of LinePool; the last checkpoint is good"


@dataclass(frozen=True)
class Shown:
    """The shapes that a pool's arrays have.

    Args:
        size: N.
        features: D.
        actions: A.
    """

    size: int
    features: int
    actions: int

    def require(self, pool: LinePool, arrays: dict[str, Any], step: int) -> None:
        """Holds ``arrays``, one of :data:`NOW`, :data:`TAKEN` and :data:`ENDED`, to dtype, shape and order in memory.

        Raises:
            SimulationError: names the first that is otherwise, or not there.
        """
        for name, dtype in arrays.items():
            found: object = getattr(pool, name, None)
            if not isinstance(found, np.ndarray) or found.dtype != dtype or found.shape != self._shape(name):
                wanted = _described(np.dtype(dtype), self._shape(name))
                text = f"{name} is {_named(found)}, expected {wanted}"
                raise SimulationError(text, field=name, step=step, remedy=_REMEDY)
            if not found.flags.c_contiguous:
                text = f"{name} does not lie in one piece in memory"
                raise SimulationError(text, field=name, step=step, remedy="give a contiguous array (C order)")

    def _shape(self, name: str) -> tuple[int, ...]:
        part = name.removeprefix("final_")
        widths = {"observation": self.features, "mask": self.actions}
        return (self.size, widths[part]) if part in widths else (self.size,)

    def require_results(self, pool: LinePool, rows: npt.NDArray[np.int64], step: int) -> None:
        """Looks at the outcome of the episodes that just ended in ``rows`` i64[k].

        Raises:
            NonFiniteError: a number is not finite; names environment and field.
            SimulationError: an array is of another kind, or a reason is unknown.
        """
        for name, kinds in _RESULTS.items():
            found: object = getattr(pool, name, None)
            if not isinstance(found, np.ndarray) or found.dtype.kind not in kinds or found.shape != (self.size,):
                text = f"{name} is {_named(found)}, expected one value of kind {kinds!r} for each environment"
                raise SimulationError(text, field=name, step=step, remedy=_REMEDY)
            bad = ~np.isfinite(found[rows])
            if bad.any():
                where: dict[str, Any] = {"environment": pool.names[rows[int(np.argmax(bad))]], "field": name}
                raise NonFiniteError("not finite", **where, step=step, remedy=_REMEDY)
        within(pool.result_reason[rows], 0, len(REASONS) - 1, "result_reason", step, [pool.names[row] for row in rows])


def within(values: npt.NDArray[Any], low: int, high: int, field: str, step: int, names: Sequence[str]) -> None:
    """Holds integers [N] to ``low`` … ``high``.

    Raises:
        SimulationError: names the environment of the first beyond them.
    """
    if len(values) and (values.min() < low or values.max() > high):
        row = int(np.argmax((values < low) | (values > high)))
        text = f"{field} {values[row]} is not from {low} to {high}"
        raise SimulationError(text, environment=names[row], field=field, step=step, remedy=_REMEDY)


def require_decisions(actions: object, mask: npt.NDArray[np.bool_], step: int, names: Sequence[str]) -> None:
    """Holds an expert's decisions to one legal action for each environment.

    Raises:
        ActionError: they are not i64[N], or one is unknown or not allowed by ``mask``; names the first environment.
    """
    remedy = "mend the expert: one legal action for each environment"
    if not isinstance(actions, np.ndarray) or actions.dtype != np.int64 or actions.shape != (len(mask),):
        text = f"the expert's actions are {_named(actions)}, expected {_described(np.dtype(np.int64), (len(mask),))}"
        raise ActionError(text, field="action", step=step, remedy=remedy)
    known = (actions >= 0) & (actions < mask.shape[1])
    bad = ~known | ~mask[np.arange(len(mask)), np.where(known, actions, 0)]
    if bad.any() and (bad & mask.any(axis=1)).any():  # where nothing is allowed, the mask is to blame
        row = int(np.argmax(bad & mask.any(axis=1)))
        text = f"the expert's action {actions[row]} is not allowed by the mask"
        raise ActionError(text, environment=names[row], field="action", step=step, remedy=remedy)


def require_answers(answers: object, action_count: int, step: int, names: Sequence[str]) -> None:
    """Holds an expert's answers to i64[N, Q], each an action that answers its question, or -1.

    Raises:
        ActionError: names environment and question of the first that is none.
    """
    remedy = "mend the expert: give an action that answers the question, or -1 where it is not to be asked"
    shape = (len(names), QUESTION_COUNT)
    if not isinstance(answers, np.ndarray) or answers.dtype != np.int64 or answers.shape != shape:
        text = f"the expert's answers are {_named(answers)}, expected {_described(np.dtype(np.int64), shape)}"
        raise ActionError(text, field="answers", step=step, remedy=remedy)
    known = (answers >= 0) & (answers < (action_count if action_count <= len(QUESTIONS) else 0))
    right = QUESTIONS[np.where(known, answers, 0)] == np.arange(QUESTION_COUNT)
    bad = (answers != -1) & ~(known & right)
    if bad.any():
        row, question = (int(place) for place in np.argwhere(bad)[0])
        text = f"the expert's answer {answers[row, question]} does not answer question {question}"
        raise ActionError(text, environment=names[row], field="answers", step=step, remedy=remedy)


def _described(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _named(found: object) -> str:
    if isinstance(found, np.ndarray):
        return _described(found.dtype, found.shape)
    return "missing" if found is None else f"a {type(found).__name__}"
