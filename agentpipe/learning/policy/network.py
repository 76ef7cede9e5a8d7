"""The actor-critic network: raw observation, last action, time and mask in; action, probabilities and value out.

Normalisation, masking and the heads exist once, here: training, evaluation and the exported graph all run this code.
With a memory its state goes in and out, too: it belongs to the caller, one a row.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentpipe.environments.layout import OBSERVATION_SIZE
from agentpipe.errors import LearningError
from agentpipe.learning.joint.line_perception import LinePerception
from agentpipe.learning.joint.memory import Memory
from agentpipe.learning.joint.perception import BELIEF, Perception

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentpipe.learning.options import NetworkOptions
    from agentpipe.learning.policy.normalisation import ObservationStatistics

OBSERVATION_CLIP = 8.0
"""normalised observations are clipped to plus and minus this many standard deviations"""
_ILLEGAL = -1.0e9
_APART = ("perception", "memory")
"""parts with losses and optimisers of their own"""
_SHORTEST_PERIOD = 0.25
"""period of the fastest time encoding, minutes"""


class UnitHead(nn.Module):
    """Logits from non-negative weights in rows of norm 1, a temperature and a bias.

        z = T W h + b,   W_j = softplus(V_j) / ||softplus(V_j)||,   T = exp(log_temperature)

    Every logit weighs the hidden features in one direction of unit length, and one temperature T, learned as its
    logarithm, says how decided all of them are together. Softmax does not see what is added to all logits, so that
    non-negative weights alone rule out nothing: the same vector can be added to all rows of any matrix. The unit norms
    do: with non-negative unit rows two of them are at most sqrt(2) apart, hence |(z_i - b_i) - (z_j - b_j)| <=
    sqrt(2) T ||h||. Nothing but T and b can let one action run away from the others.

    With dL/dW' the gradient at the effective weight W' = T W, s = softplus(V) and n = ||s|| row by row,

        dL/dV     = T / n (dL/dW' - W (W . dL/dW')) sigmoid(V)
        dL/dlog T = sum W' . dL/dW'

    Args:
        features: H, width of the last hidden layer.
        actions: A.
    """

    def __init__(self, features: int, actions: int) -> None:
        super().__init__()
        self.weight_raw = nn.Parameter(torch.zeros(actions, features))
        """V, f32[A, H]"""
        self.log_temperature = nn.Parameter(torch.tensor(math.log(features) / 2.0))
        """f32[]"""
        self.bias = nn.Parameter(torch.zeros(actions))
        """f32[A]"""

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """V ~ N(0, 0.01^2), T = sqrt(H), b = 0.

        All rows are then close to 1 / sqrt(H) in each place. What they have in common moves no probability, and logits
        differ by about 0.007 ||h||: the first policy is nearly uniform over the legal actions. T = sqrt(H) makes the
        effective weights about 1, so that a step of Adam moves them as far as it moves those of a linear layer.
        """
        nn.init.normal_(self.weight_raw, 0.0, 0.01, generator=generator)
        self.log_temperature.fill_(math.log(self.weight_raw.shape[1]) / 2.0)
        nn.init.zeros_(self.bias)

    def effective_weight(self) -> Tensor:
        """T W, f32[A, H]: the weight of the linear layer that this head equals."""
        positive = nn.functional.softplus(self.weight_raw)
        weight: Tensor = self.log_temperature.exp() * positive / positive.norm(dim=1, keepdim=True)
        return weight

    def centred_weight(self) -> Tensor:
        """T W without its mean row, f32[A, H]: what is multiplied.

        Softmax does not see what all logits have in common, and rounding does: non-negative rows share so much that
        their differences would lose two digits of float32.
        """
        weight = self.effective_weight()
        return weight - weight.mean(dim=0)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, A] of hidden features f32[N, H], up to what all actions have in common."""
        return nn.functional.linear(hidden, self.centred_weight(), self.bias)

    @torch.no_grad()
    def folded(self) -> nn.Linear:
        """The linear layer that this head equals at present; what is exported."""
        actions, features = self.weight_raw.shape
        linear = nn.Linear(features, actions)
        linear.weight.copy_(self.centred_weight())
        linear.bias.copy_(self.bias)
        return linear


