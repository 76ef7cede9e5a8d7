"""Retraining near the champion: the anchor's gradient, what it holds, and that nothing changes without it."""

import numpy as np
import pytest
import torch

from agentpipe.errors import CheckpointError, LearningError
from agentpipe.learning import checkpoint as checkpoints
from agentpipe.learning.gradient.anchor import Anchor, AnchoredBatch, AnchoredGradient
from agentpipe.learning.gradient.fused import SegmentedGradient
from agentpipe.learning.options import retraining_options, training_options
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.learning.workers import Workers
from agentpipe.settings import Settings
from agentpipe_tests.learning.gradient.reference import segmented_loss
from agentpipe_tests.learning.gradient.test_ppo import CLIP, batch_of, network_of
from agentpipe_tests.learning.test_trainer import run, weights_of
from agentpipe_tests.learning.tiny import ACTION_NAMES, NAMES, WIDTH, TinyPool, tiny_options, tiny_statistics


def neutral():
    """Statistics that leave an observation as it is."""
    statistics = ObservationStatistics.empty(NAMES)
    for row in (np.full((1, WIDTH), -1, np.float32), np.full((1, WIDTH), 1, np.float32)):
        statistics.update(row)
    return statistics


def champion_of(net, change=0.3):
    """A package near ``net``, with the normalisation that ``net`` gets too."""
    theirs = network_of((8, 6), shared_trunk=net.options.shared_trunk)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(change * torch.randn(parameter.shape, generator=generator))
    package = PolicyPackage(theirs, neutral(), NAMES, ACTION_NAMES)
    net.set_statistics(package.statistics)
    return package


