"""Connections to servers: no proxy to the loopback address, an end to all waiting, and what is no Triton is said."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from agentpipe.errors import AgentpipeError, NoServerError, ServiceError
from agentpipe.serving.agent.triton_decider import TritonDecider
from agentpipe.serving.check_records import check_once
from agentpipe.serving.client import PolicyClient
from agentpipe.serving.http_api import HttpServer
from agentpipe.serving.loopback import channel_options, http_opener, is_loopback
from agentpipe.serving.places import Given
from agentpipe.serving.server_check import PASSED, SKIPPED, check_in_server
from agentpipe.settings import load_settings
from agentpipe_tests.bundles import save_bundle
from agentpipe_tests.serving.agent.fake_triton import FakeTriton
from agentpipe_tests.serving.fake_triton import fake_triton


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    return path, save_bundle(path, 0)


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("127.0.0.1:8000", True),
        ("127.8.0.1:8000", True),
        ("localhost:8000", True),
        ("LOCALHOST.:8000", True),
        ("a.localhost:8000", True),
        ("[::1]:8000", True),
        ("10.0.0.5:8000", False),
        ("[2001:db8::1]:8000", False),
        ("127.0.0.1.example.org:8000", False),
        ("triton:8000", False),
    ],
)
def test_no_proxy_is_used_for_the_loopback_address_alone(address, own, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert is_loopback(address) is own
    assert (("grpc.enable_http_proxy", 0) in channel_options(address)) is own
    proxies = [handler.proxies for handler in http_opener(address).handlers if hasattr(handler, "proxies")]
    assert any("http" in each for each in proxies) is not own


PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "grpc_proxy")


@pytest.fixture
def proxy(monkeypatch):
    """Every variable names a proxy that nobody runs."""
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("proxy")
def test_behind_a_proxy_check_client_and_decider_reach_this_machine(bundle, tmp_path):
    with fake_triton(tmp_path) as server:
        assert check_in_server(bundle[0], Given(server.http, server.grpc)).status == PASSED
    decider = TritonDecider("127.0.0.1:1", bundle[0])
    with FakeTriton(decider.files.signature) as server:
        decider.url = server.url
        decider.probe(10.0)
        decider.close()
        assert server.answered == 1


@pytest.mark.usefixtures("proxy")
def test_behind_a_proxy_the_client_reaches_this_machine(bundle):
    signature = TritonDecider("127.0.0.1:1", bundle[0]).files.signature
    # the fake serves no largest batch: that it is asked at all is enough
    with FakeTriton(signature) as server, pytest.raises(AgentpipeError, match="takes one row only"):
        PolicyClient(server.url)


# ------------------------------------------------------------------------------------------ servers that misbehave


@contextlib.contextmanager
def tcp_server(talk):
    """Whoever connects is talked to by ``talk``, which may take long; the address."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=one, args=(connection,), daemon=True).start()

        def one(connection):
            with contextlib.suppress(OSError), connection:
                connection.recv(65_536)
                talk(connection, stop)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            listener.shutdown(socket.SHUT_RDWR)


def dripping(*parts):
    """Says the first part at once, then the second again and again, a little at a time, without end."""

    def talk(connection, stop):
        connection.sendall(parts[0])
        while not stop.wait(0.02):
            connection.sendall(parts[1])

    return talk


DRIPS = {
    "silence": dripping(b"", b""),
    "the status": dripping(b"HTTP/1.1 ", b"2"),
    "a header": dripping(b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "headers": dripping(b"HTTP/1.1 200 OK\r\n", b""),
    "the body": dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
    "a chunk": dripping(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n", b" "),
    "an error's body": dripping(b"HTTP/1.1 500 Oops\r\nContent-Length: 100000\r\n\r\n", b" "),
}


@pytest.mark.parametrize("drip", DRIPS)
def test_a_server_that_drips_is_not_waited_for_without_end(drip):
    ended = threading.Event()
    found = []

    def ask(address):
        try:
            HttpServer(address, timeout=0.2).metadata()
        except ServiceError as error:
            found.append(error)
        ended.set()

    with tcp_server(DRIPS[drip]) as address:
        threading.Thread(target=ask, args=(address,), daemon=True).start()
        assert ended.wait(60), "it is waited for still"
    [error] = found
    assert "timed out" in error.message or (error.message, drip) == ("Oops", "an error's body")


def answering(text, status="200 OK", headers=""):
    def talk(connection, _stop):
        connection.sendall(f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(text)}\r\n\r\n{text}".encode())

    return talk


@pytest.mark.parametrize(
    ("talk", "why"),
    [
        (answering("{}"), "this is no Triton"),
        (answering('{"name": "triton"}'), "this is no Triton"),
        (answering('{"name": 7, "version": []}'), "this is no Triton"),
        (answering("<html>"), "not JSON"),
        (answering("[1]"), "not a JSON object"),
        (answering("nginx", "404 Not Found"), "nginx"),
        (answering("", "302 Found", "Location: /v2\r\n"), "Found"),
        (answering('{"name": "triton", "version": "2.51.0"}', headers="Connection: close\r\n"), "does not answer over"),
    ],
)
def test_what_is_no_triton_skips_the_check_and_is_named(bundle, tmp_path, monkeypatch, talk, why):
    with tcp_server(talk) as address:
        monkeypatch.setenv("AGENTPIPE_TRITON_URL", f"http://{address}")
        monkeypatch.setenv("AGENTPIPE_SERVING__TRITON_GRPC", "127.0.0.1:1")
        found, _ = check_once(tmp_path, *bundle, load_settings())
    assert found.status == SKIPPED
    assert why in found.reason


def test_a_server_without_grpc_skips_the_check_and_names_the_setting(bundle, tmp_path):
    with fake_triton(tmp_path) as server:
        with pytest.raises(NoServerError, match=r"does not answer over gRPC.*AGENTPIPE_SERVING__TRITON_GRPC"):
            check_in_server(bundle[0], Given(server.http, "127.0.0.1:1"))
        assert server.loaded == {}, "what was loaded is unloaded"
        with fake_triton(tmp_path) as other, pytest.raises(NoServerError, match="is not the server at"):
            check_in_server(bundle[0], Given(server.http, other.grpc))
        with FakeTriton(None) as other, pytest.raises(NoServerError, match="does not answer over gRPC"):
            check_in_server(bundle[0], Given(server.http, other.url))


def test_a_slow_but_whole_answer_is_taken():
    def talk(connection, _stop):
        for part in (b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 13\r\n\r\n", b'{"name": ', b'"x"}'):
            connection.sendall(part)
            time.sleep(0.01)

    with tcp_server(talk) as address:
        assert HttpServer(address, timeout=30.0).metadata() == {"name": "x"}
