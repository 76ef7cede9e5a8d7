"""What is an answer, and what is nonsense: the same test for every policy, wherever it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.errors import ServingError
from agentpipe.serving.agent.types import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentpipe.serving.agent.types import Frame

SUM_TOLERANCE: Final = 1e-3
"""by which probabilities may miss 1: float32 sums of a few hundred terms miss it by less than 1e-5"""
_REMEDY: Final = "its answers are not used; look at the server or the bundle behind it"


def checked_answer(frame: Frame, outputs: Mapping[str, npt.NDArray[Any]], decided_by: str, version: str) -> Answer:
    """The answer in ``outputs`` (``action`` i64[1, 1], ``probabilities`` f32[1, A], ``value`` f32[1, 1]) to ``frame``.

    Raises:
        ServingError: a shape or dtype is another one; a number is not finite; the probabilities do not sum to 1, or
            give a forbidden action some; the action is forbidden, or −1 although some action is allowed.
    """
    mask = frame.mask
    action_array, probabilities, value_array = outputs["action"], outputs["probabilities"], outputs["value"]
    if action_array.size != 1 or action_array.dtype != np.int64:
        raise _nonsense(f"action is {action_array.dtype}{list(action_array.shape)}", "action", decided_by)
    if probabilities.shape != (1, len(mask)) or probabilities.dtype != np.float32:
        found = f"{probabilities.dtype}{list(probabilities.shape)}"
        raise _nonsense(f"probabilities are {found}, not float32[1, {len(mask)}]", "probabilities", decided_by)
    if value_array.size != 1 or value_array.dtype != np.float32:
        raise _nonsense(f"value is {value_array.dtype}{list(value_array.shape)}", "value", decided_by)
    action, row, value = int(action_array.item()), probabilities[0], float(value_array.item())
    if not -np.inf < value < np.inf:
        raise _nonsense("value is not finite", "value", decided_by)
    _check_choice(action, mask, decided_by)
    if action >= 0:
        _check_probabilities(row, mask, decided_by)
    return Answer(action, np.where(mask, row, np.float32(0.0)), value, decided_by, version)


def _check_choice(action: int, mask: npt.NDArray[np.bool_], decided_by: str) -> None:
    if not -1 <= action < len(mask):
        raise _nonsense(f"action {action} of {len(mask)}", "action", decided_by)
    if action < 0 and mask.any():
        raise _nonsense("no action, although some are allowed", "action", decided_by)
    if action >= 0 and not mask[action]:
        raise _nonsense(f"action {action} is not allowed by the mask", "action", decided_by)


def _check_probabilities(row: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_], decided_by: str) -> None:
    """A NaN or an infinity fails every comparison."""
    lowest, total, allowed = float(row.min()), float(row.sum()), float(row @ mask)
    if not (abs(total - 1.0) <= SUM_TOLERANCE and lowest >= 0.0):
        raise _nonsense(f"probabilities from {lowest:.3g} sum to {total:.3g}", "probabilities", decided_by)
    if not abs(allowed - total) <= SUM_TOLERANCE:
        raise _nonsense("a forbidden action has a probability", "probabilities", decided_by)


def _nonsense(message: str, field: str, decided_by: str) -> ServingError:
    return ServingError(f"no answer: {message}", decider=decided_by, field=field, remedy=_REMEDY)
