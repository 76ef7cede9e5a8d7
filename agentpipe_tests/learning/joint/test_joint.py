"""Perception and memory as modules: formulas against naive references, borders of episodes, what a rollout keeps."""

import numpy as np
import pytest
import torch

from agentpipe.environments.truth import TRUTH_SIZES
from agentpipe.errors import LearningError
from agentpipe.learning.joint.memory import Memory
from agentpipe.learning.joint.perception import BELIEF, Perception, perception_loss
from agentpipe.learning.joint.training import JointTraining
from agentpipe.learning.samples.rollout import Rollout, collect
from agentpipe.learning.workers import Workers
from agentpipe_tests.learning.knowing import Knowing, KnowingPool, knowing_network
from agentpipe_tests.learning.tiny import ACTIONS, WIDTH, TinyPool


def sizes(module):
    return sum(parameter.numel() for parameter in module.parameters())


def memory_of(units=5, inputs=4, actions=3):
    made = Memory(inputs, actions, 2, units, 6)
    made.initialise(torch.Generator().manual_seed(1))
    return made


def test_parameter_counts_are_what_the_formulas_say():
    inputs, width, actions, embedding, units, observation = 11, 7, 5, 3, 4, 9
    assert sizes(Perception(inputs, width, "relu")) == (inputs + 1) * width + (width + 1) * 21
    wide = inputs + embedding
    expected = (actions + 1) * embedding + 3 * units * (wide + units + 2) + (units + 1) * observation
    assert sizes(Memory(inputs, actions, embedding, units, observation)) == expected


def test_the_state_follows_the_formulas():
    """One step, gate by gate, in numpy."""
    memory, generator = memory_of(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    inputs, state, last = torch.randn(3, 4, generator=generator), torch.randn(3, 5, generator=generator), [0, 3, 2]
    weights = {name: parameter.detach().numpy().astype(np.float64) for name, parameter in memory.named_parameters()}
    seen = np.concatenate([inputs.numpy(), weights["embedding.weight"][last]], axis=1)
    before = np.where(np.array(last)[:, None] == 3, 0.0, state.numpy())
    given = (seen @ weights["cell.weight_ih"].T + weights["cell.bias_ih"]).reshape(3, 3, 5)
    kept = (before @ weights["cell.weight_hh"].T + weights["cell.bias_hh"]).reshape(3, 3, 5)
    reset, update = (1 / (1 + np.exp(-given[:, gate] - kept[:, gate])) for gate in (0, 1))
    expected = (1 - update) * np.tanh(given[:, 2] + reset * kept[:, 2]) + update * before
    new = memory(inputs, torch.tensor(last), state)
    np.testing.assert_allclose(new.detach().numpy(), expected, atol=1e-6)
    change = expected @ weights["predictor.weight"].T + weights["predictor.bias"]
    foreseen = memory.predict(new, torch.ones(3, 6)).detach().numpy()
    np.testing.assert_allclose(foreseen, 1 + change, atol=1e-6)


def test_unrolling_equals_stepping():
    memory, generator = memory_of(), torch.Generator().manual_seed(3)
    inputs, state = torch.randn(7, 10, 4, generator=generator), torch.randn(10, 5, generator=generator)
    last = torch.randint(0, 4, (7, 10), generator=generator)
    states = memory.unroll(inputs, last, state)
    for t in range(7):
        state = memory(inputs[t], last[t], state)
        torch.testing.assert_close(states[t], state, rtol=1e-5, atol=1e-6)


def test_an_episode_starts_without_what_was_before():
    """Whatever the state, where nothing was done yet the next one is the same; elsewhere it is not."""
    memory = memory_of()
    inputs = torch.ones(2, 4)
    one, other = (memory(inputs, torch.tensor([3, 1]), value * torch.ones(2, 5)) for value in (0.0, 40.0))
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])


def test_a_belief_is_three_distributions_that_start_nearly_even():
    perception = Perception(11, 7, "relu")
    perception.initialise(torch.Generator().manual_seed(0))
    belief = perception.belief(torch.randn(50, 11, generator=torch.Generator().manual_seed(1))).detach()
    assert belief.shape == (50, BELIEF)
    for part, count in zip(torch.split(belief, list(TRUTH_SIZES), dim=1), TRUTH_SIZES, strict=True):
        torch.testing.assert_close(part.sum(dim=1), torch.ones(50))
        assert float((part - 1 / count).abs().max()) < 0.02


def test_perception_is_judged_only_where_there_is_a_truth():
    logits = torch.randn(4, BELIEF, generator=torch.Generator().manual_seed(0))
    truth = torch.tensor([[0, 9, 2], [-1, 3, -1], [7, 0, -1], [-1, 1, -1]])
    known = torch.tensor([2.0, 4.0, 1.0])
    loss, right = perception_loss(logits, truth, known)
    expected, hits, start = 0.0, [0, 0, 0], 0
    for question, size in enumerate(TRUTH_SIZES):
        part = logits[:, start : start + size].double().numpy()
        start += size
        for row in range(4):
            answer = int(truth[row, question])
            if answer >= 0:
                expected += (np.log(np.exp(part[row]).sum()) - part[row, answer]) / float(known[question])
                hits[question] += int(part[row].argmax() == answer)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert right.tolist() == hits


def test_no_truth_at_all_is_no_loss():
    loss, right = perception_loss(torch.randn(3, BELIEF), torch.full((3, 3), -1), torch.zeros(3))
    assert (float(loss.detach()), right.tolist()) == (0.0, [0, 0, 0])


