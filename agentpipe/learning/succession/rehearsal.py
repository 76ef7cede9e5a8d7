"""Recorded steps that a fine-tuning rehearses, so that what is not labelled is not forgotten.

Each epoch draws its steps from the recorded shards and judges them by V-trace under the weights of the moment, as
:mod:`~agentpipe.learning.samples.replay` does beside live samples. There are none here, so the scale of rewards is
that of the recorded episodes (the deviation of their discounted return, as :mod:`~agentpipe.learning.gradient.rewards`
defines it), and zero and unit of the advantages are those of a first draw, as V-trace says them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from agentpipe.environments.layout import SEGMENTS
from agentpipe.learning.gradient.ppo import Prepared
from agentpipe.learning.gradient.rewards import RewardScaler, accumulated
from agentpipe.learning.samples.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentpipe.experience.store.shard import Shard
    from agentpipe.learning.gradient.anchor import Anchor, AnchoredBatch
    from agentpipe.learning.samples.replay import Replay

Floats = npt.NDArray[np.float64]


class Rehearsal:
    """The recorded part of every epoch of a fine-tuning.

    Args:
        replay: draws from the shards and judges; over the network that learns.
        anchor: what the champion says of the drawn steps.
        rows: steps of an epoch.
        discount: gamma.
        surrogate_weight: of the drawn steps' policy gradient.

    Raises:
        CorruptError: a shard was cut short.
    """

    def __init__(self, replay: Replay, anchor: Anchor, rows: int, discount: float, surrogate_weight: float) -> None:
        self.replay, self.anchor, self.discount = replay, anchor, discount
        self.surrogate_weight = surrogate_weight
        self.scaler = RewardScaler(1, discount)
        self.scaler.observe(discounted_returns(replay.samples.shards, discount))
        network = replay.network
        self.batch = Batch.allocate(rows, network.encoded_size, network.action_count)
        self.centre, self.scale = replay.moments(self.batch, self.scaler, discount, len(SEGMENTS))

    def epoch(self, number: int) -> AnchoredBatch:
        """The steps of epoch ``number`` (1, 2, ...), in memory that the next one overwrites.

        Raises:
            CorruptError: a shard was cut short.
        """
        prepared = Prepared(self.batch, {}, self.centre, self.scale)
        batch, _ = self.replay.fill(prepared, 0, self.scaler, self.discount, number=number)
        torch.mul(batch.advantage, self.surrogate_weight, out=batch.advantage)
        return self.anchor.fill(batch)


def discounted_returns(shards: Sequence[Shard], discount: float) -> Floats:
    """R_t = discount R_t-1 + r_t, zero before each episode, of every recorded step, f64[steps]."""
    found = [np.zeros(0)]
    for shard in shards:
        steps = np.asarray(shard.episodes["steps"]).astype(np.int64)
        found.append(accumulated(np.asarray(shard.records["reward"]).astype(np.float64), steps, discount))
    return np.concatenate(found)
