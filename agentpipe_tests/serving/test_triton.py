"""Bundles in a real Triton server."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from agentpipe.errors import AgentpipeError, EmptyMaskError, ServiceError
from agentpipe.serving.bundle import build_bundle
from agentpipe.serving.client import PolicyClient
from agentpipe.serving.http_api import HttpServer
from agentpipe.serving.parity import compare, synthetic_inputs
from agentpipe.serving.places import Given, Installed
from agentpipe.serving.repository import ServingRepository
from agentpipe.serving.runtime import Outputs, run_module
from agentpipe.serving.server import TritonServer, install_triton
from agentpipe.serving.server_check import check_in_server
from agentpipe.serving.triton_config import config_text, read_config

from .conftest import make_package

ANN = {"who": "ann", "reason": "a test"}
pytestmark = [pytest.mark.triton, pytest.mark.slow]


@pytest.fixture(scope="module")
def triton():
    try:
        return install_triton()
    except ServiceError as error:
        pytest.skip(f"no Triton here: {error}")


@pytest.fixture(scope="module")
def server(built, triton):
    """One that takes models on demand and serves the built bundle."""
    with TritonServer(built.path, triton, control="explicit") as server:
        HttpServer(server.http, timeout=120.0).load("policy")
        yield server


@pytest.fixture(scope="module")
def inputs():
    return synthetic_inputs(192, 46, count=96, seed=3)


def ask(client, inputs):
    served = client.act(inputs.observation, inputs.last_action, inputs.time, inputs.mask)
    return Outputs(served.action, served.probabilities, served.value, served.memory)


def test_a_bundle_passes_every_look_in_a_server_that_is_started_for_it(built, triton):
    check = check_in_server(built.path, Installed(triton))
    assert (check.status, check.reason) == ("PASSED", "")
    figures = {finding.name: finding.figures for finding in check.findings}
    assert list(figures) == ["loads", "configuration", "values", "empty_mask", "refusals", "batching"]
    assert figures["values"]["rows"] > 300
    assert figures["values"]["max_abs_probability"] <= 1e-5
    assert figures["batching"]["executions"] * 2 <= figures["batching"]["rows"]
    assert figures["batching"]["rows"] == pytest.approx(320, abs=16)  # the server counts after it has answered


def test_a_server_that_runs_takes_a_bundle_for_a_while_and_keeps_what_it_serves(built, server, inputs):
    with PolicyClient(server.grpc, timeout=30.0) as client:
        before = ask(client, inputs)
        check = check_in_server(built.path, Given(server.http, server.grpc))
        assert (check.status, check.server["place"]) == ("PASSED", f"running at {server.http}")
        np.testing.assert_array_equal(ask(client, inputs)[1], before[1])
        models = client._connection.get_model_repository_index(as_json=True)["models"]
    assert [(model["name"], model.get("state")) for model in models] == [("policy", "READY")]


def test_single_requests_are_batched_and_answered_each_with_its_own(server, package_dir, inputs):
    from agentpipe.learning.policy.package import PolicyPackage

    expected = run_module(PolicyPackage.load(package_dir).module, inputs)
    with PolicyClient(server.grpc, timeout=30.0) as client:

        def one(row):
            return ask(client, inputs.rows(slice(row, row + 1)))

        [before] = HttpServer(server.http).statistics("policy")
        with ThreadPoolExecutor(16) as threads:
            parts = list(threads.map(one, range(len(inputs))))
        [after] = HttpServer(server.http).statistics("policy")
    found = Outputs(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    compare("served one by one", 1, expected, found, inputs)
    counted = after["inference_count"] - before["inference_count"]
    assert counted == pytest.approx(len(inputs), abs=16)  # the server counts after it has answered
    assert after["execution_count"] - before["execution_count"] <= len(inputs) / 2


def test_an_empty_mask_that_slips_past_the_client_comes_back_as_an_error(server, inputs, monkeypatch):
    row = inputs.rows(slice(0, 1))
    with PolicyClient(server.grpc, timeout=30.0) as client:
        monkeypatch.setattr(
            "agentpipe.serving.client.prepare",
            lambda signature, arrays: {**row.columns(), "mask": np.zeros_like(row.mask)},
        )
        with pytest.raises(EmptyMaskError, match="no allowed action"):
            ask(client, row)


def test_a_bundle_whose_configuration_does_not_fit_is_refused_by_the_server(bundle_copy, triton):
    file = bundle_copy / "policy" / "config.pbtxt"
    config = read_config(file)
    config.input[0].dims[0] = 193
    for sample in config.model_warmup:
        sample.inputs["observation"].dims[0] = 193
    file.write_text(config_text(config))
    with pytest.raises(ServiceError, match="193"):
        TritonServer(bundle_copy, triton)


def test_a_graph_that_is_cut_short_is_refused_by_the_server(bundle_copy, triton):
    file = bundle_copy / "policy" / "1" / "model.onnx"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ServiceError, match=r"model\.onnx"):
        TritonServer(bundle_copy, triton)


def test_a_port_in_use_is_refused_before_anything_starts(built, triton):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServiceError, match=f"port {port}"):
            TritonServer(built.path, triton, grpc_port=port)


STARTER = """
import sys, time
from pathlib import Path
from agentpipe.serving.server import TritonServer, find_triton
server = TritonServer(Path(sys.argv[1]), find_triton(), control="explicit")
print(server.http, flush=True)
time.sleep(600)
"""


def test_a_process_that_is_killed_leaves_no_server_behind(built, triton):
    command = [sys.executable, "-c", STARTER, str(built.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        http = HttpServer(process.stdout.readline().strip())
        assert http.metadata()["name"] == "triton"
        process.kill()
        process.wait()

    def gone():
        try:
            http.metadata()
        except ServiceError:
            return True
        return False

    assert until(gone), "the server outlives who started it"


def test_a_busy_client_sees_versions_come_and_go_without_a_failed_request(built, triton, tmp_path, inputs):
    make_package(tmp_path / "package", seed=7)
    other = build_bundle(tmp_path / "package", tmp_path / "out", provenance={}, evaluation={}, promotable=True)
    repository = ServingRepository(tmp_path / "live")
    with repository.changing():
        repository.publish(built.path, **ANN)
    with (
        TritonServer(repository.models, triton, control="poll", poll_seconds=1) as server,
        PolicyClient(server.grpc, timeout=30.0) as client,
        Busy(server.grpc, inputs.rows(slice(0, 8))) as busy,
    ):
        before = ask(client, inputs)[1]
        with repository.changing():
            repository.publish(other.path, **ANN)
        assert until(lambda: not np.allclose(ask(client, inputs)[1], before)), "the new version is not served"
        after = ask(client, inputs)[1]
        with PolicyClient(server.grpc, version="1", timeout=30.0) as previous:
            np.testing.assert_array_equal(ask(previous, inputs)[1], before)
        with repository.changing():
            repository.rollback()
        assert until(lambda: not np.allclose(ask(client, inputs)[1], after)), "the old version is not back"
        np.testing.assert_array_equal(ask(client, inputs)[1], before)
    assert busy.failures == []
    assert busy.answered > 100


class Busy:
    """A client that asks without pause, in a thread of its own."""

    def __init__(self, url, inputs):
        self.answered, self.failures = 0, []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(url, inputs))

    def _ask(self, url, inputs):
        with PolicyClient(url, timeout=30.0) as client:
            while not self._over.is_set():
                try:
                    ask(client, inputs)
                    self.answered += 1
                except AgentpipeError as error:
                    self.failures.append(str(error))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def until(condition, seconds=20.0):
    """True as soon as ``condition()`` is, False after ``seconds``; an exception of a request fails the test."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
