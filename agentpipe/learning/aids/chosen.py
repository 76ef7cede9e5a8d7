"""Which aids a run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentpipe.learning.aids.base import Aids
from agentpipe.learning.aids.curiosity import Curiosity
from agentpipe.learning.aids.difficulty import Difficulty
from agentpipe.learning.aids.dynamic_lambda import DynamicLambda
from agentpipe.learning.aids.layer_rates import LayerRates
from agentpipe.learning.aids.orchestrator import Orchestrator
from agentpipe.learning.aids.reward_watch import RewardWatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.learning.aids.base import Aid
    from agentpipe.learning.options import TrainingOptions


def chosen_aids(options: TrainingOptions, names: Sequence[str]) -> Aids:
    """The aids that ``options`` ask for, none of which needs to know of another, or turns what another turns.

    Args:
        options: of the run.
        names: of the observation features.
    """
    chosen = options.aids
    aids: list[Aid] = [RewardWatch()]
    if chosen.curiosity != "off":
        aids.append(Curiosity(chosen, names, options.seed))
    if chosen.dynamic_lambda != "off":
        aids.append(DynamicLambda(chosen, options.ppo))
    if chosen.layer_rates != "off":
        aids.append(LayerRates(chosen, options.gates))
    if chosen.distillation != "off":
        aids.append(Difficulty())
    if options.orchestrator is not None:
        aids.append(Orchestrator(options.orchestrator, options.seed))
    return Aids(aids)
