"""The Triton model configuration, written and read with Triton's own schema."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from agentpipe.errors import BundleError
from agentpipe.serving.signature import ONNX_TYPES, TRITON_TYPES, Signature, TensorSpec
from agentpipe.storage import canonical_json

if TYPE_CHECKING:
    from pathlib import Path

    import onnx
    from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelWarmup

MAX_BATCH: Final = 64
PREFERRED_BATCHES: Final = (16, 32, 64)
QUEUE_DELAY_MICROSECONDS: Final = 10_000
MODEL_FILE: Final = "model.onnx"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_REMEDY: Final = "build the bundle again"


def is_model_name(name: str) -> bool:
    """Whether a model may be called so: 1 to 64 letters, digits, ``_``, ``.`` and ``-``, of which the first no sign."""
    return _NAME.fullmatch(name) is not None


def build_config(model_name: str, signature: Signature) -> ModelConfig:
    """The configuration as a ``ModelConfig`` message.

    It depends on the signature only, never on the weights, so that a new version of the policy is a new version folder
    beside the old one and nothing else. Dimensions leave the batch out. The two newest versions are served, so that
    clients of the previous one are not cut off while they move.

    Raises:
        BundleError: ``model_name`` is not a plain folder name.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    if not is_model_name(model_name):
        raise BundleError(f"model name {model_name!r}", field="model_name", remedy="use letters, digits, _ . and -")
    config = pb.ModelConfig(
        name=model_name,
        backend="onnxruntime",
        default_model_filename=MODEL_FILE,
        max_batch_size=MAX_BATCH,
        input=[pb.ModelInput(**_tensor(spec)) for spec in signature.inputs],
        output=[pb.ModelOutput(**_tensor(spec)) for spec in signature.outputs],
        instance_group=[pb.ModelInstanceGroup(name="cpu", count=1, kind=pb.ModelInstanceGroup.KIND_CPU)],
        version_policy=pb.ModelVersionPolicy(latest=pb.ModelVersionPolicy.Latest(num_versions=2)),
        dynamic_batching=pb.ModelDynamicBatching(
            preferred_batch_size=PREFERRED_BATCHES, max_queue_delay_microseconds=QUEUE_DELAY_MICROSECONDS
        ),
        model_warmup=[_warm_up(batch, signature) for batch in (1, MAX_BATCH)],
    )
    parameters = {
        "intra_op_thread_count": "1",
        "inter_op_thread_count": "1",
        "signature": canonical_json(signature.to_json()).decode(),
    }
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    from tritonclient.grpc import model_config_pb2 as pb

    return {"name": spec.name, "data_type": pb.DataType.Value(TRITON_TYPES[spec.dtype]), "dims": spec.dims}


def _warm_up(batch: int, signature: Signature) -> ModelWarmup:
    """Zeros: an empty mask, which the graph answers with action -1, so that every operator has run once."""
    from tritonclient.grpc import model_config_pb2 as pb

    sample = pb.ModelWarmup(name=f"batch_{batch}", batch_size=batch)
    for spec in signature.inputs:
        entry = sample.inputs[spec.name]
        entry.data_type = pb.DataType.Value(TRITON_TYPES[spec.dtype])
        entry.dims.extend(spec.dims)
        entry.zero_data = True
    return sample


def config_text(config: ModelConfig) -> str:
    """The configuration in Triton's text form."""
    from google.protobuf import text_format

    text: str = text_format.MessageToString(config)
    return text


def read_config(path: Path) -> ModelConfig:
    """Parses ``config.pbtxt``.

    Raises:
        BundleError: missing, not text, or not a model configuration.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as pb

    try:
        return text_format.Parse(path.read_bytes().decode(), pb.ModelConfig())
    except FileNotFoundError as error:
        raise BundleError("file is missing", file=path, remedy=_REMEDY) from error
    except (UnicodeDecodeError, text_format.ParseError) as error:
        raise BundleError(f"not a Triton model configuration: {error}", file=path, remedy=_REMEDY) from error


def _check_config(config: ModelConfig, signature: Signature, file: Path) -> None:
    """Holds a configuration against the signature alone.

    Raises:
        BundleError: a name, dtype or dimension differs, the dimensions include the batch, or there is no batching.
    """
    from tritonclient.grpc import model_config_pb2 as pb

    if config.max_batch_size < 1:
        raise BundleError("max_batch_size is 0: no batching", file=file, field="max_batch_size", remedy=_REMEDY)
    sides = (("input", signature.inputs, config.input), ("output", signature.outputs, config.output))
    for kind, specs, configured in sides:
        names = [[entry.name for entry in entries] for entries in (specs, configured)]
        if names[0] != names[1]:
            text = f"{kind}s are {names[0]} in the signature, {names[1]} in the configuration"
            raise BundleError(text, file=file, field=kind, remedy=_REMEDY)
        for spec, entry in zip(specs, configured, strict=True):
            if tuple(entry.dims) != spec.dims:
                text = f"dims {list(entry.dims)} in the configuration, {list(spec.dims)} in the signature"
                remedy = "the configuration's dims leave the batch dimension out"
                raise BundleError(text, file=file, field=spec.name, remedy=remedy)
            if entry.data_type != pb.DataType.Value(TRITON_TYPES[spec.dtype]):
                text = f"{pb.DataType.Name(entry.data_type)} in the configuration, {spec.dtype} in the signature"
                raise BundleError(text, file=file, field=spec.name, remedy=_REMEDY)


def cross_check(config: ModelConfig, model: onnx.ModelProto, signature: Signature, file: Path) -> None:
    """Holds configuration, graph and signature against one another.

    Raises:
        BundleError: a name, dtype or dimension differs; the graph's batch dimension is fixed; or the configuration's
            dimensions include the batch.
    """
    _check_config(config, signature, file)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    sides = (
        ("input", signature.inputs, [value for value in graph.input if value.name not in weights]),
        ("output", signature.outputs, list(graph.output)),
    )
    for kind, specs, values in sides:
        names = [[entry.name for entry in entries] for entries in (specs, values)]
        if names[0] != names[1]:
            text = f"{kind}s are {names[0]} in the signature, {names[1]} in the graph"
            raise BundleError(text, file=file, field=kind, remedy=_REMEDY)
        for spec, value in zip(specs, values, strict=True):
            _check_graph_tensor(spec, value, file)


def _check_graph_tensor(spec: TensorSpec, value: onnx.ValueInfoProto, file: Path) -> None:
    tensor = value.type.tensor_type
    shape = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
    if not shape or not isinstance(shape[0], str):
        text = f"the graph's batch dimension is fixed at {shape[0] if shape else 'none'}"
        raise BundleError(text, file=file, field=spec.name, remedy="export with a symbolic first dimension")
    if tuple(shape[1:]) != spec.dims:
        text = f"dims {shape} in the graph, {list(spec.dims)} in the signature"
        raise BundleError(text, file=file, field=spec.name, remedy=_REMEDY)
    if tensor.elem_type != ONNX_TYPES[spec.dtype]:
        text = f"ONNX type {tensor.elem_type} in the graph, {spec.dtype} in the signature"
        raise BundleError(text, file=file, field=spec.name, remedy=_REMEDY)
