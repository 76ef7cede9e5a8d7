"""What the client refuses before it asks anybody."""

from __future__ import annotations

import numpy as np
import pytest

from agentpipe.errors import BundleError, EmptyMaskError, NonFiniteError, ServiceError, ServingError
from agentpipe.serving.client import PolicyClient, prepare
from agentpipe.serving.signature import Signature, policy_signature

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
