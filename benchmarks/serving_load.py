"""Clients of a served policy: ``python -m benchmarks.serving_load``, a process of its own beside the server's.

Each client has a connection of its own. Closed: it asks again as soon as it has its answer. Open: questions arrive by
themselves, at random times of a given rate, and latency counts from when one should have been asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from grpc import aio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from agentpipe.serving.inputs import PolicyInputs

METHOD = "/inference.GRPCInferenceService/ModelInfer"
WARM_UP = 0.5
"""seconds at the beginning that are not counted"""


def write_requests(path: Path, model: str, inputs: PolicyInputs) -> None:
    """One request for each row of ``inputs``, as the wire has them: what a client computes is not measured."""
    from tritonclient.grpc import service_pb2

    from agentpipe.serving.signature import WIRE_TYPES

    requests = []
    for index in range(len(inputs)):
        request = service_pb2.ModelInferRequest(model_name=model)
        for name, array in inputs.rows(slice(index, index + 1)).columns().items():
            request.inputs.add(name=name, datatype=WIRE_TYPES[str(array.dtype)], shape=array.shape)
            request.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
        requests.append(request.SerializeToString())
    path.write_text(json.dumps([request.hex() for request in requests]))


async def closed(asks: Sequence[Any], requests: Sequence[bytes], seconds: float) -> list[float]:
    """Latencies of clients that ask without pause."""
    start = time.perf_counter()
    counted, over = start + WARM_UP, start + WARM_UP + seconds

    async def client(ask: Callable[[bytes], Awaitable[bytes]], offset: int) -> list[float]:
        times, number = [], offset
        while (now := time.perf_counter()) < over:
            await ask(requests[number % len(requests)])
            number += 1
            if now >= counted:
                times.append(time.perf_counter() - now)
        return times

    found = await asyncio.gather(*(client(ask, 7 * index) for index, ask in enumerate(asks)))
    return [second for times in found for second in times]


async def arriving(asks: Sequence[Any], requests: Sequence[bytes], seconds: float, rate: float) -> list[float]:
    """Latencies of questions that arrive ``rate`` times a second, whether or not the earlier ones are answered."""
    generator = random.Random(0)
    times: list[float] = []

    async def one(ask: Callable[[bytes], Awaitable[bytes]], request: bytes, due: float) -> None:
        await ask(request)
        times.append(time.perf_counter() - due)

    due, over, waiting, number = time.perf_counter(), time.perf_counter() + seconds, set(), 0
    while due < over:
        due += generator.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(one(asks[number % len(asks)], requests[number % len(requests)], due))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        number += 1
    await asyncio.gather(*waiting)
    return times


def summary(times: Sequence[float], seconds: float) -> dict[str, float]:
    """Milliseconds and rate."""
    p50, p90, p99, p999 = (float(value) * 1e3 for value in np.percentile(times, (50, 90, 99, 99.9)))
    return {
        "requests": len(times),
        "per_second": round(len(times) / seconds, 1),
        "p50_ms": round(p50, 3),
        "p90_ms": round(p90, 3),
        "p99_ms": round(p99, 3),
        "p999_ms": round(p999, 3),
        "max_ms": round(max(times) * 1e3, 3),
        "deviation_ms": round(float(np.std(times)) * 1e3, 3),
    }


async def load(url: str, requests: Sequence[bytes], clients: int, seconds: float, rate: float) -> dict[str, float]:
    """What ``clients`` see of the server at ``url``; ``rate`` 0 is closed."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(url, options=options) for _ in range(clients)]
    asks = [channel.unary_unary(METHOD) for channel in channels]
    try:
        await asyncio.gather(*(ask(requests[0]) for ask in asks))  # connected
        if rate:
            return summary(await arriving(asks, requests, seconds, rate), seconds)
        return summary(await closed(asks, requests, seconds), seconds)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.serving_load URL REQUESTS``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_load", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("requests", type=Path, help="written by write_requests")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=0.0, help="questions a second; 0 = as fast as answers come")
    chosen = parser.parse_args(arguments)
    requests = [bytes.fromhex(text) for text in json.loads(chosen.requests.read_text())]
    print(json.dumps(asyncio.run(load(chosen.url, requests, chosen.clients, chosen.seconds, chosen.rate))))


if __name__ == "__main__":
    main()
