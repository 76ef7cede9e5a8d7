"""A server that speaks Triton's two protocols, answers with a bundle's own graph, and misbehaves where told to."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from agentpipe.serving.http_api import _DTYPES, _WIRE
from agentpipe.serving.runtime import open_session

Arrays = dict[str, np.ndarray]
LIMITS = {"observation": ("FP32", 2), "last_action": ("INT64", 1), "time": ("FP32", 1), "mask": ("BOOL", 3)}


class RefusalError(Exception):
    """The server says no."""


@dataclass
class Fake:
    """One server. Every field but the addresses is a way to misbehave."""

    http: str = ""
    grpc: str = ""
    metadata: dict[str, Any] = field(default_factory=lambda: {"name": "triton", "version": "2.51.0"})
    refuse_load: str = ""
    change_config: Callable[[dict[str, Any]], None] = lambda _: None
    change_answer: Callable[[Arrays], Arrays] = lambda answer: answer
    lenient: bool = False
    rows_per_execution: int = 8
    loaded: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: int = 0
    limits: Mapping[str, tuple[str, int]] = field(default_factory=lambda: LIMITS)

    def load(self, name: str, parameters: Mapping[str, str]) -> None:
        if self.refuse_load:
            raise RefusalError(self.refuse_load)
        [graph] = [value for key, value in parameters.items() if key.startswith("file:")]
        self.take(name, json.loads(parameters["config"]), base64.b64decode(graph))

    def take(self, name: str, config: dict[str, Any], graph: bytes) -> None:
        self.loaded[name] = config
        self.folder.joinpath("graph.onnx").write_bytes(graph)
        self.session = open_session(self.folder / "graph.onnx")

    def config(self, name: str) -> dict[str, Any]:
        config = {**self.loaded[name], "platform": "onnxruntime_onnx"}
        self.change_config(config)
        return config

    def statistics(self) -> dict[str, Any]:
        executions = self.rows // self.rows_per_execution
        return {"model_stats": [{"version": "1", "inference_count": self.rows, "execution_count": executions}]}

    def tell(self, path: list[str]) -> Any:
        if path == ["v2"]:
            return self.metadata
        return self.statistics() if path[-1] == "stats" else self.config(path[2])

    def do(self, path: list[str], content: dict[str, Any]) -> dict[str, Any]:
        if path[-1] == "load":
            self.load(path[3], content["parameters"])
        elif path[-1] == "unload":
            self.loaded.pop(path[3], None)
        else:
            return {"outputs": [_json(*each) for each in self.infer(path[2], _arrays(content)).items()]}
        return {}

    def infer(self, name: str, arrays: Arrays) -> Arrays:
        if name not in self.loaded:
            raise RefusalError(f"unknown model {name}")
        if not self.lenient:
            self._check(arrays)
        if arrays.keys() == self.limits.keys() and arrays["observation"].ndim == 2:
            arrays["observation"] = arrays["observation"][:, : self.limits["observation"][1]].astype(np.float32)
            arrays["last_action"] = arrays["last_action"].astype(np.int64)
            outputs = [value.name for value in self.session.get_outputs()]
            answer = dict(zip(outputs, self.session.run(outputs, arrays), strict=True))
            empty = ~arrays["mask"].any(axis=1)
            answer["action"][empty], answer["probabilities"][empty] = -1, 0
        else:
            answer = {"action": np.zeros((1, 1), np.int64)}
        self.rows += len(answer["action"])
        return self.change_answer(answer)

    def _check(self, arrays: Arrays) -> None:
        if arrays.keys() != self.limits.keys():
            raise RefusalError("inputs missing")
        for name, (wire, size) in self.limits.items():
            array = arrays[name]
            if _WIRE[array.dtype] != wire or array.ndim != 2 or array.shape[1] != size or len(array) > 64:
                raise RefusalError(f"unexpected {name}")

    folder: Path = Path()


@contextmanager
def fake_triton(folder: Path, **ways: Any) -> Iterator[Fake]:
    """A server on free ports of the loopback address."""
    fake = Fake(folder=folder, **ways)
    web = _Web(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
    server = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(fake), server)
    fake.http = f"127.0.0.1:{web.server_port}"
    fake.grpc = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(0).wait()
        web.shutdown()
        web.server_close()


class _Web(http.server.ThreadingHTTPServer):
    request_queue_size = 64  # clients that come at once wait for their turn, as at a real server


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, fake: Fake) -> None:
        self.fake = fake

    def ModelInfer(  # noqa: N802 - the protocol's name
        self, request: Any, context: grpc.ServicerContext
    ) -> Any:
        arrays = {
            each.name: np.frombuffer(raw, _DTYPES[each.datatype]).reshape(each.shape).copy()
            for each, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        try:
            answer = self.fake.infer(request.model_name, arrays)
        except RefusalError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        reply = service_pb2.ModelInferResponse(model_name=request.model_name)
        for name, array in answer.items():
            reply.outputs.add(name=name, datatype=_WIRE[array.dtype], shape=array.shape)
            reply.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
        return reply

    def ModelReady(  # noqa: N802 - the protocol's name
        self, request: Any, context: grpc.ServicerContext
    ) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name in self.fake.loaded)

    def ModelStatistics(  # noqa: N802 - the protocol's name
        self, request: Any, context: grpc.ServicerContext
    ) -> Any:
        return json_format.ParseDict(self.fake.statistics(), service_pb2.ModelStatisticsResponse())

    def ModelConfig(  # noqa: N802 - the protocol's name
        self, request: Any, context: grpc.ServicerContext
    ) -> Any:
        reply = service_pb2.ModelConfigResponse()
        json_format.ParseDict(self.fake.config(request.name), reply.config)
        return reply


class _Handler(http.server.BaseHTTPRequestHandler):
    fake: Fake

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")
        if parts == ["v2"]:
            self.say(200, self.fake.metadata)
        elif parts[-1] == "stats":
            self.say(200, self.fake.statistics())
        elif parts[-1] == "ready":
            self.say(200 if parts[2] in self.fake.loaded else 400, {})
        else:
            self.say(200, self.fake.config(parts[2]))

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = self.path.strip("/").split("/")
        try:
            if parts[-1] == "load":
                self.fake.load(parts[3], content["parameters"])
                self.say(200, {})
            elif parts[-1] == "unload":
                self.fake.loaded.pop(parts[3], None)
                self.say(200, {})
            else:
                self.say(
                    200, {"outputs": [_json(*each) for each in self.fake.infer(parts[2], _arrays(content)).items()]}
                )
        except RefusalError as error:
            self.say(400, {"error": str(error)})

    def say(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        pass


def _arrays(content: dict[str, Any]) -> Arrays:
    return {
        each["name"]: np.array(each["data"], _DTYPES[each["datatype"]]).reshape(each["shape"])
        for each in content["inputs"]
    }


def _json(name: str, array: np.ndarray) -> dict[str, Any]:
    return {"name": name, "datatype": _WIRE[array.dtype], "shape": array.shape, "data": array.ravel().tolist()}
