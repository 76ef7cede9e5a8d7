"""A policy as one portable ONNX graph, from raw observation to action."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError
from agentpipe.storage import digest_bytes, write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import onnx
    import torch

    from agentpipe.serving.signature import Signature

OPSET: Final = 20
ATTENTION_OPSET: Final = 23
"""the first opset in which attention is one operator; used for networks that attend, and by no others"""
_ATTENTION: Final = "scaled_dot_product_attention"


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    ``opset`` is 20, or 23 for a network with attention. ``unsupported`` lists operators outside the ONNX standard (none
    in a bundle).
    """

    path: Path
    opset: int
    operators: dict[str, int]
    unsupported: tuple[str, ...]
    bytes: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object, without the path."""
        return {
            "opset": self.opset,
            "operators": self.operators,
            "unsupported": list(self.unsupported),
            "bytes": self.bytes,
            "digest": self.digest,
        }


def export_policy(module: torch.nn.Module, path: Path, signature: Signature) -> ExportReport:
    """Writes ``module`` to ``path`` as ONNX with a symbolic batch dimension and all weights inside the file.

    Args:
        module: ``forward(observation f32[N,D], last_action i64[N], time f32[N], mask bool[N,A])`` giving
            ``(action i64[N], probabilities f32[N,A], value f32[N])``; normalisation inside. Where ``signature`` has a
            memory, ``memory f32[N,M]`` is a fifth argument and its next state a fourth result.
        path: The file to write.
        signature: Names and sizes; vectors become columns ``[N, 1]`` in the graph, since a Triton row has no rank 0.

    A part of ``module`` with a method ``folded`` is exported as the module that it returns: a head whose weights follow
    from parameters becomes a linear layer. Beside that only constant folding is done here; fusions for one kind of
    processor are left to the runtime that loads the graph. LayerNorm is one operator, and so is attention where torch's
    scaled_dot_product_attention computes it: written out in its parts no runtime puts it together again. Equal weights
    give equal bytes.

    Raises:
        BundleError: an operator cannot be exported, or the graph is not valid ONNX.
    """
    module = _folded(module)
    model = _to_onnx(module, signature, OPSET)
    # The exporter names values after the operators of torch that give them.
    if any(_ATTENTION in str(node.output) for node in _nodes(model)):
        model = _to_onnx(module, signature, ATTENTION_OPSET)
    _strip(model)
    _check(model, path)
    data = model.SerializeToString(deterministic=True)
    write_bytes(path, data)
    operators = dict(sorted(Counter(node.op_type for node in _nodes(model)).items()))
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    return ExportReport(path, opset, operators, unsupported_operators(model), len(data), digest_bytes(data))


def _folded(module: torch.nn.Module) -> torch.nn.Module:
    names = [name for name, part in module.named_modules() if hasattr(part, "folded")]
    if not names:
        return module
    module = copy.deepcopy(module)
    for name in names:
        part: Any = module.get_submodule(name)
        module.set_submodule(name, part.folded())
    return module


def _served(module: torch.nn.Module, signature: Signature) -> torch.nn.Module:
    import torch

    class Served(torch.nn.Module):
        """``module`` with columns in place of vectors."""

        def __init__(self, policy: torch.nn.Module) -> None:
            super().__init__()
            self.policy = policy

        def forward(
            self, observation: torch.Tensor, last_action: torch.Tensor, time: torch.Tensor, mask: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            action, probabilities, value = self.policy(observation, last_action.squeeze(1), time.squeeze(1), mask)
            return action.unsqueeze(1), probabilities, value.unsqueeze(1)

    class Remembering(torch.nn.Module):
        """The same with a memory that goes in and out."""

        def __init__(self, policy: torch.nn.Module) -> None:
            super().__init__()
            self.policy = policy

        def forward(
            self,
            observation: torch.Tensor,
            last_action: torch.Tensor,
            time: torch.Tensor,
            mask: torch.Tensor,
            memory: torch.Tensor,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            row = (observation, last_action.squeeze(1), time.squeeze(1), mask, memory)
            action, probabilities, value, state = self.policy(*row)
            return action.unsqueeze(1), probabilities, value.unsqueeze(1), state

    return Remembering(module) if signature.memory_size else Served(module)


def _to_onnx(module: torch.nn.Module, signature: Signature, opset: int) -> onnx.ModelProto:
    import torch

    rows = 3  # neither 0 nor 1, which torch.export would take for constants
    example = tuple(torch.zeros((rows, *spec.dims), dtype=getattr(torch, spec.dtype)) for spec in signature.inputs)
    batch = torch.export.Dim("batch", min=1)
    with _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                _served(module, signature).eval(),
                example,
                dynamo=True,
                opset_version=opset,
                external_data=False,
                input_names=[spec.name for spec in signature.inputs],
                output_names=[spec.name for spec in signature.outputs],
                dynamic_shapes=tuple({0: batch} for _ in example),
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            first = str(error).strip().splitlines()[0]
            remedy = "replace the operator in the network by one that ONNX has"
            raise BundleError(f"the policy cannot be exported: {first}", remedy=remedy) from error
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def _nodes(model: onnx.ModelProto) -> Iterator[Any]:
    yield from model.graph.node
    for function in model.functions:
        yield from function.node


def _strip(model: onnx.ModelProto) -> None:
    """Removes source locations and other traces of the exporting machine."""
    graph = model.graph
    holders = [model, graph, *graph.input, *graph.output, *graph.value_info, *graph.initializer, *model.functions]
    for holder in [*holders, *_nodes(model)]:
        holder.ClearField("doc_string")
        holder.ClearField("metadata_props")
    model.graph.name = "policy"


def _check(model: onnx.ModelProto, path: Path) -> None:
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BundleError(
            f"the exported graph is not valid: {error}", file=path, remedy="report this network"
        ) from error


def unsupported_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """Operators that the ONNX standard does not have at the graph's opset, as ``domain::name``, sorted."""
    import onnx

    opset = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}.get("ai.onnx", 0)
    foreign = set()
    for node in _nodes(model):
        standard = node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type, opset, "")
        if not standard:
            foreign.add(f"{node.domain or 'ai.onnx'}::{node.op_type}")
    return tuple(sorted(foreign))
