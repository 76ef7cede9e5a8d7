"""Whole candidates that take no time: a tiny policy package, and a bundle of a graph of four nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from agentpipe.learning.options import NetworkOptions
from agentpipe.learning.policy.network import PolicyNetwork
from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.serving import layout
from agentpipe.serving.export import OPSET
from agentpipe.serving.inputs import PolicyInputs
from agentpipe.serving.reference import write_reference
from agentpipe.serving.signature import ONNX_TYPES, Signature, policy_signature
from agentpipe.serving.triton_config import build_config, config_text
from agentpipe.storage import write_bytes, write_json
from agentpipe_tests.learning.tiny import ACTION_NAMES, NAMES, tiny_statistics

FEATURES, ACTIONS = 2, 3


class Evenly(torch.nn.Module):
    """Every allowed action is as likely as any other, and the first of them is taken."""

    def forward(
        self, observation: torch.Tensor, last_action: torch.Tensor, time: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        del last_action, time
        allowed = mask.float()
        return allowed.argmax(1), allowed / allowed.sum(1, keepdim=True), observation.sum(1)


def save_package(folder: Path, seed: int) -> str:
    """A tiny policy package as the folder ``folder``; its digest."""
    network = PolicyNetwork(len(NAMES), len(ACTION_NAMES), NetworkOptions(hidden=(8,), action_embedding=2))
    network.initialise(torch.Generator().manual_seed(seed))
    package = PolicyPackage(network, tiny_statistics(), NAMES, ACTION_NAMES)
    package.save(folder)
    return package.digest


def save_bundle(folder: Path, seed: int, signature: Signature | None = None) -> str:
    """A bundle of :class:`Evenly` as the folder ``folder``, a whole one that verifies; its digest.

    Bundles of other seeds have other digests. ``signature`` is that of two features and three actions if None.
    """
    signature = signature or policy_signature(FEATURES, ACTIONS)
    write_bytes(folder / "policy" / "1" / "model.onnx", _graph(signature))
    write_bytes(folder / "policy" / layout.CONFIG, config_text(build_config("policy", signature)).encode())
    write_json(folder / layout.SIGNATURE, signature.to_json())
    write_reference(folder / layout.REFERENCE, Evenly(), _rows(signature))
    identity = {"name": "policy", "version": 1}
    write_json(
        folder / layout.PROVENANCE,
        {"format": layout.FORMAT, "model": identity, "promotable": True, "reasons": [], "seed": seed},
    )
    write_json(folder / layout.MEASUREMENTS, {})
    hashes = layout.hash_files(folder)
    write_bytes(folder / layout.SUMS, layout.sums_text(hashes))
    return layout.content_digest(hashes)


def _rows(signature: Signature) -> PolicyInputs:
    generator = np.random.default_rng(0)
    mask = np.zeros((3, signature.action_count), np.bool_)
    mask[:, :ACTIONS] = [[True, False, True], [False, True, False], [True, True, True]]
    observation = generator.normal(size=(3, signature.observation_size)).astype(np.float32)
    return PolicyInputs(observation, np.array([3, 0, 2]), np.zeros(3, np.float32), mask)


def _graph(signature: Any) -> bytes:
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Cast", ["mask"], ["allowed"], to=TensorProto.FLOAT),
        helper.make_node("ArgMax", ["allowed"], ["action"], axis=1),
        helper.make_node("ReduceSum", ["allowed", "one"], ["count"]),
        helper.make_node("Div", ["allowed", "count"], ["probabilities"]),
        helper.make_node("ReduceSum", ["observation", "one"], ["value"]),
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(spec.name, ONNX_TYPES[spec.dtype], ["batch", *spec.dims]) for spec in specs]
        for specs in (signature.inputs, signature.outputs)
    )
    graph = helper.make_graph(nodes, "evenly", inputs, outputs, [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))
