"""Words of the figures, defined once: key fault, idle, coverage."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agentpipe.environments.jit import entry

RARE_SHARE: Final = 4
"""one in so many of the modes present counts as rare"""
TOP: Final = 10
"""nodes of each episode whose coverage is measured"""


def key_fault_episodes(episodes: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """bool[n]: the episode failed, or its fault mode is among the rarest quarter.

    The modes present are ordered by their number of episodes here, equal ones by the mode's number; the first quarter,
    rounded up, is rare. An episode whose recording was cut has no outcome: it did not fail. A negative mode is none.

    Args:
        episodes: records of ``EPISODE``, all of the set: what is rare depends on it.
    """
    failed: npt.NDArray[np.bool_] = (episodes["success"] == 0) & (episodes["cut"] == 0)
    modes, counts = np.unique(episodes["mode"][episodes["mode"] >= 0], return_counts=True)
    rare = modes[np.lexsort((modes, counts))][: -(-len(modes) // RARE_SHARE)]
    return failed | np.isin(episodes["mode"], rare)


def idle_steps(dependents: npt.NDArray[np.uint32], earned: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """bool[n]: no later step depends on it, and its reward is nothing but the running cost of time."""
    idle: npt.NDArray[np.bool_] = (dependents == 0) & (earned == 0)
    return idle


def strictly_idle_steps(dependents: npt.NDArray[np.uint32], rewards: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """bool[n]: no later step depends on it, and its reward is zero."""
    idle: npt.NDArray[np.bool_] = (dependents == 0) & (rewards == 0)
    return idle


def most_influential(influence: npt.NDArray[np.float32], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """bool[steps]: among the ten most influential nodes of its episode, with an influence above zero.

    Of equally influential nodes the earlier one comes first.

    Args:
        influence: f32[steps], episode after episode.
        lengths: steps of each episode.
    """
    top = np.zeros(len(influence), np.bool_)
    _mark_top(influence, lengths, top)
    return top


@entry
def _mark_top(influence: npt.NDArray[np.float32], lengths: npt.NDArray[np.int64], top: npt.NDArray[np.bool_]) -> None:
    first = 0
    for episode in range(len(lengths)):
        for _ in range(TOP):
            best = -1
            for step in range(first, first + lengths[episode]):
                if not top[step] and influence[step] > 0.0 and (best < 0 or influence[step] > influence[best]):
                    best = step
            if best < 0:
                break
            top[best] = True
        first += lengths[episode]
