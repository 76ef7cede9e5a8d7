"""The memory along recorded episodes: what a policy remembers at each step if it has watched them from the start."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.experience.store.shard import Shard
    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.workers import Workers

    Integers = npt.NDArray[np.int64]

EPISODES: Final = 256
"""episodes that are gone through side by side"""


def recorded_memory(
    network: PolicyNetwork,
    shards: Sequence[Shard],
    source: Integers,
    record: Integers,
    length: Integers,
    workers: Workers,
) -> tuple[Tensor, Tensor]:
    """The states before each step of n whole episodes, M' steps together, and behind each episode.

    Args:
        network: with a memory.
        shards: that hold the episodes.
        source: i64[n], which shard; ascending.
        record: i64[n], place of the first step in its shard; it is the first one of its episode.
        length: i64[n], steps.
        workers: share the episodes; the result does not depend on how many there are.

    Returns:
        f32[M', M], episode after episode, and f32[n, M].
    """
    place = np.cumsum(length) - length
    before = torch.zeros(int(length.sum()), network.memory_size)
    behind = torch.zeros(len(length), network.memory_size)
    edges = [0, *(np.flatnonzero(np.diff(source)) + 1), len(source)]
    pieces = [
        (low, min(low + EPISODES, int(high)))
        for first, high in itertools.pairwise(edges)
        for low in range(int(first), int(high), EPISODES)
    ]

    @torch.inference_mode()  # holds for one thread only
    def piece(_: int, index: int) -> None:
        low, high = pieces[index]
        records = np.asarray(shards[int(source[low])].records)
        state = network.fresh_memory(high - low)
        for step in range(int(length[low:high].max())):
            rows = np.flatnonzero(length[low:high] > step)
            at = torch.from_numpy(rows)
            before[torch.from_numpy(place[low:high][rows] + step)] = state[at]
            seen = records[record[low:high][rows] + step]
            observation, time = (torch.from_numpy(np.ascontiguousarray(seen[name])) for name in ("observation", "time"))
            last_action = torch.from_numpy(seen["last_action"].astype(np.int64))
            state[at] = network.encode(observation, last_action, time, state[at])[1]
        behind[low:high] = state

    workers.run(piece, len(pieces))
    return before, behind
