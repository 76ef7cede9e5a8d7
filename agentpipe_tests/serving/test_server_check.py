"""What a server check finds: each way in which a server or a bundle can be wrong has its finding."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from agentpipe.errors import BundleError, CorruptError, NoServerError, ServiceError
from agentpipe.serving.check_records import CheckRecords, check_once
from agentpipe.serving.http_api import HttpServer
from agentpipe.serving.places import Given, find_place
from agentpipe.serving.server_check import FAILED, PASSED, SKIPPED, check_in_server, gates, skipped
from agentpipe.settings import load_settings
from agentpipe_tests.bundles import save_bundle

from .fake_triton import fake_triton


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    return folder, save_bundle(folder, 0)


def check(bundle, folder, **ways):
    with fake_triton(folder, **ways) as server:
        found = check_in_server(bundle[0], Given(server.http, server.grpc))
        assert server.loaded == {}, "the bundle is still loaded"
    return found


def test_a_server_that_is_right_passes_every_look(bundle, tmp_path):
    found = check(bundle, tmp_path)
    assert (found.status, found.reason, found.bundle) == (PASSED, "", bundle[1])
    names = [(finding.name, finding.passed) for finding in found.findings]
    looks = ("loads", "configuration", "values", "empty_mask", "refusals", "batching")
    assert names == [(name, True) for name in looks]
    figures = {finding.name: finding.figures for finding in found.findings}
    assert figures["values"]["batches"] == "1, 7, 64"
    assert figures["values"]["protocols"] == "HTTP, gRPC"
    assert figures["configuration"]["added"] == "platform"
    assert figures["batching"]["rows"] == 320
    assert found.server["version"] == "2.51.0"
    assert found.latency["16_clients_p50_ms"] > 0
    assert [result.passed for result in gates(found)] == [True] * 7
    json.dumps(found.to_json())


def nan(answer):
    return {**answer, "value": np.full_like(answer["value"], np.nan)}


WAYS = {
    "zeros": ("values", {"change_answer": lambda a: {n: np.zeros_like(x) for n, x in a.items()}}, "differ"),
    "a value that is off": ("values", {"change_answer": lambda a: {**a, "value": a["value"] + 1}}, "value differ by"),
    "no number": ("values", {"change_answer": nan}, "value of the answer is"),
    "one action less": (
        "values",
        {"change_answer": lambda a: {**a, "probabilities": a["probabilities"][:, :2]}},
        r"probabilities of the answer has shape \[1, 2\], not \[1, 3\]",
    ),
    "another dtype": (
        "values",
        {"change_answer": lambda a: {**a, "action": a["action"].astype(np.int32)}},
        "action of the answer is int32, not int64",
    ),
    "no value": (
        "values",
        {"change_answer": lambda a: {n: x for n, x in a.items() if n != "value"}},
        "the answer has no value",
    ),
    "an action of nobody": (
        "values",
        {"change_answer": lambda a: {**a, "action": a["action"] + 9}},
        r"action of the answer is \[",
    ),
    "an action for an empty mask": (
        "empty_mask",
        {"change_answer": lambda a: {**a, "action": np.maximum(a["action"], 0)}},
        r"an empty mask gives action \[0, 0, 0\]",
    ),
    "a smaller batch": (
        "configuration",
        {"change_config": lambda config: config.update(max_batch_size=32)},
        r"config\.max_batch_size is 32 in the server, 64 in the bundle",
    ),
    "no batcher": (
        "configuration",
        {"change_config": lambda config: config.pop("dynamic_batching")},
        r"the server has no config\.dynamic_batching",
    ),
    "another width": (
        "configuration",
        {"change_config": lambda config: config["input"][0].update(dims=["3"])},
        r"config\.input\[0\]\.dims\[0\]",
    ),
    "takes anything": ("refusals", {"lenient": True}, "one feature more is taken over HTTP"),
    "one by one": ("batching", {"rows_per_execution": 1}, "not batched"),
    "refuses the graph": ("loads", {"refuse_load": "unsupported opset 20"}, "unsupported opset 20"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_is_wrong_fails_the_look_that_says_so(bundle, tmp_path, way):
    name, ways, match = WAYS[way]
    found = check(bundle, tmp_path, **ways)
    assert found.status == FAILED
    failed = {finding.name: finding.reason for finding in found.findings if not finding.passed}
    assert name in failed
    assert re.search(match, failed[name])
    judged = {result.name: result for result in gates(found)}
    assert (judged[f"server_{name}"].passed, judged[f"server_{name}"].severity) == (False, "error")
    assert judged[f"server_{name}"].remedy
    assert judged["server_available"].passed


def test_a_server_of_another_name_or_version_is_named_in_the_figures(bundle, tmp_path):
    found = check(bundle, tmp_path, metadata={"name": "something else", "version": "1.0"})
    assert (found.server["name"], found.server["version"]) == ("something else", "1.0")


def test_a_server_that_is_too_old_is_refused_with_a_remedy(bundle, tmp_path):
    with pytest.raises(NoServerError, match=r"too old: 2\.43\.0.*use Triton 2\.44"):
        check(bundle, tmp_path, metadata={"name": "triton", "version": "2.43.0"})


def test_a_server_that_polls_takes_no_bundle_on_demand(bundle, tmp_path):
    text = "explicit model load / unload is not allowed if polling is enabled"
    with pytest.raises(NoServerError, match="--model-control-mode=explicit"):
        check(bundle, tmp_path, refuse_load=text)


def test_a_server_that_goes_away_in_between_is_no_finding_about_the_bundle(bundle, tmp_path):
    with fake_triton(tmp_path) as server:

        def vanish(_config):
            raise ConnectionError

        server.change_config = vanish
        with pytest.raises(ServiceError, match="no answer"):
            check_in_server(bundle[0], Given(server.http, server.grpc))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "nowhere", "https://10.0.0.5:8000"])
def test_a_server_that_is_not_there_skips_the_check_and_says_so(bundle, tmp_path, monkeypatch, url):
    monkeypatch.setenv("AGENTPIPE_TRITON_URL", url)
    found, before = check_once(tmp_path, *bundle, load_settings())
    assert (found.status, before) == (SKIPPED, False)
    assert url.removeprefix("http://") in found.reason
    [judged] = gates(found)
    assert (judged.name, judged.passed, judged.severity) == ("server_available", False, "warn")
    assert "install-triton" in judged.remedy


def test_without_any_server_the_check_is_skipped_and_says_how_to_get_one(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTPIPE_TRITON_HOME", str(tmp_path))
    found, _ = check_once(tmp_path, *bundle, load_settings())
    assert (found.status, found.findings) == (SKIPPED, ())
    assert "agentpipe bundle install-triton" in found.reason


def test_what_passed_is_not_checked_again_and_what_did_not_is(bundle, tmp_path, monkeypatch):
    with fake_triton(tmp_path, refuse_load="busy") as server:
        monkeypatch.setenv("AGENTPIPE_TRITON_URL", server.http)
        monkeypatch.setenv("AGENTPIPE_SERVING__TRITON_GRPC", server.grpc)
        assert find_place(load_settings()) == Given(server.http, server.grpc)
        assert check_once(tmp_path, *bundle, load_settings())[0].status == FAILED
        server.refuse_load = ""
        first, before = check_once(tmp_path, *bundle, load_settings())
        assert (first.status, before) == (PASSED, False)
    assert check_once(tmp_path, *bundle, load_settings()) == (first, True)


def test_another_bundle_in_its_place_is_not_taken_for_it(bundle, tmp_path):
    CheckRecords(tmp_path).save(skipped("0" * 64, "a test"))
    with pytest.raises(BundleError, match="not 000000000000"):
        check_once(tmp_path, bundle[0], "0" * 64, load_settings())


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 1, "check": {}}', '{"format": 1, "check": {"findings": 3}}'])
def test_a_damaged_record_is_a_typed_error(tmp_path, text):
    records = CheckRecords(tmp_path)
    records.save(skipped("1" * 64, "a test"))
    assert records.find("1" * 64) == skipped("1" * 64, "a test")
    records.path("1" * 64).write_text(text)
    with pytest.raises(CorruptError, match="not a server check"):
        records.find("1" * 64)


def test_grpc_is_one_port_above_http_unless_set(monkeypatch):
    monkeypatch.setenv("AGENTPIPE_TRITON_URL", "http://10.0.0.5:8000/")
    assert find_place(load_settings()) == Given("10.0.0.5:8000", "10.0.0.5:8001")


def test_an_answer_that_is_no_json_is_a_typed_error(tmp_path):
    with fake_triton(tmp_path, metadata=[]) as server, pytest.raises(ServiceError, match="not a JSON object"):
        HttpServer(server.http).metadata()
