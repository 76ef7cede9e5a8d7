"""A bundle for the built-in line whose policy needs no torch: the allowed action with the highest number is likeliest.

It declares a false alarm and rejects it: every order takes two decisions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save

from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_SIZE
from agentpipe.serving import layout
from agentpipe.serving.export import OPSET
from agentpipe.serving.signature import ONNX_TYPES
from agentpipe.serving.triton_config import build_config, config_text
from agentpipe.storage import write_bytes, write_json
from agentpipe_tests.serving.agent.questions import LINE


def save_line_bundle(folder: Path, *, package: str = "a" * 64, power: float = 1.0) -> str:
    """Writes the bundle; returns the digest of the package that it says it is of. ``power`` makes other policies."""
    weights = (np.arange(ACTION_COUNT, dtype=np.float32) + 1) ** np.float32(power)
    write_bytes(folder / "policy" / "1" / "model.onnx", _graph(weights))
    write_bytes(folder / "policy" / layout.CONFIG, config_text(build_config("policy", LINE)).encode())
    write_json(folder / layout.SIGNATURE, LINE.to_json())
    write_bytes(folder / layout.REFERENCE, _reference(weights))
    identity = {"name": "policy", "version": 1}
    content = {"format": layout.FORMAT, "model": identity, "promotable": True, "reasons": []}
    write_json(folder / layout.PROVENANCE, {**content, "package": {"digest": package}})
    write_json(folder / layout.MEASUREMENTS, {})
    write_bytes(folder / layout.SUMS, layout.sums_text(layout.hash_files(folder)))
    return package


def _reference(weights):
    generator = np.random.default_rng(0)
    mask = generator.random((4, ACTION_COUNT)) < 0.5
    mask[:, 0] = True
    observation = generator.normal(size=(4, OBSERVATION_SIZE)).astype(np.float32)
    likely = mask * weights
    tensors = {
        "observation": observation,
        "last_action": np.full(4, ACTION_COUNT, np.int64),
        "time": np.zeros(4, np.float32),
        "mask": mask,
        "action": likely.argmax(axis=1).astype(np.int64),
        "probabilities": (likely / likely.sum(axis=1, keepdims=True)).astype(np.float32),
        "value": observation.sum(axis=1),
    }
    return save(tensors)


def _graph(weights):
    constants = [
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
        numpy_helper.from_array(weights[None].astype(np.float32), "weights"),
    ]
    nodes = [
        helper.make_node("Cast", ["mask"], ["allowed"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["allowed", "weights"], ["likely"]),
        helper.make_node("ArgMax", ["likely"], ["action"], axis=1),
        helper.make_node("ReduceSum", ["likely", "one"], ["total"]),
        helper.make_node("Div", ["likely", "total"], ["probabilities"]),
        helper.make_node("ReduceSum", ["observation", "one"], ["value"]),
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(spec.name, ONNX_TYPES[spec.dtype], ["batch", *spec.dims]) for spec in specs]
        for specs in (LINE.inputs, LINE.outputs)
    )
    graph = helper.make_graph(nodes, "highest", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))
