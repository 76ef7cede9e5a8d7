"""Memory: a recurrent network (GRU) that learns to foresee what will be observed next.

With the input v = [x | belief | e_l], x the base encoding, e_l an embedding of the last action of the memory's own, and
the state s of the step before (Cho et al., 2014, with the reset gate behind the recurrent product):

    s' = 0 where the last action is "none yet", else s
    r, z = sigmoid(W_r v + b_r + U_r s' + c_r), sigmoid(W_z v + b_z + U_z s' + c_z)
    s_new = (1 - z) tanh(W_n v + b_n + r (U_n s' + c_n)) + z s'

An episode begins where nothing was done yet, so that no caller has to know of borders between episodes. The loss is the
mean squared error of o + P s_new + p as a prediction of the next normalised observation, o being the present one: that
of the next step, or the final one where the episode ends with this step. The state is thus asked for what the present
observation does not show by staying as it is. The gradient goes back through the steps of a rollout, from the state
that was stored at its beginning (Kapturowski et al., R2D2, 2019). Policy and memory are trained apart and the policy
reads the state as an input, as in Ha and Schmidhuber's World Models (2018).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Memory(nn.Module):
    """The network of the module's formulae.

    Parameters, with I = inputs + e: (A + 1) e + 3 M (I + M + 2) + (M + 1) D.

    Args:
        inputs: width of base encoding and belief together.
        action_count: A; last action A means "none yet".
        embedding: e, width of the embedding of the last action.
        units: M.
        observation_size: D.
    """

    def __init__(self, inputs: int, action_count: int, embedding: int, units: int, observation_size: int) -> None:
        super().__init__()
        self.action_count = action_count
        self.embedding = nn.Embedding(action_count + 1, embedding)
        self.cell = nn.GRUCell(inputs + embedding, units)
        self.predictor = nn.Linear(units, observation_size)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Orthogonal matrices for each gate (gain 1; 0.01 for the prediction), zero biases."""
        nn.init.normal_(self.embedding.weight, 0.0, 0.1, generator=generator)
        for weight in (self.cell.weight_ih, self.cell.weight_hh):
            for gate in weight.chunk(3):
                nn.init.orthogonal_(gate, 1.0, generator=generator)
        nn.init.orthogonal_(self.predictor.weight, 0.01, generator=generator)
        for bias in (self.cell.bias_ih, self.cell.bias_hh, self.predictor.bias):
            nn.init.zeros_(bias)

    def forward(self, inputs: Tensor, last_action: Tensor, state: Tensor) -> Tensor:
        """The next state f32[N, M], from f32[N, inputs], i64[N] and the state f32[N, M] of the step before."""
        kept = state * (last_action != self.action_count).unsqueeze(-1)
        new: Tensor = self.cell(torch.cat([inputs, self.embedding(last_action)], dim=-1), kept)
        return new

    def unroll(self, inputs: Tensor, last_action: Tensor, state: Tensor) -> Tensor:
        """The states f32[T, N, M] of T steps, from f32[T, N, inputs], i64[T, N] and the state f32[N, M] before them.

        Equal to T calls, but that what does not depend on the state is computed for all steps at once.
        """
        width, cell = inputs.shape[-1], self.cell
        table = nn.functional.linear(self.embedding.weight, cell.weight_ih[:, width:], cell.bias_ih)
        given = nn.functional.linear(inputs, cell.weight_ih[:, :width]) + nn.functional.embedding(last_action, table)
        fresh = (last_action != self.action_count).unsqueeze(-1)
        states = []
        for step, keep in zip(given, fresh, strict=True):
            kept = state * keep
            gates, before = step.chunk(3, dim=-1), nn.functional.linear(kept, cell.weight_hh, cell.bias_hh)
            reset, update, own = before.chunk(3, dim=-1)
            new = (gates[2] + (gates[0] + reset).sigmoid() * own).tanh()
            state = torch.lerp(new, kept, (gates[1] + update).sigmoid())
            states.append(state)
        return torch.stack(states)

    def predict(self, states: Tensor, now: Tensor) -> Tensor:
        """The normalised observation f32[..., D] that is expected behind ``now`` f32[..., D], states f32[..., M]."""
        change: Tensor = self.predictor(states)
        return now + change
