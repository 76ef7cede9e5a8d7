"""A policy with a memory from package to server: its state goes in, and out again, with every row."""

from __future__ import annotations

import contextlib
import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from google.protobuf import json_format
from safetensors.numpy import load, save

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, OBSERVATION_SIZE
from agentpipe.errors import AnswerError, BundleError, NonFiniteError, ParityError, ServiceError, ServingError
from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.normalisation import ObservationStatistics
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.serving import layout
from agentpipe.serving.bundle import build_bundle
from agentpipe.serving.client import PolicyClient
from agentpipe.serving.export import export_policy
from agentpipe.serving.inputs import PolicyInputs
from agentpipe.serving.parity import check_parity, compare, synthetic_inputs
from agentpipe.serving.places import Given, Installed
from agentpipe.serving.reference import read_reference
from agentpipe.serving.runtime import OneRow, Outputs, check_session, open_session, run_module, run_session
from agentpipe.serving.server import TritonServer, install_triton
from agentpipe.serving.server_check import check_in_server
from agentpipe.serving.signature import Signature, policy_signature
from agentpipe.serving.triton_config import read_config
from agentpipe.serving.verify import verify_bundle

from .fake_triton import fake_triton

UNITS, STEPS = 6, 7
LIMITS = {
    "observation": ("FP32", OBSERVATION_SIZE),
    "last_action": ("INT64", 1),
    "time": ("FP32", 1),
    "mask": ("BOOL", ACTION_COUNT),
    "memory": ("FP32", UNITS),
}


