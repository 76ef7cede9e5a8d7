"""One way to run an exported graph locally: ONNX Runtime, one thread, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from agentpipe.errors import BundleError
from agentpipe.serving.signature import MEMORY, MEMORY_NEXT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import onnxruntime
    import torch

    from agentpipe.serving.inputs import PolicyInputs
    from agentpipe.serving.signature import Signature

_DTYPES: Final = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


class Outputs(NamedTuple):
    """What a policy answers to N rows."""

    action: npt.NDArray[np.int64]
    """i64[N]"""
    probabilities: npt.NDArray[np.float32]
    """f32[N, A]"""
    value: npt.NDArray[np.float32]
    """f32[N]"""
    memory: npt.NDArray[np.float32]
    """f32[N, M], for the next step; of no width without a memory"""

    @classmethod
    def of(cls, answers: Mapping[str, npt.NDArray[Any]]) -> Outputs:
        """From the outputs of a graph by name, vectors as columns ``[N, 1]``."""
        memory = answers.get(MEMORY_NEXT, answers["value"][:, :0])
        return cls(answers["action"][:, 0], answers["probabilities"], answers["value"][:, 0], memory)


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


def check_session(session: onnxruntime.InferenceSession, signature: Signature, file: Path) -> None:
    """Holds inputs and outputs of a graph that is loaded against the signature.

    Raises:
        BundleError: a name, dtype or dimension differs, or the batch dimension is fixed.
    """
    remedy = "build the bundle again"
    sides = (
        ("input", signature.inputs, session.get_inputs()),
        ("output", signature.outputs, session.get_outputs()),
    )
    for kind, specs, values in sides:
        names = [[each.name for each in entries] for entries in (specs, values)]
        if names[0] != names[1]:
            text = f"{kind}s are {names[0]} in the signature, {names[1]} in the graph"
            raise BundleError(text, file=file, field=kind, remedy=remedy)
        for spec, value in zip(specs, values, strict=True):
            if not value.shape or isinstance(value.shape[0], int):
                text = f"the graph's batch dimension is fixed at {value.shape[0] if value.shape else 'none'}"
                raise BundleError(text, file=file, field=spec.name, remedy=remedy)
            if tuple(value.shape[1:]) != spec.dims or _DTYPES.get(value.type) != spec.numpy:
                text = f"{value.type}{value.shape} in the graph, {spec.dtype}{list(spec.dims)} in the signature"
                raise BundleError(text, file=file, field=spec.name, remedy=remedy)


def run_session(session: onnxruntime.InferenceSession, inputs: PolicyInputs, batch: int) -> Outputs:
    """What the graph answers, computed ``batch`` rows at a time."""
    names = [value.name for value in session.get_outputs()]
    parts = []
    for start in range(0, len(inputs), batch):
        rows = inputs.rows(slice(start, start + batch))
        parts.append(session.run(names, rows.columns()))
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Outputs.of(dict(zip(names, columns, strict=True)))


class OneRow:
    """One decision at a time without the cost of preparing arrays: buffers that are bound to the session once.

    A memory goes on from one call to the next: ask the questions of one episode one after the other, or give each its
    own state.

    Args:
        session: Of :func:`open_session`. Not for two threads at once: each takes a ``OneRow`` of its own.
    """

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session, self._binding = session, session.io_binding()
        buffers: dict[str, npt.NDArray[Any]] = {}
        for value in (*session.get_inputs(), *session.get_outputs()):
            buffers[value.name] = np.zeros((1, *value.shape[1:]), _DTYPES[value.type])
        for value in session.get_inputs():
            self._binding.bind_cpu_input(value.name, buffers[value.name])
        for value in session.get_outputs():
            array = buffers[value.name]
            self._binding.bind_output(value.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._observation, self._mask = buffers["observation"][0], buffers["mask"][0]
        self._last_action, self._time = buffers["last_action"], buffers["time"]
        self._action, self._value = buffers["action"], buffers["value"]
        self._probabilities = buffers["probabilities"][0]
        nothing = np.zeros((1, 0), np.float32)
        self._before, self._after = buffers.get(MEMORY, nothing)[0], buffers.get(MEMORY_NEXT, nothing)[0]

    @property
    def memory(self) -> npt.NDArray[np.float32]:
        """f32[M], the state after the last decision: what the next one begins from."""
        state: npt.NDArray[np.float32] = self._after.copy()
        return state

    def act(
        self,
        observation: npt.NDArray[np.float32],
        last_action: int,
        time: float,
        mask: npt.NDArray[np.bool_],
        memory: npt.NDArray[np.float32] | None = None,
    ) -> tuple[int, npt.NDArray[np.float32], float]:
        """Decides one row: observation f32[D], last action, minutes, mask bool[A], memory f32[M] (see the class).

        Returns:
            Action, probabilities f32[A], value: what :func:`run_session` gives, as numbers.
        """
        self._observation[:] = observation
        self._last_action[0, 0] = last_action
        self._time[0, 0] = time
        self._mask[:] = mask
        self._before[:] = self._after if memory is None else memory
        self._session.run_with_iobinding(self._binding)
        return int(self._action[0, 0]), self._probabilities.copy(), float(self._value[0, 0])


def run_module(module: torch.nn.Module, inputs: PolicyInputs) -> Outputs:
    """The same of the torch module, all rows at once."""
    import torch

    arrays = inputs.arrays if inputs.memory.shape[1] else inputs.arrays[:-1]
    with torch.no_grad():
        outputs = module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
    action, probabilities, value, *kept = (part.numpy() for part in outputs)
    return Outputs(action, probabilities, value, kept[0] if kept else inputs.memory)
