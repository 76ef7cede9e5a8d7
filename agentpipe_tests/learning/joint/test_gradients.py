"""Isolated gradients (S12), path by path: whose loss reaches whose parameters, and whose does not."""

import copy
import dataclasses

import pytest
import torch

from agentpipe.learning.gradient.fused import SegmentedGradient
from agentpipe.learning.gradient.ppo import prepare, update
from agentpipe.learning.gradient.rewards import RewardScaler
from agentpipe.learning.joint.perception import perception_loss
from agentpipe.learning.options import PpoOptions
from agentpipe_tests.learning.gradient.reference import segmented_loss
from agentpipe_tests.learning.knowing import Knowing
from agentpipe_tests.learning.tiny import WIDTH

CLIP = (0.15, 0.08, 0.25, 0.12)
STEPS, SIZE = 6, 24
BASE = WIDTH + 4


class Joint:
    """A rollout with everything that it was collected from, so that autograd can go through it again."""

    def __init__(self, **changes):
        self.made = made = Knowing(SIZE, STEPS, **changes)
        made.collect()  # so that the memory of the second rollout starts from something
        before = copy.deepcopy(made.pool)
        self.rollout, self.network = made.collect(), made.network
        self.seen = []
        for action in self.rollout.action.numpy():
            arrays = (before.observation, before.last_action, before.time)
            self.seen.append(tuple(torch.from_numpy(array.copy()) for array in arrays))
            before.step(action)
        generator = torch.Generator().manual_seed(5)
        batch = prepare(self.rollout, RewardScaler(SIZE, 0.9, 5.0), PpoOptions(discount=0.9)).batch
        nudge = 0.2 * torch.randn(batch.log_probability.shape, generator=generator)
        self.batch = dataclasses.replace(batch, log_probability=batch.log_probability + nudge)

    def encoded(self):
        """What the trunk reads and the memory's states, f32[T, N, ...] each, step after step from raw observations."""
        rows, state = [], self.rollout.joint.memory_start
        for seen in self.seen:
            rows.append(self.network.encode(*seen, state))
            state = rows[-1][1]
        return tuple(torch.stack(part) for part in zip(*rows, strict=True))

    def losses(self, whole, states):
        """The three losses, through one graph over all steps."""
        network, record = self.network, self.rollout.joint
        torch.testing.assert_close(whole.detach(), self.rollout.encoded)
        policy = segmented_loss(
            network, dataclasses.replace(self.batch, encoded=whole.flatten(0, 1)), torch.tensor(CLIP), 0.02, 0.5
        ).total
        truth = torch.from_numpy(record.truth).flatten(0, 1).long()
        known = (truth >= 0).sum(dim=0).float()
        perception, _ = perception_loss(network.perception(whole[..., :BASE].flatten(0, 1)), truth, known)
        now = whole[..., :WIDTH].detach()
        target = torch.cat([now[1:], record.after.unsqueeze(0)]).clone()
        target[record.final_at >= 0] = record.finals[record.final_at[record.final_at >= 0]]
        memory = (network.memory.predict(states, now) - target.detach()).square().mean()
        return {"policy": policy, "perception": perception, "memory": memory}

    def group(self, name):
        if name == "policy":
            return dict(self.network.policy_parameters())
        return dict(getattr(self.network, name).named_parameters())


def reached(loss, parameters):
    """The gradient of ``loss`` at each parameter; zeros where the graph does not lead there at all."""
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    return {n: torch.zeros_like(p) if gradient is None else gradient for (n, p), gradient in pairs}


@pytest.fixture(scope="module", params=["linear", "unit"])
def joint(request):
    return Joint(actor_head=request.param)


@pytest.fixture(scope="module")
def losses(joint):
    return joint.losses(*joint.encoded())


FORBIDDEN = [
    ("policy", "perception"),
    ("policy", "memory"),
    ("perception", "policy"),
    ("perception", "memory"),
    ("memory", "policy"),
    ("memory", "perception"),
]