def network_of(**changes):
    options = {"hidden": (16, 16), "memory": UNITS, "perception": 8, "actor_head": "unit", **changes}
    network = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, NetworkOptions(**options))
    network.initialise(torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return network.eval()


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    generator = np.random.default_rng(0)
    mean, m2 = generator.normal(size=OBSERVATION_SIZE), generator.uniform(0.01, 900, size=OBSERVATION_SIZE)
    made = PolicyPackage(network_of(), ObservationStatistics(OBSERVATION_NAMES, 100.0, mean, m2))
    path = made.save(tmp_path_factory.mktemp("package") / "package")
    return made, path


@pytest.fixture(scope="module")
def built(package, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    return build_bundle(package[1], folder, provenance={}, evaluation={}, promotable=True)


def episode(rows=3, seed=1):
    """Questions of ``rows`` episodes side by side, step by step; the first has no last action."""
    parts = [synthetic_inputs(OBSERVATION_SIZE, ACTION_COUNT, count=rows, seed=seed + step) for step in range(STEPS)]
    parts[0].last_action[:] = ACTION_COUNT
    for part in parts[1:]:
        part.last_action[:] %= ACTION_COUNT
    return parts


def along(package, parts):
    """What torch answers, the memory handed on from step to step."""
    state, answers = np.full((len(parts[0]), UNITS), 0.9, np.float32), []
    for part in parts:
        answer = package.act(*part.arrays[:4], memory=state)
        state = answer.memory
        answers.append(Outputs(*answer))
    return answers


# -- the graph -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{"perception": 0, "actor_head": "linear", "encoder": "mlp", "memory": 1}, {"memory": 0}]
)
def test_graph_and_torch_agree_on_every_case_at_batch_1_7_and_64(changes, tmp_path):
    network = network_of(**changes)
    signature = policy_signature(OBSERVATION_SIZE, ACTION_COUNT, memory=network.memory_size)
    report = export_policy(network, tmp_path / "model.onnx", signature)
    assert report.unsupported == ()
    check_session(open_session(report.path), signature, report.path)
    inputs = synthetic_inputs(OBSERVATION_SIZE, ACTION_COUNT, count=64)
    found = check_parity(network, report.path, inputs.remembering(network.memory_size))
    assert {case.batch for case in found.cases} == {1, 7, 64}
    assert found.max_abs_probability <= 1e-5
    if network.memory_size:
        assert 0 <= found.max_abs_memory <= 1e-5
        assert all(case["max_abs_memory"] <= 1e-5 for case in found.to_json()["cases"])
    else:
        assert "max_abs_memory" not in json.dumps(found.to_json())


def test_what_the_unit_head_makes_of_its_weights_is_a_constant_of_the_graph(built):
    """Softplus and norm are of the weights, not of the question: the graph holds their result."""
    assert not built.export.operators.keys() & {"Softplus", "ReduceL2"}
    weights = {tensor.name: list(tensor.dims) for tensor in onnx.load(built.export.path).graph.initializer}
    assert weights["policy.actor_head.weight"] == [ACTION_COUNT, 16]
    assert not [name for name in weights if "weight_raw" in name or "log_temperature" in name]


def test_the_graph_names_the_state_that_goes_in_and_out(built):
    graph = onnx.load(built.export.path).graph
    names = [[value.name for value in values] for values in (graph.input, graph.output)]
    assert names == [
        ["observation", "last_action", "time", "mask", "memory"],
        ["action", "probabilities", "value", "memory_next"],
    ]


def test_a_state_that_differs_is_named_by_the_comparison():
    zeros = np.zeros(2, np.float32)
    asked = PolicyInputs(np.zeros((2, 5), np.float32), np.zeros(2, np.int64), zeros, np.ones((2, 3), np.bool_))
    good = Outputs(np.zeros(2, np.int64), np.full((2, 3), 1 / 3, np.float32), np.zeros(2, np.float32), np.zeros((2, 4)))
    for change, match in ((2e-5, "memory differ by"), (np.nan, "memory are not finite")):
        other = np.zeros((2, 4))
        other[1, 2] = change
        with pytest.raises(ParityError, match=match) as caught:
            compare("case", 1, good, good._replace(memory=other), asked)
        assert (caught.value.where["field"], caught.value.where["row"]) == ("memory", 1)


def test_at_the_start_of_an_episode_the_graph_does_not_look_at_the_state(built):
    session = open_session(built.export.path)
    row = episode(rows=2)[0]
    one, other = (run_session(session, row.remembering(UNITS, seed), 2) for seed in (0, 1))
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


# -- one row -------------------------------------------------------------------------------------------------------


def test_one_row_carries_the_state_from_question_to_question(package, built):
    parts, expected = episode(rows=1), along(package[0], episode(rows=1))
    one = OneRow(open_session(built.export.path))
    for part, answer in zip(parts, expected, strict=True):
        action, probabilities, value = one.act(
            part.observation[0], int(part.last_action[0]), float(part.time[0]), part.mask[0]
        )
        assert action == int(answer.action[0])
        np.testing.assert_allclose(probabilities, answer.probabilities[0], atol=1e-5)
        assert value == pytest.approx(float(answer.value[0]), abs=1e-4)
        np.testing.assert_allclose(one.memory, answer.memory[0], atol=1e-5)
    again = OneRow(open_session(built.export.path))
    last = parts[-1]
    arguments = (last.observation[0], int(last.last_action[0]), float(last.time[0]), last.mask[0])
    again.act(*arguments, memory=expected[-2].memory[0])
    np.testing.assert_allclose(again.memory, expected[-1].memory[0], atol=1e-5)


# -- the bundle ----------------------------------------------------------------------------------------------------


def test_a_bundle_with_a_memory_says_so_everywhere_and_verifies(built):
    assert verify_bundle(built.path).ok
    content = json.loads((built.path / layout.SIGNATURE).read_text())
    signature = Signature.from_json(content)
    assert signature.memory_size == UNITS
    assert content["inputs"][-1] == {"name": "memory", "dtype": "float32", "dims": [UNITS]}
    assert content["outputs"][-1] == {"name": "memory_next", "dtype": "float32", "dims": [UNITS]}
    config = read_config(built.path / "policy" / "config.pbtxt")
    assert list(config.input[-1].dims) == list(config.output[-1].dims) == [UNITS]
    assert {sample.inputs["memory"].zero_data for sample in config.model_warmup} == {True}
    inputs, outputs = read_reference(built.path / layout.REFERENCE, signature)
    assert inputs.memory.shape == outputs.memory.shape == (len(inputs), UNITS)
    assert 0.5 < np.abs(inputs.memory).max() <= 1.0
    assert built.parity.max_abs_memory <= 1e-5


def test_a_bundle_whose_known_states_are_others_does_not_verify(built, tmp_path):
    path = shutil.copytree(built.path, tmp_path / "bundle")
    file = path / layout.REFERENCE
    tensors = load(file.read_bytes())
    tensors["memory_next"] = tensors["memory_next"] + np.float32(1e-3)
    file.write_bytes(save(tensors))
    (path / layout.SUMS).write_bytes(layout.sums_text(layout.hash_files(path)))
    with pytest.raises(ParityError, match=r"memory differ by 0\.001"):
        verify_bundle(path)


def test_a_signature_that_forgets_the_memory_does_not_fit_the_graph(built, tmp_path):
    path = shutil.copytree(built.path, tmp_path / "bundle")
    content = json.loads((path / layout.SIGNATURE).read_text())
    content["inputs"], content["outputs"] = content["inputs"][:-1], content["outputs"][:-1]
    (path / layout.SIGNATURE).write_text(json.dumps(content))
    (path / layout.SUMS).write_bytes(layout.sums_text(layout.hash_files(path)))
    with pytest.raises(BundleError, match="memory"):
        verify_bundle(path)


def test_lines_are_told_apart_by_what_they_see_not_by_what_a_policy_remembers():
    plain, remembering = (policy_signature(5, 4, memory=memory) for memory in (0, 3))
    assert plain != remembering
    assert plain.same_line(remembering)
    assert remembering.same_line(policy_signature(5, 4, memory=9))
    assert not plain.same_line(policy_signature(5, 3))
    assert "memory" not in json.dumps(plain.to_json())


def test_rows_without_a_memory_are_what_they_were():
    rows = synthetic_inputs(5, 4, count=6)
    assert rows.memory.shape == (6, 0)
    assert list(rows.columns()) == ["observation", "last_action", "time", "mask"]
    assert rows.rows(slice(0, 2)).memory.shape == (2, 0)
    assert PolicyInputs.concatenate([rows, rows]).memory.shape == (12, 0)
    remembering = rows.remembering(3, seed=1)
    assert list(remembering.columns()) == ["observation", "last_action", "time", "mask", "memory"]
    assert remembering.with_mask(rows.mask[::-1]).memory is remembering.memory
    with pytest.raises(ServingError, match="memory is float64"):
        PolicyInputs(*rows.arrays[:4], np.ones((6, 3)))


# -- servers -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(bundle, folder, **ways):
    config = json_format.MessageToDict(
        read_config(bundle.path / "policy" / "config.pbtxt"), preserving_proto_field_name=True
    )
    with fake_triton(folder, limits=LIMITS, **ways) as server:
        server.take("policy", config, bundle.export.path.read_bytes())
        with PolicyClient(server.grpc, timeout=20.0) as client:
            yield client


def test_a_client_hands_the_state_on(package, built, tmp_path):
    parts, expected = episode(), along(package[0], episode())
    with served(built, tmp_path) as client:
        state = client.fresh_memory(3)
        for part, answer in zip(parts, expected, strict=True):
            found = client.act(*part.arrays[:4], memory=state)
            state = found.memory
            compare("served", 3, answer, Outputs(found.action, found.probabilities, found.value, state), part)


def test_a_client_refuses_a_state_that_is_missing_of_another_shape_or_not_finite(built, tmp_path):
    part = episode()[0]
    with served(built, tmp_path) as client:
        with pytest.raises(ServingError, match=r"inputs missing: \['memory'\]"):
            client.act(*part.arrays[:4])
        with pytest.raises(ServingError, match=r"memory has shape \[3, 5\], the model takes \[N, 6\]"):
            client.act(*part.arrays[:4], memory=np.zeros((3, 5), np.float32))
        with pytest.raises(NonFiniteError) as caught:
            client.act(*part.arrays[:4], memory=np.full((3, UNITS), np.nan, np.float32))
        assert caught.value.where["field"] == "memory"


def test_an_answer_without_a_state_or_with_one_that_is_not_finite_is_no_answer(built, tmp_path):
    part = episode()[0]
    spoils = {
        "the answer has no memory_next": lambda a: {n: x for n, x in a.items() if n != "memory_next"},
        "memory_next of the answer is not finite": lambda a: {**a, "memory_next": a["memory_next"] * np.nan},
    }
    for number, (match, spoil) in enumerate(spoils.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with served(built, folder, change_answer=spoil) as client, pytest.raises(AnswerError, match=match):
            client.act(*part.arrays[:4], memory=client.fresh_memory(3))


def test_a_server_check_looks_at_the_state_too(built, tmp_path):
    for name, spoil, status in (
        ("right", lambda answer: answer, "PASSED"),
        ("wrong", lambda answer: {**answer, "memory_next": answer["memory_next"] + 1}, "FAILED"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        with fake_triton(folder, limits=LIMITS, change_answer=spoil) as server:
            check = check_in_server(built.path, Given(server.http, server.grpc))
        assert check.status == status, check.reason
        assert ("memory differ by" in check.reason) == (status == "FAILED")


@pytest.mark.triton
@pytest.mark.slow
def test_a_real_server_takes_the_bundle_and_carries_the_state_through_an_episode(package, built):
    try:
        triton = install_triton()
    except ServiceError as error:
        pytest.skip(f"no Triton here: {error}")
    check = check_in_server(built.path, Installed(triton))
    assert (check.status, check.reason) == ("PASSED", "")
    parts, expected = episode(), along(package[0], episode())
    with TritonServer(built.path, triton) as server, PolicyClient(server.grpc, timeout=30.0) as client:
        state = client.fresh_memory(3)
        for part, answer in zip(parts, expected, strict=True):
            found = client.act(*part.arrays[:4], memory=state)
            state = found.memory
            compare("served", 3, answer, Outputs(found.action, found.probabilities, found.value, state), part)
    assert np.abs(state).max() > 0.01
    np.testing.assert_allclose(run_module(package[0].module, remembered(parts[-1], expected)).memory, state, atol=1e-5)


def remembered(part, answers):
    return PolicyInputs(*part.arrays[:4], answers[-2].memory)
