"""A torch server to hold Triton against: ``python -m benchmarks.serving_torch PACKAGE``.

The same protocol, the same network on one thread, and the same dynamic batching: a batch begins as soon as a preferred
size is reached, or when its oldest question has waited as long as the queue may delay it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import torch
from grpc import aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from agentpipe.learning.policy.package import PolicyPackage
from agentpipe.serving.inputs import PolicyInputs
from agentpipe.serving.runtime import Outputs, run_module
from agentpipe.serving.triton_config import PREFERRED_BATCHES, QUEUE_DELAY_MICROSECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence


DTYPES = {"FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}


class Batcher:
    """Questions of one row, answered together."""

    def __init__(self, module: torch.nn.Module, delay: float) -> None:
        self.module, self.delay = module, delay
        self.rows, self.executions = 0, 0
        self._waiting: deque[tuple[float, PolicyInputs, asyncio.Future[Outputs]]] = deque()
        self._came = asyncio.Event()
        self._thread = ThreadPoolExecutor(1)

    async def ask(self, row: PolicyInputs) -> Outputs:
        """The answer to one row."""
        answer: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        self._waiting.append((time.perf_counter(), row, answer))
        self._came.set()
        return await answer

    def _size(self) -> int:
        """How many questions to answer now; 0 is none."""
        found = max((size for size in PREFERRED_BATCHES if size <= len(self._waiting)), default=0)
        late = self._waiting and time.perf_counter() - self._waiting[0][0] >= self.delay
        return found or (len(self._waiting) if late else 0)

    async def run(self) -> None:
        """Answers for ever."""
        loop = asyncio.get_running_loop()
        while True:
            size = self._size()
            if not size:
                self._came.clear()
                left = self.delay - (time.perf_counter() - self._waiting[0][0]) if self._waiting else None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._came.wait(), None if left is None else max(0.0, left))
                continue
            batch = [self._waiting.popleft() for _ in range(size)]
            inputs = PolicyInputs.concatenate([row for _, row, _ in batch])
            answers = await loop.run_in_executor(self._thread, run_module, self.module, inputs)
            self.rows, self.executions = self.rows + size, self.executions + 1
            for index, (_, _, answer) in enumerate(batch):
                at = slice(index, index + 1)
                if not answer.done():
                    answer.set_result(Outputs(*(part[at] for part in answers)))  # type: ignore[arg-type]


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated, without types
    """The two calls that the benchmark makes."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher

    async def ModelInfer(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: ANN401, ARG002, N802
        """One row."""
        arrays = {
            each.name: np.frombuffer(raw, DTYPES[each.datatype]).reshape(each.shape)
            for each, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        row = PolicyInputs(arrays["observation"], arrays["last_action"][:, 0], arrays["time"][:, 0], arrays["mask"])
        action, probabilities, value, _ = await self.batcher.ask(row)
        reply = service_pb2.ModelInferResponse(model_name=request.model_name)
        for name, wire, array in (
            ("action", "INT64", action[:, None]),
            ("probabilities", "FP32", probabilities),
            ("value", "FP32", value[:, None]),
        ):
            reply.outputs.add(name=name, datatype=wire, shape=array.shape)
            reply.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
        return reply

    async def ModelStatistics(self, request: Any, context: grpc.aio.ServicerContext) -> Any:  # noqa: ANN401, ARG002, N802
        """How many rows, in how many runs of the network."""
        reply = service_pb2.ModelStatisticsResponse()
        reply.model_stats.add(
            name=request.name, inference_count=self.batcher.rows, execution_count=self.batcher.executions
        )
        return reply


async def serve(package: Path, delay: float) -> None:
    """Serves until it is ended; says its port first."""
    torch.set_num_threads(1)
    batcher = Batcher(PolicyPackage.load(package).module, delay)
    server = aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(batcher), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await batcher.run()


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.serving_torch PACKAGE``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_torch", description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--delay-us", type=int, default=QUEUE_DELAY_MICROSECONDS)
    chosen = parser.parse_args(arguments)
    asyncio.run(serve(chosen.package, chosen.delay_us / 1e6))


if __name__ == "__main__":
    main()
