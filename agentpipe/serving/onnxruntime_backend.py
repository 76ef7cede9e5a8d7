"""An ``onnxruntime`` backend for a Triton that has only the Python backend; copied into its backend folder.

It runs inside Triton's own stub process with numpy and onnxruntime and nothing else, so it imports nothing of
agentpipe. It refuses what Triton's native backend refuses (names, dtypes, shapes, a fixed batch dimension), and hands
all requests of a batch to ONNX Runtime at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton  # type: ignore[import-not-found]  # exists inside the stub process only

_TYPES = {"tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64", "tensor(bool)": "TYPE_BOOL"}


class TritonPythonModel:
    """One loaded version of one model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the graph and compares it with the configuration; raises TritonModelException when they differ."""
        config = json.loads(args["model_config"])
        name = config.get("default_model_filename") or "model.onnx"
        # Triton's "model repository" is the folder of this model.
        path = Path(args["model_repository"]) / args["model_version"] / name
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = _number(config, "intra_op_thread_count")
        options.inter_op_num_threads = _number(config, "inter_op_thread_count")
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors share no base
            raise triton.TritonModelException(f"failed to load {path}: {error}") from error
        self._batched = int(config.get("max_batch_size", 0)) > 0
        self._compare("input", config["input"], self._session.get_inputs())
        self._compare("output", config["output"], self._session.get_outputs())
        self._inputs = [entry["name"] for entry in config["input"]]
        self._outputs = [entry["name"] for entry in config["output"]]

    def _compare(self, kind: str, configured: list[dict[str, Any]], found: list[Any]) -> None:
        graph = {value.name: value for value in found}
        if sorted(graph) != sorted(entry["name"] for entry in configured):
            raise triton.TritonModelException(f"{kind}s of the graph are {sorted(graph)}, not those configured")
        for entry in configured:
            value = graph[entry["name"]]
            if _TYPES.get(value.type) != entry["data_type"]:
                text = f"{kind} {value.name}: configured {entry['data_type']}, the graph has {value.type}"
                raise triton.TritonModelException(text)
            shape = [dim if isinstance(dim, int) else -1 for dim in value.shape]
            dims = [-1] * self._batched + [int(dim) for dim in entry["dims"]]
            if shape != dims:
                raise triton.TritonModelException(f"{kind} {value.name}: configured {dims}, the graph has {shape}")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers a batch of requests with one run of the graph."""
        columns = [
            [triton.get_input_tensor_by_name(request, name).as_numpy() for request in requests] for name in self._inputs
        ]
        feed = {name: np.concatenate(parts) for name, parts in zip(self._inputs, columns, strict=True)}
        try:
            outputs = self._session.run(self._outputs, feed)
        except Exception as error:  # noqa: BLE001 - every request must be answered
            return [triton.InferenceResponse(error=triton.TritonError(str(error))) for _ in requests]
        responses, start = [], 0
        for part in columns[0]:
            rows = slice(start, start + len(part))
            tensors = [
                triton.Tensor(name, np.ascontiguousarray(output[rows]))
                for name, output in zip(self._outputs, outputs, strict=True)
            ]
            responses.append(triton.InferenceResponse(tensors))
            start += len(part)
        return responses


def _number(config: dict[str, Any], key: str) -> int:
    return int(config.get("parameters", {}).get(key, {}).get("string_value", "1"))
