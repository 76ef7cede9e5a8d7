"""One way to run an exported graph locally: ONNX Runtime, one thread, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentpipe.errors import BundleError

if TYPE_CHECKING:
    from pathlib import Path

    import onnxruntime
    import torch

    from agentpipe.serving.inputs import PolicyInputs

Outputs = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]


def open_session(path: Path, *, optimised: Path | None = None) -> onnxruntime.InferenceSession:
    """Loads the graph at ``path`` as a server would: all optimisations, one thread.

    Where ``optimised`` is given, the graph that ONNX Runtime makes of it is written there.

    Raises:
        BundleError: ONNX Runtime refuses the graph.
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    refusals = (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NoSuchFile,
        state.NotImplemented,
    )
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except refusals as error:
        remedy = "build the bundle again"
        raise BundleError(f"ONNX Runtime refuses the graph: {error}", file=path, remedy=remedy) from error


def run_session(session: onnxruntime.InferenceSession, inputs: PolicyInputs, batch: int) -> Outputs:
    """Action i64[N], probabilities f32[N,A], value f32[N] of the graph, computed ``batch`` rows at a time."""
    parts = []
    for start in range(0, len(inputs), batch):
        rows = inputs.rows(slice(start, start + batch))
        parts.append(session.run(["action", "probabilities", "value"], rows.columns()))
    action, probabilities, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    return action[:, 0], probabilities, value[:, 0]


def run_module(module: torch.nn.Module, inputs: PolicyInputs) -> Outputs:
    """The same of the torch module, all rows at once."""
    import torch

    with torch.no_grad():
        arrays = (inputs.observation, inputs.last_action, inputs.time, inputs.mask)
        action, probabilities, value = module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
    return action.numpy(), probabilities.numpy(), value.numpy()