@pytest.mark.parametrize("shared", [True, False])
def test_anchored_gradient_equals_autograd(shared):
    net = network_of((8, 6), shared_trunk=shared)
    champion = champion_of(net)
    batch = batch_of(net, size=150)
    rows = len(batch.action)
    batch.weight = 2 * torch.rand(rows, generator=torch.Generator().manual_seed(2))
    with Workers(2) as workers:
        anchored = Anchor(champion, net, workers, rows).fill(batch)
        sums = AnchoredGradient(net, CLIP.tolist(), 0.7, workers, 0.4)(anchored, torch.arange(rows), 0.02)
    fused = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad()
    with torch.no_grad():
        theirs = champion.network.heads(batch.encoded, batch.last_action, batch.mask)[0].log_softmax(1)
    mine = net.heads(batch.encoded, batch.last_action, batch.mask)[0].log_softmax(1)
    divergence = (theirs.exp() * (theirs - mine)).masked_fill(~batch.mask, 0.0).sum(1)
    loss = segmented_loss(net, batch, CLIP, 0.02, 0.7).total + 0.4 * (batch.weight * divergence).mean()
    loss.backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(fused[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert sums[-1] == pytest.approx(float((batch.weight * divergence).sum().detach()), rel=1e-4)
    torch.testing.assert_close(anchored.anchor, theirs.exp() * batch.mask, rtol=1e-5, atol=1e-7)


def test_at_the_champion_itself_the_anchor_pulls_nowhere():
    net = network_of((8, 6), shared_trunk=True)
    champion = champion_of(net, change=0.0)
    batch = batch_of(net)
    rows = torch.arange(len(batch.action))
    with Workers(1) as workers:
        SegmentedGradient(net, CLIP.tolist(), 0.5, workers)(batch, rows, 0.01)
        plain = net.actor_head.weight.grad.clone()
        anchored = Anchor(champion, net, workers, len(rows)).fill(batch)
        sums = AnchoredGradient(net, CLIP.tolist(), 0.5, workers, 3.0)(anchored, rows, 0.01)
    torch.testing.assert_close(net.actor_head.weight.grad, plain, rtol=1e-3, atol=1e-6)
    assert abs(sums[-1]) < 1e-3


def test_the_anchor_grows_with_the_batch_and_does_not_depend_on_threads():
    net = network_of((8, 6))
    champion, batch = champion_of(net), batch_of(net, size=300)
    found = []
    for threads in (1, 3):
        with Workers(threads) as workers:
            anchored = Anchor(champion, net, workers, 4).fill(batch)
            assert isinstance(anchored, AnchoredBatch)
            found.append(anchored.anchor.clone())
    assert torch.equal(*found)


def test_another_normalisation_than_the_champions_is_refused():
    net = network_of((8, 6))
    champion = champion_of(net)
    net.set_statistics(tiny_statistics())
    with pytest.raises(LearningError, match="normalisation"):
        Anchor(champion, net, Workers(1), 4)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    return run(tmp_path_factory.mktemp("parent"), tiny_options(budget_steps=10_000)).package


def divergence(package, parent):
    pool = TinyPool(512, seed=77)
    inputs = (pool.observation, pool.last_action, pool.time, pool.mask)
    q, p = (policy.act(*inputs).probabilities.astype(np.float64) for policy in (parent, package))
    return float(np.where(q > 0, q * np.log(np.maximum(q, 1e-30) / np.maximum(p, 1e-30)), 0).sum(axis=1).mean())


def test_an_anchored_retraining_stays_nearer_than_a_free_one(tmp_path, parent):
    """Rewards without meaning: what moves the policy is noise, and the anchor holds it."""
    options = {"budget_steps": 512 * 12, "ppo": {"entropy_weight": 0.3}}
    free, held = (
        run(tmp_path / str(weight), tiny_options(**{**options, "ppo": dict(options["ppo"])}, kl_weight=weight),
            TinyPool(seed=3, shuffled=True), initial=parent)
        for weight in (0.0, 3.0)
    )  # fmt: skip
    assert divergence(held.package, parent) < divergence(free.package, parent) / 3
    assert held.update_log[-1]["losses/anchor_kl"] > 0
    assert "losses/anchor_kl" not in free.update_log[-1]


def test_anchored_resume_equals_an_uninterrupted_run_bit_for_bit(tmp_path, parent):
    options = tiny_options(budget_steps=512 * 4, checkpoint_every=1, kl_weight=0.7)
    whole = run(tmp_path / "whole", options, initial=parent)
    asked = iter([False, False, True])
    part = run(tmp_path / "part", options, initial=parent, stop=lambda: next(asked))
    assert part.updates == 2
    resumed = run(tmp_path / "part", options, initial=parent, resume=part.checkpoint)
    assert checkpoints.load(resumed.checkpoint).digest == checkpoints.load(whole.checkpoint).digest
    assert weights_of(resumed) == weights_of(whole)
    other = run(tmp_path / "other", tiny_options(budget_steps=512)).package
    with pytest.raises(CheckpointError, match="another package"):
        run(tmp_path / "part", options, initial=other, resume=resumed.checkpoint)
    with pytest.raises(LearningError, match="without a package"):
        run(tmp_path / "part", options, resume=resumed.checkpoint)


def test_anchored_run_does_not_depend_on_the_number_of_threads(tmp_path, parent):
    one, two = (
        run(tmp_path / str(threads), tiny_options(budget_steps=1_024, kl_weight=0.5, threads=threads), initial=parent)
        for threads in (1, 2)
    )
    assert weights_of(one) == weights_of(two)


def test_an_option_that_asks_for_no_anchor_has_no_name():
    """Digests of trainings without an anchor are those from before there was one."""
    assert "kl_weight" not in tiny_options().decisive()
    assert tiny_options(kl_weight=0.5).decisive()["kl_weight"] == 0.5
    assert tiny_options(kl_weight=0.5).digest() != tiny_options().digest()


def test_retraining_options_are_those_of_a_training_near_the_champion():
    settings = Settings(finetuning={"retraining_rate_share": 0.2, "retraining_steps": 999, "retraining_kl_weight": 0.3})
    whole, near = training_options(settings), retraining_options(settings)
    assert near.ppo.learning_rate == pytest.approx(0.2 * whole.ppo.learning_rate)
    assert (near.budget_steps, near.kl_weight, near.warm_up) == (999, 0.3, None)
    assert near.replay == whole.replay