@pytest.mark.parametrize("encoder", ["fusion", "mlp"])
def test_the_trunk_reads_base_belief_and_memory_in_this_order(encoder):
    network = knowing_network(encoder=encoder)
    pool = TinyPool(9, 1)
    state = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    observation, time = torch.from_numpy(pool.observation), torch.from_numpy(pool.time)
    last = torch.arange(9) % 4
    encoded, new = network.encode(observation, last, time, state)
    base = WIDTH + (4 if encoder == "fusion" else 0)
    assert encoded.shape == (9, base + 21 + 5) == (9, network.encoded_size)
    torch.testing.assert_close(encoded[:, :WIDTH], network.normalise(observation))
    torch.testing.assert_close(encoded[:, base : base + 21], network.perception.belief(encoded[:, :base]))
    torch.testing.assert_close(encoded[:, base + 21 :], new)
    torch.testing.assert_close(new, network.memory(encoded[:, : base + 21], last, state))
    assert not encoded.requires_grad


def test_a_policy_with_a_memory_is_not_asked_without_its_state():
    network, pool = knowing_network(), TinyPool(2, 1)
    inputs = (torch.from_numpy(array) for array in (pool.observation, pool.last_action, pool.time, pool.mask))
    with pytest.raises(LearningError, match=r"without its state.*fresh_memory"):
        network(*inputs)


def test_policy_parameters_leave_out_what_is_trained_apart():
    names = [name for name, _ in knowing_network().policy_parameters()]
    plain = knowing_network(perception=0, memory=0)
    assert names == [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in plain.policy_parameters()]


# -- what a rollout keeps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncating", [True, False])
def test_a_rollout_keeps_the_memory_through_borders_of_episodes(truncating):
    """Two rollouts of six steps, episodes of four: played again step by step, with the state reset by hand."""
    made, again = Knowing(truncating=truncating), KnowingPool(24, 3, truncating=truncating)
    network, state, expected = made.network, torch.zeros(24, 5), None
    for number in range(2):
        rollout = made.collect()
        torch.testing.assert_close(rollout.joint.memory_start, state, msg=f"start of rollout {number}")
        for t in range(6):
            state[again.last_action == ACTIONS] = 0.0
            observation, last, time = (
                torch.from_numpy(array.copy()) for array in (again.observation, again.last_action, again.time)
            )
            if expected is not None:
                torch.testing.assert_close(expected[0], network.normalise(observation)[~expected[1]])
            with torch.no_grad():
                encoded, state = network.encode(observation, last, time, state)
            torch.testing.assert_close(rollout.encoded[t], encoded)
            assert rollout.joint.truth[t, :, 0].tolist() == again.target.tolist()
            again.step(rollout.action[t].numpy())
            ended = torch.from_numpy(again.terminated | again.truncated)
            place = rollout.joint.final_at[t]
            assert torch.equal(place >= 0, ended)
            assert 0 < int(ended.sum()) < 24
            final = network.normalise(torch.from_numpy(again.final_observation))[ended]
            torch.testing.assert_close(rollout.joint.finals[place[ended]], final)
            following = network.normalise(torch.from_numpy(again.observation.copy()))
            expected = (following[~ended], ended)
        torch.testing.assert_close(rollout.joint.after, network.normalise(torch.from_numpy(again.observation)))
    torch.testing.assert_close(made.joint.memory, state)


def test_values_behind_a_border_are_those_of_the_memory_that_led_there():
    made, again = Knowing(truncating=True, steps=4), KnowingPool(24, 3, truncating=True)
    rollout, network, state = made.collect(), made.network, torch.zeros(24, 5)
    with torch.no_grad():
        for t in range(4):
            seen = (torch.from_numpy(array.copy()) for array in (again.observation, again.last_action, again.time))
            _, state = network.encode(*seen, state)
            again.step(rollout.action[t].numpy())
        final = (again.final_observation, again.final_last_action, again.final_time, again.final_mask)
        *_, expected, _ = network(*(torch.from_numpy(array) for array in final), state)
        now = (again.observation, again.last_action, again.time, again.mask)
        *_, last, _ = network(*(torch.from_numpy(array) for array in now), state)
    ended = again.truncated
    np.testing.assert_allclose(rollout.final_value[3][ended], expected.numpy()[ended], rtol=1e-5)
    assert (rollout.final_value[3][~ended] == 0).all()
    np.testing.assert_allclose(rollout.last_value, last.numpy(), rtol=1e-5)


def test_a_rollout_that_keeps_no_memory_is_refused():
    network = knowing_network()
    rollout = Rollout(2, 8, network.encoded_size, ACTIONS)
    with pytest.raises(LearningError, match="does not keep the policy's memory"):
        collect(KnowingPool(8), network, rollout, np.random.default_rng(0), Workers(1))


def test_perception_is_refused_where_environments_tell_no_truth():
    with pytest.raises(LearningError, match=r"nothing to learn from.*perception.*width 0"):
        JointTraining(knowing_network(), TinyPool(8), Workers(1))
    assert JointTraining(knowing_network(perception=0), TinyPool(8), Workers(1)).record(2) is not None


def test_without_perception_and_memory_nothing_is_kept_or_done():
    made = Knowing(perception=0, memory=0)
    assert made.joint.record(4) is None
    assert made.joint.update(made.collect()) == {}
    assert made.joint.memory.shape == (24, 0)
