"""A policy behind gRPC: known by its answers, asked within a deadline, refused when it talks nonsense."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from agentpipe.errors import BundleError, ParityError, ServiceError, ServingError
from agentpipe.serving.agent.deciders import read_policy
from agentpipe.serving.agent.triton_decider import TritonDecider
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.serving.agent.fake_triton import FakeTriton
from agentpipe_tests.serving.agent.frames import frame
from agentpipe_tests.serving.agent.proxy import Proxy

LONG = 20.0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("even") / "bundle"
    save_bundle(folder, 0)
    return read_policy(folder)


@pytest.fixture
def server(files):
    with FakeTriton(files.signature) as running:
        yield running


@pytest.fixture
def decider(server, files):
    client = TritonDecider(server.url, files)
    client.probe(LONG)
    yield client
    client.close()


def test_an_answer_of_the_server_is_the_policys(decider, files):
    answer = decider.decide(frame((0.5, 1.0), (False, True, True)), LONG)
    assert (answer.action, answer.value, answer.decided_by, answer.policy_version) == (1, 1.5, "triton", files.version)
    assert answer.probabilities.tolist() == [0.0, 0.5, 0.5]


def test_nobody_is_asked_before_a_probe_has_found_the_server_to_be_the_right_one(server, files):
    with pytest.raises(ServiceError, match="not connected"):
        TritonDecider(server.url, files).decide(frame(), LONG)
    assert server.answered == 0


def spoiled(name, change):
    def spoil(outputs):
        outputs[name] = change(outputs[name])

    return spoil


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (spoiled("probabilities", lambda array: array * np.float32(np.nan)), "sum to nan"),
        (spoiled("probabilities", lambda array: array * np.float32(2.0)), "sum to 2"),
        (spoiled("probabilities", lambda array: array[:, :2]), r"probabilities are float32\[1, 2\]"),
        (spoiled("value", lambda array: array * np.float32(np.inf)), "value is not finite"),
        (spoiled("action", lambda array: array * 0 + 1), "action 1 is not allowed"),
        (spoiled("action", lambda array: array * 0 - 1), "no action, although some are allowed"),
        (spoiled("action", lambda array: array.astype(np.float32)), "action is float32"),
        (lambda outputs: outputs.pop("value"), "'value'.* missing"),
    ],
)
def test_nonsense_of_a_server_is_no_answer(decider, server, spoil, match):
    server.spoil = spoil
    with pytest.raises(ServingError, match=match):
        decider.decide(frame(), LONG)
    server.spoil = None
    assert decider.decide(frame(), LONG).action == 0


def test_a_slow_server_is_left_at_the_time_out(decider, server):
    server.gate.clear()
    started = time.monotonic()
    with pytest.raises(ServiceError, match="DEADLINE_EXCEEDED"):
        decider.decide(frame(), 0.2)
    assert time.monotonic() - started < 5.0
    server.gate.set()
    assert decider.decide(frame(), LONG).action == 0


def test_no_time_left_is_no_request(decider, server):
    answered = server.answered
    with pytest.raises(ServiceError, match="no time is left"):
        decider.decide(frame(), -0.01)
    assert server.answered == answered


def test_a_server_of_another_policy_is_refused_by_its_answers(server, files):
    server.spoil = spoiled("value", lambda array: array + np.float32(0.01))
    decider = TritonDecider(server.url, files)
    with pytest.raises(ParityError, match="answered otherwise"):
        decider.probe(LONG)
    with pytest.raises(ServiceError, match="not connected"):
        decider.decide(frame(), LONG)


@pytest.mark.parametrize("change", [{"observation_digest": "other"}, {"no_action": 7}])
def test_a_server_of_another_signature_is_refused(server, files, change):
    server.signature = replace(files.signature, **change)
    with pytest.raises(BundleError, match="another signature"):
        TritonDecider(server.url, files).probe(LONG)


def test_a_server_that_is_away_is_found_again_by_a_probe(files):
    with FakeTriton(files.signature) as server:
        decider = TritonDecider(server.url, files)
        decider.probe(LONG)
    with pytest.raises(ServiceError, match="infer failed"):
        decider.decide(frame(), LONG)
    with pytest.raises(ServiceError):
        decider.probe(5.0)
    with FakeTriton(files.signature, server.port):
        decider.probe(LONG)
        assert decider.decide(frame(), LONG).action == 0
    decider.close()


@pytest.mark.parametrize("mode", ["swallow", "reset", "refuse", "half"])
def test_a_network_that_misbehaves_fails_within_the_time_out_and_heals(server, files, mode):
    with Proxy(server.url) as proxy:
        decider = TritonDecider(proxy.address, files)
        decider.probe(LONG)
        proxy.set(mode)
        started = time.monotonic()
        with pytest.raises(ServiceError):
            decider.decide(frame(), 0.3)
        with pytest.raises(ServiceError):
            decider.probe(0.3)
        assert time.monotonic() - started < 5.0
        proxy.set("pass")
        decider.probe(LONG)
        assert decider.decide(frame(), LONG).action == 0
        decider.close()


def test_the_version_that_is_the_policy_is_asked_also_beside_a_newer_one(decider, server, files):
    server.spoils["2"] = spoiled("value", lambda array: array + np.float32(1.0))
    server.newest = "2"
    decider.probe(LONG)
    assert decider.decide(frame((0.5, 1.0), (False, True, True)), LONG).value == 1.5
    with pytest.raises(ParityError):
        TritonDecider(server.url, files).probe(LONG)
    server.spoils = {"1": server.spoils["2"]}  # the policy is now served as another version
    with pytest.raises(ParityError):
        decider.probe(LONG)
    decider.probe(LONG)
    assert decider.decide(frame((0.5, 1.0), (False, True, True)), LONG).value == 1.5


def test_an_address_that_is_none_is_a_typed_error(files):
    with pytest.raises(ServiceError):
        TritonDecider("no address", files).probe(1.0)
