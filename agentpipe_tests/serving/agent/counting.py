"""Bundles of a policy with a memory that counts the questions of an order: its value is how many it has seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from safetensors.numpy import save

from agentpipe.serving import layout
from agentpipe.serving.export import OPSET
from agentpipe.serving.signature import ONNX_TYPES, Signature, policy_signature
from agentpipe.serving.triton_config import build_config, config_text
from agentpipe.storage import write_bytes, write_json

UNITS = 2
SMALL = policy_signature(2, 3, memory=UNITS)


def save_counting_bundle(folder: Path, signature: Signature = SMALL, *, package: str = "c" * 64) -> Path:
    """Writes the bundle; every allowed action is as likely as any other, and the first of them is taken."""
    write_bytes(folder / "policy" / "1" / "model.onnx", _graph(signature))
    write_bytes(folder / "policy" / layout.CONFIG, config_text(build_config("policy", signature)).encode())
    write_json(folder / layout.SIGNATURE, signature.to_json())
    write_bytes(folder / layout.REFERENCE, _reference(signature))
    identity = {"name": "policy", "version": 1}
    content = {"format": layout.FORMAT, "model": identity, "promotable": True, "reasons": []}
    write_json(folder / layout.PROVENANCE, {**content, "package": {"digest": package}})
    write_json(folder / layout.MEASUREMENTS, {})
    write_bytes(folder / layout.SUMS, layout.sums_text(layout.hash_files(folder)))
    return folder


def counted(memory, last_action, no_action):
    """What the memory is behind a question."""
    return np.where(last_action.reshape(-1, 1) == no_action, np.float32(0), memory) + np.float32(1)


def _reference(signature):
    generator = np.random.default_rng(0)
    rows, actions = 4, signature.action_count
    mask = generator.random((rows, actions)) < 0.5
    mask[:, 0] = True
    memory = generator.uniform(-1, 1, (rows, UNITS)).astype(np.float32)
    last_action = np.array([actions, 0, 1, 2])
    after = counted(memory, last_action, actions).astype(np.float32)
    tensors = {
        "observation": generator.normal(size=(rows, signature.observation_size)).astype(np.float32),
        "last_action": last_action,
        "time": np.zeros(rows, np.float32),
        "mask": mask,
        "memory": memory,
        "action": mask.argmax(axis=1).astype(np.int64),
        "probabilities": (mask / mask.sum(axis=1, keepdims=True)).astype(np.float32),
        "value": after[:, 0].copy(),
        "memory_next": after,
    }
    return save(tensors)


def _graph(signature):
    constants = [
        helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
        helper.make_tensor("none_yet", TensorProto.INT64, [1], [signature.no_action]),
        helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]),
        helper.make_tensor("first", TensorProto.INT64, [1], [0]),
    ]
    nodes = [
        helper.make_node("Cast", ["mask"], ["allowed"], to=TensorProto.FLOAT),
        helper.make_node("ArgMax", ["allowed"], ["action"], axis=1),
        helper.make_node("ReduceSum", ["allowed", "axis"], ["count"]),
        helper.make_node("Div", ["allowed", "count"], ["probabilities"]),
        helper.make_node("Equal", ["last_action", "none_yet"], ["fresh"]),
        helper.make_node("Not", ["fresh"], ["kept"]),
        helper.make_node("Cast", ["kept"], ["keep"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["memory", "keep"], ["before"]),
        helper.make_node("Add", ["before", "one"], ["memory_next"]),
        helper.make_node("Gather", ["memory_next", "first"], ["value"], axis=1),
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(spec.name, ONNX_TYPES[spec.dtype], ["batch", *spec.dims]) for spec in specs]
        for specs in (signature.inputs, signature.outputs)
    )
    graph = helper.make_graph(nodes, "counting", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))
