"""Perception: what the policy believes the fault to be, learned from what the simulator knows.

One hidden layer over the base encoding x (normalised observation and time) gives logits of which machine, which mode
and how severe, and the belief is the softmax of each, 21 numbers:

    u = U f(H x + h) + c,   belief = [softmax(u_machine) | softmax(u_mode) | softmax(u_severity)]

The loss is the sum of the three cross-entropies against the truth, each averaged over the steps at which there is one.
The policy reads the belief detached, so that its loss moves nothing here; the input holds no parameter, so that the
loss here moves nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentpipe.environments.truth import TRUTH_SIZES

if TYPE_CHECKING:
    from agentpipe.learning.options import Activation

BELIEF: int = sum(TRUTH_SIZES)
"""width of a belief"""


class Perception(nn.Module):
    """The network of the module's formula.

    Parameters: (inputs + 1) width + (width + 1) 21.

    Args:
        inputs: width of the base encoding.
        width: of the hidden layer.
        activation: f.
    """

    def __init__(self, inputs: int, width: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.hidden = nn.Linear(inputs, width)
        self.answers = nn.Linear(width, BELIEF)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Orthogonal weights, of gain 0.01 at the end: the first beliefs are nearly uniform; zero biases."""
        nn.init.orthogonal_(self.hidden.weight, nn.init.calculate_gain(self.activation), generator=generator)
        nn.init.orthogonal_(self.answers.weight, 0.01, generator=generator)
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.answers.bias)

    def forward(self, base: Tensor) -> Tensor:
        """Logits f32[..., 21] of the base encoding f32[..., inputs]."""
        hidden = self.hidden(base)
        logits: Tensor = self.answers(hidden.tanh() if self.activation == "tanh" else hidden.relu())
        return logits

    def belief(self, base: Tensor) -> Tensor:
        """The probabilities of the three questions side by side, f32[..., 21]."""
        parts = torch.split(self.forward(base), list(TRUTH_SIZES), dim=-1)
        return torch.cat([part.softmax(dim=-1) for part in parts], dim=-1)


def perception_loss(logits: Tensor, truth: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies of n rows, and how many answers were right.

    Args:
        logits: f32[n, 21].
        truth: i64[n, 3], -1 where there is none.
        known: f32[3], how many truths each cross-entropy is the mean over; of more rows than these where they are a
            part of a minibatch.

    Returns:
        The loss, and i64[3] answers of the most probable class that are right.
    """
    right = torch.zeros(len(TRUTH_SIZES), dtype=torch.int64)
    total = logits.new_zeros(())
    for question, part in enumerate(torch.split(logits, list(TRUTH_SIZES), dim=-1)):
        answer = truth[:, question]
        entropy = nn.functional.cross_entropy(part, answer, ignore_index=-1, reduction="sum")
        total = total + entropy / known[question].clamp_min(1.0)
        right[question] = (part.detach().argmax(dim=-1) == answer).sum()
    return total, right
