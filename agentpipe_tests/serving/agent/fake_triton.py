"""A gRPC server that speaks Triton's protocol and answers what a test wants, also nonsense."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as service

from agentpipe_tests.serving.agent.counting import counted


class FakeTriton(service.GRPCInferenceServiceServicer):
    """Serves the policy of :class:`agentpipe_tests.bundles.Evenly` on a free port, or on ``port``.

    Attributes:
        spoil: called with the outputs by name before they are sent; changes them in place.
        spoils: the same for single versions of the model, in place of ``spoil``.
        newest: version that answers where none is named.
        pause: seconds before each answer.
        gate: answers wait while it is cleared.
    """

    def __init__(self, signature, port=0) -> None:
        self.signature = signature
        self.spoil, self.pause, self.answered = None, 0.0, 0
        self.newest, self.spoils = "1", {}
        self.gate = threading.Event()
        self.gate.set()
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        service.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.url = f"127.0.0.1:{self.port}"
        self._server.start()

    def ModelConfig(self, request, context):  # noqa: N802 - gRPC's name
        answer = pb.ModelConfigResponse()
        answer.config.name = request.name
        answer.config.parameters["signature"].string_value = json.dumps(self.signature.to_json())
        return answer

    def ModelInfer(self, request, context):  # noqa: N802 - gRPC's name
        self.gate.wait(10)
        threading.Event().wait(self.pause)
        self.answered += 1
        arrays = {}
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            dtype = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}[tensor.datatype]
            arrays[tensor.name] = np.frombuffer(raw, dtype).reshape(tuple(tensor.shape))
        allowed = arrays["mask"].astype(np.float32)
        outputs = {
            "action": allowed.argmax(axis=1)[:, None].astype(np.int64),
            "probabilities": allowed / allowed.sum(axis=1, keepdims=True),
            "value": arrays["observation"].sum(axis=1, dtype=np.float32)[:, None],
        }
        if "memory" in arrays:  # then it is the policy of agentpipe_tests.serving.agent.counting
            state = counted(arrays["memory"], arrays["last_action"], self.signature.no_action)
            outputs |= {"memory_next": state.astype(np.float32), "value": state[:, :1].astype(np.float32)}
        version = request.model_version or self.newest
        spoil = self.spoils.get(version, self.spoil)
        if spoil is not None:
            spoil(outputs)
        answer = pb.ModelInferResponse(model_name=request.model_name, model_version=version)
        for name, array in outputs.items():
            kind = {"f": "FP32", "i": "INT64", "b": "BOOL"}[array.dtype.kind]
            answer.outputs.add(name=name, datatype=kind, shape=array.shape)
            answer.raw_output_contents.append(array.tobytes())
        return answer

    def stop(self):
        """Ends at once: open calls are cancelled."""
        self.gate.set()
        self._server.stop(None).wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
