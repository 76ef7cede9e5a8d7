"""The exported graph: portable, self-contained, the same bytes each time."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from agentpipe.errors import BundleError, ParityError, ServingError
from agentpipe.serving.export import export_policy, unsupported_operators
from agentpipe.serving.inputs import PolicyInputs
from agentpipe.serving.latency import measure_latency
from agentpipe.serving.optimised import operator_table, optimise
from agentpipe.serving.parity import check_parity, compare, parity_cases, synthetic_inputs
from agentpipe.serving.runtime import OneRow, Outputs, open_session, run_module, run_session
from agentpipe.serving.signature import policy_signature

from .conftest import TinyPolicy

SIGNATURE = policy_signature(5, 4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    return export_policy(TinyPolicy().eval(), path, SIGNATURE)


def test_graph_has_the_named_tensors_with_a_symbolic_batch(exported):
    graph = onnx.load(exported.path).graph
    shapes = {}
    for value in (*graph.input, *graph.output):
        tensor = value.type.tensor_type
        shapes[value.name] = (tensor.elem_type, [dim.dim_param or dim.dim_value for dim in tensor.shape.dim])
    batch = shapes["observation"][1][0]
    assert isinstance(batch, str)
    assert shapes == {
        "observation": (TensorProto.FLOAT, [batch, 5]),
        "last_action": (TensorProto.INT64, [batch, 1]),
        "time": (TensorProto.FLOAT, [batch, 1]),
        "mask": (TensorProto.BOOL, [batch, 4]),
        "action": (TensorProto.INT64, [batch, 1]),
        "probabilities": (TensorProto.FLOAT, [batch, 4]),
        "value": (TensorProto.FLOAT, [batch, 1]),
    }


def test_graph_holds_only_standard_operators_of_opset_20(exported):
    assert exported.unsupported == ()
    assert exported.opset == 20
    assert [(entry.domain, entry.version) for entry in onnx.load(exported.path).opset_import] == [("", 20)]


def test_an_operator_of_another_domain_counts_as_unsupported():
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    nodes = [helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft"), helper.make_node("Relu", ["y"], ["z"])]
    graph = helper.make_graph(nodes, "g", [value], [])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    )
    assert unsupported_operators(model) == ("com.microsoft::Gelu",)


def test_weights_are_inside_the_file_and_no_trace_of_the_machine(exported):
    model = onnx.load(exported.path, load_external_data=False)
    assert all(tensor.data_location == TensorProto.DEFAULT for tensor in model.graph.initializer)
    assert all(not node.metadata_props and not node.doc_string for node in model.graph.node)
    assert b".py" not in exported.path.read_bytes()


def test_equal_weights_give_equal_bytes_and_other_weights_others(exported, tmp_path):
    again = export_policy(TinyPolicy().eval(), tmp_path / "again.onnx", SIGNATURE)
    assert again.digest == exported.digest
    other = export_policy(TinyPolicy(seed=1).eval(), tmp_path / "other.onnx", SIGNATURE)
    assert other.digest != exported.digest


def test_normalisation_is_inside_the_graph(exported):
    """At the mean of each feature the first layer sees zeros: shifting mean and observation alike changes nothing."""
    session = open_session(exported.path)
    row = synthetic_inputs(5, 4, count=1)
    mean = np.array([[0.0, 10.0, -3.0, 0.5, 100.0]], dtype=np.float32)
    at_mean = run_session(session, PolicyInputs(mean, row.last_action, row.time, row.mask), 1).probabilities
    policy = TinyPolicy().eval()
    policy.mean.zero_()
    expected = run_module(policy, PolicyInputs(np.zeros_like(mean), row.last_action, row.time, row.mask))
    np.testing.assert_allclose(at_mean, expected.probabilities, atol=1e-6)


def test_a_network_that_onnx_cannot_express_is_a_typed_error(tmp_path):
    class Foreign(TinyPolicy):
        def forward(self, observation, last_action, time, mask):
            action, p, value = super().forward(observation, last_action, time, mask)
            return action, p, torch.special.bessel_j0(value)

    with pytest.raises(BundleError, match="cannot be exported"):
        export_policy(Foreign().eval(), tmp_path / "model.onnx", SIGNATURE)
    assert not (tmp_path / "model.onnx").exists()


def test_parity_covers_recorded_extreme_single_random_and_empty_masks_at_three_batch_sizes(exported):
    report = check_parity(TinyPolicy().eval(), exported.path, synthetic_inputs(5, 4))
    assert {(case.case, case.batch) for case in report.cases} == {
        (case, batch)
        for case in ("recorded", "out_of_range", "single_action", "random_mask", "empty_mask")
        for batch in (1, 7, 64)
    }
    rows = {case.case: case.rows for case in report.cases}
    assert rows == {"recorded": 256, "out_of_range": 26, "single_action": 4, "random_mask": 1000, "empty_mask": 8}
    assert report.max_abs_probability <= 1e-5
    assert report.max_relative_value <= 1e-5
    assert report.action_mismatches == 0


def test_parity_cases_reach_far_out_of_range_and_stay_finite():
    cases = parity_cases(synthetic_inputs(5, 4))
    extreme = cases["out_of_range"].observation
    assert np.isfinite(extreme).all()
    assert extreme.max() == np.float32(3e38)
    assert (extreme == np.float32(-1e6)).any()
    assert cases["single_action"].mask.sum(axis=1).tolist() == [1, 1, 1, 1]
    assert not cases["empty_mask"].mask.any()
    assert cases["random_mask"].mask.any(axis=1).all()


def test_an_empty_mask_gives_action_minus_one_and_zero_probabilities(exported):
    inputs = parity_cases(synthetic_inputs(5, 4))["empty_mask"]
    action, probabilities, value, _ = run_session(open_session(exported.path), inputs, 8)
    assert action.tolist() == [-1] * 8
    assert not probabilities.any()
    assert np.isfinite(value).all()


def test_a_graph_of_other_weights_fails_parity_and_names_case_and_row(exported):
    with pytest.raises(ParityError) as caught:
        check_parity(TinyPolicy(seed=1).eval(), exported.path, synthetic_inputs(5, 4))
    assert caught.value.where["case"] == "recorded"
    assert {"batch", "field", "row"} <= caught.value.where.keys()


def _outputs(action, probabilities, value):
    return Outputs(
        np.array(action, dtype=np.int64),
        np.array(probabilities, dtype=np.float32),
        np.array(value, dtype=np.float32),
        np.zeros((len(action), 0), np.float32),
    )


def _asked(observation=0.0):
    mask = np.array([[True, True, False]])
    return PolicyInputs(np.full((1, 5), observation, np.float32), np.zeros(1, np.int64), np.zeros(1, np.float32), mask)


ASKED = _asked()
GOOD = _outputs([0], [[0.75, 0.25, 0.0]], [200.0])


@pytest.mark.parametrize(
    ("found", "field"),
    [
        (_outputs([0], [[0.75002, 0.24998, 0.0]], [200.0]), "probabilities"),
        (_outputs([0], [[0.75, 0.25, 0.0]], [200.01]), "value"),
        (_outputs([1], [[0.75, 0.25, 0.0]], [200.0]), "action"),
        (_outputs([2], [[0.75, 0.25, 0.0]], [200.0]), "action"),
        (_outputs([-1], [[0.75, 0.25, 0.0]], [200.0]), "action"),
        (_outputs([0], [[0.75, 0.25, 1e-6]], [200.0]), "probabilities"),
        (_outputs([0], [[np.nan, 0.25, 0.0]], [200.0]), "probabilities"),
        (_outputs([0], [[0.75, 0.25, 0.0]], [np.inf]), "value"),
    ],
)
def test_each_kind_of_difference_is_refused(found, field):
    with pytest.raises(ParityError) as caught:
        compare("case", 1, GOOD, found, ASKED)
    assert caught.value.where["field"] == field


def test_differences_within_the_tolerance_pass_with_their_size():
    found = _outputs([0], [[0.750004, 0.249996, 0.0]], [200.001])
    figures = compare("case", 1, GOOD, found, ASKED)
    assert figures.max_abs_probability == pytest.approx(4e-6, rel=0.05)
    assert figures.max_relative_value == pytest.approx(5e-6, rel=0.05)
    assert figures.ties == 0


def test_what_no_sensor_gives_may_differ_by_more_and_stands_beside():
    found = _outputs([0], [[0.75005, 0.24995, 0.0]], [200.01])
    figures = compare("case", 1, GOOD, found, _asked(1e30))
    assert (figures.max_abs_probability, figures.max_relative_value) == (0.0, 0.0)
    assert figures.max_abs_probability_far == pytest.approx(5e-5, rel=0.01)
    for refused in (_outputs([0], [[0.7504, 0.2496, 0.0]], [200.0]), _outputs([1], [[0.75, 0.25, 0.0]], [200.0])):
        with pytest.raises(ParityError):
            compare("case", 1, GOOD, refused, _asked(-1e30))


def test_two_equally_likely_actions_may_be_swapped_and_are_counted():
    expected = _outputs([0], [[0.5, 0.5, 0.0]], [0.0])
    assert compare("case", 1, expected, _outputs([1], [[0.5, 0.5, 0.0]], [0.0]), ASKED).ties == 1


def test_latency_restores_the_thread_count(exported):
    before = torch.get_num_threads()
    report = measure_latency(TinyPolicy().eval(), exported.path, synthetic_inputs(5, 4), repeats=20)
    assert torch.get_num_threads() == before
    assert 0 < report.onnx_p50_ms <= report.onnx_p99_ms
    assert 0 < report.torch_p50_ms <= report.torch_p99_ms


def test_a_graph_that_is_no_graph_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match="ONNX Runtime refuses"):
        open_session(tmp_path / "model.onnx")


def test_inputs_of_unequal_length_or_wrong_type_are_refused():
    good = synthetic_inputs(5, 4, count=3)
    with pytest.raises(ServingError, match="time is float64"):
        PolicyInputs(good.observation, good.last_action, good.time.astype(np.float64), good.mask)
    with pytest.raises(ServingError, match="mask is"):
        PolicyInputs(good.observation, good.last_action, good.time, good.mask[:2])


class Attending(torch.nn.Module):
    """Eight tokens of four features that attend to one another once, between two LayerNorms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.before, self.after = torch.nn.Linear(4, 64), torch.nn.LayerNorm(64), torch.nn.LayerNorm(64)
        self.query, self.key, self.value, self.mix = (torch.nn.Linear(64, 64) for _ in range(4))
        self.feed, self.actor, self.critic = torch.nn.Linear(64, 64), torch.nn.Linear(64, 4), torch.nn.Linear(64, 1)

    def forward(self, observation, last_action, time, mask):
        x = self.token(observation.clamp(-8, 8).reshape(-1, 8, 4))
        h = self.before(x)
        q, k, v = (layer(h).reshape(-1, 8, 4, 16).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 8, 64)
        h = torch.nn.functional.gelu(self.feed(self.after(x + self.mix(attended)))).mean(1)
        p = self.actor(h).masked_fill(~mask, -1e9).softmax(-1) * mask
        return torch.where(mask.any(-1), p.argmax(-1), -1), p, self.critic(h).squeeze(-1)


