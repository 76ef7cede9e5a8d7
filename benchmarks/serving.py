"""How a policy is served: ``python -m benchmarks.serving``.

The network of the standard profile, with random weights, at 1, 16 and 64 clients: a real Triton over gRPC, a torch
server with the same dynamic batching, and ONNX Runtime in the caller's own process. Then latency while questions arrive
by themselves, and what the batcher's queue delay costs and brings. Servers and clients share this machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentpipe.errors import ServiceError
from benchmarks.measure import ROOT, results_folder, stamp, store
from benchmarks.serving_load import summary, write_requests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnxruntime

    from agentpipe.serving.bundle import Bundle
    from agentpipe.serving.inputs import PolicyInputs

PACKAGES = ("numpy", "onnxruntime", "torch", "tritonclient", "grpcio")
CLIENTS = (1, 16, 64)
DELAYS = (0, 1_000, 5_000, 10_000)
LIMITS = {("Triton", 16): 15.0, ("Triton", 64): 42.0, ("ONNX Runtime", 1): 0.3}
"""milliseconds of p99 that we ask of ourselves on two cores"""
USUAL = 10_000
HALF = 0.5
"""rate of arriving questions, of what the server answers at 16 clients"""


def make_bundle(folder: Path) -> tuple[Path, Bundle]:
    """Package and bundle of a network of the standard profile's size with random weights."""
    import torch

    from agentpipe.environments.layout import ACTION_COUNT, OBSERVATION_NAMES, OBSERVATION_SIZE
    from agentpipe.learning.options import NetworkOptions
    from agentpipe.learning.policy.network import PolicyNetwork
    from agentpipe.learning.policy.normalisation import ObservationStatistics
    from agentpipe.learning.policy.package import PolicyPackage
    from agentpipe.serving.bundle import build_bundle
    from agentpipe.settings import load_settings

    width = load_settings(profile="standard").training.hidden
    network = PolicyNetwork(OBSERVATION_SIZE, ACTION_COUNT, NetworkOptions(hidden=(width, width)))
    network.initialise(torch.Generator().manual_seed(0))
    generator = np.random.default_rng(0)
    mean, m2 = generator.normal(size=OBSERVATION_SIZE), generator.uniform(0.01, 900, size=OBSERVATION_SIZE)
    statistics = ObservationStatistics(OBSERVATION_NAMES, 100.0, mean, m2)
    PolicyPackage(network, statistics, provenance={"seed": 0}).save(folder / "package")
    bundle = build_bundle(folder / "package", folder / "bundles", provenance={}, evaluation={}, promotable=True)
    return folder / "package", bundle


