"""Registers the built-in line with Gymnasium.

Importing this module is enough, and cheap: simulator and data are loaded by the first ``make``. Gymnasium 1.4 has no
plug-in entry points any more, but imports a module named before a colon, so one line does without an import::

    gymnasium.make("agentpipe.environments.registration:agentpipe/ProductionLine-v0")
"""

from __future__ import annotations

from typing import Final

import gymnasium

ENVIRONMENT_ID: Final = "agentpipe/ProductionLine-v0"


def register_environments() -> None:
    """Makes ``agentpipe/ProductionLine-v0`` known to Gymnasium; a second call changes nothing.

    No ``max_episode_steps`` is given: the line itself truncates after 64 steps, so no wrapper has to.
    """
    if ENVIRONMENT_ID in gymnasium.registry:
        return
    gymnasium.register(
        id=ENVIRONMENT_ID,
        entry_point="agentpipe.environments.gym_env:ProductionLineEnv",
        vector_entry_point="agentpipe.environments.gym_env:ProductionLineVectorEnv",
    )


register_environments()
