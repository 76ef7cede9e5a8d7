"""Which aids a run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentpipe.learning.aids.base import Aids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.learning.aids.base import Aid
    from agentpipe.learning.options import TrainingOptions


def chosen_aids(options: TrainingOptions, names: Sequence[str]) -> Aids:
    """The aids that ``options`` ask for, none of which needs to know of another.

    Args:
        options: of the run.
        names: of the observation features.
    """
    del options, names
    aids: list[Aid] = []
    return Aids(aids)