def test_attention_and_layer_norm_are_one_operator_each_and_the_graph_decides_alike(tmp_path):
    module = Attending().eval()
    report = export_policy(module, tmp_path / "model.onnx", policy_signature(32, 4))
    assert report.opset == 23
    assert report.unsupported == ()
    assert (report.operators["Attention"], report.operators["LayerNormalization"]) == (1, 2)
    optimised = optimise(report.path)
    # of the two LayerNorms, the second one takes up the sum before it
    assert optimised.fused == {
        "Attention": 1,
        "LayerNormalization": 1,
        "com.microsoft::BiasGelu": 1,
        "com.microsoft::SkipLayerNormalization": 1,
    }
    assert "1 com.microsoft::SkipLayerNormalization" in operator_table(report.operators, optimised)
    assert check_parity(module, report.path, synthetic_inputs(32, 4)).max_abs_probability <= 1e-5


def test_what_a_policy_without_attention_has_to_fuse_is_matrix_products_with_their_activations(built):
    assert set(built.optimised.fused) == {"com.microsoft::FusedGemm"}
    assert sum(built.optimised.operators.values()) < sum(built.export.operators.values())
    assert built.figures()["fused_operators"] == built.optimised.fused


def test_one_row_on_bound_buffers_decides_like_the_session(built):
    session = open_session(built.export.path)
    inputs = synthetic_inputs(192, 46, count=30, seed=5)
    inputs.mask[7] = False
    action, probabilities, value, _ = run_session(session, inputs, 1)
    one = OneRow(session)
    found = [
        one.act(inputs.observation[row], int(inputs.last_action[row]), float(inputs.time[row]), inputs.mask[row])
        for row in range(30)
    ]
    assert [each[0] for each in found] == action.tolist()
    assert found[7][0] == -1
    np.testing.assert_array_equal([each[1] for each in found], probabilities)
    assert [each[2] for each in found] == value.tolist()
