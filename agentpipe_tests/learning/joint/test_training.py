"""Training perception and memory: they learn, on any number of threads alike, and resuming equals continuing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from agentpipe.errors import CheckpointError, LearningError, NonFiniteError
from agentpipe.learning.joint.record import JointRecord
from agentpipe.learning.samples.rollout import Rollout
from agentpipe.learning.workers import single_threaded_torch
from agentpipe_tests.learning.knowing import Knowing
from agentpipe_tests.learning.tiny import ACTIONS

FILE = Path("joint.safetensors")


@pytest.fixture(autouse=True)
def _single_threaded():
    with single_threaded_torch():
        yield


def learned(updates, **changes):
    made = Knowing(**{"size": 64, "steps": 8, "minibatch": 128, **changes})
    return made, [made.joint.update(made.collect(), number) for number in range(updates)]


@pytest.mark.parametrize("truncating", [False, True])
def test_a_final_observation_that_is_not_finite_is_named_before_a_memory_foresees_it(truncating):
    made = Knowing(size=64, steps=8, minibatch=128, truncating=truncating)
    step = made.pool.step

    def breaks(actions):
        step(actions)
        made.pool.final_observation[5, 1] = np.nan

    made.pool.step = breaks
    with pytest.raises(NonFiniteError) as caught:
        made.collect()
    assert caught.value.where["environment"] == made.pool.names[5]
    assert caught.value.where["field"] == "observation"


def bytes_of(made):
    weights = {name: tensor.numpy().tobytes() for name, tensor in made.network.state_dict().items()}
    return weights | {name: array.tobytes() for name, array in made.joint.state().items()}


def test_perception_learns_the_fault_and_memory_what_comes_next():
    made, figures = learned(80, steps=4, minibatch=64)
    assert figures[0]["perception/machine_right"] < 0.7
    last = {name: np.mean([each[name] for each in figures[-8:]]) for name in figures[0]}
    assert last["perception/machine_right"] > 0.85
    assert last["perception/mode_right"] > 0.85
    assert last["perception/severity_right"] > 0.75
    assert last["memory/loss"] < 0.85 * last["memory/loss_if_unchanged"]
    assert figures[0]["memory/loss"] > 0.95 * figures[0]["memory/loss_if_unchanged"]
    assert made.joint.memory.abs().max() < 1.0


def test_perception_learns_nothing_from_a_truth_that_is_not_shown(monkeypatch):
    """Negative control: the truth of another environment is right by chance, a third of the time."""
    before = JointRecord.before

    def mixed(record, t, pool):
        before(record, t, pool)
        record.truth[t] = np.random.default_rng(t).permutation(record.truth[t])

    monkeypatch.setattr(JointRecord, "before", mixed)
    _, figures = learned(50, steps=4, minibatch=64)
    assert figures[-1]["perception/machine_right"] < 0.55


@pytest.mark.parametrize("part", ["perception", "memory"])
def test_one_of_both_is_trained_alone(part):
    changes = {"perception": {"memory": 0}, "memory": {"perception": 0}}[part]
    _, figures = learned(1, **changes)
    assert {name.partition("/")[0] for name in figures[0]} == {part}


def test_the_result_does_not_depend_on_the_number_of_threads():
    first, second, third = (learned(3, threads=threads)[0] for threads in (1, 2, 3))
    assert bytes_of(first) == bytes_of(second) == bytes_of(third)


def test_resuming_equals_continuing_bit_for_bit():
    whole, _ = learned(3)
    snapshot, state = whole.pool.snapshot(), whole.joint.state()
    weights = {name: tensor.clone() for name, tensor in whole.network.state_dict().items()}
    uniforms = whole.uniforms.bit_generator.state
    again = Knowing(size=64, steps=8, minibatch=128, threads=2)
    again.pool.restore(snapshot)
    again.network.load_state_dict(weights)
    again.joint.restore(state, FILE)
    again.uniforms.bit_generator.state = uniforms
    for made in (whole, again):
        for number in range(3):
            made.joint.update(made.collect(), number)
    assert bytes_of(whole) == bytes_of(again)
    assert whole.rollout.encoded.numpy().tobytes() == again.rollout.encoded.numpy().tobytes()


def test_without_the_memory_resuming_would_not_equal_continuing():
    """Negative control of the state that is kept."""
    whole, _ = learned(2)
    state = whole.joint.state()
    again, _ = learned(2)
    again.joint.restore({**state, "state": np.zeros_like(state["state"])}, FILE)
    assert whole.collect().encoded.numpy().tobytes() != again.collect().encoded.numpy().tobytes()


def test_a_state_of_another_shape_is_refused_and_changes_nothing():
    made, _ = learned(1)
    before, state = bytes_of(made), made.joint.state()
    with pytest.raises(CheckpointError, match=r"a memory of \(63, 5\) float32, this run has \(64, 5\)"):
        made.joint.restore({**state, "state": state["state"][:-1]}, FILE)
    with pytest.raises(CheckpointError, match=r"memory\.cell\.weight_hh/exp_avg"):
        made.joint.restore({**state, "memory.cell.weight_hh/exp_avg": np.zeros((2, 2), np.float32)}, FILE)
    with pytest.raises(CheckpointError, match="'state' is missing"):
        made.joint.restore({}, FILE)
    assert bytes_of(made) == before


@pytest.mark.parametrize(("column", "name"), [(0, r"perception\.hidden\.weight"), (-1, r"memory\.")])
def test_the_first_gradient_that_is_not_finite_stops_before_the_step(column, name):
    """A NaN in an observation reaches perception first; one behind the last step is the memory's alone."""
    made, _ = learned(1, minibatch=512)
    rollout = made.collect()
    if column == 0:
        rollout.encoded[2, 5, 0] = float("nan")
    else:
        rollout.joint.after[5, 0] = float("nan")
        rollout.joint.final_at[-1] = -1
    before = bytes_of(made)
    with pytest.raises(NonFiniteError, match=name) as caught:
        made.joint.update(rollout, 7)
    assert caught.value.where["step"] == 7
    after = bytes_of(made)
    changed = {key.partition(".")[0] for key in after if after[key] != before[key]}
    assert changed == (set() if column == 0 else {"perception"})


