"""PPO in one file, in the style of CleanRL's ``ppo.py`` (Huang et al., 2022), with action masks: everything in a row.

It differs from that script in this: masks, the value of an episode that was cut off is bootstrapped, a trunk that may
be shared, and a clock and snapshots from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions.categorical import Categorical

from agentpipe.environments.layout import ACTION_COUNT
from benchmarks.peers_settings import CLIP, DISCOUNT, GAE_LAMBDA, GRADIENT_NORM, HIDDEN, VALUE_WEIGHT

if TYPE_CHECKING:
    from benchmarks.peers_line import Floats, PreparedLine
    from benchmarks.peers_recorder import Recorder
    from benchmarks.peers_settings import Setting


def layer_init(layer: nn.Linear, std: float = 2.0**0.5) -> nn.Linear:
    """Orthogonal weights, no bias."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, activation: str) -> nn.Sequential:
    """Two hidden layers."""
    kind = nn.Tanh if activation == "tanh" else nn.ReLU
    return nn.Sequential(
        layer_init(nn.Linear(inputs, HIDDEN[0])), kind(), layer_init(nn.Linear(HIDDEN[0], HIDDEN[1])), kind()
    )


class Agent(nn.Module):
    """Actor and critic.

    Args:
        inputs: width of the prepared observation.
        setting: activation, and whether there is one trunk.
    """

    def __init__(self, inputs: int, setting: Setting) -> None:
        super().__init__()
        self.actor_trunk = mlp(inputs, setting.activation)
        self.critic_trunk = self.actor_trunk if setting.shared else mlp(inputs, setting.activation)
        self.actor = layer_init(nn.Linear(HIDDEN[1], ACTION_COUNT), std=0.01)
        self.critic = layer_init(nn.Linear(HIDDEN[1], 1), std=1.0)

    def get_value(self, x: Tensor) -> Tensor:
        """f32[N]."""
        value: Tensor = self.critic(self.critic_trunk(x)).squeeze(-1)
        return value

    def get_action_and_value(
        self, x: Tensor, mask: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Action, its log-probability, entropy and value, f32[N] each but the action i64[N]."""
        hidden = self.actor_trunk(x)
        logits = self.actor(hidden).masked_fill(~mask, -1e8)
        distribution: Any = Categorical(logits=logits, validate_args=False)
        if action is None:
            action = distribution.sample()
        value = self.critic(hidden if self.critic_trunk is self.actor_trunk else self.critic_trunk(x)).squeeze(-1)
        return action, distribution.log_prob(action), distribution.entropy(), value


def weights_of(agent: nn.Module) -> dict[str, Tensor]:
    """A copy."""
    return {name: tensor.detach().clone() for name, tensor in agent.state_dict().items()}


def logits_of(agent: Agent, x: Floats) -> Floats:
    """f32[N, A] before the mask."""
    with torch.no_grad():
        logits: Floats = agent.actor(agent.actor_trunk(torch.from_numpy(x))).numpy()
    return logits


def train(envs: PreparedLine, setting: Setting, seed: int, recorder: Recorder) -> Agent:  # noqa: PLR0915 - in a row
    """Trains until the recorder says that it is enough; the agent of the last update."""
    torch.manual_seed(seed)
    torch.set_num_threads(setting.threads)
    recorder.begin()
    num_envs, num_steps = envs.num_envs, setting.rollout_steps
    batch_size = num_envs * num_steps
    agent = Agent(envs.preparation.size, setting)
    optimizer = torch.optim.Adam(agent.parameters(), lr=setting.learning_rate, eps=1e-5, fused=True)

    obs = torch.zeros(num_steps, num_envs, envs.preparation.size)
    masks = torch.zeros(num_steps, num_envs, ACTION_COUNT, dtype=torch.bool)
    actions = torch.zeros(num_steps, num_envs, dtype=torch.int64)
    logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs) for _ in range(4))

    global_step = 0
    next_obs = torch.from_numpy(envs.reset(seed=seed)[0])
    next_mask = torch.from_numpy(envs.mask)
    while not recorder.look(global_step, lambda: weights_of(agent)):
        if setting.anneal:
            optimizer.param_groups[0]["lr"] = setting.learning_rate * (1.0 - recorder.progress)

        for step in range(num_steps):
            global_step += num_envs
            obs[step], masks[step] = next_obs, next_mask
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs, next_mask)
            values[step], actions[step], logprobs[step] = value, action, logprob
            found: tuple[Any, ...] = envs.step(action.numpy())
            next_obs, next_mask = torch.from_numpy(found[0]), torch.from_numpy(envs.mask)
            rewards[step] = torch.from_numpy(found[1])
            cut = torch.from_numpy(np.flatnonzero(found[3] & ~found[2]))
            if len(cut):
                with torch.no_grad():
                    final = agent.get_value(torch.from_numpy(found[4]["final_prepared"])[cut])
                rewards[step, cut] += DISCOUNT * final
            dones[step] = torch.from_numpy((found[2] | found[3]).astype(np.float32))

        with torch.no_grad():
            next_value = agent.get_value(next_obs)
            advantages, lastgaelam = torch.zeros_like(rewards), torch.zeros(num_envs)
            for t in reversed(range(num_steps)):
                nextvalues = next_value if t == num_steps - 1 else values[t + 1]
                nextnonterminal = 1.0 - dones[t]
                delta = rewards[t] + DISCOUNT * nextvalues * nextnonterminal - values[t]
                lastgaelam = delta + DISCOUNT * GAE_LAMBDA * nextnonterminal * lastgaelam
                advantages[t] = lastgaelam
            returns = advantages + values

        b_obs, b_masks = obs.flatten(0, 1), masks.flatten(0, 1)
        b_actions, b_logprobs = actions.flatten(), logprobs.flatten()
        b_advantages, b_returns = advantages.flatten(), returns.flatten()
        for _ in range(setting.epochs):
            for mb in torch.split(torch.randperm(batch_size), setting.minibatch):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_masks[mb], b_actions[mb])
                ratio = (newlogprob - b_logprobs[mb]).exp()
                adv = b_advantages[mb]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                v_loss = 0.5 * (newvalue - b_returns[mb]).square().mean()
                loss = pg_loss - setting.entropy_weight * entropy.mean() + VALUE_WEIGHT * v_loss
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(agent.parameters(), GRADIENT_NORM)
                optimizer.step()
    return agent
