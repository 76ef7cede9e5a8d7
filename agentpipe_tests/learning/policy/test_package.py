"""The policy package: equal after loading, damage and other versions refused, the mask never violated."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, OBSERVATION_SIZE
from agentpipe.errors import (
    ActionError,
    CheckpointError,
    EmptyMaskError,
    NonFiniteError,
    SimulationError,
    VersionError,
)
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import OBSERVATION_CLIP, PolicyNetwork
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.policy.package import PolicyPackage


def make(seed=0, **changes):
    options = NetworkOptions(**{"hidden": (16, 16), "action_embedding": 4, "time_frequencies": 2, **changes})
    network = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, options)
    network.initialise(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        network.actor_head.weight.mul_(100.0)
    statistics = ObservationStatistics.empty(OBSERVATION_NAMES)
    statistics.update(np.random.default_rng(seed).normal(5.0, 3.0, (50, OBSERVATION_SIZE)))
    return PolicyPackage(network, statistics, provenance={"parent": None, "updates": 3})


def inputs(rows=5, seed=0, legal=0.2):
    generator = np.random.default_rng(seed)
    mask = generator.random((rows, ACTION_COUNT)) < legal
    mask[np.arange(rows), generator.integers(0, ACTION_COUNT, rows)] = True
    observation = generator.normal(5.0, 30.0, (rows, OBSERVATION_SIZE)).astype(np.float32)
    last_action = generator.integers(0, ACTION_COUNT + 1, rows)
    return observation, last_action, generator.random(rows, dtype=np.float32), mask


@pytest.fixture(scope="module")
def package():
    return make()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_loaded_package_acts_the_same(tmp_path, shared, activation):
    package = make(shared_trunk=shared, activation=activation)
    loaded = PolicyPackage.load(package.save(tmp_path / "p"))
    for mine, theirs in zip(package.act(*inputs()), loaded.act(*inputs()), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    assert loaded.digest == package.digest
    assert loaded.provenance == {"parent": None, "updates": 3}
    assert loaded.signature == package.signature


def test_fresh_process_gives_equal_actions(tmp_path, package):
    package.save(tmp_path / "p")
    code = (
        "import sys; from pathlib import Path; from agentpipe.learning.policy.package import PolicyPackage;"
        "from agentpipe_tests.learning.policy.test_package import inputs;"
        "print(PolicyPackage.load(Path(sys.argv[1])).act(*inputs()).action.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "p")], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == package.act(*inputs()).action.tolist()


def test_saving_twice_gives_equal_bytes(tmp_path, package):
    first, second = package.save(tmp_path / "a"), package.save(tmp_path / "b")
    for name in ("package.json", "weights.safetensors", "statistics.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_digest_ignores_provenance_but_not_weights():
    package, other = make(), make()
    other.provenance["parent"] = "someone"
    assert other.digest == package.digest
    assert make(seed=1).digest != package.digest


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["package.json", "weights.safetensors", "statistics.safetensors"]),
    st.floats(0, 1),
    st.integers(0, 7),
)
def test_any_flipped_bit_is_found(tmp_path_factory, name, where, bit):
    root = tmp_path_factory.mktemp("flip")
    make().save(root / "p")
    file = root / "p" / name
    data = bytearray(file.read_bytes())
    data[min(int(where * len(data)), len(data) - 1)] ^= 1 << bit
    file.write_bytes(data)
    unchanged = name == "package.json" and _same_json(data, file)
    if not unchanged:
        with pytest.raises((CheckpointError, VersionError)):
            PolicyPackage.load(root / "p")


def _same_json(data, file):
    """White space between tokens may change without changing what is read; everything that is read is checked."""
    try:
        content = json.loads(data.decode())
    except ValueError:
        return False
    return content == json.loads(make().save(file.parent / "again").joinpath("package.json").read_text())


def test_missing_file_is_named(tmp_path, package):
    package.save(tmp_path / "p")
    (tmp_path / "p" / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        PolicyPackage.load(tmp_path / "p")
    with pytest.raises(CheckpointError, match=r"package\.json"):
        PolicyPackage.load(tmp_path / "nothing")


def test_another_format_version_is_refused(tmp_path, package):
    package.save(tmp_path / "p")
    file = tmp_path / "p" / "package.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))
    with pytest.raises(VersionError, match="format 2, this program reads 1"):
        PolicyPackage.load(tmp_path / "p")


def test_names_that_do_not_fit_the_network_are_refused(package):
    with pytest.raises(CheckpointError, match="does not fit"):
        PolicyPackage(package.network, package.statistics, action_names=("one",))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.5), st.booleans())
def test_mask_is_never_violated(seed, legal, greedy):
    observation, last_action, time, mask = inputs(9, seed, legal)
    uniforms = np.random.default_rng(seed).random(9)
    output = PACKAGE.act(observation, last_action, time, mask, greedy=greedy, uniforms=uniforms)
    assert mask[np.arange(9), output.action].all()
    assert (output.probabilities[~mask] == 0).all()
    np.testing.assert_allclose(output.probabilities.sum(axis=1), 1.0, atol=1e-6)


PACKAGE = make()


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_extreme_uniform_numbers_still_give_legal_actions(uniform):
    observation, last_action, time, mask = inputs(50)
    output = PACKAGE.act(observation, last_action, time, mask, greedy=False, uniforms=np.full(50, uniform))
    assert mask[np.arange(50), output.action].all()


def test_sampled_actions_follow_the_probabilities():
    observation, last_action, time, mask = (part.repeat(20_000, axis=0) for part in inputs(1, legal=0.1))
    uniforms = np.random.default_rng(0).random(20_000)
    output = PACKAGE.act(observation, last_action, time, mask, greedy=False, uniforms=uniforms)
    shares = np.bincount(output.action, minlength=ACTION_COUNT) / 20_000
    np.testing.assert_allclose(shares, output.probabilities[0], atol=0.015)


def test_module_gives_minus_one_and_zeros_for_an_empty_mask(package):
    observation, last_action, time, mask = (torch.from_numpy(part) for part in inputs(3))
    mask[1] = False
    with torch.no_grad():
        action, probabilities, value = package.module(observation, last_action, time, mask)
    assert action[1] == -1
    assert action[0] >= 0
    assert probabilities[1].tolist() == [0.0] * ACTION_COUNT
    assert torch.isfinite(value).all()


def test_act_turns_an_empty_mask_into_an_error(package):
    observation, last_action, time, mask = inputs(3)
    mask[2] = False
    with pytest.raises(EmptyMaskError) as caught:
        package.act(observation, last_action, time, mask)
    assert caught.value.where["environment"] == 2


def test_non_finite_observation_is_named(package):
    observation, last_action, time, mask = inputs(3)
    observation[1, 4] = np.inf
    with pytest.raises(NonFiniteError) as caught:
        package.act(observation, last_action, time, mask)
    assert caught.value.where == {"environment": 1, "field": OBSERVATION_NAMES[4]}


def test_out_of_range_observations_are_clipped_to_eight_deviations(package):
    observation, last_action, time, mask = inputs(2)
    observation[0], observation[1] = 1e30, -1e30
    encoded, _ = package.network.encode(*(torch.from_numpy(part) for part in (observation, last_action, time)))
    assert encoded[0, :OBSERVATION_SIZE].unique().tolist() == [OBSERVATION_CLIP]
    assert encoded[1, :OBSERVATION_SIZE].unique().tolist() == [-OBSERVATION_CLIP]
    assert np.isfinite(package.act(observation, last_action, time, mask).value).all()


@pytest.mark.parametrize(
    ("index", "dtype", "message"),
    [(0, np.float64, "observation is float64"), (1, np.int32, "last_action is int32"), (3, np.int8, "mask is int8")],
)
def test_wrong_types_are_refused(package, index, dtype, message):
    given_inputs = list(inputs(2))
    given_inputs[index] = given_inputs[index].astype(dtype)
    with pytest.raises(SimulationError, match=message):
        package.act(*given_inputs)


def test_last_action_out_of_range_is_refused(package):
    observation, last_action, time, mask = inputs(2)
    last_action[0] = ACTION_COUNT + 1
    with pytest.raises(ActionError):
        package.act(observation, last_action, time, mask)


def test_embedding_table_equals_concatenation():
    """The table look-up is the concatenation of the embedding to the input, written differently."""
    network = make(activation="tanh").network
    observation, last_action, time, mask = (torch.from_numpy(part) for part in inputs(6))
    encoded, _ = network.encode(observation, last_action, time)
    wide = torch.cat([encoded, network.embedding(last_action)], dim=1)
    weight = torch.cat([network.first.weight, network.projection.weight], dim=1)
    first = torch.tanh(torch.nn.functional.linear(wide, weight, network.first.bias))
    actor = torch.tanh(network.actor_hidden[0](first[:, :16]))
    logits = network.actor_head(actor).masked_fill(~mask, -1e9)
    torch.testing.assert_close(network.heads(encoded, last_action, mask)[0], logits)