def ask(url: str, requests: Path, clients: int, seconds: float, rate: float = 0.0) -> dict[str, Any]:
    """What clients in a process of their own see."""
    command = [sys.executable, "-m", "benchmarks.serving_load", url, str(requests)]
    options = ["--clients", str(clients), "--seconds", str(seconds), "--rate", str(rate)]
    done = subprocess.run([*command, *options], check=True, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def counters(url: str, model: str) -> tuple[int, int]:
    """Rows and executions of ``model`` so far."""
    from tritonclient.grpc import InferenceServerClient

    with contextlib.closing(InferenceServerClient(url)) as client:
        found = client.get_inference_statistics(model).model_stats[0]
        return int(found.inference_count), int(found.execution_count)


def measured(
    name: str, url: str, requests: Path, clients: int, seconds: float, *, model: str, delay: int, rate: float = 0.0
) -> dict[str, Any]:
    """One row of the result."""
    before = counters(url, model)
    figures = ask(url, requests, clients, seconds, rate)
    rows, executions = (after - earlier for after, earlier in zip(counters(url, model), before, strict=True))
    found = {"name": name, "clients": clients, "delay_us": delay, "rate": round(rate), **figures}
    print(f"  {name}, {clients} clients, delay {delay} us: {figures['per_second']}/s", file=sys.stderr)
    return {**found, "mean_batch": round(rows / max(1, executions), 2)}


def triton_rows(bundle: Bundle, folder: Path, inputs: PolicyInputs, sizes: Sizes) -> list[dict[str, Any]]:
    """Triton with each queue delay, then with arriving questions."""
    from google.protobuf import json_format

    from agentpipe.serving import layout
    from agentpipe.serving.http_api import HttpServer
    from agentpipe.serving.server import TritonServer
    from agentpipe.serving.triton_config import read_config
    from agentpipe.serving.triton_install import install_triton

    empty = folder / "empty"
    empty.mkdir()
    rows = []
    with TritonServer(empty, install_triton(), control="explicit") as server:
        http = HttpServer(server.http, timeout=60.0)
        for delay in sizes.delays:
            model = f"delay-{delay}"
            config = read_config(bundle.path / bundle.model_name / layout.CONFIG)
            config.name, config.dynamic_batching.max_queue_delay_microseconds = model, delay
            content = json_format.MessageToDict(config, preserving_proto_field_name=True)
            http.load(model, content, {"1/model.onnx": bundle.export.path.read_bytes()})
            requests = folder / f"{model}.json"
            write_requests(requests, model, inputs)
            rows += [
                measured("Triton", server.grpc, requests, clients, sizes.seconds, model=model, delay=delay)
                for clients in sizes.clients
            ]
            if delay == USUAL:
                rows.append(_arriving("Triton", server.grpc, requests, rows, sizes, model))
            http.unload(model)
    return rows


def _arriving(
    name: str, url: str, requests: Path, rows: Sequence[dict[str, Any]], sizes: Sizes, model: str
) -> dict[str, Any]:
    [busy] = [row for row in rows if (row["name"], row["clients"], row["delay_us"]) == (name, 16, USUAL)]
    rate = HALF * busy["per_second"]
    return measured(name, url, requests, 16, sizes.seconds, model=model, delay=USUAL, rate=rate)


@contextlib.contextmanager
def torch_server(package: Path) -> Iterator[str]:
    """The torch server's address while it runs."""
    command = [sys.executable, "-m", "benchmarks.serving_torch", str(package), "--delay-us", str(USUAL)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def torch_rows(package: Path, folder: Path, inputs: PolicyInputs, sizes: Sizes) -> list[dict[str, Any]]:
    """The torch server with the usual delay, then with arriving questions."""
    requests = folder / "torch.json"
    write_requests(requests, "policy", inputs)
    with torch_server(package) as url:
        rows = [
            measured("torch", url, requests, clients, sizes.seconds, model="policy", delay=USUAL)
            for clients in sizes.clients
        ]
        return [*rows, _arriving("torch", url, requests, rows, sizes, "policy")]


def local_rows(bundle: Bundle, inputs: PolicyInputs, sizes: Sizes) -> list[dict[str, Any]]:
    """ONNX Runtime in the caller's process: one session, one thread for each client, a row at a time."""
    from agentpipe.serving.runtime import open_session

    session = open_session(bundle.export.path)
    rows = []
    for clients in sizes.clients:
        with ThreadPoolExecutor(clients) as threads:
            over = time.perf_counter() + sizes.seconds
            found = list(
                threads.map(_decide, *zip(*[(session, inputs, index, over) for index in range(clients)], strict=True))
            )
        times = [second for each in found for second in each]
        figures = summary(times, sizes.seconds)
        print(f"  ONNX Runtime, {clients} threads: {figures['per_second']}/s", file=sys.stderr)
        rows.append(
            {"name": "ONNX Runtime", "clients": clients, "delay_us": 0, "rate": 0, **figures, "mean_batch": 1.0}
        )
    return rows


def _decide(session: onnxruntime.InferenceSession, inputs: PolicyInputs, first: int, over: float) -> list[float]:
    """Seconds of each decision of one thread."""
    from agentpipe.serving.runtime import OneRow

    one = OneRow(session)
    times, number = [], first
    while (start := time.perf_counter()) < over:
        at = number % len(inputs)
        one.act(inputs.observation[at], int(inputs.last_action[at]), float(inputs.time[at]), inputs.mask[at])
        times.append(time.perf_counter() - start)
        number += 1
    return times


class Sizes:
    """How much is measured."""

    def __init__(self, *, smoke: bool) -> None:
        self.seconds = 0.4 if smoke else 8.0
        self.clients = (1, 16) if smoke else CLIENTS
        self.delays = (0, USUAL) if smoke else DELAYS


def section(content: dict[str, Any]) -> str:
    """The Markdown section of ``RESULTS.md``."""
    text = (
        "Decisions of one row by a network of the standard profile's size. Clients ask again as soon as they have their"
        " answer, each over a connection of its own, in a process beside the server's; all share the machine's cores."
        " Triton runs the bundle through the Python backend that stands in for its own ONNX Runtime; torch serves on"
        " one thread behind the same batching. ONNX Runtime is called by threads of one process: no network, no"
        " batching. A lone client waits for company as long as the queue lets it."
    )
    rows = content["rows"]
    usual = [row for row in rows if not row["rate"] and (row["delay_us"] == USUAL or row["name"] == "ONNX Runtime")]
    arriving = [row for row in rows if row["rate"]]
    delays = [row for row in rows if row["name"] == "Triton" and not row["rate"]]
    parts = [text, "", *_table(usual)]
    parts += [
        "",
        "Questions that arrive at random, half as many as were answered at 16 clients:",
        "",
        *_jitter(arriving),
    ]
    if delays:
        parts += ["", "Triton, by how long a question may wait for others:", "", *_table(delays, delay=True)]
    return "\n".join(parts)


def _table(rows: Sequence[dict[str, Any]], *, delay: bool = False) -> list[str]:
    head = "| | delay, ms | clients | decisions/s | p50, ms | p99, ms | limit | batch |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        limit = None if delay and row["delay_us"] != USUAL else LIMITS.get((row["name"], row["clients"]))
        shown = "–" if row["name"] == "ONNX Runtime" else f"{row['delay_us'] / 1e3:g}"
        lines.append(
            f"| {row['name']} | {shown} | {row['clients']} | {row['per_second']:,.0f} | {row['p50_ms']:.3f} |"
            f" {row['p99_ms']:.3f} | {'–' if limit is None else f'{limit:g}'} | {row['mean_batch']:.1f} |"
        )
    return lines


def _jitter(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| | decisions/s | p50, ms | p90 | p99 | p99.9 | longest | deviation | batch |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        figures = " | ".join(f"{row[f'{name}_ms']:.2f}" for name in ("p50", "p90", "p99", "p999", "max", "deviation"))
        lines.append(f"| {row['name']} | {row['per_second']:,.0f} | {figures} | {row['mean_batch']:.1f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m benchmarks.serving``."""
    from agentpipe.serving.parity import synthetic_inputs

    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="half a second of each, only to try it")
    parser.add_argument("--out", type=Path, help="folder of the results; of a smoke run by default a temporary one")
    chosen = parser.parse_args(arguments)
    out, sizes = results_folder(chosen.out, smoke=chosen.smoke), Sizes(smoke=chosen.smoke)
    origin = stamp("python -m benchmarks.serving", PACKAGES)
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        package, bundle = make_bundle(folder)
        sizes_of = package_signature(bundle)
        inputs = synthetic_inputs(*sizes_of, count=256, seed=1)
        rows = local_rows(bundle, inputs, sizes)
        try:
            rows += triton_rows(bundle, folder, inputs, sizes)
        except ServiceError as error:
            skipped["Triton"] = error.message
        rows += torch_rows(package, folder, inputs, sizes)
    store("serving", origin, [], out, rows=rows, seconds=sizes.seconds, skipped=skipped, smoke=chosen.smoke)
    print(section({"rows": rows}))


def package_signature(bundle: Bundle) -> tuple[int, int]:
    """Features and actions of a bundle."""
    from agentpipe.serving import layout
    from agentpipe.serving.signature import Signature
    from agentpipe.storage import read_json

    signature = Signature.from_json(read_json(bundle.path / layout.SIGNATURE))
    return signature.observation_size, signature.action_count


if __name__ == "__main__":
    main()
