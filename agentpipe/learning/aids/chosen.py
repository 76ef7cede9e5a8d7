"""Which aids a run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentpipe.learning.aids.base import Aids

if TYPE_CHECKING:
    from agentpipe.learning.aids.base import Aid
    from agentpipe.learning.options import TrainingOptions


def chosen_aids(options: TrainingOptions) -> Aids:
    """The aids that ``options`` ask for, none of which needs to know of another."""
    del options
    aids: list[Aid] = []
    return Aids(aids)
