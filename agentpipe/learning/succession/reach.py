"""Which labels can teach anything, told without torch: the sensor that would launch a training asks it as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from agentpipe.environments.layout import ACTION_SEGMENT
from agentpipe.feedback.labelled import CORRECT, EXECUTION, NEEDS_IMPROVEMENT

if TYPE_CHECKING:
    import numpy.typing as npt

    from agentpipe.feedback.labelled import LabelledDecisions

EXECUTE: Final = 3
"""the execute segment, see :data:`~agentpipe.environments.layout.SEGMENTS`"""


class Beyond(NamedTuple):
    """Labels that move nothing; one that has several reasons is in each of them."""

    forced: npt.NDArray[np.bool_]
    """bool[n]: the mask allows one action only"""
    elsewhere: npt.NDArray[np.bool_]
    """bool[n]: an execution error on an action outside the execute segment"""
    weightless: npt.NDArray[np.bool_]
    """bool[n]: its verdict, or its confidence, has the weight zero"""

    @property
    def any(self) -> npt.NDArray[np.bool_]:
        """bool[n]: for one of these reasons."""
        return self.forced | self.elsewhere | self.weightless


def beyond(
    *,
    mask: npt.NDArray[np.bool_],
    action: npt.NDArray[np.int64],
    verdict: npt.NDArray[np.int8],
    error_type: npt.NDArray[np.int8],
    confidence: npt.NDArray[np.float32],
    weak_negative: float,
    action_segment: npt.NDArray[np.int8] = ACTION_SEGMENT,
) -> Beyond:
    """Which of n labels move nothing, and why; the columns are those of a day's labelled decisions.

    Args:
        mask: bool[n, A].
        action: i64[n], taken.
        verdict: i8[n].
        error_type: i8[n].
        confidence: f32[n].
        weak_negative: weight of ``needs improvement``.
        action_segment: i8[A], segment of each action.
    """
    segment = np.take(action_segment, action, mode="clip")
    weak = (verdict == NEEDS_IMPROVEMENT) & (weak_negative <= 0)
    return Beyond(
        forced=mask.sum(axis=1) == 1,
        elsewhere=(verdict != CORRECT) & (error_type == EXECUTION) & (segment != EXECUTE),
        weightless=weak | (confidence <= 0),
    )


def why_nothing(
    labelled: LabelledDecisions, weak_negative: float, action_segment: npt.NDArray[np.int8] = ACTION_SEGMENT
) -> str:
    """Why none of these labels can teach anything; empty where one can, or there is none."""
    found = beyond(
        mask=labelled.mask,
        action=labelled.action,
        verdict=labelled.verdict,
        error_type=labelled.error_type,
        confidence=labelled.confidence,
        weak_negative=weak_negative,
        action_segment=action_segment,
    )
    count = len(labelled)
    if not count or not found.any.all():
        return ""
    reasons = {
        "of a decision whose mask allows no other action": found.forced,
        "an execution error of an action outside the execute segment": found.elsewhere & ~found.forced,
        "of weight zero": found.weightless & ~found.forced & ~found.elsewhere,
    }
    told = ", ".join(f"{int(rows.sum())} {reason}" for reason, rows in reasons.items() if rows.any())
    return f"none of {count} new labels can teach anything: {told}"
