"""The benchmark of serving: its clients, its torch server's batching, and its page, from rows written by hand."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch

from agentpipe.serving.inputs import PolicyInputs
from agentpipe_tests.bundles import Evenly, save_bundle
from agentpipe_tests.serving.fake_triton import fake_triton
from benchmarks.serving import counters, section
from benchmarks.serving_load import load, summary, write_requests
from benchmarks.serving_torch import Batcher


def inputs(rows):
    generator = np.random.default_rng(0)
    observation = generator.normal(size=(rows, 2)).astype(np.float32)
    return PolicyInputs(observation, np.full(rows, 3), np.zeros(rows, np.float32), np.ones((rows, 3), np.bool_))


@pytest.mark.parametrize("rate", [0.0, 100.0])
def test_clients_count_what_was_answered(tmp_path, rate):
    save_bundle(tmp_path / "bundle", 0)
    write_requests(tmp_path / "requests.json", "policy", inputs(5))
    requests = [bytes.fromhex(text) for text in json.loads((tmp_path / "requests.json").read_text())]
    with fake_triton(tmp_path) as server:
        graph = (tmp_path / "bundle" / "policy" / "1" / "model.onnx").read_bytes()
        server.take("policy", {}, graph)
        found = asyncio.run(load(server.grpc, requests, clients=2, seconds=0.3, rate=rate))
        assert 0 < found["requests"] <= server.rows - 2  # two more connected the clients
    assert 0 < found["p50_ms"] <= found["p90_ms"] <= found["p99_ms"] <= found["p999_ms"] <= found["max_ms"]


def test_milliseconds_and_rates_are_those_of_the_times():
    found = summary([0.001] * 99 + [0.101], seconds=2.0)
    assert (found["requests"], found["per_second"], found["p50_ms"], found["max_ms"]) == (100, 50.0, 1.0, 101.0)
    assert found["p99_ms"] == pytest.approx(2.0)  # 1 % of the way from 1 to 101
    assert found["deviation_ms"] == pytest.approx(9.95, abs=0.01)


def test_the_torch_server_answers_preferred_batches_at_once_and_the_rest_after_the_delay():
    rows = inputs(52)
    expected = rows.observation.sum(1)

    async def twenty() -> tuple[list[float], list[int]]:
        batcher = Batcher(Evenly(), delay=0.02)
        sizes = []
        batcher.module.register_forward_hook(lambda _module, _inputs, output: sizes.append(len(output[0])))
        asked = [asyncio.create_task(batcher.ask(rows.rows(slice(row, row + 1)))) for row in range(52)]
        await asyncio.sleep(0)  # all of them wait now
        server = asyncio.create_task(batcher.run())
        answers = await asyncio.gather(*asked)
        server.cancel()
        assert (batcher.rows, batcher.executions) == (52, len(sizes))
        return [float(answer.value[0]) for answer in answers], sizes

    with torch.no_grad():
        values, sizes = asyncio.run(twenty())
    assert values == pytest.approx(expected, abs=1e-6)
    assert sizes == [32, 16, 4]


def row(name, clients, **changes):
    figures = {"per_second": 1234.0, "p50_ms": 1.5, "p90_ms": 2.0, "p99_ms": 3.25, "p999_ms": 4.0, "max_ms": 5.0}
    more = {"deviation_ms": 0.5, "delay_us": 10_000, "rate": 0, "mean_batch": 15.96}
    return {"name": name, "clients": clients, **figures, **more, **changes}


def test_the_page_shows_each_way_jitter_and_the_delay():
    rows = [
        row("ONNX Runtime", 1, delay_us=0, p99_ms=0.05),
        row("Triton", 16, delay_us=1_000, p99_ms=2.0),
        row("Triton", 16),
        row("Triton", 16, rate=617),
        row("torch", 16),
    ]
    page = section({"rows": rows})
    usual, rest = page.split("Questions that arrive")
    jitter, delays = rest.split("Triton, by how long")
    assert "| ONNX Runtime | – | 1 | 1,234 | 1.500 | 0.050 | 0.3 | 16.0 |" in usual
    assert usual.count("| Triton |") == 1
    assert "| Triton | 10 | 16 | 1,234 | 1.500 | 3.250 | 15 | 16.0 |" in usual
    assert jitter.count("| Triton |") == 1
    assert "| Triton | 1 | 16 | 1,234 | 1.500 | 2.000 | – | 16.0 |" in delays
    assert delays.count("| Triton |") == 2


def test_counters_are_the_servers_own(tmp_path):
    with fake_triton(tmp_path) as server:
        server.rows = 80
        assert counters(server.grpc, "policy") == (80, 10)