class PolicyNetwork(nn.Module):
    """Actor and critic over a normalised observation, an embedding of the last action and a sin/cos encoding of time.

    With x = [normalised observation | sin | cos] (``encoded``, width E), the embedding e(l) of the last action l and f
    the activation, each of the T trunks (one for the actor and one for the critic, or one for both) is

        h_1 = f(W_1 x + P e(l) + b_1),   h_k = f(W_k h_(k-1) + b_k),   z = actor_head(h_K),   V = w h_K + c

    where W_1 x + P e(l) is the first layer over the concatenation [x | e(l)], written as a table look-up. With the
    encoder ``mlp`` x is the normalised observation alone, and there is neither embedding nor P. ``actor_head`` is a
    linear layer or a :class:`UnitHead`.

    Where the options ask for them, x goes on with a belief of what the fault is
    (:class:`~agentpipe.learning.joint.perception.Perception`, over observations of the built-in line
    :class:`~agentpipe.learning.joint.line_perception.LinePerception`) and with the state of a memory
    (:class:`~agentpipe.learning.joint.memory.Memory`), both detached: what the policy learns reaches the columns of W_1
    that read them and nothing behind (S12).

    Parameters, with D features, A actions, embedding width e, F octaves of time, E = D + 2 F, hidden widths w_1 .. w_K:

        (A + 1) e + e T w_1 + (E + 1) T w_1 + T sum_k (w_k + 1) w_(k+1) + head + w_K + 1

    with head = (w_K + 1) A, and one more for ``unit``; ``mlp`` has no first two terms and E = D. Perception makes E
    wider by 21 and a memory of M units by M; what they have themselves stands with them.

    Args:
        observation_size: D.
        action_count: A; last action A means "none yet".
        options: sizes.
    """

    mean: Tensor
    scale: Tensor
    frequencies: Tensor
    embedding: nn.Embedding
    """of the last action, f32[A + 1, e]; only where :attr:`fuses`"""
    projection: nn.Linear
    """P, of the embedding into the first layer; only where :attr:`fuses`"""
    actor_head: nn.Linear | UnitHead

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
        if self.fuses:
            self.embedding = nn.Embedding(action_count + 1, options.action_embedding)
            self.projection = nn.Linear(options.action_embedding, trunks * width, bias=False)
        self.first = nn.Linear(self.encoded_size, trunks * width)
        self.actor_hidden = _stack(options.hidden)
        self.critic_hidden = nn.ModuleList() if options.shared_trunk else _stack(options.hidden)
        head = UnitHead if options.actor_head == "unit" else nn.Linear
        self.actor_head = head(options.hidden[-1], action_count)
        self.critic_head = nn.Linear(options.hidden[-1], 1)
        self.perception: Perception | None = None
        self.memory: Memory | None = None
        if options.perception:
            sizes = (options.perception, options.activation)
            line = observation_size == OBSERVATION_SIZE
            self.perception = LinePerception(*sizes) if line else Perception(self.base_size, *sizes)
        if options.memory:
            inputs, embedding = self.base_size + self.belief_size, options.action_embedding
            self.memory = Memory(inputs, action_count, embedding, options.memory, observation_size)

    @property
    def fuses(self) -> bool:
        """Whether the first layer reads last action and time beside the observation."""
        return self.options.encoder == "fusion"

    @property
    def base_size(self) -> int:
        """Width of the base encoding: observation, then sines, then cosines of time."""
        return self.observation_size + (2 * self.options.time_frequencies if self.fuses else 0)

    @property
    def belief_size(self) -> int:
        """Width of the belief behind it; 0 without perception."""
        return BELIEF if self.options.perception else 0

    @property
    def memory_size(self) -> int:
        """M, width of the memory's state behind both; 0 without a memory."""
        return self.options.memory

    @property
    def encoded_size(self) -> int:
        """Width of what :meth:`encode` returns: base encoding, belief, state of the memory."""
        return self.base_size + self.belief_size + self.memory_size

    def policy_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that the policy's own losses and optimiser reach, in the order of registration.

        That is all but those of perception and memory.
        """
        for name, parameter in self.named_parameters():
            if not name.startswith(_APART):
                yield name, parameter

    def fresh_memory(self, rows: int) -> Tensor:
        """The memory's state before anything was observed: zeros f32[rows, M]."""
        return torch.zeros(rows, self.memory_size)

    def initialise(self, generator: torch.Generator) -> None:
        """Orthogonal weights (gain 0.01 in a linear actor's head, 1 in the critic's), zero biases; by ``generator``."""
        gain = nn.init.calculate_gain(self.options.activation)
        heads = {self.actor_head: 0.01, self.critic_head: 1.0}
        for name, module in self.named_modules():
            if isinstance(module, UnitHead):
                module.initialise(generator)
            if isinstance(module, nn.Linear) and not name.startswith(_APART):
                nn.init.orthogonal_(module.weight, heads.get(module, gain), generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.fuses:
            nn.init.normal_(self.embedding.weight, 0.0, 0.1, generator=generator)
        for part in (self.perception, self.memory):
            if part is not None:
                part.initialise(generator)

    def set_statistics(self, statistics: ObservationStatistics) -> None:
        """Fixes the normalisation: (observation - mean) * scale, in float32."""
        self.mean.copy_(torch.from_numpy(statistics.mean.astype("float32")))
        self.scale.copy_(torch.from_numpy(statistics.scale))
        if isinstance(self.perception, LinePerception):
            self.perception.set_statistics(self.mean, self.scale)

    def normalise(self, observation: Tensor) -> Tensor:
        """Observations f32[..., D] in standard deviations from the mean, clipped."""
        return ((observation - self.mean) * self.scale).clamp(-OBSERVATION_CLIP, OBSERVATION_CLIP)

    def encode(
        self, observation: Tensor, last_action: Tensor, time: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """All that the first layer reads but the embedding of the last action, and what the memory keeps.

        Args:
            observation: f32[N, D], raw.
            last_action: i64[N], 0 to A; A = none yet.
            time: f32[N], minutes since the start of the episode.
            memory: f32[N, M], the state that the call of the step before gave for these rows, of any value at the start
                of an episode; needed where the network has a memory, and not looked at where it has none.

        Returns:
            Encoded input f32[N, encoded_size], the parts behind the base encoding detached: the observation, normalised
            and clipped, sines and cosines of time, the belief, the new state of the memory. And that state, f32[N, M].

        Raises:
            LearningError: the network has a memory and no state was given.
        """
        encoded, state = self._read(observation, last_action, time, memory)
        return encoded, encoded[..., :0] if state is None else state

    def _read(
        self, observation: Tensor, last_action: Tensor, time: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        base = self.normalise(observation)
        if self.fuses:
            angle = time.unsqueeze(-1) * self.frequencies
            base = torch.cat([base, angle.sin(), angle.cos()], dim=-1)
        if self.perception is not None:
            base = torch.cat([base, self.perception.belief(base.detach()).detach()], dim=-1)
        if self.memory is None:
            return base, None
        if memory is None:
            remedy = "pass the state that the step before gave, fresh_memory() at the first"
            raise LearningError("a policy with a memory was asked without its state", field="memory", remedy=remedy)
        state = self.memory(base.detach(), last_action, memory)
        return torch.cat([base, state.detach()], dim=-1), state

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
        if self.fuses:
            # Equal to concatenating the embedding to the input, at the price of a table look-up.
            table = self.projection(self.embedding.weight)
            hidden = self._activate(self.first(encoded) + table[last_action])
        else:
            hidden = self._activate(self.first(encoded))
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

    def actor_weight(self) -> Tensor:
        """Weight of the actor's head, f32[A, H]; of a :class:`UnitHead` the centred one."""
        head = self.actor_head
        return head.centred_weight() if isinstance(head, UnitHead) else head.weight

    def forward(
        self, observation: Tensor, last_action: Tensor, time: Tensor, mask: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The greedy decision.

        Args:
            observation: f32[N, D], raw.
            last_action: i64[N], 0 to A; A = none yet.
            time: f32[N], minutes since the start of the episode.
            mask: bool[N, A], true where an action is allowed.
            memory: f32[N, M], see :meth:`encode`.

        Returns:
            action i64[N] (the first most probable one; -1 where nothing is allowed), probabilities f32[N, A] (all
            zero where nothing is allowed), value f32[N] (in scaled returns); with a memory its new state f32[N, M].
        """
        encoded, state = self._read(observation, last_action, time, memory)
        logits, value = self.heads(encoded, last_action, mask)
        probabilities = logits.softmax(dim=-1) * mask
        action = torch.where(mask.any(dim=-1), logits.argmax(dim=-1), -1)
        if state is not None:
            return action, probabilities, value, state
        return action, probabilities, value

    def _activate(self, values: Tensor) -> Tensor:
        return values.tanh() if self.options.activation == "tanh" else values.relu()


def _stack(hidden: tuple[int, ...]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(hidden))
