"""What the client refuses before it asks anybody."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from google.protobuf import json_format

from agentpipe.errors import AnswerError, BundleError, EmptyMaskError, NonFiniteError, ServiceError, ServingError
from agentpipe.serving.client import PolicyClient, prepare
from agentpipe.serving.signature import Signature, policy_signature
from agentpipe.serving.triton_config import read_config
from agentpipe_tests.bundles import save_bundle

from .fake_triton import fake_triton

SIGNATURE = policy_signature(5, 4, observation_names=["a", "b", "c", "d", "e"])


def good(rows=2):
    return {
        "observation": np.zeros((rows, 5), dtype=np.float32),
        "last_action": np.full(rows, 4),
        "time": np.zeros(rows, dtype=np.float32),
        "mask": np.ones((rows, 4), dtype=np.bool_),
    }


def test_good_arrays_become_the_columns_of_the_graph():
    shapes = {name: (array.shape, str(array.dtype)) for name, array in prepare(SIGNATURE, good()).items()}
    assert shapes == {
        "observation": ((2, 5), "float32"),
        "last_action": ((2, 1), "int64"),
        "time": ((2, 1), "float32"),
        "mask": ((2, 4), "bool"),
    }


@pytest.mark.parametrize(
    ("name", "array", "match"),
    [
        ("observation", np.zeros((2, 5)), "observation is float64, the model takes float32"),
        ("observation", np.zeros((2, 6), dtype=np.float32), r"shape \[2, 6\], the model takes \[N, 5\]"),
        ("observation", np.zeros(5, dtype=np.float32), r"shape \[5\]"),
        ("last_action", np.zeros(2, dtype=np.int32), "last_action is int32"),
        ("last_action", np.array([0, 5]), "out of range"),
        ("last_action", np.array([-1, 0]), "out of range"),
        ("time", np.zeros(3, dtype=np.float32), "rows per input"),
        ("mask", np.ones((2, 4), dtype=np.uint8), "mask is uint8, the model takes bool"),
    ],
)
def test_wrong_types_shapes_and_ranges_are_refused_by_name(name, array, match):
    with pytest.raises(ServingError, match=match):
        prepare(SIGNATURE, {**good(), name: array})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_refused_with_row_and_column(bad):
    arrays = good()
    arrays["observation"][1, 3] = bad
    with pytest.raises(NonFiniteError) as caught:
        prepare(SIGNATURE, arrays)
    assert caught.value.where == {"field": "observation", "row": 1, "column": 3}


def test_an_empty_mask_is_refused_with_its_row():
    arrays = good()
    arrays["mask"][1] = False
    with pytest.raises(EmptyMaskError) as caught:
        prepare(SIGNATURE, arrays)
    assert caught.value.where["row"] == 1


def test_missing_unknown_and_no_rows_are_refused():
    arrays = good()
    del arrays["time"]
    with pytest.raises(ServingError, match=r"missing: \['time'\], unknown: \['clock'\]"):
        prepare(SIGNATURE, {**arrays, "clock": np.zeros(2, dtype=np.float32)})
    with pytest.raises(ServingError, match="at least one"):
        prepare(SIGNATURE, good(0))


def test_a_signature_survives_json_and_tells_layouts_apart():
    assert Signature.from_json(SIGNATURE.to_json()) == SIGNATURE
    assert policy_signature(5, 4, observation_names=["b", "a", "c", "d", "e"]) != SIGNATURE
    content = SIGNATURE.to_json()
    content["inputs"][0]["dtype"] = "float64"
    with pytest.raises(BundleError, match="malformed signature"):
        Signature.from_json(content)


def test_no_server_is_a_typed_error():
    with pytest.raises(ServiceError, match="get_model_config failed"):
        PolicyClient("127.0.0.1:1", timeout=0.5)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    save_bundle(folder, 0)
    return folder


@contextlib.contextmanager
def served(bundle, folder, **ways):
    """A client of a server that has the tiny bundle of two features and three actions."""
    config = json_format.MessageToDict(
        read_config(bundle / "policy" / "config.pbtxt"), preserving_proto_field_name=True
    )
    with fake_triton(folder, **ways) as server:
        server.take("policy", config, (bundle / "policy" / "1" / "model.onnx").read_bytes())
        with PolicyClient(server.grpc, timeout=20.0) as client:
            yield client


def ask(client, rows=2):
    return client.act(
        np.ones((rows, 2), np.float32), np.full(rows, 3), np.zeros(rows, np.float32), np.ones((rows, 3), np.bool_)
    )


def test_a_served_policy_decides(bundle, tmp_path):
    with served(bundle, tmp_path) as client:
        answer = ask(client, 70)  # more than the largest batch
    assert answer.action.tolist() == [0] * 70
    assert answer.probabilities.sum(axis=1) == pytest.approx(np.ones(70))


def without(name):
    return lambda answer: {key: array for key, array in answer.items() if key != name}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: {**a, "value": a["value"] * np.nan}, "value of the answer is"),
        (lambda a: {**a, "probabilities": a["probabilities"] * np.inf}, "probabilities of the answer is not finite"),
        (lambda a: {**a, "probabilities": a["probabilities"][:, :2]}, r"shape \[2, 2\], not \[2, 3\]"),
        (lambda a: {**a, "value": a["value"][:1]}, r"value of the answer has shape \[1, 1\]"),
        (lambda a: {**a, "action": a["action"] + 3}, "action of the answer is"),
        (lambda a: {**a, "action": a["action"].astype(np.int32)}, "action of the answer is int32"),
        (without("action"), "the answer has no action"),
    ],
)
def test_an_answer_that_is_no_decision_is_a_typed_error_that_says_why(bundle, tmp_path, change, match):
    with served(bundle, tmp_path, change_answer=change) as client, pytest.raises(AnswerError, match=match):
        ask(client)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda config: config["parameters"].pop("signature"), "carries no signature"),
        (lambda config: config["parameters"]["signature"].update(string_value="{"), "no JSON"),
        (lambda config: config["parameters"]["signature"].update(string_value="[]"), "malformed signature"),
        (lambda config: config["parameters"]["signature"].update(string_value="{}"), "malformed signature"),
        (lambda config: config.pop("max_batch_size"), "one row only"),
    ],
)
def test_a_model_that_is_none_of_ours_is_refused_with_the_reason(bundle, tmp_path, change, match):
    with pytest.raises(BundleError, match=match), served(bundle, tmp_path, change_config=change):
        pass