def test_one_environment_and_one_step_are_enough():
    made, figures = learned(2, size=1, steps=1)
    assert all(np.isfinite(value) for row in figures for value in row.values())
    assert made.joint.memory.shape == (1, 5)


def test_a_rollout_without_a_record_is_refused():
    made = Knowing()
    with pytest.raises(LearningError, match="keeps nothing to learn from"):
        made.joint.update(Rollout(2, 24, made.network.encoded_size, ACTIONS))


def test_figures_are_means_over_what_was_seen_before_each_step():
    """With one minibatch the loss is that of the weights before the update: computed plainly here."""
    made = Knowing(size=24, steps=6)
    rollout = made.collect()
    base = rollout.encoded[..., : made.network.base_size].flatten(0, 1)
    truth = torch.from_numpy(rollout.joint.truth).flatten(0, 1).long()
    with torch.no_grad():
        logits = torch.split(made.network.perception(base), [8, 10, 3], dim=1)
    losses = [
        torch.nn.functional.cross_entropy(part, truth[:, question], ignore_index=-1)
        for question, part in enumerate(logits)
    ]
    right = [
        (part.argmax(1) == truth[:, question]).sum() / (truth[:, question] >= 0).sum()
        for question, part in enumerate(logits)
    ]
    figures = made.joint.update(rollout)
    assert figures["perception/loss"] == pytest.approx(float(sum(losses)), rel=1e-5)
    found = [figures[f"perception/{name}_right"] for name in ("machine", "mode", "severity")]
    assert found == pytest.approx([float(share) for share in right], rel=1e-6)
