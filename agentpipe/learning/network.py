"""The actor-critic network: raw observation, last action, time and mask in; action, probabilities and value out.

Normalisation, masking and the heads exist once, here: training, evaluation and the exported graph all run this code.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from agentpipe.learning.normalisation import ObservationStatistics
    from agentpipe.learning.options import NetworkOptions

OBSERVATION_CLIP = 8.0
"""normalised observations are clipped to plus and minus this many standard deviations"""
_ILLEGAL = -1.0e9
_SHORTEST_PERIOD = 0.25
"""period of the fastest time encoding, minutes"""


class PolicyNetwork(nn.Module):
    """Actor and critic over a normalised observation, an embedding of the last action and a sin/cos encoding of time.

    Args:
        observation_size: D.
        action_count: A; last action A means "none yet".
        options: sizes.
    """

    mean: Tensor
    scale: Tensor
    frequencies: Tensor

    def __init__(self, observation_size: int, action_count: int, options: NetworkOptions) -> None:
        super().__init__()
        self.observation_size = observation_size
        self.action_count = action_count
        self.options = options
        self.register_buffer("mean", torch.zeros(observation_size), persistent=False)
        self.register_buffer("scale", torch.ones(observation_size), persistent=False)
        octaves = torch.arange(options.time_frequencies, dtype=torch.float32)
        self.register_buffer("frequencies", 2.0 * math.pi / (_SHORTEST_PERIOD * 2.0**octaves), persistent=False)
        trunks = 1 if options.shared_trunk else 2
        width = options.hidden[0]
        self.embedding = nn.Embedding(action_count + 1, options.action_embedding)
        self.projection = nn.Linear(options.action_embedding, trunks * width, bias=False)
        self.first = nn.Linear(self.encoded_size, trunks * width)
        self.actor_hidden = _stack(options.hidden)
        self.critic_hidden = nn.ModuleList() if options.shared_trunk else _stack(options.hidden)
        self.actor_head = nn.Linear(options.hidden[-1], action_count)
        self.critic_head = nn.Linear(options.hidden[-1], 1)

    @property
    def encoded_size(self) -> int:
        """Width of what :meth:`encode` returns: observation, then sines, then cosines of time."""
        return self.observation_size + 2 * self.options.time_frequencies

    def initialise(self, generator: torch.Generator) -> None:
        """Orthogonal weights (gain 0.01 in the actor's head, 1 in the critic's), zero biases; from ``generator``."""
        gain = nn.init.calculate_gain(self.options.activation)
        heads = {self.actor_head: 0.01, self.critic_head: 1.0}
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, heads.get(module, gain), generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, 0.0, 0.1, generator=generator)

    def set_statistics(self, statistics: ObservationStatistics) -> None:
        """Fixes the normalisation: (observation - mean) * scale, in float32."""
        self.mean.copy_(torch.from_numpy(statistics.mean.astype("float32")))
        self.scale.copy_(torch.from_numpy(statistics.scale))

    def encode(self, observation: Tensor, time: Tensor) -> Tensor:
        """Normalised and clipped observation, and the encoding of time (minutes): f32[N, encoded_size]."""
        normalised = ((observation - self.mean) * self.scale).clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)
        angle = time.unsqueeze(-1) * self.frequencies
        return torch.cat([normalised, angle.sin(), angle.cos()], dim=-1)

    def heads(self, encoded: Tensor, last_action: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Masked logits f32[N, A] (illegal actions at -1e9) and values f32[N] of encoded input."""
        actor, critic = self.branches(self.fuse(encoded, last_action))
        logits = self.actor_head(actor).masked_fill(~mask, _ILLEGAL)
        return logits, self.critic_head(critic).squeeze(-1)

    def fuse(self, encoded: Tensor, last_action: Tensor) -> Tensor:
        """The encoder: all that actor and critic have in common, from encoded input and last action.

        Returns:
            With a shared trunk its last activations f32[N, width]; else the first ones of both trunks, side by side.
        """
        # Equal to concatenating the embedding to the input, at the price of a table look-up.
        table = self.projection(self.embedding.weight)
        hidden = self._activate(self.first(encoded) + table[last_action])
        if self.options.shared_trunk:
            for layer in self.actor_hidden:
                hidden = self._activate(layer(hidden))
        return hidden

    def branches(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What actor's and critic's heads look at, f32[N, width] each, from what :meth:`fuse` gives."""
        if self.options.shared_trunk:
            return hidden, hidden
        width = self.options.hidden[0]
        actor, critic = hidden[:, :width], hidden[:, width:]
        for layer in self.actor_hidden:
            actor = self._activate(layer(actor))
        for layer in self.critic_hidden:
            critic = self._activate(layer(critic))
        return actor, critic

    def in_encoder(self, name: str) -> bool:
        """Whether the parameter ``name`` belongs to the encoder."""
        shared = ("embedding.", "projection.", "first.", *(("actor_hidden.",) if self.options.shared_trunk else ()))
        return name.startswith(shared)

    def forward(
        self, observation: Tensor, last_action: Tensor, time: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The greedy decision.

        Args:
            observation: f32[N, D], raw.
            last_action: i64[N], 0 to A; A = none yet.
            time: f32[N], minutes since the start of the episode.
            mask: bool[N, A], true where an action is allowed.

        Returns:
            action i64[N] (the first most probable one; -1 where nothing is allowed), probabilities f32[N, A] (all
            zero where nothing is allowed), value f32[N] (in scaled returns).
        """
        logits, value = self.heads(self.encode(observation, time), last_action, mask)
        probabilities = logits.softmax(dim=-1) * mask
        action = torch.where(mask.any(dim=-1), logits.argmax(dim=-1), -1)
        return action, probabilities, value

    def _activate(self, values: Tensor) -> Tensor:
        return values.tanh() if self.options.activation == "tanh" else values.relu()


def _stack(hidden: tuple[int, ...]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(hidden))
