"""What a label teaches: its loss, its weight, and the parameters that its error type lets it move."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentpipe.errors import LearningError, NonFiniteError
from agentpipe.feedback.labelled import CORRECT, EXECUTION, NEEDS_IMPROVEMENT, PERCEPTION, PLANNING, WRONG
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.samples.batch import Batch
from agentpipe.learning.succession.labels import critic_loss, label_loss, lessons, row_losses
from agentpipe_tests.learning.succession.labelled import ACTION_SEGMENT, labelled
from agentpipe_tests.learning.tiny import ACTIONS, CHOICES, WIDTH

EXECUTE = torch.from_numpy(ACTION_SEGMENT == 3)
ENCODER = {"embedding.weight", "projection.weight", "first.weight", "first.bias"}
TRUNK = {"actor_hidden.0.weight", "actor_hidden.0.bias"}
ILLEGAL = -1e9


def network(*, shared=True, hidden=(8, 6), seed=0):
    net = PolicyNetwork(WIDTH, ACTIONS, NetworkOptions(hidden=hidden, action_embedding=3, shared_trunk=shared))
    net.initialise(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        net.actor_head.weight.mul_(100.0)
    return net


def taught(net, made, weak_negative=0.25):
    rows = np.arange(len(made))
    return lessons(made, rows, net, weak_negative=weak_negative, action_segment=ACTION_SEGMENT)


def gradients(net, made):
    """Loss of all rows and the gradient of every parameter (zeros where nothing arrived)."""
    net.zero_grad()
    loss, seen = label_loss(net, taught(net, made), EXECUTE)
    loss.backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}
    return float(loss.detach()), seen, found


def all_wrong(rows=40, **columns):
    made = labelled(rows, verdict=np.full(rows, WRONG, np.int8), **columns)
    corrected = made.action // CHOICES * CHOICES + (made.action + 1) % CHOICES
    return dataclasses.replace(made, corrected_action=corrected)


def routed(made, route):
    return dataclasses.replace(made, error_type=np.full(len(made), route, np.int8))


def test_losses_of_a_uniform_policy():
    """Three legal actions: towards one of them log 3, away from one log 3/2."""
    logits = torch.full((2, 4), ILLEGAL)
    logits[:, :3] = 0.7
    losses = row_losses(logits, torch.tensor([1, 1]), torch.tensor([False, True]))
    assert losses.tolist() == pytest.approx([np.log(3), np.log(1.5)], rel=1e-6)


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=6), st.integers(0, 5), st.sampled_from([True, False])
)
def test_gradient_of_a_row_is_the_written_one_and_never_exceeds_its_weight(values, chosen, away):
    chosen %= len(values)
    logits = torch.tensor([[*values, ILLEGAL]], dtype=torch.float64, requires_grad=True)
    row_losses(logits, torch.tensor([chosen]), torch.tensor([away])).sum().backward()
    p = np.exp(np.array(values, np.float64) - max(values))
    p /= p.sum()
    picked = np.arange(len(values)) == chosen
    others = np.where(picked, 0.0, np.exp(np.array(values) - max(v for i, v in enumerate(values) if i != chosen)))
    expected = np.where(picked, p[chosen], -p[chosen] * others / others.sum()) if away else p - picked
    np.testing.assert_allclose(logits.grad[0, :-1].numpy(), expected, atol=1e-9)
    assert logits.grad.abs().max() <= 1 + 1e-9
    assert logits.grad[0, -1] == 0


def test_away_from_the_only_legal_action_moves_nothing():
    logits = torch.tensor([[ILLEGAL, 2.0, ILLEGAL]], requires_grad=True)
    loss = row_losses(logits, torch.tensor([1]), torch.tensor([True])).sum()
    loss.backward()
    assert float(loss.detach()) == 0
    assert logits.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("verdict", "corrected", "expected"),
    [
        (CORRECT, False, ("taken", False, 1.0)),
        (WRONG, True, ("corrected", False, 1.0)),
        (WRONG, False, ("taken", True, 1.0)),
        (NEEDS_IMPROVEMENT, True, ("corrected", False, 0.25)),
        (NEEDS_IMPROVEMENT, False, ("taken", True, 0.25)),
    ],
)
def test_a_verdict_decides_target_direction_and_weight(verdict, corrected, expected):
    made = all_wrong(4, confidence=np.array([1.0, 0.5, 0.25, 0.0], np.float32))
    made = dataclasses.replace(made, verdict=np.full(4, verdict, np.int8))
    if not corrected:
        made = dataclasses.replace(made, corrected_action=np.full(4, -1, np.int64))
    batch = taught(network(), made)
    target, away, weight = expected
    assert batch.target.tolist() == (made.action if target == "taken" else made.corrected_action).tolist()
    assert batch.away.tolist() == [away] * 4
    assert batch.weight.tolist() == pytest.approx([weight * c for c in (1.0, 0.5, 0.25, 0.0)])
    assert batch.useful().tolist() == [0, 1, 2]


def test_a_decision_without_a_choice_weighs_nothing():
    made = labelled(3)
    mask = made.mask.copy()
    mask[1] = np.arange(ACTIONS) == made.action[1]
    assert taught(network(), dataclasses.replace(made, mask=mask)).useful().tolist() == [0, 2]


def test_the_loss_is_the_weighted_mean_over_all_rows():
    net = network()
    made = all_wrong(7, confidence=np.linspace(0.1, 1, 7).astype(np.float32))
    loss, seen, _ = gradients(net, made)
    logits, _ = net.heads(*(getattr(taught(net, made), name) for name in ("encoded", "last_action", "mask")))
    expected = -logits.log_softmax(1)[torch.arange(7), torch.from_numpy(made.corrected_action)]
    torch.testing.assert_close(seen, expected.detach())
    assert loss == pytest.approx(float((expected.detach() * torch.from_numpy(made.confidence)).sum()) / 7, rel=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_perception_errors_reach_the_encoder_alone_with_the_gradient_of_the_whole_loss(shared):
    net, made = network(shared=shared), all_wrong()
    whole_loss, _, whole = gradients(net, made)
    loss, _, found = gradients(net, routed(made, PERCEPTION))
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    for name, gradient in found.items():
        if name in (ENCODER | TRUNK if shared else ENCODER):
            torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-7, msg=name)
            assert gradient.abs().max() > 0, name
        else:
            assert gradient.abs().max() == 0, name


@pytest.mark.parametrize("shared", [True, False])
def test_planning_errors_reach_everything_behind_the_encoder_and_nothing_of_it(shared):
    net, made = network(shared=shared), all_wrong()
    _, _, whole = gradients(net, made)
    _, _, found = gradients(net, routed(made, PLANNING))
    for name, gradient in found.items():
        if name in (ENCODER | TRUNK if shared else ENCODER):
            assert gradient.abs().max() == 0, name
        elif not name.startswith("critic"):
            torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-7, msg=name)
            assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("shared", [True, False])
def test_execution_errors_reach_the_logits_of_the_execute_segment_alone(shared):
    net, made = network(shared=shared), all_wrong()
    made = made.take(ACTION_SEGMENT[made.action] == 3)
    _, _, whole = gradients(net, made)
    _, _, found = gradients(net, routed(made, EXECUTION))
    for name in ("actor_head.weight", "actor_head.bias"):
        torch.testing.assert_close(found[name][EXECUTE], whole[name][EXECUTE], rtol=1e-4, atol=1e-7)
        assert found[name][EXECUTE].abs().max() > 0
        assert found[name][~EXECUTE].abs().max() == 0
    assert all(found[name].abs().max() == 0 for name in found if not name.startswith("actor_head"))
    assert whole["first.weight"].abs().max() > 0  # the control: without the error type it goes further


def test_execution_errors_elsewhere_move_nothing():
    made = routed(all_wrong(), EXECUTION)
    segment = ACTION_SEGMENT[made.action]
    assert taught(network(), made).useful().tolist() == np.flatnonzero(segment == 3).tolist()


def test_error_type_of_a_correct_decision_is_no_route():
    made = labelled(5, error_type=np.full(5, PERCEPTION, np.int8))
    assert taught(network(), made).route.tolist() == [-1] * 5


def test_mixed_minibatch_adds_up_to_its_parts():
    net, made = network(), all_wrong(32)
    route = np.arange(32) % 4 - 1
    parts = [gradients(net, routed(made, kind).take(route == kind)) for kind in range(-1, 3)]
    _, _, whole = gradients(net, dataclasses.replace(made, error_type=route.astype(np.int8)))
    for name, gradient in whole.items():
        together = sum(found[name] for _, _, found in parts) / 4
        torch.testing.assert_close(gradient, together, rtol=1e-4, atol=1e-6, msg=name)


def rehearsed(net, rows=60, seed=1):
    generator = torch.Generator().manual_seed(seed)
    batch = Batch.allocate(rows, net.encoded_size, ACTIONS)
    batch.encoded.normal_(generator=generator)
    batch.returns.normal_(generator=generator)
    batch.segment[:] = torch.arange(rows) % 4
    batch.mask[:] = True
    batch.weight[:] = torch.rand(rows, generator=generator)
    return batch


@pytest.mark.parametrize("shared", [True, False])
def test_planning_errors_weigh_the_critics_own_targets_in_their_segment(shared):
    """Two planning errors of weights 0.5 and 0.2 in segment 2 among 10 rows: the value loss there counts 0.07 more."""
    net, batch = network(shared=shared), rehearsed(network())
    made = all_wrong(10, action=np.full(10, 2 * CHOICES, np.int64), mask=np.tile(np.arange(ACTIONS) // 3 == 2, (10, 1)))
    route, confidence = np.full(10, -1, np.int8), np.ones(10, np.float32)
    route[[3, 6]], confidence[[3, 6]] = PLANNING, (0.5, 0.2)
    lesson = taught(net, dataclasses.replace(made, error_type=route, confidence=confidence))
    rows = torch.arange(60)
    net.zero_grad()
    loss = critic_loss(net, lesson, batch, rows, 0.5)
    loss.backward()
    _, value = net.heads(batch.encoded, batch.last_action, batch.mask)
    error = batch.weight * (value.detach() - batch.returns).square()
    assert float(loss.detach()) == pytest.approx(0.5 * 0.07 * float(error[batch.segment == 2].sum()) / 60 / 2, rel=1e-5)
    reached = {name for name, p in net.named_parameters() if p.grad is not None and bool(p.grad.abs().max() > 0)}
    head, own = {"critic_head.weight", "critic_head.bias"}, {"critic_hidden.0.weight", "critic_hidden.0.bias"}
    assert reached == (head if shared else head | own)


def test_without_planning_errors_the_critic_gets_nothing_more():
    net = network()
    loss = critic_loss(net, taught(net, all_wrong()), rehearsed(net), torch.arange(60), 0.5)
    assert float(loss.detach()) == 0


def spoiled(name, value, row=2):
    made = all_wrong(5)
    column = getattr(made, name).copy()
    column[row] = value
    return dataclasses.replace(made, **{name: column})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("observation", np.nan, NonFiniteError),
        ("time", np.inf, NonFiniteError),
        ("confidence", np.nan, NonFiniteError),
        ("confidence", 1.5, LearningError),
        ("confidence", -0.1, LearningError),
        ("action", ACTIONS, LearningError),
        ("action", -1, LearningError),
        ("corrected_action", ACTIONS, LearningError),
        ("last_action", ACTIONS + 1, LearningError),
        ("mask", False, LearningError),
        ("verdict", 3, LearningError),
        ("error_type", 7, LearningError),
    ],
)
def test_what_does_not_fit_names_its_label(name, value, error):
    with pytest.raises(error) as caught:
        taught(network(), spoiled(name, value))
    assert caught.value.where["label"] == "label-00002"
    assert name in caught.value.where["field"]


def test_a_correction_that_the_mask_forbids_is_refused():
    made = all_wrong(5)
    other = (made.action + CHOICES) % ACTIONS
    with pytest.raises(LearningError, match="mask forbids"):
        taught(network(), dataclasses.replace(made, corrected_action=other))


def test_decisions_of_another_line_are_refused():
    made = labelled(3)
    with pytest.raises(LearningError, match="observation is float32"):
        taught(network(), dataclasses.replace(made, observation=made.observation[:, :-1]))


def test_loss_that_is_not_finite_names_its_label():
    net = network()
    lesson = taught(net, all_wrong(4))
    lesson.encoded[1] = torch.inf
    with pytest.raises(NonFiniteError) as caught:
        label_loss(net, lesson, EXECUTE)
    assert caught.value.where["label"] == "label-00001"
