"""The gradient of the warm-up's loss, against autograd."""

import numpy as np
import pytest
import torch

from agentpipe.learning.cloning.fused import (
    ANSWERED,
    ANSWERED_RIGHT,
    ANSWERS,
    CHOICES,
    CROSS_ENTROPY,
    RIGHT,
    VALUE_ERROR,
    ClonedBatch,
    CloningGradient,
)
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.workers import Workers

ROWS, WIDTH, ACTIONS = 150, 5, 9
QUESTIONS = np.array([-1, 0, 0, 0, 1, 1, -1, -1, -1], np.int8)


def network(**options):
    made = PolicyNetwork(
        WIDTH, ACTIONS, NetworkOptions(hidden=(8, 6), action_embedding=2, time_frequencies=1, **options)
    )
    made.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        made.actor_head.weight.mul_(100.0)
    return made


def batch_of(net):
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(ROWS, ACTIONS, generator=generator) < 0.4
    action = torch.randint(0, ACTIONS, (ROWS,), generator=generator)
    mask[torch.arange(ROWS), action] = True
    empty = torch.zeros(0)
    batch = ClonedBatch(
        encoded=torch.randn(ROWS, net.encoded_size, generator=generator),
        last_action=torch.randint(0, ACTIONS + 1, (ROWS,), generator=generator),
        mask=mask,
        action=action,
        log_probability=empty,
        advantage=empty,
        returns=torch.randn(ROWS, generator=generator),
        segment=empty,
        weight=empty,
    )
    first, second = (torch.randint(low, high, (ROWS,), generator=generator) for low, high in ((1, 4), (4, 6)))
    unasked = torch.rand(ROWS, 2, generator=generator) < 0.3
    batch.answers = torch.where(unasked, -1, torch.stack([first, second], dim=1))
    return batch


def unmasked_logits(net, batch):
    return net.heads(batch.encoded, batch.last_action, torch.ones_like(batch.mask))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("answer_weight", [0.0, 0.7])
def test_fused_gradient_equals_autograd(shared, answer_weight):
    net = network(shared_trunk=shared)
    batch = batch_of(net)
    with Workers(2) as workers:
        sums = CloningGradient(net, QUESTIONS, answer_weight, 0.3, workers)(batch, torch.arange(ROWS), 0.0)
    fused = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad()
    logits, value = unmasked_logits(net, batch)
    decided = torch.nn.functional.cross_entropy(logits.masked_fill(~batch.mask, -1e9), batch.action)
    answered = torch.zeros(())
    for question in range(2):
        others = torch.from_numpy(question != QUESTIONS)
        target = batch.answers[:, question]
        answered = answered + torch.nn.functional.cross_entropy(
            logits.masked_fill(others, -1e9), target, ignore_index=-1, reduction="sum"
        )
    error = value - batch.returns
    (decided + answer_weight * answered / ROWS + 0.3 * 0.5 * error.square().mean()).backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(fused[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert sums[CROSS_ENTROPY] == pytest.approx(float(decided.detach()) * ROWS, rel=1e-5)
    assert sums[VALUE_ERROR] == pytest.approx(float(error.detach().abs().sum()), rel=1e-5)
    assert sums[ANSWERED] == float((batch.answers >= 0).sum())
    assert sums[ANSWERS] == pytest.approx(float(answered.detach()), rel=1e-5)


def test_shares_that_were_right_are_counted():
    net = network()
    batch = batch_of(net)
    sums = CloningGradient(net, QUESTIONS, 1.0, 0.5, Workers(1))(batch, torch.arange(ROWS), 0.0)
    with torch.no_grad():
        logits, _ = unmasked_logits(net, batch)
    choice = batch.mask.sum(1) > 1
    right = logits.masked_fill(~batch.mask, -1e9).argmax(1) == batch.action
    assert sums[CHOICES] == float(choice.sum())
    assert sums[RIGHT] == float((right & choice).sum())
    answered = sum(
        int((logits.masked_fill(torch.from_numpy(q != QUESTIONS), -1e9).argmax(1) == batch.answers[:, q]).sum())
        for q in range(2)
    )
    assert sums[ANSWERED_RIGHT] == answered
