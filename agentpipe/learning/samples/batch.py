"""The samples of one update: live ones first, then replayed ones, in memory that is allocated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass
class Batch:
    """M samples, flattened over time and environments; one row each."""

    encoded: Tensor
    """f32[M, E]"""
    last_action: Tensor
    """i64[M]"""
    mask: Tensor
    """bool[M, A]"""
    action: Tensor
    """i64[M]"""
    log_probability: Tensor
    """f32[M], when the action was chosen; of a replayed sample: under the policy at the start of the update"""
    advantage: Tensor
    """f32[M], normalised per segment"""
    returns: Tensor
    """f32[M]"""
    segment: Tensor
    """i64[M]"""
    weight: Tensor
    """f32[M], of everything that the sample adds to the loss; 1 for a live one"""

    @classmethod
    def allocate(cls, rows: int, encoded_size: int, action_count: int) -> Self:
        """Room for ``rows`` samples, with weight 1 and zeros elsewhere."""
        integers = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
        last_action, action, segment = integers
        log_probability, advantage, returns = (torch.zeros(rows) for _ in range(3))
        return cls(
            encoded=torch.zeros(rows, encoded_size),
            last_action=last_action,
            mask=torch.zeros(rows, action_count, dtype=torch.bool),
            action=action,
            log_probability=log_probability,
            advantage=advantage,
            returns=returns,
            segment=segment,
            weight=torch.ones(rows),
        )

    def first(self, rows: int) -> Self:
        """The first ``rows`` samples, in the same memory."""
        return type(self)(*(getattr(self, name)[:rows] for name in Batch.__dataclass_fields__))