@pytest.mark.parametrize(("loss", "group"), FORBIDDEN)
def test_a_loss_reaches_nothing_of_another_part(joint, losses, loss, group):
    for name, gradient in reached(losses[loss], joint.group(group)).items():
        assert not gradient.any(), f"{loss} loss at {group}.{name}"


@pytest.mark.parametrize("part", ["policy", "perception", "memory"])
def test_a_loss_reaches_every_parameter_of_its_own_part(joint, losses, part):
    for name, gradient in reached(losses[part], joint.group(part)).items():
        assert gradient.any(), f"{part} loss at {name}"


def test_the_policys_loss_reaches_the_weights_that_read_belief_and_memory(joint, losses):
    gradient = reached(losses["policy"], joint.group("policy"))["first.weight"]
    belief, memory = gradient[:, BASE : BASE + 21], gradient[:, BASE + 21 :]
    assert bool((belief != 0).any(dim=0).all())
    assert memory.shape[1] == 5
    assert bool((memory != 0).any(dim=0).all())


@pytest.mark.parametrize("part", ["policy", "perception", "memory"])
def test_the_joint_loss_gives_each_part_the_gradient_of_its_own_loss(joint, losses, part):
    total = sum(losses.values())
    own, together = (reached(loss, joint.group(part)) for loss in (losses[part], total))
    for name, gradient in own.items():
        assert torch.equal(gradient, together[name]), name


def test_the_written_out_gradient_of_the_policy_is_that_of_the_joint_loss(joint, losses):
    expected = reached(sum(losses.values()), joint.group("policy"))
    gradient = SegmentedGradient(joint.network, CLIP, 0.5, joint.made.workers)
    gradient(joint.batch, torch.arange(STEPS * SIZE), 0.02)
    for name, parameter in joint.network.policy_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    joint.network.zero_grad()


@pytest.mark.parametrize("part", ["perception", "memory"])
def test_what_joint_training_steps_along_is_the_gradient_of_the_joint_loss(joint, losses, part):
    expected = reached(sum(losses.values()), joint.group(part))
    trained = joint.made.joint
    own = next(found for found in trained._parts if found.name == part)
    trained._gradient(own, joint.rollout, joint.rollout.joint, torch.arange(SIZE))
    for name, parameter in joint.group(part).items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-7, msg=name)
    joint.network.zero_grad()


@pytest.mark.parametrize(("loss", "group"), [("policy", "perception"), ("policy", "memory"), ("memory", "perception")])
def test_a_missing_detach_would_be_noticed(monkeypatch, loss, group):
    """Negative control: where nothing is detached the same measurement finds what must not be there."""
    joint = Joint()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "detach", lambda tensor: tensor)
        encoded = joint.encoded()
    leaked = reached(joint.losses(*encoded)[loss], joint.group(group))
    assert any(bool(gradient.any()) for gradient in leaked.values())


def test_an_update_of_one_part_leaves_the_bytes_of_the_others():
    joint = Joint(minibatch=24)
    network, made = joint.network, joint.made
    parts = {name: joint.group(name) for name in ("policy", "perception", "memory")}

    def copied(*names):
        return [parameter.detach().clone() for name in names for parameter in parts[name].values()]

    def same(before, *names):
        return [torch.equal(one, other) for one, other in zip(before, copied(*names), strict=True)]

    apart, policy = copied("perception", "memory"), copied("policy")
    optimiser = torch.optim.Adam(parts["policy"].values(), lr=1e-2, fused=True)
    gradient = SegmentedGradient(network, CLIP, 0.5, made.workers)
    order = torch.Generator().manual_seed(0)
    update(network, optimiser, gradient, joint.batch, PpoOptions(epochs=2, minibatch=64), order, entropy_weight=0.01)
    assert all(same(apart, "perception", "memory"))
    assert not any(same(policy, "policy"))
    policy = copied("policy")
    made.joint.update(joint.rollout)
    assert all(same(policy, "policy"))
    assert not any(same(apart, "perception", "memory"))
